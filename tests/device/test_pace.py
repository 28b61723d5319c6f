"""How long pieces of prompts become beside running answers."""

from __future__ import annotations

import pytest

from worker.device.pace import LEAST, Pace


def learned(token_s: float, row_s: float, *, stall_s: float = 0.25, block: int = 128) -> Pace:
    pace = Pace(stall_s, block)
    for _ in range(40):
        pace.learn(4, 0, row_s)
        pace.learn(4, 32, row_s + 32 * token_s)
    return pace


def test_without_answers_a_prompt_gets_whole_blocks() -> None:
    assert Pace(0.01, 128).budget(0) == 128
    assert learned(1.0, 1.0).budget(0) == 128


def test_before_anything_is_known_pieces_are_small() -> None:
    assert Pace(0.25, 128).budget(3) == LEAST
    assert Pace(0.25, 8).budget(3) == 8


@pytest.mark.parametrize(
    ("token_s", "row_s", "budget"),
    [(0.003, 0.05, 64), (0.003, 0.2, 16), (0.0001, 0.01, 128), (0.02, 0.3, 16)],
)
def test_pieces_take_what_the_answers_leave_of_the_time(token_s: float, row_s: float, budget: int) -> None:
    """50 ms for the answers leave 200 ms, in which 64 tokens of 3 ms fit and 128 do not."""
    assert learned(token_s, row_s).budget(4) == budget


def test_a_device_that_becomes_slower_is_noticed() -> None:
    pace = learned(0.001, 0.05)
    assert pace.budget(4) == 128
    for _ in range(20):
        pace.learn(4, 128, 0.05 + 128 * 0.01)
    assert pace.budget(4) == LEAST
