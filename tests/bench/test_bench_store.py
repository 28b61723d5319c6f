"""`bench store`: the cache's own program, what is made of what it says, and how it is ended."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from bench_runs import PATIENCE_S, check_one_line, turnkeep

from bench.old import report
from bench.old.page import render
from bench.old.store.page import page_of
from bench.old.store.summary import Opened, Read, StoreReport, checks, series, summarise

MIB = 2**20


def reads(share: float, tokens: int = 1500, rounds: int = 9) -> list[Read]:
    return [
        Read(
            tokens=tokens,
            size_bytes=64 * MIB,
            restore_s=0.02 / share * (1 + i / 50),
            load_s=0.02 * (1 + i / 50),
        )
        for i in range(rounds)
    ]


def opened(open_s: float, match_s: float, blocks: int = 100_000, chain: int = 1_000) -> list[Opened]:
    return [Opened(blocks=blocks, chain=chain, open_s=open_s, match_s=match_s) for _ in range(5)]


@pytest.mark.parametrize(
    ("share", "index", "passed"),
    [
        (0.9, opened(0.7, 0.004), [True, True, True]),
        (0.7, opened(1.2, 0.006), [False, False, False]),
        (0.9, opened(0.1, 0.001, blocks=2_000), [True, None, None]),
        (0.9, [], [True, None, None]),
    ],
)
def test_what_is_promised_is_held_against_the_medians(share, index, passed) -> None:
    assert [check.passed for check in checks(summarise(reads(share), index))] == passed


def test_the_slowest_length_counts_and_each_has_its_series() -> None:
    both = [*reads(0.95, tokens=300), *reads(0.75)]
    summary = summarise(both, [])
    assert [round(length.share.median, 2) for length in summary.lengths] == [0.95, 0.75]
    assert "0.75 at 1,500 tokens" in checks(summary)[0].detail
    assert list(series(both, opened(1, 1))) == [
        "restore: 300 tokens",
        "MLX alone: 300 tokens",
        "restore: 1500 tokens",
        "MLX alone: 1500 tokens",
        "opening the index",
        "matching a prefix",
    ]
    assert [check.passed for check in checks(summarise([], []))] == [None] * 3
    assert series([], []) == {}


@pytest.mark.process
def test_a_smoke_run_of_the_store_ends_well(tmp_path: Path) -> None:
    process = turnkeep("store", "--smoke", "--out", tmp_path)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    found = report.read(next(tmp_path.glob("store-*.json")), StoreReport)
    assert found.complete
    assert [(read.tokens, read.size_bytes > 300 * 46_080) for read in found.reads] == [(300, True)] * 3
    assert [(one.blocks, one.chain) for one in found.opened] == [(2_000, 1_000)] * 3
    assert all(read.restore_s > 0 and read.load_s > 0 for read in found.reads)
    assert next(tmp_path.glob("store-*.html")).read_text().count("<svg") == 2
    page = render(page_of(found), warn=print)
    assert page is not None
    assert "opening 2,000 blocks" in page


@pytest.mark.process
def test_a_store_bench_that_is_interrupted_leaves_no_process_and_no_files(tmp_path: Path) -> None:
    process = turnkeep("store", "--smoke", "--blocks", 2000, "--dir", tmp_path)
    deadline = time.monotonic() + 30
    while not any(tmp_path.glob("*/store/snapshots")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="a directory that even root cannot write to is wanted")
def test_a_directory_that_takes_nothing_is_one_line() -> None:
    check_one_line(turnkeep("store", "--smoke", "--dir", "/proc"), "nothing can be written to /proc: ")


@pytest.mark.process
def test_a_program_that_fails_is_one_line(tmp_path: Path) -> None:
    """Its directory is taken away while it writes."""
    process = turnkeep("store", "--blocks", 50_000, "--tokens", 4000, "--dir", tmp_path)
    deadline = time.monotonic() + 30
    while not any(tmp_path.glob("*/store/snapshots/*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shutil.rmtree(tmp_path, ignore_errors=True)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert err.startswith("turnkeep: the measuring process ended: ")
    assert err.count("\n") == 1, err
