"""What a worker is promised to do around its memory limit, held against what was measured. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.old.figures import MIB
from bench.old.report import Check

if TYPE_CHECKING:
    from .summary import PressureSummary

#: A load that never comes so close to its limit proves nothing.
NEAR: Final = 0.75
#: What a process may grow by besides what MLX has allocated: freed buffers that are kept for reuse, snapshots
#: that are being written, Python's own.
BESIDE_BYTES: Final = 192 * 2**20


def checks(summary: PressureSummary) -> tuple[Check, ...]:
    """Hold the aggregates against what is promised."""
    return (
        *_limits(summary),
        _count("no request that fits was refused", summary.wrongly_refused, summary.fitting, "that fit"),
        _count(
            "no request was carried out that can never fit",
            summary.wrongly_taken,
            summary.unfitting,
            "that do not",
        ),
        Check(
            name="every other request was answered",
            passed=not summary.faults if summary.sent else None,
            detail=", ".join(f"{n} {name}" for name, n in summary.faults.items())
            or f"{summary.sent:,} requests",
            exact=True,
        ),
        _once(summary),
        _count(
            "no answer ran over another context than was sent", summary.other_contexts, summary.sent, "sent"
        ),
        _alone(summary),
        _near(summary),
        _process(summary),
    )


def _limits(summary: PressureSummary) -> tuple[Check, ...]:
    known = summary.readings > 0
    return (
        Check(
            name="what MLX allocates stays within device_memory",
            passed=summary.most_peak_bytes <= summary.device_limit_bytes if known else None,
            detail=f"at the most {summary.most_peak_bytes / MIB:,.1f} of"
            f" {summary.device_limit_bytes / MIB:,.1f} MiB, in {summary.readings:,} readings",
            exact=True,
        ),
        Check(
            name="KV stays within max_memory",
            passed=summary.most_kv_bytes <= summary.kv_limit_bytes if known else None,
            detail=f"at the most {summary.most_kv_bytes / MIB:,.2f} of"
            f" {summary.kv_limit_bytes / MIB:,.2f} MiB",
            exact=True,
        ),
        Check(
            name="the worker's limits are those that it was given",
            passed=not summary.other_limits if known else None,
            detail=f"{summary.other_limits:,} of {summary.readings:,} readings name others",
            exact=True,
        ),
    )


def _count(name: str, number: int, of: int, which: str) -> Check:
    return Check(
        name=name,
        passed=number == 0 if of else None,
        detail=f"{number:,} of {of:,} {which}",
        exact=True,
    )


def _once(summary: PressureSummary) -> Check:
    found = summary.answers
    passed = None if found is None else not (found.unanswered or found.repeated)
    return Check(
        name="every request has exactly one result in the log",
        passed=passed,
        detail="the log was not read"
        if found is None
        else f"{found.unanswered:,} of {found.requests:,} have none, {found.repeated:,} several",
        exact=True,
    )


def _alone(summary: PressureSummary) -> Check:
    found = summary.replayed
    wrong = [one for one in found if one.differs_at is not None]
    total = sum(one.answers for one in found)
    detail = f"{total:,} answers of {len(found):,} sessions, {sum(one.tokens for one in found):,} tokens"
    if wrong:
        first = wrong[0]
        detail += f"; {len(wrong)} sessions differ, session {first.session} in answer {first.differs_at}"
    return Check(
        name="answers are those of the same sessions alone",
        passed=not wrong if total else None,
        detail=detail,
        exact=True,
    )


def _near(summary: PressureSummary) -> Check:
    """Without it every other check could be passed by a limit that leaves far too much."""
    passed: bool | None = None
    detail = "not known"
    if summary.readings and summary.kv_limit_bytes:
        used = summary.most_active_bytes - summary.idle_bytes
        passed = min(used, summary.most_kv_bytes) >= NEAR * summary.kv_limit_bytes
        detail = (
            f"{used / summary.kv_limit_bytes:.0%} of max_memory were allocated at the most,"
            f" {summary.most_kv_bytes / summary.kv_limit_bytes:.0%} accounted for"
        )
    return Check(name="the load came near the limit", passed=passed, detail=detail, exact=False)


def _process(summary: PressureSummary) -> Check:
    passed: bool | None = None
    detail = "not known"
    if summary.first_process_bytes and summary.most_process_bytes:
        allowed = summary.device_limit_bytes - summary.idle_bytes + BESIDE_BYTES
        grown = summary.most_process_bytes - summary.first_process_bytes
        passed = grown <= allowed
        detail = (
            f"{grown / MIB:,.0f} MiB, where device_memory leaves"
            f" {(summary.device_limit_bytes - summary.idle_bytes) / MIB:,.0f} beside the weights"
        )
    return Check(name="the process grows by little more than that", passed=passed, detail=detail, exact=False)
