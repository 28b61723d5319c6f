"""What `bench many` measures: sessions as they were built, turns as they went."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

#: Where a turn found its session's KV.
Found = Literal["memory", "SSD", "prefilled"]
#: Of a session's tokens at least this share must have been found for it to count as found.
FOUND_SHARE: Final = 0.5


class Built(Struct, frozen=True, kw_only=True):
    """A session's beginning. `at_s` is its end, by the watch's clock."""

    session: int
    at_s: float
    latency_s: float
    position: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    kv_live_bytes: int = 0
    error: str | None = None


class Turn(Struct, frozen=True, kw_only=True):
    """One turn of one session. `at_s` is when it was sent, by the watch's clock.

    `held` is the position that the bench knows of from the session's last answer, `told` the one that the
    worker named right before the turn; either is None where it is not known. `resident` is the worker's
    word too. Counts are 0 where the turn failed.
    """

    session: int
    at_s: float
    latency_s: float
    held: int | None
    told: int | None
    resident: bool
    first_chunk_s: float = 0.0
    position: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    generated_tokens: int = 0
    rewritten_from: int | None = None
    error: str | None = None


class Account(Struct, frozen=True, kw_only=True):
    """Tokens since a worker's start, by the worker's own count or by the bench's."""

    cached: int
    prefilled: int
    generated: int


def found(turn: Turn) -> Found | None:
    """Say where a turn found its session's KV; None where it was not answered, or nothing was to be found.

    A session that was resident right before its turn was found in memory. Of the others, those whose tokens
    were mostly cached were found on SSD: there is nothing else. What is left was prefilled.
    """
    if turn.error is not None or not turn.held:
        return None
    if turn.resident:
        return "memory"
    return "SSD" if turn.cached_tokens >= FOUND_SHARE * turn.held else "prefilled"


def forgotten(turn: Turn) -> bool:
    """Say whether a turn shows that its session was forgotten, in part or in whole.

    The worker must name the position of the last answer, the prompt must hold what the session held (up to
    where the chat template rewrote it), and the answer must follow the prompt.
    """
    if turn.held is None:
        return False
    if turn.told is not None and turn.told != turn.held:
        return True
    if turn.error is not None:
        return False
    kept = turn.held if turn.rewritten_from is None else turn.rewritten_from
    return turn.prompt_tokens <= kept or turn.position != turn.prompt_tokens + turn.generated_tokens
