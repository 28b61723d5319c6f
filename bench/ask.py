"""One generate, timed by the client's clock, as a `Turn`."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any, Final

from turnkeep_client.errors import RequestFailedError, TurnkeepError
from turnkeep_client.session import Session

from .turns import Turn

#: The errors of a session that has no room left.
FULL: Final = frozenset({"context_exceeded", "memory_exceeded"})
#: The pause after a failed turn, so that a broken worker is not flooded.
FAULT_PAUSE_S: Final = 0.2


async def ask(
    session: Session,
    *,
    timeout_s: float,
    began_s: float = 0.0,
    begun: asyncio.Event | None = None,
    texts: bool = False,
    **request: Any,
) -> Turn:
    """Send one generate and wait for its end. A fault is returned in the turn, not raised.

    `request` are the arguments of `Session.generate`. `at_s` counts from `began_s` on the monotonic clock.
    The first chunk sets `begun`. With `texts` the answer's text is a fact of the turn. An answer without text
    has no chunk: its first token arrives with the result.
    """
    sent_s = time.monotonic()
    chunks_s: list[float] = []
    counts: list[int] = []
    tokens: list[int] = []
    text = ""
    try:
        generation = session.generate(timeout_s=timeout_s, **request)
        async for chunk in generation:
            chunks_s.append(time.monotonic() - sent_s)
            if begun is not None:
                begun.set()
            counts.append(len(chunk.tokens))
            tokens += chunk.tokens
            text += chunk.text
        result = generation.result
    except TurnkeepError as error:
        result, fault = None, error
    total_s = time.monotonic() - sent_s
    times: dict[str, Any] = {"at_s": sent_s - began_s, "total_s": total_s, "session": session.key.session}
    if result is None:
        return Turn(first_s=next(iter(chunks_s), None), error=class_of(fault), message=str(fault), **times)
    usage = result.usage
    return Turn(
        **times,
        first_s=chunks_s[0] if chunks_s else total_s,
        gaps_s=tuple(later - sooner for sooner, later in itertools.pairwise(chunks_s)),
        counts=tuple(counts) if set(counts) != {1} else (),
        position=result.position,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        prefilled_tokens=usage.prefilled_tokens,
        tokens=result.tokens,
        finish_reason=result.finish_reason,
        joined=text == result.text and tuple(tokens) == result.tokens,
        kv_live_bytes=result.kv_live_bytes,
        queued_s=result.seconds.queued,
        rewritten_from=result.rewritten_from,
        facts={"text": result.text} if texts else {},
    )


def class_of(fault: TurnkeepError) -> str:
    """Return the class under which a fault is counted: the worker's code, or the exception's name."""
    return fault.code if isinstance(fault, RequestFailedError) else type(fault).__name__
