"""Images in requests of each API: their files are stored by digest, and conversations are found with them."""

import asyncio
import json
import ssl
import subprocess
import threading
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from apis import APIS

from gateway.boundaries import chain
from gateway.dialects.openai import chat
from gateway.image_fetcher import ImageFetcher
from gateway.turn import ClientTurn, Fault
from tests.parts import free_port, png
from turnkeep_client.images import MOST_BYTES, files_of, images_in

Start = Any
PNG = png(1)


def digest(file: bytes) -> str:
    return sha256(file).hexdigest()


def block(dialect: str, data: str) -> dict[str, Any]:
    """Return an image block with this base64."""
    url = f"data:image/png;base64,{data}"
    return {
        "chat": {"type": "image_url", "image_url": {"url": url, "detail": "auto"}},
        "messages": {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data},
            "cache_control": {"type": "ephemeral"},
        },
        "responses": {"type": "input_image", "image_url": url, "detail": "auto"},
    }[dialect]


def said(dialect: str, text: str, *images: bytes | str) -> dict[str, Any]:
    """Return a user's message with a text, and then images."""
    written = [one if isinstance(one, str) else b64encode(one).decode() for one in images]
    if dialect == "ollama":
        return {"role": "user", "content": text, "images": written}
    kind = "input_text" if dialect == "responses" else "text"
    return {
        "role": "user",
        "content": [{"type": kind, "text": text}, *(block(dialect, one) for one in written)],
    }


