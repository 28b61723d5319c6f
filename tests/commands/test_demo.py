"""`turnkeep demo`: the answer that a kill interrupts goes on, with KV from the disk or at another worker."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from command_runs import Terminal, turnkeep

from tests.parts import make_endless_model, make_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny = make_tiny_model(tmp_path / "tiny", max_position_embeddings=8192)
    return make_endless_model(tiny, tmp_path / "endless")


@pytest.mark.process
def test_the_demo_survives_its_kills_and_says_what_each_turn_cost(tmp_path: Path, model: Path) -> None:
    done = turnkeep("demo", "--data-dir", tmp_path / "data", TURNKEEP_MODEL=str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9 in the middle of the answer" in done.stdout
    rows = [line for line in done.stdout.splitlines() if re.search(r"… +SSD +\d", line)]
    assert len(rows) == 2, done.stdout
    assert "tokens were prefilled, and the first token" in done.stdout


@pytest.mark.process
def test_of_two_workers_the_other_one_continues_the_answer(tmp_path: Path, model: Path) -> None:
    done = turnkeep("demo", "--cluster", "--data-dir", tmp_path / "data", TURNKEEP_MODEL=str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    (killed, other) = re.findall(r"kill -9 of worker (\w+), which answers. Worker (\w+)", done.stdout)[0]
    assert {killed, other} == {"one", "two"}
    went_on = rf"mid-answer; after [\d.]+ s worker {other} went on with it"
    assert re.search(went_on, done.stdout), done.stdout
    prefilled = re.findall(r"prefilled\s+(\d+) tokens; for the next question (\d+),", done.stdout)
    assert max(map(int, prefilled[0])) < 400, "of more than 2,000"


@pytest.mark.process
def test_on_a_terminal_the_demo_s_worker_alone_draws_its_start_and_hints_at_nothing(
    tmp_path: Path, model: Path
) -> None:
    with Terminal("demo", "--data-dir", tmp_path / "data", TURNKEEP_MODEL=str(model)) as terminal:
        terminal.wait_for("Who was the first keeper")
        assert "In another terminal" not in terminal.transcript, "this worker is about to be killed"
        assert not re.search("[\u2800-\u28ff] start", terminal.transcript), "over the bar of the worker"
        terminal.type("\x03")
        terminal.end()
