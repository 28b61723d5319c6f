"""Simulated histories fail if a safeguard of the program is removed; the report lists the causes."""

import re

import pytest

from tests.matrices import first
from tests.mutants import table
from tests.simulation.played import simulate


def test_the_report_of_a_failed_simulation_lists_a_few_actions_that_reproduce_the_failure() -> None:
    mutation = ("--without", "no idempotency")
    _, said = simulate("21000", "--histories", "400", *mutation, "--first")
    (seed,) = re.findall(r"^seed (\d+):", said, re.MULTILINE)
    status, said = simulate(seed, *mutation)
    assert status == 1
    (acts,) = re.findall(rf"seed {seed} goes wrong with these alone: (.*)", said)
    assert 0 < len(acts.split(", ")) < 8, acts
    assert "asks" in said
    assert "wrong: " in said


#: Half of the time for one safeguard would go into the start of a process, so each process takes several.
PLAYED = [name for name, mutant in table().items() if not mutant.test]
TOGETHER = [PLAYED[number::9] for number in range(9)]


@pytest.mark.timeout(1200)  # the removal of one of them shows in one history of 300
@pytest.mark.parametrize("names", first(TOGETHER), ids=lambda names: f"{names[0]} and others")
def test_the_simulation_finds_a_violation_if_any_listed_safeguard_of_the_program_is_removed(
    names: list[str],
) -> None:
    """Runs seeds until one fails. With the safeguards, no seed may fail: see `test_simulation`."""
    status, said = simulate("80000", "--histories", "1500", "--first", "--without", *names)
    assert status == 1, said
    assert re.findall(r"^without (.*):$", said, re.MULTILINE) == names
    assert "AttributeError" not in said, "a removal itself is broken"
