"""A client for streamed chat completions of OpenAI-compatible servers; and `mlx_lm.server` as a process.

A failed request returns a turn with the class of its error, and raises nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from .faults import BenchError
from .local import Process, free_port
from .turns import TimedTurn

OWN: Final = "mlx_lm.server"
#: The name that `mlx_lm.server` has for its model; most other servers ignore the name.
MODEL: Final = "default_model"
CONNECT_TIMEOUT_S: Final = 10.0
#: The most characters that are shown of an error message.
MAX_SHOWN: Final = 300
#: The fields of a delta with text; the tokens of a model's reasoning count too.
SAID: Final = ("content", "reasoning", "reasoning_content")


@dataclass
class _Heard:
    """What has come of one streamed answer: its text, when the first of it came, and the reported counts."""

    sent_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    text: str = ""
    num_deltas: int = 0
    is_finished: bool = False
    prompt: int = 0
    cached: int = 0
    num_tokens: int = 0

    def add(self, chunk: Any) -> None:
        if usage := chunk.usage:
            self.prompt, self.num_tokens = usage.prompt_tokens, usage.completion_tokens
            details = usage.prompt_tokens_details
            self.cached = (details.cached_tokens if details else None) or 0
        for choice in chunk.choices or ():
            if any(getattr(choice.delta, name, None) for name in SAID):
                self.first_s = self.first_s or time.monotonic() - self.sent_s
                self.text += choice.delta.content or ""
                self.num_deltas += 1
            self.is_finished |= choice.finish_reason is not None


class Server:
    """A connection to one OpenAI-compatible server; requests name `model`."""

    def __init__(self, name: str, url: str, model: str | None = None) -> None:
        """Prepare a connection to the base URL `url`. Raises `BenchError` without OpenAI's library."""
        try:
            import openai  # here: half a second, and an extra that the other benches do not need
        except ModuleNotFoundError:
            raise BenchError("the library openai is not installed: pip install 'turnkeep[bench]'") from None
        self.name, self.url, self.model = name, url, model
        # The environment's proxy and `.netrc` are for other hosts.
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        self._openai = openai
        self._client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)

    async def __aenter__(self) -> Self:
        """Choose the model: the given one, else the first that the server lists; None if it lists none."""
        if self.model is None:
            with contextlib.suppress(self._openai.OpenAIError, LookupError, TypeError):
                self.model = (await self._client.models.list(timeout=CONNECT_TIMEOUT_S)).data[0].id
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask(
        self, messages: list[Any], *, max_tokens: int, timeout_s: float, began_s: float = 0.0
    ) -> TimedTurn:
        """Stream a greedy answer to `messages`, and time it. An error is returned in the turn, not raised.

        If the server reports no token counts, each delta counts as a token.
        """
        error = message = None
        heard = _Heard()
        try:
            async with asyncio.timeout(timeout_s):
                chunks = await self._begin(messages, max_tokens)
                async for chunk in chunks:
                    heard.add(chunk)
        except TimeoutError:
            error, message = "timeout", f"no whole answer within {timeout_s:g} s"
        except self._openai.APIStatusError as bad:
            error, message = f"http_{bad.status_code}", bad.response.text
        except Exception as bad:  # noqa: BLE001  # a broken stream raises the HTTP library's and JSON's too
            error, message = type(bad).__name__, f"{self.url}: {bad} {bad.__cause__ or ''}"
        else:
            if not heard.is_finished:
                error, message = "broken_off", "the stream ended before the answer"
        num_tokens = heard.num_tokens or heard.num_deltas
        return TimedTurn(
            at_s=heard.sent_s - began_s,
            total_s=time.monotonic() - heard.sent_s,
            first_s=heard.first_s,
            error=error,
            message=message and " ".join(message.split())[:MAX_SHOWN],
            position=None if error else heard.prompt + num_tokens,
            prompt_tokens=heard.prompt,
            cached_tokens=heard.cached,
            prefilled_tokens=heard.prompt - heard.cached,
            facts={"tokens": num_tokens, "text": heard.text},
        )

    async def _begin(self, messages: list[Any], max_tokens: int) -> Any:
        return await self._client.chat.completions.create(
            model=self.model or MODEL,
            messages=messages,
            max_tokens=max_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
        )


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
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/v1"
        command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--log-level", "WARNING"]
        command += ["--host", "127.0.0.1", "--port", f"{self._port}"]
        super().__init__(f"the peer {OWN}", command, logged=True, like=like)

    async def ready(self) -> None:
        """Wait until the port answers. Raises `BenchError`."""
        _, writer = await self.until(lambda: asyncio.open_connection("127.0.0.1", self._port))
        writer.close()
