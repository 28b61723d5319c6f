"""Any request is answered in the form of its API, and costs a bounded amount of time and memory."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from parts import until

from gateway import image_fetcher, keys
from gateway.dialects.openai import chat, common
from gateway.http.handlers import Handlers
from gateway.image_fetcher import ImageFetcher
from gateway.keys import ApiKey, KeyLimits, Keys
from gateway.turn import ClientTurn, Fault

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
#: For each path, the field with the messages, and other fields that a request needs.
PATHS = {
    CHAT: ("messages", {"max_tokens": 2}),
    "/v1/responses": ("input", {"max_output_tokens": 2}),
    "/v1/messages": ("messages", {"max_tokens": 2}),
}
PAGE = {"origin": "http://localhost:3000"}


@pytest.mark.parametrize("path", PATHS)
async def test_an_internal_error_of_the_gateway_has_the_error_format_of_its_api_and_cors_headers(
    gateway: Any, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> bytes:
        raise KeyError("secret")

    monkeypatch.setattr(Handlers, "_body", fail)
    served = await gateway()
    answer = await served.http.post(path, json=HELLO, headers=PAGE)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the gateway failed: KeyError")
    assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
    assert "KeyError: 'secret'" in caplog.text


@pytest.mark.parametrize("num_bytes", [200_000, 10_000_000])
async def test_a_client_that_is_still_sending_a_large_body_receives_the_refusal(
    gateway: Any, num_bytes: int
) -> None:
    limited = ApiKey("default", KeyLimits(requests=1))
    served = await gateway(keys=Keys({keys._digest("k"): limited}))
    body = {"messages": [{"role": "user", "content": "a" * num_bytes}]}
    limited.one_request().__enter__()
    for key, status in 5 * [("k", 429), ("other", 401)]:
        answer = await served.http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
        assert (answer.status_code, "message" in answer.json()["error"]) == (status, True)


MOST = common.MOST_ITEMS
MANY: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * MOST}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [""] * MOST}]}),
    "items": ("/v1/responses", {"input": [{"role": "user", "content": ""}] * MOST}),
    "results": (
        "/v1/messages",
        {
            "max_tokens": 2,
            "messages": [{"role": "user", "content": [{"type": "tool_result", "content": [""] * MOST}]}],
        },
    ),
    "ollama": ("/api/chat", {"messages": [{"role": "user", "content": "", "images": ["a"] * MOST}]}),
    "tools": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": [{"function": {"name": "f"}}] * (MOST + 1),
        },
    ),
}


@pytest.mark.parametrize("many", MANY)
async def test_a_request_of_more_than_100000_messages_or_parts_is_refused_with_an_error_of_one_sentence(
    http: httpx2.AsyncClient, many: str
) -> None:
    path, body = MANY[many]
    if many in {"messages", "items"}:
        body = {name: [*given, given[0]] for name, given in body.items()}
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert (answer.status_code, "more than 100000 messages, parts" in message) == (400, True), message


@pytest.mark.parametrize("path", PATHS)
async def test_a_model_name_of_more_than_4096_characters_is_refused(
    http: httpx2.AsyncClient, path: str
) -> None:
    field, more = PATHS[path]
    asked = {field: [{"role": "user", "content": "Hello."}], **more}
    answer = await http.post(path, json={**asked, "model": "m" * 4097})
    message = "model has 4097 characters; the most are 4096"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    assert (await http.post(path, json={**asked, "model": "m" * 4096})).json()["model"] == "m" * 4096


class Host:
    """An HTTP server on loopback; each request is answered by `write`, which gets the socket."""

    def __init__(self, write: Callable[[socket.socket], None]) -> None:
        self.num_at_once = self.most_at_once = self.num_requests = 0
        self._write = write
        self._lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=self.listener.accept()[:1], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self.num_requests += 1
            self.num_at_once += 1
            self.most_at_once = max(self.most_at_once, self.num_at_once)
        with connection, contextlib.suppress(OSError):
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n\x89PNG")
            self._write(connection)
        with self._lock:
            self.num_at_once -= 1


def linked(host: Host, num: int) -> ClientTurn:
    """Return a request with images at this host."""
    parts = [{"type": "image_url", "image_url": {"url": f"{host.url}/{number}"}} for number in range(num)]
    return chat.read(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode())


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.mark.usefixtures("no_proxy")
async def test_a_request_fetches_4_images_at_the_same_time_and_is_refused_beyond_100_images_or_32_mib() -> (
    None
):
    host, fetcher = Host(lambda to: to.sendall(bytes(10_000_000))), ImageFetcher(["127.0.0.1"])
    with pytest.raises(Fault, match="the fetched images have more than 33554432 bytes") as large:
        await fetcher.fetched(linked(host, 60))
    assert (large.value.status, large.value.code, large.value.param) == (
        413,
        "request_too_large",
        "messages[0].content[3]",
    )
    assert (host.most_at_once <= 4, host.num_requests) == (True, 4)
    with pytest.raises(Fault, match="101 images are to be fetched; the most are 100") as many:
        await fetcher.fetched(linked(host, 101))
    assert many.value.param == "messages[0].content[100]"
    assert host.num_requests == 4
    host.listener.close()


@pytest.mark.usefixtures("no_proxy")
async def test_an_image_fetch_from_a_host_that_sends_byte_by_byte_ends_at_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drip(to: socket.socket) -> None:
        for _ in range(200):
            to.sendall(b"x")
            time.sleep(0.1)

    monkeypatch.setattr(image_fetcher, "_FETCH_S", 0.5)
    host = Host(drip)
    with pytest.raises(Fault, match="the image did not arrive within"):
        await ImageFetcher(["127.0.0.1"]).fetched(linked(host, 4))
    async with asyncio.timeout(5):
        await until(lambda: not host.num_at_once)
    host.listener.close()
