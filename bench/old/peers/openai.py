"""Any OpenAI-compatible server: one streamed chat completion, timed by the client's clock.

Whatever a server does wrong comes back as the class of an error with a sentence; nothing is raised.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit, urlunsplit

import httpx2
import msgspec
from msgspec import Struct

from bench.faults import BenchError

from .turns import Turn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

CONNECT_TIMEOUT_S: Final = 10.0
MODELS_TIMEOUT_S: Final = 10.0
#: Of a refusal's body this much is shown.
MAX_SHOWN: Final = 300

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `model` is what its requests name; without it the first model that it lists."""

    name: str
    url: str
    model: str | None = None


def parse(spec: str) -> Address:
    """Read `NAME=URL` or `NAME=URL#MODEL`; the URL with or without `/v1`. Raises `BenchError`."""
    name, _, url = spec.partition("=")
    parts = urlsplit(url)
    try:
        usable = bool(name.strip()) and parts.scheme in {"http", "https"} and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not parts.hostname:
        raise BenchError(f"--peer {spec!r} is not valid: it must be NAME=URL, such as llama=http://host:8080")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/v1") else path + "/v1"
    return Address(
        name.strip(), urlunsplit((parts.scheme, parts.netloc, path, "", "")), parts.fragment or None
    )


class BadStreamError(Exception):
    """What came is no stream of chat completion chunks; `kind` is the class it is counted under."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(Struct):
    delta: _Delta = _Delta()
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


class _Answer:
    """An answer as it comes in."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self.first_s: float | None = None
        self.texts: list[str] = []
        self.num_deltas = 0
        self.num_events = 0
        self.usage: _Usage | None = None
        self.ended = False

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def add(self, data: str) -> None:
        self.num_events += 1
        try:
            event = msgspec.json.decode(data, type=_Event)
        except (msgspec.DecodeError, UnicodeError):
            raise BadStreamError("garbage", f"an event is no chat completion chunk: {_short(data)}") from None
        if event.error is not None:
            raise BadStreamError("error_event", _short(str(event.error)))
        self.usage = event.usage or self.usage
        for choice in event.choices:
            text = choice.delta.content or choice.delta.reasoning or choice.delta.reasoning_content
            if text:
                self.first_s = self.elapsed_s if self.first_s is None else self.first_s
                self.num_deltas += 1
                self.texts.append(choice.delta.content or "")
            self.ended = self.ended or choice.finish_reason is not None

    def turn(self, error: str | None = None) -> Turn:
        usage = self.usage
        details = usage.prompt_tokens_details if usage else None
        return Turn(
            started_s=self.started_s,
            latency_s=self.elapsed_s,
            first_s=self.first_s,
            tokens=usage.completion_tokens if usage else self.num_deltas,
            counted=usage is None,
            context_tokens=usage.prompt_tokens if usage else None,
            cached_tokens=details.cached_tokens if details else None,
            text="".join(self.texts),
            error=error,
        )


class Server:
    """A connection to one server; an async context manager. `messages` has the first of every error."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.messages: dict[str, str] = {}
        self._model = address.model
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        # No proxy, no `.netrc`: what the environment says is for other hosts.
        self._http = httpx2.AsyncClient(limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """Return the name that requests give the model: the first one listed, or a name that most ignore."""
        if self._model is None:
            try:
                reply = await self._http.get(f"{self.address.url}/models", timeout=MODELS_TIMEOUT_S)
                models = msgspec.json.decode(reply.content, type=_Models).data if reply.is_success else []
            except httpx2.TimeoutException:
                return "default_model"  # it may be busy with its start; asked again next time
            except (httpx2.HTTPError, msgspec.DecodeError):
                models = []
            self._model = models[0].id if models else "default_model"
        return self._model

    async def complete(self, messages: Sequence[Message], *, max_tokens: int, timeout_s: float) -> Turn:
        """Ask for the next answer, greedily, as a stream. An error is an outcome."""
        model = await self.model()
        body = {
            "model": model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = _Answer()
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream(body, answer)
        except BadStreamError as error:
            return self._failed(answer, error.kind, str(error))
        except (TimeoutError, httpx2.TimeoutException):
            return self._failed(answer, "timeout", f"no whole answer within {timeout_s:g} s")
        except httpx2.ConnectError as error:
            return self._failed(answer, "unreachable", f"nothing answers at {self.address.url}: {error}")
        except httpx2.SSEError as error:
            return self._failed(answer, "garbage", str(error))
        except httpx2.HTTPError as error:
            kind = "broken_off" if answer.num_events else "no_answer"
            return self._failed(answer, kind, f"the connection ended: {error or type(error).__name__}")
        return answer.turn()

    async def _stream(self, body: dict[str, Any], answer: _Answer) -> None:
        url = f"{self.address.url}/chat/completions"
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        async with self._http.stream("POST", url, json=body, timeout=timeout) as reply:
            if not reply.is_success:
                text = (await reply.aread()).decode(errors="replace")
                raise BadStreamError(f"http_{reply.status_code}", _short(text) or reply.reason_phrase)
            async for event in httpx2.EventSource(reply):
                if event.data == "[DONE]":
                    return
                answer.add(event.data)
        if not answer.num_events:
            raise BadStreamError("garbage", "the reply has no server-sent event")
        if not answer.ended:
            raise BadStreamError("broken_off", "the stream ended in the middle of an answer")

    def _failed(self, answer: _Answer, kind: str, message: str) -> Turn:
        self.messages.setdefault(kind, " ".join(message.split()))
        return answer.turn(kind)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else line[:MAX_SHOWN] + "..."
