"""What follows from the requests and readings of `bench pressure`: pure, to a report."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec import Struct

from bench.old.report import Report, Series
from bench.old.stats import Spread, spread

from .plan import KINDS, Kind
from .turns import Answers, Reading, Replayed, Sent, faulty, fits, wrongly_refused, wrongly_taken

if TYPE_CHECKING:
    from collections.abc import Sequence


class Sizes(Struct, frozen=True, kw_only=True):
    """What the bench found out before it set the limits.

    `idle_bytes` is on the device without any session, `beside_bytes` what the worker keeps free of KV: its
    weights and what its largest step takes.
    """

    bytes_per_token: int
    fixed_bytes: int
    idle_bytes: int
    beside_bytes: int

    def kv_bytes(self, num_tokens: int) -> int:
        """Return what the KV of so many tokens takes: the formula by which a request fits."""
        return self.fixed_bytes + num_tokens * self.bytes_per_token


class OfKind(Struct, frozen=True, kw_only=True):
    """The requests of one kind by outcome, and how long those took that were carried out."""

    kind: Kind
    sent: int
    outcomes: dict[str, int]
    seconds: Spread | None


class PressureSummary(Struct, frozen=True, kw_only=True):
    """The aggregates. Sizes are in bytes; the limits are those that the worker was given."""

    sent: int
    cancelled: int
    fitting: int
    unfitting: int
    wrongly_refused: int
    wrongly_taken: int
    other_contexts: int
    faults: dict[str, int]
    kinds: tuple[OfKind, ...]
    readings: int
    other_limits: int
    device_limit_bytes: int
    kv_limit_bytes: int
    idle_bytes: int
    most_active_bytes: int
    most_peak_bytes: int
    most_kv_bytes: int
    first_process_bytes: int
    most_process_bytes: int
    most_waiting_for_memory: int
    restored_bytes: int
    answers: Answers | None
    replayed: tuple[Replayed, ...]


class PressureReport(Report, frozen=True, kw_only=True):
    """The report of `bench pressure`. `messages` has the first message of every kind of failure."""

    sizes: Sizes | None
    summary: PressureSummary
    messages: dict[str, str]
    sent: tuple[Sent, ...]
    readings: tuple[Reading, ...]


def series(sent: Sequence[Sent], readings: Sequence[Reading]) -> dict[str, Series]:
    """Return the measures that two reports are compared by."""
    measures = {
        f"request, {kind}": Series(unit="s", better="lower", values=tuple(_seconds(sent, kind)))
        for kind in KINDS
        if kind != "never"
    }
    measures["process memory"] = Series(
        unit="bytes", better="lower", values=tuple(float(reading.process_bytes) for reading in readings)
    )
    return measures


def summarise(
    sent: Sequence[Sent],
    readings: Sequence[Reading],
    *,
    room: int,
    sizes: Sizes | None,
    device_limit_bytes: int,
    process_bytes: Sequence[int],
    answers: Answers | None,
    replayed: Sequence[Replayed],
) -> PressureSummary:
    """Aggregate all so far. `process_bytes` are the system's own readings, the first before the load."""
    kv_limit = sizes.kv_bytes(room) if sizes else 0
    fitting = sum(fits(one, room) for one in sent)
    return PressureSummary(
        sent=len(sent),
        cancelled=sum(one.cancelled for one in sent),
        fitting=fitting,
        unfitting=len(sent) - fitting,
        wrongly_refused=sum(wrongly_refused(one, room) for one in sent),
        wrongly_taken=sum(wrongly_taken(one, room) for one in sent),
        other_contexts=sum(one.prompt != one.expected for one in sent),
        faults=dict(
            Counter(one.outcome for one in sent if faulty(one, room) and not wrongly_refused(one, room))
        ),
        kinds=tuple(_of_kind(sent, kind) for kind in KINDS),
        readings=len(readings),
        other_limits=sum(
            (reading.device_limit_bytes, reading.kv_limit_bytes) != (device_limit_bytes, kv_limit)
            for reading in readings
        ),
        device_limit_bytes=device_limit_bytes,
        kv_limit_bytes=kv_limit,
        idle_bytes=sizes.idle_bytes if sizes else 0,
        most_active_bytes=max((reading.active_bytes for reading in readings), default=0),
        most_peak_bytes=max((reading.peak_bytes for reading in readings), default=0),
        most_kv_bytes=max((reading.kv_bytes for reading in readings), default=0),
        first_process_bytes=process_bytes[0] if process_bytes else 0,
        most_process_bytes=max(process_bytes, default=0),
        most_waiting_for_memory=max((reading.waiting_for_memory for reading in readings), default=0),
        restored_bytes=readings[-1].restored_bytes if readings else 0,
        answers=answers,
        replayed=tuple(replayed),
    )


def _of_kind(sent: Sequence[Sent], kind: Kind) -> OfKind:
    some = [one for one in sent if one.kind == kind]
    return OfKind(
        kind=kind,
        sent=len(some),
        outcomes=dict(Counter(one.outcome for one in some)),
        seconds=spread(_seconds(sent, kind)),
    )


def _seconds(sent: Sequence[Sent], kind: Kind) -> list[float]:
    return [one.latency_s for one in sent if one.kind == kind and one.outcome == "ok" and not one.cancelled]
