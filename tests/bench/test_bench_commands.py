"""Every bench as a command: complete, interrupted and failed runs, and their reports."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from lies import SUITES, Suite

from bench.checks import Verdict
from bench.report import Report

Start = Callable[..., subprocess.Popen[str]]
Lasting = tuple[subprocess.Popen[str], Path]

pytestmark = pytest.mark.process
#: Time limit of a bench that takes seconds, for a busy machine.
PATIENCE_S = 120
#: Options of runs that last until a test ends them. All benches share the code that ends a run, so one of
#: several processes is interrupted, and the only process of one is killed. `make soak` tests all.
LONG = {
    "device": "--pieces 64 --rows 1 --rounds 10000",
    "session": "--duration 600 --every 0.1 --max-tokens 2",
    "peers": "--part chat --chats 1000 --turns 3 --turn-tokens 20 --max-tokens 4",
    "load": "--concurrency 1 --turns 10000 --max-tokens 2 --history 1",
    "restart": "--tokens 256 --rounds 20",
    "recall": "--tokens 600 --resident 512 --texts 100",
}


def _benches(*always: str, packaging: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Parametrise a test by bench: `always`, `packaging` in `make packaging`, the others in `make soak`."""

    def marks(name: str) -> list[pytest.MarkDecorator]:
        return [] if name in always else [pytest.mark.packaging if name in packaging else pytest.mark.soak]

    suites = [pytest.param(one, marks=marks(one.bench.name), id=one.bench.name) for one in SUITES]
    return pytest.mark.parametrize("suite", suites)


@pytest.fixture
def model(suite: Suite, request: pytest.FixtureRequest) -> Path:
    """A tiny model; recall also has paged sessions, which need wider heads."""
    folder: Path = request.getfixturevalue("wide_model" if suite.bench.name == "recall" else "tiny_model")
    return folder


def read(path: Path) -> Report:
    return msgspec.json.decode(path.read_bytes(), type=Report)


@pytest.fixture
def lasting(suite: Suite, tmp_path: Path, model: Path, turnkeep: Start) -> Lasting:
    """A running bench and the path of its report, once this has three turns or samples."""
    options = LONG[suite.bench.name].split()
    process = turnkeep(
        suite.bench.name,
        *options,
        "--corpus",
        "built-in",
        "--checkpoint",
        0.1,
        "--model",
        model,
        "--out",
        tmp_path,
    )
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for path in tmp_path.glob("*.json"):
            found = read(path)
            if len(found.turns) + len(found.samples) >= 3:
                return process, path
        time.sleep(0.1)
    raise AssertionError("no checkpoint had three turns or samples")


@_benches("session", packaging=("device", "load", "peers", "recall", "restart"))
def test_a_smoke_run_of_a_bench_succeeds_with_a_cached_hub_model_and_draws_its_plots(
    suite: Suite, tmp_path: Path, model: Path, turnkeep: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bench needs no network: it takes the model from the hub's local cache."""
    cached = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(model, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    process = turnkeep(suite.bench.name, "--smoke", "--model", "org/tiny", "--out", tmp_path)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out + err
    found = read(next(tmp_path.glob("*.json")))
    assert found.complete
    assert Verdict.FAILS not in {check.outcome for check in found.checks if check.exact}
    findings = suite.bench.findings(found)
    # A tiny model's answer may be one chunk, which has no gaps to draw.
    drawn = [one for one in suite.bench.plots if any(findings.of(measure) for measure in one.measures)]
    assert next(tmp_path.glob("*.html")).read_text().count("<svg") == len(drawn) >= len(suite.bench.plots) - 2


@_benches("peers")
def test_an_interrupted_bench_writes_a_partial_report_and_leaves_no_process(lasting: Lasting) -> None:
    process, path = lasting
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "partial report: " in out
    found = read(path)
    assert (found.complete, found.ending) == (False, "interrupted")
    assert psutil.wait_procs(family, timeout=10)[1] == []


@_benches("session")
def test_a_bench_whose_worker_is_killed_exits_with_code_1_and_reports_the_fault(lasting: Lasting) -> None:
    process, path = lasting
    while process.poll() is None:  # repeatedly: the bench may have been about to end the first one itself
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            for worker in psutil.Process(process.pid).children():
                worker.kill()
        time.sleep(0.05)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "ended with exit code -9" in err.splitlines()[-1]
    assert read(path).ending.startswith("fault: ")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("device --prompt 5000", "is 2,048 tokens; take a shorter --prompt"),
        ("recall --depths 10,110", "depths of up to 100%"),
        ("recall --resident 64", "a window of 60 tokens is smaller than this"),  # behind a full case
    ],
)
def test_a_bench_refuses_a_too_long_prompt_or_too_small_window_in_one_line_without_a_report(
    tmp_path: Path, tiny_model: Path, turnkeep: Start, command: str, message: str
) -> None:
    options = [*command.split(), "--smoke", "--model", tiny_model, "--out", tmp_path / "reports"]
    process = turnkeep(*options)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err.count("\n"), err[:10]) == (1, 1, "turnkeep: "), err
    assert message in err
    has_measured = "window" in message
    assert (bool(out), any((tmp_path / "reports").iterdir())) == (has_measured, has_measured)
