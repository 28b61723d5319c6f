"""`turnkeep demo`: an answer interrupted by a kill continues, with KV from disk or on another worker."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from command_runs import WAIT_S, Terminal, processes_with, turnkeep

from tests.parts import make_endless_model, make_tiny_model

pytestmark = pytest.mark.process


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny = make_tiny_model(tmp_path / "tiny", max_position_embeddings=8192)
    return make_endless_model(tiny, tmp_path / "endless")


def test_the_demo_continues_after_each_kill_and_shows_the_cost_of_its_turns(
    tmp_path: Path, model: Path
) -> None:
    done = turnkeep("demo", "--data-dir", tmp_path / "data", TURNKEEP_MODEL=str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9 in the middle of the answer" in done.stdout
    rows = [line for line in done.stdout.splitlines() if re.search(r"… +SSD +\d", line)]
    assert len(rows) == 2, done.stdout
    assert "tokens were prefilled, and the first token" in done.stdout
    assert re.search(r"stay for the next run: rm -r +\S+data +frees \d+", done.stdout.replace("\n", " "))


@pytest.mark.packaging
def test_the_demo_on_a_terminal_hides_the_startup_messages_of_its_workers(
    tmp_path: Path, model: Path
) -> None:
    place = ("--data-dir", tmp_path / "data")
    with Terminal("demo", *place, TURNKEEP_MODEL=str(model)) as terminal:
        terminal.wait_for("When was the lighthouse built")
        terminal.type("\x03")
        terminal.end()
        assert "In another terminal" not in terminal.transcript
        assert "start" not in terminal.transcript.replace("first start", ""), "the worker shows its own steps"
    with Terminal("demo", "--data-dir", tmp_path / "other", "--model", "no/where/at/all") as terminal:
        assert terminal.end() == 1
        assert re.search(r"^turnkeep: there is no model", terminal.transcript, re.MULTILINE)


@pytest.mark.packaging
@pytest.mark.parametrize("ended", ["SIGTERM", "SIGKILL", "closed terminal"])
def test_a_demo_that_is_ended_from_outside_leaves_no_worker_and_no_nats_server(
    tmp_path: Path, model: Path, ended: str
) -> None:
    data = tmp_path / "data"
    with Terminal("demo", "--data-dir", data, TURNKEEP_MODEL=str(model)) as terminal:
        terminal.wait_for("When was the lighthouse built")
        if ended == "closed terminal":
            terminal.hang_up()
        else:
            terminal.process.send_signal(getattr(signal, ended))
        terminal.process.wait(WAIT_S)
    deadline = time.monotonic() + 20
    while (left := processes_with(str(data))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.mark.packaging
def test_the_other_worker_of_a_cluster_demo_continues_the_killed_worker_s_answer(
    tmp_path: Path, model: Path
) -> None:
    done = turnkeep("demo", "--cluster", "--data-dir", tmp_path / "data", TURNKEEP_MODEL=str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    (killed, other) = re.findall(r"kill -9 of worker (\w+), which answers. Worker (\w+)", done.stdout)[0]
    assert {killed, other} == {"one", "two"}
    went_on = rf"mid-answer; after [\d.]+ s worker {other} went on with it"
    assert re.search(went_on, done.stdout), done.stdout
    prefilled = re.findall(r"prefilled\s+(\d+) tokens; for the next question (\d+),", done.stdout)
    assert max(map(int, prefilled[0])) < 400, "of more than 2,000"
