"""Lists the slowest files, folders and tests of a run: `python -m tests.durations REPORT [--budget SECONDS]`.

`REPORT` is what pytest writes by `--junitxml`. `Meter` adds the CPU time of each test: its process, and the
processes that it has waited for, but not forked workers and the NATS server that all tests share. How long a
test takes also depends on the machine's other load; so the budget of a file is CPU time.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[1]
CPU = "cpu_s"


def used_cpu_s() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Meter:
    """A plug-in of pytest that adds the CPU time of each test to the report."""

    def __init__(self) -> None:
        self._begun_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._begun_s = used_cpu_s()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((CPU, f"{used_cpu_s() - self._begun_s:.3f}"))
        return report


@dataclass
class Took:
    """How many tests were added up, and the sums of their times."""

    num_tests: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __iadd__(self, other: Took) -> Self:
        self.num_tests += other.num_tests
        self.wall_s += other.wall_s
        self.cpu_s += other.cpu_s
        return self

    def __str__(self) -> str:
        return f"{self.wall_s:8.1f} s {self.cpu_s:8.1f} s CPU {self.num_tests:5}"


def file_of(case: ET.Element) -> str:
    """Return a test's file: the longest part of its class name (`tests.ops.test_top.Case`) that is one."""
    parts = case.get("classname", "").split(".")
    return next(
        (
            str(path)
            for end in range(len(parts), 0, -1)
            if (ROOT / (path := Path(*parts[:end]).with_suffix(".py"))).exists()
        ),
        "?",
    )


def read(report: Path) -> dict[tuple[str, str], Took]:
    """Return the times of each test of a report, by its file and name."""
    tests: dict[tuple[str, str], Took] = {}
    for case in ET.parse(report).iter("testcase"):
        cpu_s = sum(float(one.get("value", 0)) for one in case.iter("property") if one.get("name") == CPU)
        tests[file_of(case), case.get("name", "")] = Took(1, float(case.get("time", 0)), cpu_s)
    return tests


def slowest(tests: dict[tuple[str, str], Took], name: Callable[[str, str], str]) -> list[tuple[str, Took]]:
    """Add up the tests for which `name(file, test)` is the same; return the slowest sums first."""
    sums: defaultdict[str, Took] = defaultdict(Took)
    for test, took in tests.items():
        sums[name(*test)] += took
    return sorted(sums.items(), key=lambda one: -one[1].wall_s)


def main() -> int:
    parser = argparse.ArgumentParser(prog="durations", description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--top", type=int, default=15, help="list so many files and tests")
    parser.add_argument("--budget", type=float, help="only fail if a file takes more CPU time, in seconds")
    asked = parser.parse_args()
    tests = read(asked.report)
    files = slowest(tests, lambda file, _: file)
    if asked.budget is not None:
        over = [(file, took.cpu_s) for file, took in files if took.cpu_s > asked.budget]
        for file, cpu_s in over:
            print(f"ERROR {file} took {cpu_s:.0f} s of CPU time; a file has {asked.budget:g} s")
        return bool(over)
    for title, some in (
        ("all", slowest(tests, lambda *_: "tests")),
        ("folders", slowest(tests, lambda file, _: str(Path(file).parent))),
        ("files", files[: asked.top]),
        ("tests", slowest(tests, lambda file, name: f"{file}::{name}")[: asked.top]),
    ):
        print(title, *(f"{took}  {name}" for name, took in some), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
