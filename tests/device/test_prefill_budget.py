"""How many tokens of prompts a step prefills beside running answers."""

from __future__ import annotations

import pytest

from worker.device.prefill_budget import LEAST, PrefillBudget


def learned(token_s: float, row_s: float, *, stall_s: float = 0.25, most: int = 128) -> PrefillBudget:
    pace = PrefillBudget(stall_s, most)
    for _ in range(40):
        pace.learn(4, 0, row_s)
        pace.learn(4, 32, row_s + 32 * token_s)
    return pace


def test_a_prompt_without_answers_beside_it_is_prefilled_in_whole_blocks() -> None:
    assert PrefillBudget(0.01, 128).budget(0) == 128
    assert learned(1.0, 1.0).budget(0) == 128


def test_prompts_beside_answers_prefill_as_many_tokens_per_step_as_the_stall_limit_allows() -> None:
    """As on a GPU, a step takes 15 ms plus 20 us a token: 2,048 tokens stall answers for only 56 ms."""
    pace, budgets = PrefillBudget(0.25, 2048), []
    for _ in range(4):
        budgets.append(pace.budget(1))
        pace.learn(1, 0, 0.005)
        pace.learn(1, budgets[-1], 0.005 + 0.01 + budgets[-1] * 20e-6)
    assert budgets[0] == LEAST
    assert budgets[2:] == [2048, 2048], "not more than a step may have"
    assert PrefillBudget(0.25, 2048).budget(0) == 2048


def test_a_prompt_alone_runs_in_smaller_pieces_where_its_context_makes_a_piece_too_long_for_the_device() -> (
    None
):
    """As on a Mac: 1,024 tokens of a short context take 1 s, and of a context of 100,000 tokens 10 s."""
    pace = PrefillBudget(0.25, 1024, alone_s=2.0)
    pace.learn(0, 1024, 1.0)
    assert pace.budget(0) == 1024
    for _ in range(20):
        pace.learn(0, pace.budget(0), pace.budget(0) * 0.01)
    assert pace.budget(0) == 200


def test_a_workers_first_prompt_for_which_a_gpu_compiles_kernels_makes_only_the_next_piece_small() -> None:
    pace = PrefillBudget(0.25, 1024, alone_s=2.0)
    pace.learn(0, 20, 3.0)
    assert (pace.budget(0), pace.budget(1)) == (LEAST, LEAST)
    pace.learn(1, LEAST, 0.02)
    assert (pace.budget(0), pace.budget(1)) == (1024, 200)


def test_a_piece_that_was_too_long_for_the_device_halves_all_later_ones_down_to_the_smallest() -> None:
    pace, found = PrefillBudget(0.25, 1024), []
    assert pace.shrink(700), "a prompt's last piece"
    assert pace.budget(0) == 344
    while pace.shrink(1024):
        found.append(pace.budget(0))
    assert found == [168, 80, 40, 16]
    assert not pace.shrink(LEAST)
    assert PrefillBudget(0.25, 1024).shrink(8) is False


def test_prompt_pieces_are_small_until_step_times_have_been_measured() -> None:
    assert PrefillBudget(0.25, 128).budget(3) == LEAST
    assert PrefillBudget(0.25, 8).budget(3) == 8


@pytest.mark.parametrize(
    ("token_s", "row_s", "budget"),
    [(0.003, 0.05, 64), (0.003, 0.2, 16), (0.0001, 0.01, 128), (0.02, 0.3, 16)],
)
def test_prompt_pieces_fill_the_part_of_the_stall_limit_that_answers_leave(
    token_s: float, row_s: float, budget: int
) -> None:
    """50 ms for the answers leave 200 ms, in which 64 tokens of 3 ms fit and 128 do not."""
    assert learned(token_s, row_s).budget(4) == budget


def test_prompt_pieces_shrink_when_the_device_becomes_slower() -> None:
    pace = learned(0.001, 0.05)
    assert pace.budget(4) == 128
    for _ in range(20):
        pace.learn(4, 128, 0.05 + 128 * 0.01)
    assert pace.budget(4) == LEAST


@pytest.mark.parametrize("before_s", [None, 0.3], ids=["nothing", "a hiccup"])
def test_prompt_pieces_grow_even_if_every_step_has_a_prompt(before_s: float | None) -> None:
    """Prompts in every step leave no step from which to learn the time of answers alone."""
    pace, row_s, token_s = PrefillBudget(0.25, 128), 0.05, 0.003
    if before_s is not None:
        pace.learn(4, 0, before_s)
        pace.learn(4, LEAST, before_s + LEAST * token_s)
    budgets = []
    for _ in range(100):
        budgets.append(pace.budget(4))
        pace.learn(4, budgets[-1], row_s + budgets[-1] * token_s)
    assert budgets[0] == LEAST
    assert max(budgets) <= 80
    assert set(budgets[30:]) == {64}, "what fits beside answers that take 50 ms"
