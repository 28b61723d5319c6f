"""`turnkeep demo`: the answer that a kill interrupts goes on, and the KV comes from the disk."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from command_runs import turnkeep

from tests.parts import make_endless_model, make_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.process
def test_the_demo_survives_its_kills_and_says_what_each_turn_cost(tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "tiny", max_position_embeddings=8192)
    model = make_endless_model(tiny, tmp_path / "endless")
    done = turnkeep("demo", "--data-dir", tmp_path / "data", TURNKEEP_MODEL=str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9 in the middle of the answer" in done.stdout
    rows = [line for line in done.stdout.splitlines() if re.search(r"… +SSD +\d", line)]
    assert len(rows) == 2, done.stdout
    assert "tokens were prefilled, and the first token" in done.stdout
