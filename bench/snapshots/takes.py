"""What was measured once: the same sessions on one side, their prompts read and then answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from protocol.messages import SnapshotCounters

#: The sides: one worker each.
OFF: Final = "off"
ON: Final = "on"
SLOW: Final = "slow disk"
FAILING: Final = "failing disk"
SIDES: Final = (OFF, ON, SLOW, FAILING)


class Snapshots(Struct, frozen=True, kw_only=True):
    """What became of the snapshots of a take: on disk, given up, or still on their way at its end."""

    durable: int
    lost: int
    waiting: int
    written_bytes: int


class Take(Struct, frozen=True, kw_only=True):
    """`batch` sessions on one side.

    `prefill_s` is from sending all prompts to the last result, `decode_s` from the moment when every answer
    has its first token to the last token of all; `decoded` are the tokens that came in it. `agreeing` are the
    answers' tokens up to the first that differs from the side without snapshots, of `tokens`.
    """

    round: int
    batch: int
    side: str
    prompt_tokens: int
    prefill_s: float
    tokens: int
    agreeing: int
    decoded: int
    decode_s: float
    snapshots: Snapshots

    @property
    def decode_rate(self) -> float:
        """Tokens per second of all answers together."""
        return self.decoded / self.decode_s

    @property
    def prefill_rate(self) -> float:
        """Tokens per second of all prompts together."""
        return self.prompt_tokens / self.prefill_s

    @property
    def place(self) -> tuple[int, int]:
        """What the other sides' takes of the same sessions have too."""
        return self.round, self.batch


class Heard(Struct, frozen=True):
    """One answer as it came: when, and how many tokens."""

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]
    counts: tuple[int, ...]


def decoding(answers: list[Heard]) -> tuple[int, float]:
    """Count the tokens that came after every answer had its first chunk, and the seconds until the last."""
    begun_s = max(answer.times_s[0] for answer in answers)
    ended_s = max(answer.times_s[-1] for answer in answers)
    decoded = sum(
        count
        for answer in answers
        for time_s, count in zip(answer.times_s, answer.counts, strict=True)
        if time_s > begun_s
    )
    return decoded, ended_s - begun_s


def agreeing(answers: list[Heard], reference: list[Heard]) -> int:
    """Count the tokens before the first one that differs, answer by answer."""
    pairs = zip(answers, reference, strict=True)
    return sum(_common(answer.tokens, meant.tokens) for answer, meant in pairs)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


def became(before: SnapshotCounters, after: SnapshotCounters) -> Snapshots:
    """Say what happened between two readings of a worker's counters."""
    return Snapshots(
        durable=after.durable - before.durable,
        lost=after.failed + sum(after.dropped.values()) - before.failed - sum(before.dropped.values()),
        waiting=after.in_flight,
        written_bytes=after.written_bytes - before.written_bytes,
    )
