"""A client for streamed chat completions of OpenAI-compatible servers; and `mlx_lm.server` as a process.

A failed request returns a turn with the class of its error, and raises nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import httpx2
import msgspec
from msgspec import Struct

from .faults import BenchError
from .local import Process, free_port
from .turns import Turn

OWN: Final = "mlx_lm.server"
#: The name that `mlx_lm.server` has for its model; most other servers ignore the name.
MODEL: Final = "default_model"
CONNECT_TIMEOUT_S: Final = 10.0
#: The most characters that are shown of an error message.
MAX_SHOWN: Final = 300
#: The fields of a delta with text; the tokens of a model's reasoning count too.
SAID: Final = ("content", "reasoning", "reasoning_content")


class _Choice(Struct):
    delta: dict[str, Any] = {}
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: dict[str, Any] | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _BadAnswerError(Exception):
    """The reply is not a valid answer; the arguments are the error's class and its message."""


class Server:
    """A connection to one server; requests name `model`."""

    def __init__(self, name: str, url: str, model: str | None = None) -> None:
        self.name, self.url, self.model = name, url, model
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        # Ignore the environment's proxy and `.netrc`, which are for other hosts.
        self._http = httpx2.AsyncClient(limits=limits, timeout=timeout, trust_env=False)

    async def __aenter__(self) -> Self:
        """Choose the model: the one that the user has named, else the first that the server lists."""
        if self.model is None:
            with contextlib.suppress(httpx2.HTTPError, msgspec.DecodeError, LookupError, TypeError):
                reply = await self._http.get(f"{self.url}/models", timeout=CONNECT_TIMEOUT_S)
                self.model = str(msgspec.json.decode(reply.content)["data"][0]["id"])
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(
        self, messages: list[dict[str, str]], *, max_tokens: int, timeout_s: float, began_s: float = 0.0
    ) -> Turn:
        """Stream a greedy answer to `messages`, and time it. An error is returned in the turn, not raised.

        If the server reports no token counts, each delta counts as a token.
        """
        usage: _Usage | None = None
        first_s = error = message = None
        text, deltas, sent_s = "", 0, time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                async for event in self._events(messages, max_tokens):
                    usage = event.usage or usage
                    for delta in (choice.delta for choice in event.choices):
                        if any(map(delta.get, SAID)):
                            first_s = first_s or time.monotonic() - sent_s
                            text += str(delta.get("content") or "")
                            deltas += 1
        except _BadAnswerError as bad:
            error, message = bad.args
        except (TimeoutError, httpx2.TimeoutException):
            error, message = "timeout", f"no whole answer within {timeout_s:g} s"
        except httpx2.HTTPError as bad:
            error, message = "connection", f"{self.url}: {bad or type(bad).__name__}"
        total_s = time.monotonic() - sent_s
        usage = usage or _Usage(0, deltas)
        cached = (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
        return Turn(
            at_s=sent_s - began_s,
            total_s=total_s,
            first_s=first_s,
            error=error,
            message=message and " ".join(message.split())[:MAX_SHOWN],
            position=None if error else usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=cached,
            prefilled_tokens=usage.prompt_tokens - cached,
            facts={"tokens": usage.completion_tokens, "text": text},
        )

    async def _events(self, messages: list[dict[str, str]], max_tokens: int) -> AsyncGenerator[_Event]:
        body = {"model": self.model or MODEL, "messages": messages, "max_tokens": max_tokens}
        body |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
        ended = False
        async with self._http.stream("POST", f"{self.url}/chat/completions", json=body) as reply:
            if not reply.is_success:
                text = (await reply.aread()).decode(errors="replace")
                raise _BadAnswerError(f"http_{reply.status_code}", text)
            async for one in httpx2.EventSource(reply):
                if one.data == "[DONE]":
                    return
                try:
                    event = msgspec.json.decode(one.data, type=_Event)
                except (msgspec.DecodeError, UnicodeError):
                    raise _BadAnswerError("garbage", f"no chat completion chunk: {one.data}") from None
                if event.error is not None:
                    raise _BadAnswerError("error_event", str(event.error))
                yield event
                ended = ended or any(choice.finish_reason for choice in event.choices)
        if not ended:
            raise _BadAnswerError("broken_off", "the stream ended before the answer")


def parse(spec: str) -> Server:
    """Parse `NAME=URL` or `NAME=URL#MODEL`, the URL with or without `/v1`. Raises `BenchError`."""
    name, _, url = spec.partition("=")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not name.strip() or not usable:
        raise BenchError(f"--peer {spec!r} is not valid: it must be NAME=URL, such as llama=http://host:8080")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Server(name.strip(), f"{parts.scheme}://{parts.netloc}{path}/v1", parts.fragment or None)


class MlxServer(Process):
    """`mlx_lm.server` on a free port of 127.0.0.1, with the same OpenBLAS library as the process `like`."""

    def __init__(self, model: Path, like: Process) -> None:
        """Prepare the server. Raises `BenchError` if it is not installed."""
        if importlib.util.find_spec("mlx_lm") is None:
            raise BenchError(f"{OWN} is not installed: pip install mlx-lm, or name a running peer by --peer")
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/v1"
        command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--log-level", "WARNING"]
        command += ["--host", "127.0.0.1", "--port", f"{self._port}"]
        super().__init__(f"the peer {OWN}", command, logged=True, like=like)

    async def ready(self) -> None:
        """Wait until the port answers. Raises `BenchError`."""
        _, writer = await self.until(lambda: asyncio.open_connection("127.0.0.1", self._port))
        writer.close()
