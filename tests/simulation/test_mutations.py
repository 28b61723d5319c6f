"""Simulated histories fail if a safeguard of the program is removed; the report lists the causes."""

from __future__ import annotations

import re

import pytest

from tests.simulation.mutations import MUTATIONS
from tests.simulation.played import simulate


def test_the_report_of_a_failed_simulation_lists_the_few_actions_that_cause_it() -> None:
    mutation = ("--without", "no idempotency")
    _, said = simulate("20000", "--histories", "400", *mutation, "--first")
    (seed,) = re.findall(r"^seed (\d+):", said, re.MULTILINE)
    status, said = simulate(seed, *mutation)
    assert status == 1
    (acts,) = re.findall(rf"seed {seed} goes wrong with these alone: (.*)", said)
    assert 0 < len(acts.split(", ")) < 8, acts
    assert "asks" in said
    assert "wrong: " in said


@pytest.mark.timeout(600)  # the removal of one of them shows in one history of 300
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_simulated_history_fails_if_this_safeguard_of_the_program_is_removed(name: str) -> None:
    """Runs seeds until one fails. With the safeguard, no seed may fail: see `test_simulation`."""
    status, said = simulate("80000", "--histories", "1500", "--without", name, "--first")
    assert status == 1, said
