"""One generate, timed by the client's clock, as a `Turn`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from turnkeep_client.errors import RequestFailedError, TurnkeepError
from turnkeep_client.messages import Chunk, Generated
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
    arrivals: list[tuple[float, Chunk]] = []
    try:
        generation = session.generate(timeout_s=timeout_s, **request)
        async for chunk in generation:
            arrivals.append((time.monotonic() - sent_s, chunk))
            if begun is not None:
                begun.set()
        result = generation.result
    except TurnkeepError as error:
        result, fault = None, error
    total_s = time.monotonic() - sent_s
    times: dict[str, Any] = {"at_s": sent_s - began_s, "total_s": total_s, "session": session.key.session}
    if result is None:
        first_s = arrivals[0][0] if arrivals else None
        return Turn(first_s=first_s, error=class_of(fault), message=str(fault), **times)
    turn = _answered(arrivals, result, times)
    return replace(turn, facts={"text": result.text}) if texts else turn


def _answered(arrivals: Sequence[tuple[float, Chunk]], result: Generated, times: dict[str, Any]) -> Turn:
    """Make the turn of an answer from its chunks, each with its time, and its result."""
    usage, counts = result.usage, tuple(len(chunk.tokens) for _, chunk in arrivals)
    tokens = tuple(token for _, chunk in arrivals for token in chunk.tokens)
    text = "".join(chunk.text for _, chunk in arrivals)
    return Turn(
        **times,
        first_s=arrivals[0][0] if arrivals else times["total_s"],
        gaps_s=tuple(later - sooner for (sooner, _), (later, _) in itertools.pairwise(arrivals)),
        counts=counts if set(counts) != {1} else (),
        position=result.position,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        prefilled_tokens=usage.prefilled_tokens,
        tokens=result.tokens,
        finish_reason=result.finish_reason,
        joined=(text, tokens) == (result.text, result.tokens),
        kv_live_bytes=result.kv_live_bytes,
        queued_s=result.seconds.queued,
        rewritten_from=result.rewritten_from,
    )


def class_of(fault: TurnkeepError) -> str:
    """Return the class under which a fault is counted: the worker's code, or the exception's name."""
    return fault.code if isinstance(fault, RequestFailedError) else type(fault).__name__
