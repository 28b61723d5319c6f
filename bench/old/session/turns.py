"""The turns of one session as they were measured, and what follows from each of them alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from turnkeep_client.messages import Generated


class Answer(Struct, frozen=True, kw_only=True):
    """A turn that was answered. `first_chunk_s` is the client's clock, the rest the worker's account.

    `position_before` is the session's position as the turn was sent, None where it was not known.
    """

    first_chunk_s: float
    queued_s: float
    prefill_s: float
    first_token_s: float
    position_before: int | None
    position: int
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    finish_reason: str
    kv_live_bytes: int
    rewritten_from: int | None


class Memory(Struct, frozen=True, kw_only=True):
    """A worker's memory and disk, read right after a turn."""

    at_s: float
    worker: str
    uptime_s: float
    process_bytes: int
    resident_kv_bytes: int
    written_bytes: int


class Turn(Struct, frozen=True, kw_only=True):
    """One turn: when it was sent, how long it took by the client's clock, and how it ended."""

    turn: int
    started_s: float
    latency_s: float
    answer: Answer | None = None
    error: str | None = None
    memory: Memory | None = None


class Rewind(Struct, frozen=True, kw_only=True):
    """The session was full and began anew: before which turn, from which position, and why."""

    turn: int
    position: int
    reason: str


def answer_of(result: Generated, first_chunk_s: float, position_before: int | None) -> Answer:
    """Take from a result what is measured."""
    usage, seconds = result.usage, result.seconds
    return Answer(
        first_chunk_s=first_chunk_s,
        queued_s=seconds.queued,
        prefill_s=seconds.prefill,
        first_token_s=seconds.first_token,
        position_before=position_before,
        position=result.position,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        prefilled_tokens=usage.prefilled_tokens,
        completion_tokens=usage.completion_tokens,
        finish_reason=result.finish_reason,
        kv_live_bytes=result.kv_live_bytes,
        rewritten_from=result.rewritten_from,
    )


def per_token_s(turn: Turn) -> float | None:
    """Return the seconds per token after the first, None for an answer of fewer than two tokens."""
    answer = turn.answer
    if answer is None or answer.completion_tokens < 2:
        return None
    return (turn.latency_s - answer.first_chunk_s) / (answer.completion_tokens - 1)


def excess_prefilled(answer: Answer) -> int:
    """Return how many tokens were prefilled beyond the turn's own.

    A turn's own tokens are those that it added to the session, those that the chat template rewrote, and
    the one whose forward pass the turn before left waiting.
    """
    if answer.position_before is None:
        return 0
    kept = answer.position_before if answer.rewritten_from is None else answer.rewritten_from
    own = answer.prompt_tokens - kept + (1 if kept else 0)
    return max(0, answer.prefilled_tokens - own)
