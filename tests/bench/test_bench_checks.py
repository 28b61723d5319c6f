"""Falsified results fail the check made for the fault and no other; correct ones fail none."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from lies import COMMON, SUITES, Lie, Suite

from bench import checks
from bench.checks import Check, Verdict
from bench.spec import Findings

#: The common lies falsify turns: a bench that has only samples does not get them.
LIES = [(suite, lie) for suite in SUITES for lie in (*(COMMON if suite.honest(0)[0] else ()), *suite.lies)]
#: Number of simulated runs of a suite, with the seeds 0, 1, ...; `make soak` simulates more.
RUNS = int(os.environ.get("TURNKEEP_TEST_EXAMPLES", "20"))
KEPT_TIME = checks.kept_time([]).name
each_suite = pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.bench.name)


def identify(one: Suite | Lie) -> str:
    return one.bench.name if isinstance(one, Suite) else one.name


@cache
def honest(make: Callable[[int], Any], seed: int) -> Sequence[Any]:
    """Make an honest run once per seed; all lies falsify copies of its turns and samples."""
    return make(seed)


def judged(suite: Suite, seed: int, lie: Lie | None = None, end: int | None = None) -> list[Check]:
    turns, samples = (
        [lie.bend(one) if lie else one for one in some[:end]] for some in honest(suite.honest, seed)
    )
    found = Findings(suite.bench, suite.plan, turns, samples)
    return [*suite.bench.checked(found, [])]


def failed(found: Any) -> list[str]:
    return [check.name for check in found if check.outcome is Verdict.FAILS]


@pytest.mark.parametrize(("suite", "lie"), LIES, ids=identify)
def test_each_kind_of_falsified_result_fails_the_check_made_for_it_and_no_other(
    suite: Suite, lie: Lie
) -> None:
    found = [failed(judged(suite, seed, lie)) for seed in range(RUNS)]
    assert [name for names in found for name in names if not name.startswith(lie.check)] == []
    assert sum(map(bool, found)) >= 0.95 * RUNS


@each_suite
def test_correct_results_fail_no_exact_check_and_seldom_a_statistical_one(suite: Suite) -> None:
    runs = [judged(suite, seed) for seed in range(RUNS)]
    assert not [check.name for run in runs for check in run if check.failed]
    assert sum(bool(failed(run)) for run in runs) <= 0.05 * RUNS
    assert sum(check.outcome is Verdict.HOLDS for run in runs for check in run) >= 0.8 * sum(map(len, runs))
    caught = [lie.check for one, lie in LIES if one is suite]
    assert [check.name for check in runs[0] if not check.name.startswith((*caught, KEPT_TIME))] == []


@each_suite
def test_an_honest_run_that_stops_after_any_turn_fails_no_check(suite: Suite) -> None:
    for end in range(len(honest(suite.honest, 0)[0])):
        assert failed(judged(suite, 0, end=end)) == []


def test_the_check_of_timekeeping_fails_if_the_measuring_loop_is_often_late() -> None:
    assert checks.kept_time([0.001] * 1000).outcome is Verdict.HOLDS
    assert checks.kept_time([0.001] * 980 + [0.1] * 20).outcome is Verdict.FAILS
    assert checks.kept_time([0.1] * 20).outcome is Verdict.CANNOT_TELL
