"""The output of commands: tables on a terminal and in a pipe, JSON, error messages and units."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from command_runs import command as run
from command_runs import environment, turnkeep, where

from commands.cli import main
from tests.parts import make_tiny_model
from worker.observe.progress import terminal_progress
from worker.process.formatting import size, span
from worker.process.setting_kinds import TenantLimits

LONG = "a-model-with-a-name-that-is-longer-than-a-terminal-is-wide-" * 2


@pytest.fixture
def data_dir(tmp_path: Path, tiny_model: Path) -> Path:
    """Return a data directory with one converted model under a long name."""
    shutil.copytree(tiny_model, tmp_path / "data" / "models" / LONG)
    return tmp_path / "data"


def test_a_table_in_a_pipe_has_one_whole_line_for_each_row(data_dir: Path) -> None:
    done = turnkeep("model", "list", "--data-dir", data_dir, COLUMNS="40")
    found = [line for line in done.stdout.splitlines() if LONG in line]
    assert len(found) == 1
    assert found[0].endswith(str(data_dir / "models" / LONG)), "neither folded nor cut nor padded"
    assert "…" not in done.stdout


def test_a_table_on_a_terminal_wraps_long_cells_without_losing_text(data_dir: Path) -> None:
    control, terminal = pty.openpty()
    command = [sys.executable, "-m", "commands", "model", "list", "--data-dir", str(data_dir)]
    environ = environment() | {"COLUMNS": "60", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environ) as process:
        os.close(terminal)
        output = b""
        while True:
            try:
                read = os.read(control, 65536)
            except OSError:  # Linux says so at the end of a terminal
                break
            if not read:
                break
            output += read
    os.close(control)
    assert process.returncode == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output.decode()).splitlines()
    assert max(map(len, lines)) <= 60
    column = "".join(line.split()[0] for line in lines[1:] if not line.startswith(" "))
    assert LONG in column, "folded, not cut"


@pytest.mark.parametrize("command", [("model", "list"), ("doctor",)])
def test_model_list_and_doctor_print_the_entries_of_their_tables_as_json(
    data_dir: Path, command: tuple[str, ...]
) -> None:
    done = turnkeep(*command, "--json", "--data-dir", data_dir)
    names = [entry["name"] for entry in json.loads(done.stdout)]
    assert {"list": LONG, "doctor": "data directory"}[command[-1]] in names


async def test_info_without_a_session_shows_the_worker_s_current_state(local_worker: Callable) -> None:
    """The command asks for the metrics: the worker publishes its next metrics message only in an hour."""
    worker = await local_worker(metrics_interval_s=3600.0, tenants=TenantLimits(metrics=5))
    await worker.client.session("s").append(text="hello")
    shown = await run("info", *where(worker))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"^worker +test$", shown.stdout, re.MULTILINE)
    assert re.search(r"^sessions +1 in use, 1 with KV on the device$", shown.stdout, re.MULTILINE)
    assert re.search(r"^  room .* evictable, .* in use$", shown.stdout, re.MULTILINE)
    raw = json.loads((await run("info", "--json", *where(worker))).stdout)
    assert (raw["type"], raw["requests"]["append"]) == ("metrics", {"ok": 1})
    assert not any(raw["by_tenant"].values()), "one tenant is told nothing of another"


@pytest.mark.parametrize("made", ["nothing", "data directory", "empty folder"])
def test_cache_commands_say_that_a_fresh_data_directory_has_nothing_cached(tmp_path: Path, made: str) -> None:
    data_dir = tmp_path / "fresh"

    def cache(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["cache", *map(str, arguments), "--data-dir", str(data_dir)])

    if made != "nothing":
        data_dir.mkdir()
    if made == "empty folder":
        (data_dir / "snapshots").mkdir()
    done = cache("ls")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"nothing is cached yet in {data_dir / 'snapshots'}\n")
    for command in (("verify",), ("prune", "--all"), ("export", "--all", tmp_path / "x.tar")):
        done = cache(*command)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith("turnkeep: nothing is cached yet in")
    found = json.loads(cache("ls", "--json").stdout)
    assert (found["chains"], found["total_bytes"]) == ([], 0)
    assert data_dir.exists() == (made != "nothing"), "looking makes nothing"


def test_in_a_pipe_a_long_step_prints_lines_that_say_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.observe.progress._EVERY_S", 0.0)
    lines: list[str] = []
    with terminal_progress(lines.append) as progress:
        for done in (0, 50, 100):
            progress(done * 2**20, 100 * 2**20, "loading weights")
    assert lines == ["loading weights", "loading weights: 50 MiB of 100 MiB"]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (13 * 2**20, "13 MiB"), (1.5 * 2**30, "1.5 GiB"), (20 * 2**30, "20 GiB")],
)
def test_sizes_are_formatted_with_a_fitting_unit(size_bytes: float, text: str) -> None:
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (120, "2 min"), (30 * 3600, "30 h"), (3 * 86400, "3 days")],
)
def test_durations_are_formatted_with_a_fitting_unit(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_standard_output_is_only_json_while_a_model_is_tried_for_the_first_time(tmp_path: Path) -> None:
    windows = {"model_type": "gemma3_text", "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 12}
    model = make_tiny_model(tmp_path / "windows", **windows, sliding_window_pattern=3)
    both = ("--model", model, "--draft-model", model)
    done = turnkeep("doctor", "--json", *both, "--data-dir", tmp_path / "data")
    assert isinstance(json.loads(done.stdout), dict | list), done.stderr
