"""Takes guards of the program away, one at a time, and proves that a test then fails: `make mutants`.

A mutant of `mutants.toml` replaces exact pieces of the program's source, each of which its file has once.
It names the cheapest test that fails with it, or fields of the plans (`plan`) of simulated histories that do.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Final

import psutil

from tests.forked import CAN_FORK

ROOT: Final = Path(__file__).parents[1]
# Processes are forked from one that has imported the program; one that has loaded Metal must not fork.
_FORKS: Final = multiprocessing.get_context("forkserver" if CAN_FORK else "spawn")
if CAN_FORK:
    _FORKS.set_forkserver_preload(["tests.imported", "pytest"])
#: How long a mutant's tests or histories may take; pytest ends a test that hangs before, if it can be ended.
_MOST_S: Final = 1800.0
#: Where a function begins: its file, its qualified name, its first line.
Place = tuple[str, str, int]


@dataclass(frozen=True)
class Mutant:
    """One guard of the program: `edits` (file, old text, new text) take it away, `test` fails without it.

    Without a test, histories find it; `plan` has the fields of their plans that fail soonest.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    test: str
    plan: dict[str, Any]

    @classmethod
    def of(cls, name: str, row: dict[str, Any]) -> Mutant:
        """Build the mutant of a row of the table. Raises `KeyError` for a row without edit or test."""
        edits = row["edits"] if "edits" in row else [row["edit"]]
        test = "" if "plan" in row else row["test"]
        return cls(name, tuple((file, old, new) for file, old, new in edits), test, row.get("plan", {}))

    def codes(self) -> dict[Place, CodeType]:
        """Return the code of the functions of the changed files, by their place in the program as it is.

        Raises `ValueError` if a file does not have an old text exactly once, or no function has it.
        """
        found: dict[Place, CodeType] = {}
        for file in dict.fromkeys(file for file, _, _ in self.edits):
            before = after = (ROOT / file).read_text()
            for _, old, new in (edit for edit in self.edits if edit[0] == file):
                if (times := before.count(old)) != 1 or after.count(old) != 1:
                    raise ValueError(f"{self.name}: {file} has {old!r} {times} times; it must have it once")
                after = after.replace(old, new)
            changed = False
            codes = _codes(after, file)
            for name, code in _codes(before, file).items():
                if name in codes:
                    found[code.co_filename, code.co_qualname, code.co_firstlineno] = codes[name]
                    changed = changed or (name[0] != "<module>" and _differ(code, codes[name]))
            if not changed:
                raise ValueError(f"{self.name}: no function of {file} changes")
        return found


