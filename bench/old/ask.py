"""One generate, timed by the client's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnkeep_client.errors import NoWorkerError, RequestFailedError, ResultTimeoutError, TurnkeepError

if TYPE_CHECKING:
    from turnkeep_client.messages import Generated
    from turnkeep_client.session import Session


@dataclass(frozen=True, slots=True)
class Asked:
    """How one generate went. Exactly one of `result` and `fault` is set.

    `sent_s` is on the monotonic clock; `chunks_s` are the arrivals of its chunks, `first_text_s` that of the
    first one with text, and `latency_s` that of its end, in seconds from there. `tokens` are those of the
    chunks, joined.
    """

    sent_s: float
    latency_s: float
    chunks_s: tuple[float, ...]
    result: Generated | None = None
    fault: TurnkeepError | None = None
    first_text_s: float | None = None
    tokens: tuple[int, ...] = ()

    @property
    def first_chunk_s(self) -> float:
        """Seconds to the first chunk; to the result for an answer without text, which has no chunk."""
        return self.chunks_s[0] if self.chunks_s else self.latency_s

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first, None for an answer of fewer than two tokens."""
        if self.result is None or self.result.usage.completion_tokens < 2:
            return None
        return (self.latency_s - self.first_chunk_s) / (self.result.usage.completion_tokens - 1)

    @property
    def error(self) -> str | None:
        """The class of its fault."""
        return None if self.fault is None else error_class(self.fault)


async def ask(session: Session, *, timeout_s: float, **request: Any) -> Asked:
    """Send one generate and wait for its end. A fault is an outcome, not an exception.

    `request` are the arguments of `Session.generate`.
    """
    sent_s = time.monotonic()
    chunks_s: list[float] = []
    tokens: list[int] = []
    result: Generated | None = None
    fault: TurnkeepError | None = None
    first_text_s: float | None = None
    try:
        generation = session.generate(timeout_s=timeout_s, **request)
        async for chunk in generation:
            chunks_s.append(time.monotonic() - sent_s)
            tokens.extend(chunk.tokens)
            if chunk.text and first_text_s is None:
                first_text_s = chunks_s[-1]
        result = generation.result
    except TurnkeepError as error:
        fault = error
    ended_s = time.monotonic() - sent_s
    return Asked(sent_s, ended_s, tuple(chunks_s), result, fault, first_text_s, tuple(tokens))


def error_class(fault: TurnkeepError) -> str:
    """Name the class that a fault is counted under."""
    match fault:
        case RequestFailedError():
            return fault.code
        case ResultTimeoutError():
            return "timeout"
        case NoWorkerError():
            return "no_worker"
        case _:
            return type(fault).__name__
