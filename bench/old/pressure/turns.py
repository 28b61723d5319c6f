"""What `bench pressure` measures: requests as they went, and the worker's memory over time."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from .plan import Kind, Verb  # noqa: TC001  # msgspec reads the annotations

#: What a cancelled request may end with: an answer cut short, or a refusal that says that nothing was done.
WITHDRAWN: Final = frozenset({"ok", "expired"})
REFUSED: Final = "memory_exceeded"


class Sent(Struct, frozen=True, kw_only=True):
    """One append or generate. `size` is what its session has to hold at the least, in tokens.

    `outcome` is `ok`, the code of a `failed`, or the class of a fault; `expected` is the context that it had
    to run over, and `prompt` the one that its answer names (both 0 where there is no answer).
    """

    session: int
    verb: Verb
    kind: Kind
    at_s: float
    latency_s: float
    size: int
    cancelled: bool
    outcome: str
    expected: int = 0
    prompt: int = 0
    generated: int = 0


class Reading(Struct, frozen=True, kw_only=True):
    """The worker at one time, by its metrics; `active` and `peak` (since its start) are what MLX measures."""

    at_s: float
    active_bytes: int
    peak_bytes: int
    kv_bytes: int
    process_bytes: int
    device_limit_bytes: int
    kv_limit_bytes: int
    running: int
    waiting: int
    waiting_for_memory: int
    resident_sessions: int
    restored_bytes: int


class Replayed(Struct, frozen=True, kw_only=True):
    """One session that was asked again, alone: answers compared, and the first that differs (None: none)."""

    session: int
    answers: int
    tokens: int
    differs_at: int | None


class Answers(Struct, frozen=True, kw_only=True):
    """The log after the run: requests, and those of them that have no result, or more than one."""

    requests: int
    unanswered: int
    repeated: int


def fits(sent: Sent, room: int) -> bool:
    """Say whether a request fits into memory for `room` tokens: its prompt, and a token of its answer."""
    return sent.size <= room


def wrongly_refused(sent: Sent, room: int) -> bool:
    """Say whether a request was refused for want of memory though it fits."""
    return sent.outcome == REFUSED and fits(sent, room)


def wrongly_taken(sent: Sent, room: int) -> bool:
    """Say whether a request was carried out that can never fit. A cancelled one may have been withdrawn."""
    return not fits(sent, room) and sent.outcome == "ok" and not sent.cancelled


def faulty(sent: Sent, room: int) -> bool:
    """Say whether a request ended otherwise than it should, whatever memory has to do with it."""
    if sent.outcome == "ok" or (sent.outcome == REFUSED and not fits(sent, room)):
        return False
    return not (sent.cancelled and sent.outcome in WITHDRAWN)
