"""Any OpenAI-compatible server, asked for one streamed chat completion; and `mlx_lm.server` as a process.

Whatever a server does wrong in an answer is a turn with the class of the error; nothing is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import time
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

import httpx2
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from .faults import BenchError
from .local import READY_TIMEOUT_S, Process, free_port
from .samples import Turn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OWN: Final = "mlx_lm.server"
#: What that calls the model that it was started with, and a name that most servers ignore.
MODEL: Final = "default_model"
CONNECT_TIMEOUT_S: Final = 10.0
#: Of a refusal's body this much is shown.
MAX_SHOWN: Final = 300


class _Delta(Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


class _BadStreamError(Exception):
    """What came is no stream of chat completion chunks: the class it is counted under, and why."""


class _Answer:
    """An answer as it comes in."""

    def __init__(self) -> None:
        self.sent_s = time.monotonic()
        self.first_s: float | None = None
        self.text = ""
        self.deltas = 0
        self.events = 0
        self.usage: _Usage | None = None
        self.ended = False

    def add(self, data: str) -> None:
        self.events += 1
        try:
            event = msgspec.json.decode(data, type=_Event)
        except (msgspec.DecodeError, UnicodeError):
            raise _BadStreamError("garbage", f"an event is no chat completion chunk: {_line(data)}") from None
        if event.error is not None:
            raise _BadStreamError("error_event", _line(str(event.error)))
        self.usage = event.usage or self.usage
        for choice in event.choices:
            delta = choice.delta
            if delta.content or delta.reasoning or delta.reasoning_content:
                self.first_s = self.first_s or time.monotonic() - self.sent_s
                self.deltas += 1
                self.text += delta.content or ""
            self.ended = self.ended or choice.finish_reason is not None

    def turn(self, began_s: float) -> Turn:
        """Tell of it; a server that counts nothing has its deltas counted."""
        usage = self.usage or _Usage(0, self.deltas)
        cached = (usage.prompt_tokens_details or _Details()).cached_tokens or 0
        return Turn(
            at_s=self.sent_s - began_s,
            total_s=time.monotonic() - self.sent_s,
            first_s=self.first_s,
            position=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=cached,
            prefilled_tokens=usage.prompt_tokens - cached,
            facts={"tokens": usage.completion_tokens, "text": self.text},
        )


class Server:
    """A connection to one server. `model` is what requests name; without it the first one that it lists."""

    def __init__(self, name: str, url: str, model: str | None = None) -> None:
        self.name, self.url = name, url
        self._model = model
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        # No proxy, no `.netrc`: what the environment says is for other hosts.
        self._http = httpx2.AsyncClient(limits=limits, trust_env=False)

    async def close(self) -> None:
        """Close it."""
        await self._http.aclose()

    async def model(self) -> str:
        """Return the name that requests give the model."""
        if self._model is None:
            found: list[_Model] = []
            try:
                reply = await self._http.get(f"{self.url}/models", timeout=CONNECT_TIMEOUT_S)
                found = msgspec.json.decode(reply.content, type=_Models).data if reply.is_success else []
            except httpx2.TimeoutException:
                return MODEL  # it may be busy with its start; asked again next time
            except (httpx2.HTTPError, msgspec.DecodeError):
                pass
            self._model = found[0].id if found else MODEL
        return self._model

    async def ask(
        self, messages: Sequence[dict[str, str]], *, max_tokens: int, timeout_s: float, began_s: float = 0.0
    ) -> Turn:
        """Ask for the next answer, greedily, as a stream. An error is an outcome."""
        body = {"model": await self.model(), "messages": list(messages), "max_tokens": max_tokens}
        body |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
        answer = _Answer()
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream(body, answer)
            return answer.turn(began_s)
        except _BadStreamError as error:
            kind, message = error.args
        except (TimeoutError, httpx2.TimeoutException):
            kind, message = "timeout", f"no whole answer within {timeout_s:g} s"
        except httpx2.ConnectError as error:
            kind, message = "unreachable", f"nothing answers at {self.url}: {error}"
        except httpx2.SSEError as error:
            kind, message = "garbage", str(error)
        except httpx2.HTTPError as error:
            kind = "broken_off" if answer.events else "no_answer"
            message = f"the connection ended: {error or type(error).__name__}"
        return replace(answer.turn(began_s), position=None, error=kind, message=_line(message))

    async def _stream(self, body: dict[str, Any], answer: _Answer) -> None:
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        url = f"{self.url}/chat/completions"
        async with self._http.stream("POST", url, json=body, timeout=timeout) as reply:
            if not reply.is_success:
                text = (await reply.aread()).decode(errors="replace")
                raise _BadStreamError(f"http_{reply.status_code}", text.strip() or reply.reason_phrase)
            async for event in httpx2.EventSource(reply):
                if event.data == "[DONE]":
                    return
                answer.add(event.data)
        if not answer.events:
            raise _BadStreamError("garbage", "the reply has no server-sent event")
        if not answer.ended:
            raise _BadStreamError("broken_off", "the stream ended in the middle of an answer")


def parse(spec: str) -> Server:
    """Read `NAME=URL` or `NAME=URL#MODEL`; the URL with or without `/v1`. Raises `BenchError`."""
    name, _, url = spec.partition("=")
    parts = urlsplit(url)
    try:
        usable = bool(name.strip()) and parts.scheme in {"http", "https"} and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not parts.hostname:
        raise BenchError(f"--peer {spec!r} is not valid: it must be NAME=URL, such as llama=http://host:8080")
    path = f"{parts.path.rstrip('/').removesuffix('/v1')}/v1"
    address = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
    return Server(name.strip(), address, parts.fragment or None)


class MlxServer(Process):
    """`mlx_lm.server` on a free port of 127.0.0.1, with the libraries `preload`."""

    def __init__(self, model: Path, log: IO[bytes], preload: str | None) -> None:
        """Raise `BenchError` where it is not installed."""
        if importlib.util.find_spec("mlx_lm") is None:
            raise BenchError(f"{OWN} is not installed: pip install mlx-lm, or name a running peer by --peer")
        self._port = free_port()
        command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--log-level", "WARNING"]
        command += ["--host", "127.0.0.1", "--port", f"{self._port}"]
        super().__init__(f"the peer {OWN}", command, log=log, preload=preload)

    @property
    def server(self) -> Server:
        """Connect to it."""
        return Server(OWN, f"http://127.0.0.1:{self._port}/v1", MODEL)

    async def ready(self) -> None:
        """Wait until its port answers. Raises `BenchError`."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            self.expect()
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.close()
                return
            await asyncio.sleep(0.05)
        raise BenchError(f"{self.name} was not ready within {READY_TIMEOUT_S:.0f} s")


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN] + "..."