def body(dialect: str, told: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    stored = {"store": False} if dialect == "responses" else {}
    return APIS[dialect].body(told, **{"temperature": 0, **stored, **more})


def read(*told: dict[str, Any]) -> ClientTurn:
    """Read a request of the API chat."""
    return chat.read(json.dumps(body("chat", [*told])).encode())


def test_the_same_messages_with_a_different_image_have_a_different_conversation_digest() -> None:
    def boundaries(*images: bytes) -> list[bytes]:
        return chain(read(said("chat", "What?", *images), said("chat", "So?")).messages or (), {})

    first = boundaries(PNG)
    assert boundaries(PNG) == first
    for other in (boundaries(), boundaries(png(2)), boundaries(PNG, PNG)):
        assert other[0] == first[0]
        assert not {*other[1:]} & {*first[1:]}


BAD = {
    "empty": "",
    "blank": " ",
    "no base64": "not base64!",
    "cut in a group": b64encode(PNG).decode()[:-3],
    "without padding": b64encode(b"\x89PNG").decode().rstrip("="),
    "of another alphabet": urlsafe_b64encode(b"\x89PNG" + b"\xff\xfe" * 9).decode(),
    "twice base64": b64encode(b64encode(PNG)).decode(),
    "a URL in it": b64encode(b"https://a.example/a.png").decode(),
    **{
        name: b64encode(file).decode()
        for name, file in {
            "a text": b"This is a PNG, honestly.",
            "a page": b"<!doctype html><img src=x>",
            "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            "PDF": b"%PDF-1.7\n",
            "BMP": b"BM" + bytes(60),
            "TIFF": b"II*\0" + bytes(60),
            "HEIC": b"\0\0\0\x18ftypheic" + bytes(60),
            "AVIF": b"\0\0\0\x18ftypavif" + bytes(60),
            "ICO": b"\0\0\1\0" + bytes(60),
            "JPEG XL": b"\xff\x0a" + bytes(60),
            "ZIP": b"PK\3\4" + bytes(60),
            "gzip": b"\x1f\x8b" + bytes(60),
            "WAV": b"RIFF\0\0\0\0WAVE" + bytes(60),
            "MP4": b"\0\0\0\x18ftypmp42" + bytes(60),
            "zeros": bytes(64),
            "one byte": b"\x89",
            "half a signature": b"\x89P",
            "signature behind a space": b" " + PNG,
            "a BOM": b"\xef\xbb\xbf" + PNG,
        }.items()
    },
}
#: Blocks that are wrong in other ways than their base64, with the words of the refusal.
WRONG: list[tuple[str, Any, str]] = [
    ("chat", {"type": "image_url", "image_url": {"url": "data:image/png,rawbytes"}}, "data: URL with base64"),
    ("chat", {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "data: URL with base64"),
    ("chat", {"type": "image_url", "image_url": {"url": "picture.png"}}, "data: URL with base64"),
    ("chat", {"type": "image_url", "image_url": {"url": "ftp://a.example/a.png"}}, "data: URL with base64"),
    ("chat", {"type": "image_url", "image_url": {"url": "http://a.example/a.png"}}, "gateway_image_hosts"),
    ("chat", {"type": "image_url", "image_url": "HTTP://a.example/a.png"}, "gateway_image_hosts|data: URL"),
    ("chat", {"type": "image_url", "image_url": {"url": "https://[::1/a.png"}}, "URL is not valid"),
    ("chat", {"type": "image_url", "image_url": {"url": "https:///a.png"}}, "gateway_image_hosts"),
    ("messages", {"type": "image", "source": {"type": "url", "url": "https://a.example/a"}}, "a.example"),
    ("messages", {"type": "image", "source": {"type": "base64", "data": 5}}, "base64"),
    ("responses", {"type": "input_image", "image_url": "https://127.0.0.1/a.png"}, "127.0.0.1"),
    ("responses", {"type": "input_image", "image_url": "data:text/plain;base64,aGk="}, "no known format"),
    ("messages", {"type": "image", "data": "aGk=", "mimeType": "image/png"}, "no known format"),
]


def fault_in(dialect: str, answer: httpx2.Response) -> str:
    """Return the message of an error, whose shape is the dialect's."""
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json"), answer.text
    found = answer.json()
    if dialect == "ollama":
        assert [*found] == ["error"]
        return str(found["error"])
    if dialect == "messages":
        assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    else:
        assert found["error"]["type"] == "invalid_request_error"
        assert found["error"]["param"].startswith(("messages[0].content[1]", "input[0].content[1]"))
    return str(found["error"]["message"])


@pytest.mark.parametrize("dialect", APIS)
async def test_an_undecodable_or_oversized_image_in_a_request_is_refused_in_a_sentence(
    dialect: str, http: httpx2.AsyncClient
) -> None:
    huge = b64encode(b"\x89PNG" + bytes(MOST_BYTES)).decode()
    bad = [*BAD.items()]
    for name, data in (*(bad if dialect == "chat" else bad[::5]), ("huge", huge)):
        answer = await http.post(APIS[dialect].path, json=body(dialect, [said(dialect, "See: ", data)]))
        words = fault_in(dialect, answer)
        wanted = "20000004 bytes; the most are 20000000" if name == "huge" else "format|base64"
        assert any(one in words for one in wanted.split("|")), (name, words)
    for of, wrong, wanted in WRONG if dialect != "ollama" else ():
        if of == dialect:
            content = [*said(dialect, "See: ")["content"], wrong]
            told = body(dialect, [{"role": "user", "content": content}])
            words = fault_in(dialect, await http.post(APIS[dialect].path, json=told))
            assert any(one in words for one in wanted.split("|")), (wrong, words)
    good = await http.post(APIS[dialect].path, json=body(dialect, [said(dialect, "Hello.")]))
    assert good.status_code == 200


class Pictures(BaseHTTPRequestHandler):
    """Serves a picture, redirects, and what is none."""

    def do_GET(self) -> None:  # the name that the class calls
        own = f"127.0.0.1:{self.server.server_address[1]}"  # type: ignore[misc]
        to = {"/moved": f"http://{own}/a.png", "/away": f"http://localhost:{own.split(':')[1]}/a.png"}
        to |= {"/file": "file:///etc/passwd", "/around": f"http://{own}/around"}
        if self.path in to:
            self.send_response(302)
            self.send_header("Location", to[self.path])
            self.end_headers()
            return
        if self.path == "/broken":
            self.wfile.write(b"no HTTP\r\n")
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        if self.path == "/slow":
            self.server.slow.wait()  # type: ignore[attr-defined]
        self.wfile.write(
            {"/huge": b"\x89PNG" + bytes(MOST_BYTES), "/page": b"<!doctype html>"}.get(self.path, PNG)
        )

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def pictures() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        server.slow = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.slow.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


async def test_the_gateway_fetches_image_urls_only_from_the_hosts_that_its_setting_allows(
    pictures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")

    async def fetched(path: str, *hosts: str) -> list[str]:
        link = {"type": "image_url", "image_url": {"url": pictures + path}}
        other = said("chat", "And: ", png(2))
        turn = read({"role": "user", "content": [link]}, other)
        turn = await ImageFetcher(hosts).fetched(turn)
        found = [one for message in turn.messages or () for one in images_in(message.content)]
        assert files_of(turn) == {digest(PNG): PNG, digest(png(2)): png(2)}
        return found

    for path in ("/a.png", "/moved"):
        assert await fetched(path, "127.0.0.1") == [digest(PNG), digest(png(2))]
    for path, hosts, why in (
        ("/a.png", (), "images are not fetched from '127.0.0.1': send the file in base64"),
        ("/a.png", ("127.0.0.10", "0.0.1"), "images are not fetched from '127.0.0.1'"),
        ("/away", ("127.0.0.1",), "images are not fetched from 'localhost'"),
        ("/file", ("127.0.0.1",), "cannot be fetched|not fetched"),
        ("/around", ("127.0.0.1",), "cannot be fetched: status 302"),
        ("/none", ("127.0.0.1",), "cannot be fetched: status 404"),
        ("/broken", ("127.0.0.1",), "cannot be fetched: BadStatusLine"),
        ("/a b.png", ("127.0.0.1",), "cannot be fetched: InvalidURL"),
        ("/page", ("127.0.0.1",), "of no known format"),
        ("/huge", ("127.0.0.1",), "the most are 20000000"),
        ("/slow", ("127.0.0.1",), "did not arrive within"),
    ):
        if path == "/slow":
            monkeypatch.setattr("gateway.image_fetcher._FETCH_S", 0.5)
        with pytest.raises(Fault, match=why) as refused:
            await fetched(path, *hosts)
        assert (refused.value.status, refused.value.param) == (400, "messages[0].content[0]"), path


@pytest.fixture
def self_signed(tmp_path: Path) -> ssl.SSLContext:
    """Return the TLS context of a server with a certificate that no client knows."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-subj", "/CN=127.0.0.1", "-keyout", "key.pem", "-out", "own.pem"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "key.pem")
    return context


async def test_a_refusal_of_an_image_url_says_that_its_hosts_certificate_cannot_be_verified(
    self_signed: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some Pythons come without any certificates: 'URLError' would not say that these are what lacks."""
    monkeypatch.setenv("no_proxy", "*")

    async def refused(port: int) -> str:
        link = {"type": "image_url", "image_url": {"url": f"https://127.0.0.1:{port}/a.png"}}
        with pytest.raises(Fault) as caught:
            await ImageFetcher(["127.0.0.1"]).fetched(read({"role": "user", "content": [link]}))
        return caught.value.message

    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=self_signed) as server:
        says = await refused(server.sockets[0].getsockname()[1])
    assert "cannot verify its host's certificate (self-signed certificate)" in says
    assert await refused(free_port()) == "the image cannot be fetched: ConnectionRefusedError"


async def test_a_conversation_with_an_image_url_continues_in_its_session(
    local_worker: Start, door: Start, pictures: str
) -> None:
    worker = await local_worker()
    gateway = await door(worker.settings.nats, worker.settings.prefix, image_hosts=("127.0.0.1",))
    told: list[Any] = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"{pictures}/a"}}]}
    ]
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=60) as http:
        first = await http.post(APIS["chat"].path, json=body("chat", told))
        told += [first.json()["choices"][0]["message"], said("chat", "And?", PNG)]
        second = await http.post(APIS["chat"].path, json=body("chat", told))
    name = first.headers["x-turnkeep-session"].split()[0]
    assert second.headers["x-turnkeep-session"] == f"{name} continued"
    messages = (await worker.client.session(name).history()).messages
    assert [one for message in messages for one in images_in(message.content)] == [digest(PNG)] * 2
    assert await worker.client.session(name).image(digest(PNG)) == PNG
