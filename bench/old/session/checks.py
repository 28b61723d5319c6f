"""What a session is promised to cost, held against what was measured. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.old.report import Check

from .summary import MIN_READINGS

if TYPE_CHECKING:
    from .summary import Slope, Summary, Wait

#: A session prefilled anew each turn waits about one prefilled token's time for every token that it holds;
#: attention to them alone costs a few percent of it. In between lies this share.
PREFILL_SHARE: Final = 0.25
#: A shorter run sees only how the process fills its caches, whatever the slope.
MIN_GROWTH_S: Final = 600.0


def checks(summary: Summary) -> tuple[Check, ...]:
    """Hold the aggregates against what is promised."""
    answered = summary.answered > 0
    errors = ", ".join(f"{count} {name}" for name, count in summary.errors.items())
    formula = None if summary.answered < 2 else summary.kv_bytes_per_token is not None
    if formula and summary.kv_formula_broken_at:
        formula = False
    drift = summary.latency.drift_share if summary.latency else None
    waits = summary.wait
    return (
        Check(
            name="every turn was answered",
            passed=answered and not errors,
            detail=errors or f"{summary.answered} of {summary.turns}",
            exact=True,
        ),
        Check(
            name="KV is not empty and follows its formula at every turn",
            passed=formula,
            detail=_formula(summary),
            exact=True,
        ),
        Check(
            name="only a turn's own tokens are prefilled",
            passed=not summary.excess_prefilled_max if answered else None,
            detail=_excess(summary),
            exact=True,
        ),
        wait_check(waits),
        Check(
            name="the latency's drift is at most 5 s",
            passed=summary.prefill_bounded,
            detail="fewer than 10 answers" if drift is None else f"{drift:+.1%} of the median",
            exact=False,
        ),
        growth_check(summary.beyond_kv),
    )


def wait_check(waits: Wait | None) -> Check:
    """Say whether the client's clock agrees with what the worker says that it found in its cache."""
    return Check(
        name="the wait for the first chunk bears out the cache",
        passed=None if waits is None else not _prefills_all(waits),
        detail=_wait(waits),
        exact=False,
    )


def growth_check(beyond_kv: Slope | None) -> Check:
    """Say whether the worker's process keeps its size."""
    return Check(
        name="the process does not grow, its KV left out",
        passed=_level(beyond_kv),
        detail=_growth(beyond_kv),
        exact=False,
    )


def _formula(summary: Summary) -> str:
    if summary.kv_bytes_per_token is None:
        return "no two turns agree on the bytes per token"
    if summary.kv_formula_broken_at:
        return f"broken at turns {', '.join(map(str, summary.kv_formula_broken_at))}"
    return f"{summary.kv_bytes_per_token:,} bytes per token"


def _excess(summary: Summary) -> str:
    if not summary.excess_prefilled_max:
        return f"at most {summary.prefilled_tokens_max:,} tokens a turn"
    turns = ", ".join(map(str, summary.excess_prefilled_at))
    return f"up to {summary.excess_prefilled_max:,} tokens too many, at turns {turns}"


def _prefills_all(waits: Wait) -> bool:
    return waits.low_s > 0 and waits.per_position_s > PREFILL_SHARE * waits.per_prefilled_s


def _wait(waits: Wait | None) -> str:
    if waits is None:
        return f"fewer than {MIN_READINGS} answers, or no turn that found an empty cache"
    return (
        f"{waits.per_position_s * 1e6:+.1f} us for a token of the session"
        f" (95%: {waits.low_s * 1e6:+.1f} to {waits.high_s * 1e6:+.1f}),"
        f" {waits.per_prefilled_s * 1e6:.0f} us for a prefilled one"
    )


def _level(slope: Slope | None) -> bool | None:
    return None if slope is None or slope.seconds < MIN_GROWTH_S else slope.low <= 0


def _growth(slope: Slope | None) -> str:
    if slope is None:
        return f"fewer than {MIN_READINGS} readings after the warm-up"
    mib = 2**20
    rate = f"{slope.bytes_per_hour / mib:+.1f} MiB an hour"
    interval = f"(95%: {slope.low / mib:+.1f} to {slope.high / mib:+.1f})"
    return f"{rate} {interval}" + ("" if slope.seconds >= MIN_GROWTH_S else ", within minutes of the start")