def _codes(source: str, file: str) -> dict[tuple[str, int], CodeType]:
    """Return the code of a module and of all its functions and classes, by name and number of that name."""
    found: dict[tuple[str, int], CodeType] = {}
    numbers = Counter[str]()
    waiting = [compile(source, str(ROOT / file), "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        numbers[code.co_qualname] += 1
        found[code.co_qualname, numbers[code.co_qualname]] = code
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
    return found


def _differ(one: CodeType, other: CodeType) -> bool:
    constants = [
        [value for value in code.co_consts if not isinstance(value, CodeType)] for code in (one, other)
    ]
    return one.co_code != other.co_code or one.co_names != other.co_names or constants[0] != constants[1]


def table() -> dict[str, Mutant]:
    """Read the table of mutants, by name."""
    rows = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
    return {name: Mutant.of(name, row) for name, row in rows.items()}


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Run the program without the mutant's guard inside the block: its functions get other code."""
    codes = mutant.codes()
    for file, _, _ in mutant.edits:
        import_module(file.removeprefix("protocol/").removesuffix(".py").replace("/", "."))
    gc.unfreeze()  # else the collector does not list frozen functions
    places = [
        (one, (code.co_filename, code.co_qualname, code.co_firstlineno))
        for one in gc.get_objects()
        if isinstance(one, FunctionType) and (code := one.__code__)
    ]
    functions = [(one, one.__code__, codes[place]) for one, place in places if place in codes]
    for function, _, code in functions:
        function.__code__ = code
    try:
        yield
    finally:
        for function, code, _ in functions:
            function.__code__ = code


def find(mutant: Mutant, gone: tuple[str, ...]) -> tuple[bool, str, float]:
    """Run a mutant's test, in a process of its own; return whether it failed, its id, and the seconds.

    Tests whose ids begin with one of `gone` do not run: then all others of the test's folder do, to the first
    that fails.
    """
    begun_s = time.monotonic()
    try:
        mutant.codes()
    except (ValueError, SyntaxError) as error:  # it is the row that fails
        return False, str(error), 0.0
    if not mutant.test:
        seeds = ("80000", "--histories", "1500", "--first")
        command = [sys.executable, "-P", "-m", "tests.simulation", *seeds, "--without", mutant.name]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_MOST_S
            )
        except subprocess.TimeoutExpired:
            return False, f"its histories have not ended within {_MOST_S:.0f} s", _MOST_S
        said = done.stdout + done.stderr
        wrong = re.search(r"^seed \d+:\n +(.{,60})", said, re.MULTILINE)
        return done.returncode == 1, wrong[1] if wrong else said, time.monotonic() - begun_s
    is_gone = bool(gone) and mutant.test.startswith(gone)
    left = str(Path(mutant.test.partition("::")[0]).parent) if is_gone else mutant.test
    # Else each row would leave the folders of its tests: its process ends without pytest's own removal.
    with tempfile.TemporaryDirectory(prefix="mutant", ignore_cleanup_errors=True) as folder:
        arguments = [left, f"--basetemp={folder}/tests", *(f"--deselect={test}" for test in gone)]
        output = Path(folder, "output")
        process = _FORKS.Process(target=_test, args=(mutant, arguments, output))
        process.start()
        process.join(_MOST_S)
        if process.is_alive():
            _kill(process.pid)
            why = f"its process has not ended within {_MOST_S:.0f} s, nor did pytest end the test"
            return False, why, time.monotonic() - begun_s
        said = output.read_text()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    code = process.exitcode or 0
    what = "its process has crashed" if code < 0 else failed[-1] if failed else said[-3000:]
    return (code == 1 and bool(failed)) or code < 0, what, time.monotonic() - begun_s


def _kill(pid: int | None) -> None:
    """Kill a process and what it has started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            one.kill()


def _test(mutant: Mutant, arguments: list[str], output: Path) -> None:
    """Run tests without a guard, in this process, and exit with pytest's code."""
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(ROOT)
    import pytest

    options = ["-qx", "-p", "no:cacheprovider", "--timeout=120"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the first process has imported pytest
    with mutated(mutant):
        code = pytest.main([*options, *arguments])
    sys.stdout.flush()
    os._exit(code)  # threads of a test may wait for ever


def main() -> int:
    """Run the table, or a part of it; return 1 if a mutant was not found."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="run mutants with one of these words in name, file or test")
    parser.add_argument(
        "--gone", nargs="+", default=[], help="run the mutants of these tests, files or folders without them"
    )
    asked = parser.parse_args()
    gone = tuple(asked.gone)
    mutants = [
        one
        for one in table().values()
        if any(word in f"{one.name} {one.edits} {one.test}" for word in asked.words or [""])
        and (not gone or one.test.startswith(gone))
    ]
    counts = Counter[bool]()
    with ThreadPoolExecutor(2) as pool:
        runs = {pool.submit(find, one, gone): one for one in mutants}
        for run in as_completed(runs):
            is_found, said, took_s = run.result()
            counts[is_found] += 1
            outcome = "found" if is_found else "NOT FOUND"
            print(f"{outcome:10}{took_s:6.1f} s  {runs[run].name}: {said}", flush=True)
    print(f"{counts[True]} of {counts.total()} mutants were found")
    return int(counts[False] > 0 or not counts)


if __name__ == "__main__":
    sys.exit(main())
