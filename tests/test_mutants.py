"""The table of mutants fits the program and its tests; `make mutants`, which takes minutes, runs it."""

import re

import pytest

from tests import mutants
from tests.mutants import ROOT, Mutant, find, mutated, table
from worker.wire import intake

ROWS = table()


@pytest.mark.parametrize("name", ROWS)
def test_the_text_that_a_mutant_replaces_is_in_the_program_exactly_once_and_the_mutants_test_exists(
    name: str,
) -> None:
    assert ROWS[name].codes()
    if test := ROWS[name].test:
        file, function = re.split("::|\\[", test)[:2]
        assert re.search(rf"^(async def |def |){function}\b", (ROOT / file).read_text(), re.MULTILINE), test


@pytest.mark.parametrize(
    "test", ["tests/test_mutants.py::test_a_mutant_changes_its_function_only_inside_its_with_block", ""]
)
def test_a_mutant_whose_text_to_replace_is_not_in_the_program_is_reported_as_not_detected(test: str) -> None:
    """Neither by a test nor by histories: what fails then is the row."""
    stale = Mutant("a stale row", (("worker/wire/intake.py", "no such text", "x"),), test, {})
    is_found, said, _ = find(stale, ())
    assert (is_found, "it must have it once" in said) == (False, True)


def test_a_mutant_whose_new_code_cannot_replace_the_functions_code_is_reported_as_not_detected() -> None:
    """The code of a function cannot be replaced by one that has another number of outer variables."""
    edit = ("ops/http_server.py", "return contextlib.nullcontext()", "return super().capture_signals()")
    is_found, said, _ = find(Mutant("needs __class__", (edit,), "tests/test_mutants.py", {}), ())
    assert (is_found, "free vars" in said) == (False, True)


@pytest.mark.timeout(60)
def test_a_mutant_whose_process_does_not_end_is_reported_as_not_detected_and_the_process_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mutants, "_MOST_S", 3.0)
    edit = ("worker/wire/intake.py", 'if name in ("*", ">") or', 'if __import__("time").sleep(100) or')
    test = "tests/test_mutants.py::test_a_mutant_changes_its_function_only_inside_its_with_block"
    is_found, said, took_s = find(Mutant("hangs", (edit,), test, {}), ())
    assert (is_found, said) == (False, "its process has not ended within 3 s, nor did pytest end the test")
    assert took_s < 50


def test_a_mutant_changes_its_function_only_inside_its_with_block() -> None:
    edit = ("worker/wire/intake.py", 'if name in ("*", ">") or', "if")
    with mutated(Mutant("wild cards are names", (edit,), "", {})):
        assert intake.session_of("p.in.*.*.x") is not None
    assert intake.session_of("p.in.*.*.x") is None


@pytest.mark.parametrize("old", ["no such text", "return", "import annotations"])
def test_a_mutant_whose_edit_changes_no_function_or_is_ambiguous_is_refused(old: str) -> None:
    mutant = Mutant("no", (("worker/wire/intake.py", old, old.upper()),), "", {})
    with pytest.raises((ValueError, SyntaxError)):
        mutant.codes()
