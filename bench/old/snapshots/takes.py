"""What was measured once: the same sessions on one side, their prompts read and then answered."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from turnkeep_client.messages import SnapshotCounters

#: The sides: one worker each.
OFF: Final = "off"
ON: Final = "on"
SLOW: Final = "slow disk"
FAILING: Final = "failing disk"
SIDES: Final = (OFF, ON, SLOW, FAILING)

#: The steps that a block's copying and writing can hold up, and how many on each side of them it cannot.
WINDOW: Final = 4
NEIGHBOURS: Final = 12


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
    answers' tokens up to the first that differs from the side without snapshots, of `tokens`. `beside_s` is
    what `beside_blocks` tells of them all.
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
    beside_s: tuple[float, ...]
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
    """One answer as it came, behind `position` tokens: when, and how many tokens."""

    position: int
    tokens: tuple[int, ...]
    times_s: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def steps_s(self) -> list[float]:
        """The time from each token to the next."""
        pairs = zip(self.times_s, self.counts, strict=True)
        return [b - a for a, b in pairwise(time_s for time_s, count in pairs for _ in range(count))]


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


def beside_blocks(answer: Heard, block_tokens: int) -> list[float]:
    """Tell what `WINDOW` steps took above the median of their neighbours, for each block that was completed.

    A block is full with the KV of the token that was drawn last, so the steps behind that token are those
    that its copying and writing can hold up; as many neighbours as there are, on both sides, say what steps
    take at that moment. This tells a cost of milliseconds where whole answers scatter by seconds.
    """
    steps = answer.steps_s
    found = []
    first = block_tokens - answer.position % block_tokens
    for drawn in range(first, len(steps) - WINDOW + 1, block_tokens):
        end = drawn + WINDOW
        around = steps[max(0, drawn - NEIGHBOURS) : drawn] + steps[end : end + NEIGHBOURS]
        if len(around) >= NEIGHBOURS:
            found.append(sum(steps[drawn:end]) - WINDOW * statistics.median(around))
    return found


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
