"""The report of slow tests, and the combinations of parameters in an ordinary run."""

from pathlib import Path

import pytest

from tests.durations import main
from tests.matrices import thinned

CASE = '<testcase classname="{}" name="{}" time="{}"><properties>{}</properties></testcase>'
CPU = '<property name="cpu_s" value="{}"/>'


def test_the_durations_report_fails_and_names_a_test_file_that_exceeds_the_cpu_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        ("tests.test_rooms", "test_a", 3),
        ("tests.test_rooms", "test_b[x.y]", 4),
        ("tests.test_no", "c", 1),
    ]
    report = tmp_path / "tests.xml"
    written = "".join(CASE.format(*case, CPU.format(case[2])) for case in cases)
    report.write_text(f"<testsuites><testsuite>{written}</testsuite></testsuites>")
    for budget, failed in (("7.5", 0), ("6.5", 1)):
        monkeypatch.setattr("sys.argv", ["durations", str(report), "--budget", budget])
        assert main() == failed
    assert capsys.readouterr().out == "ERROR tests/test_rooms.py took 7 s of CPU time; a file has 6.5 s\n"
    monkeypatch.setattr("sys.argv", ["durations", str(report)])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["8.0", "s", "8.0", "s", "CPU", "3", "tests"]
    assert lines[lines.index("files") + 1].split()[-2:] == ["2", "tests/test_rooms.py"]


def test_test_parameters_thinned_out_for_short_test_runs_still_cover_each_value_or_each_pair_of_values() -> (
    None
):
    axes = range(5), range(2), range(3)
    for strength, num_kept in ((1, 5), (2, 15)):
        cases = thinned(*axes, strength=strength)
        kept = [case.values for case in cases if not case.marks]
        assert len(cases) == 30
        assert num_kept <= len(kept) <= num_kept + 2
        for i, axis in enumerate(axes):
            assert {case[i] for case in kept} == set(axis)
    assert len({case[:2] for case in kept}) == 10
    assert len({case[1:] for case in kept}) == 6
