"""A gateway whose NATS server has no connection left, or no room on its disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from apis import APIS, Api

from gateway import conversations
from tests.parts import NatsServer
from turnkeep_client import writes
from turnkeep_client.client import connect
from turnkeep_client.messages import encode
from worker.metrics_collector import unloaded_metrics

pytestmark = pytest.mark.process

SAYS = "the NATS server stores nothing; is its disk full, or do too few servers of its cluster run?"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello."}]


@pytest.mark.parametrize("path", [CHAT, "/health"])
async def test_a_gateway_answers_503_with_the_reason_if_the_nats_server_has_no_connection_left(
    door: Any, tmp_path: Path, path: str
) -> None:
    """'No NATS server can be reached' would have its reader start another one."""
    (tmp_path / "full.conf").write_text("max_connections: 1")
    server = NatsServer(tmp_path / "store", ("-c", str(tmp_path / "full.conf")))
    server.start()
    try:
        async with connect(server.url), httpx2.AsyncClient(base_url=(await door(server.url)).url) as http:
            asking = http.get(path) if path == "/health" else http.post(path, json=APIS["chat"].body(HELLO))
            answer = await asking
            assert (answer.status_code, answer.headers.get("retry-after")) == (503, "5")
            assert "the NATS server has no connection left" in answer.text
    finally:
        server.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_log_does_not_acknowledge_gets_an_error_that_says_so(
    worker: Any, served: Any, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    """So does the next one, and its deletion, which at once see that others wait."""
    js = worker.app._nc.jetstream()
    log = (await js.stream_info(worker.client.subjects.log_stream)).config
    body = APIS["chat"].body(HELLO)
    first = (await http.post(CHAT, json=body)).json()
    await js.update_stream(log.evolve(no_ack=True))
    monkeypatch.setattr(conversations, "_STORE_S", 1.5)
    monkeypatch.setattr(conversations, "LAST_PAUSE_S", 0.5)
    monkeypatch.setattr(writes, "UNSTORED_S", 0.5)
    answer = await http.post(CHAT, json=body | {"stream": stream})
    assert (answer.status_code, SAYS in answer.text) == (200 if stream else 503, True)
    deleted = await http.delete(f"{CHAT}/{first['id']}")
    assert (deleted.status_code, SAYS in deleted.text) == (503, True)
    await js.update_stream(log.evolve(no_ack=False))
    async with asyncio.timeout(60):
        while SAYS in (await http.post(CHAT, json=body)).text:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_the_health_endpoint_says_that_the_log_stores_nothing_even_if_one_of_two_models_is_not_loaded(
    worker: Any, door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics of a model that is not loaded know nothing of the disk."""
    tiny = await worker.client.worker_metrics()

    async def tell(message: Any) -> None:
        await message.respond(encode(unloaded_metrics(worker="w", version=tiny.version, model="b")))

    subscription = await worker.app._nc.subscribe("unloaded.default.any.ctl", cb=tell)
    prefixes = {"a": worker.settings.prefix, "b": "unloaded"}
    started = await door(worker.settings.nats, prefixes=prefixes, patience_s=0.5)
    async with httpx2.AsyncClient(base_url=started.url, timeout=30) as http:
        assert (await http.get("/health")).json()["models"] == ["a", "b"]
        monkeypatch.setattr(writes, "UNSTORED_S", 0.0)
        waiting = worker.app._parts.journal.writes
        with waiting.waiting():
            answer = await http.get("/health")
            waiting.refusal = "the log is full"
            told = [await http.get("/health")]
            told.append(await http.post(CHAT, json=APIS["chat"].body(HELLO) | {"model": "a"}))
        client = (await started.gateway.connections.of("default", "b")).client
        with client._wire.writes.waiting():
            waits = await http.get("/health")
        for one in (answer, waits):
            assert (one.status_code, SAYS in one.text) == (503, True)
        for one in told:
            assert "stores nothing: the log is full; see the runbook" in one.text
    await subscription.unsubscribe()


class FullDisk:
    """A disk with the files of a NATS server, and a file that can take all its room."""

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"
        self.server = NatsServer(folder / "store")

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    def mend(self) -> None:
        """Make room, and restart the server, which stores nothing more until then."""
        self._filler.unlink()
        self.server.kill()
        self.server.start()


@pytest.fixture
def full_disk(mounted: Callable[[str], Path]) -> Iterator[FullDisk]:
    disk = FullDisk(mounted("size=48m"))
    disk.server.start()
    yield disk
    disk.server.kill()


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_of_all_apis_get_an_error_about_a_full_disk_and_are_answered_once_there_is_space(
    full_disk: FullDisk, local_worker: Any, door: Any, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    """The server sends no error: requests and answers just are not stored, now and later."""
    monkeypatch.setattr(conversations, "_STORE_S", 2.0)
    limits = {"log_max_bytes": 8 * 2**20, "token_max_bytes": 4 * 2**20}
    worker = await local_worker(nats=full_disk.server.url, **limits)
    started = await door(full_disk.server.url, worker.settings.prefix, patience_s=0.5)
    async with httpx2.AsyncClient(base_url=started.url, timeout=30) as http:

        async def ask(api: Api, text: str) -> httpx2.Response:
            body = api.body([{"role": "user", "content": text}]) | {"stream": stream}
            return await http.post(api.path, json=body)

        for api in APIS.values():
            assert (await ask(api, "Hello.")).status_code == 200
        full_disk.fill()
        for number in range(4):  # the blocks of files may still take the first ones
            asking = [ask(api, f"Now, {number}?") for api in APIS.values()]
            refused = [SAYS in answer.text for answer in await asyncio.gather(*asking)]
        assert all(refused)
        told = await ask(APIS["chat"], "And now?")
        assert (told.status_code, told.headers["retry-after"]) == (503, "5")
        full_disk.mend()
        async with asyncio.timeout(60):
            for api in APIS.values():
                while SAYS in (await ask(api, "Again.")).text:  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
