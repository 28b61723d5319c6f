"""How many tokens a step prefills, which step is chosen when memory is short, and what a step costs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import append, loaded

from worker.device import step_chooser
from worker.device.memory import Estimator, shape_of
from worker.device.prefill_budget import LEAST, PrefillBudget
from worker.device.scheduler import AGE_STEPS, Scheduler
from worker.device.step_chooser import StepChooser
from worker.device.turn import DeviceTurn


def learned(token_s: float, row_s: float, *, stall_s: float = 0.25, most: int = 128) -> PrefillBudget:
    pace = PrefillBudget(stall_s, most)
    for _ in range(40):
        pace.learn(4, 0, row_s)
        pace.learn(4, 32, row_s + 32 * token_s)
    return pace


def test_a_prompt_that_runs_alone_gets_smaller_prefill_pieces_once_a_long_context_makes_each_too_slow() -> (
    None
):
    """As on a Mac: 1,024 tokens of a short context take 1 s, and of a context of 100,000 tokens 10 s."""
    pace = PrefillBudget(0.25, 1024, alone_s=2.0)
    pace.learn(0, 1024, 1.0)
    assert pace.budget(0) == 1024
    for _ in range(20):
        pace.learn(0, pace.budget(0), pace.budget(0) * 0.01)
    assert pace.budget(0) == 200


def test_a_first_prefill_piece_slowed_by_kernel_compilation_makes_only_the_next_piece_small() -> None:
    pace = PrefillBudget(0.25, 1024, alone_s=2.0)
    pace.learn(0, 20, 3.0)
    assert (pace.budget(0), pace.budget(1)) == (LEAST, LEAST)
    pace.learn(1, LEAST, 0.02)
    assert (pace.budget(0), pace.budget(1)) == (1024, 200)


def test_a_prefill_piece_that_was_too_long_for_the_device_halves_all_later_pieces_down_to_a_minimum() -> None:
    pace, found = PrefillBudget(0.25, 1024), []
    assert pace.shrink(700), "a prompt's last piece"
    assert pace.budget(0) == 344
    while pace.shrink(1024):
        found.append(pace.budget(0))
    assert found == [168, 80, 40, 16]
    assert not pace.shrink(LEAST)
    assert PrefillBudget(0.25, 1024).shrink(8) is False


def test_halved_prefill_pieces_grow_again_after_many_quick_pieces_and_more_slowly_after_each_failure() -> (
    None
):
    """What made them too long, such as another program on the GPU, may be over."""
    pace = PrefillBudget(0.25, 1024)

    def num_steps(most: int) -> int:
        for number in range(1000):
            if pace.most == most:
                return number
            pace.learn(0, pace.budget(0), 0.1)
        raise AssertionError(pace.most)

    pace.shrink(1024)
    assert 100 <= num_steps(1024) < 110
    for _ in range(2):
        pace.shrink(1024)
    assert 2 * 400 <= num_steps(1024) < 2 * 410
    for _ in range(200):
        pace.learn(0, 8, 0.1)
    assert pace.most == 1024


@pytest.mark.parametrize(
    ("token_s", "row_s", "budget"),
    [(0.003, 0.05, 64), (0.003, 0.2, 16), (0.0001, 0.01, 128), (0.02, 0.3, 16)],
    ids=["fast answers", "slow answers", "fast prompts", "slow prompts"],
)
def test_prefill_pieces_take_the_part_of_the_step_time_limit_that_running_answers_leave(
    token_s: float, row_s: float, budget: int
) -> None:
    """50 ms for the answers leave 200 ms, in which 64 tokens of 3 ms fit and 128 do not."""
    assert learned(token_s, row_s).budget(4) == budget


@pytest.mark.parametrize("before_s", [None, 0.3], ids=["no slow step before", "after one slow step"])
def test_prefill_pieces_grow_until_steps_reach_the_time_limit_even_if_all_steps_prefill_a_prompt(
    before_s: float | None,
) -> None:
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


BLOCK = 64


class IdleKv:
    """Simulated memory that is full, or has room for all."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.is_open, self.is_promised = False, False

    def make_room(self, size_bytes: int) -> bool:
        return self.is_open


@pytest.fixture
def estimator(make_model) -> Estimator:
    model = loaded(make_model("llama"))
    shape = shape_of(model.config)
    return Estimator(shape, limit_bytes=0, weight_bytes=0, kv=model.kv, num_layers=2, fused=False)


def chooser_of(
    scheduler: Scheduler,
    room: IdleKv,
    starve: Callable[[Any], None] = lambda event: None,
    behind: Collection[DeviceTurn] = (),
) -> StepChooser:
    batch: Any = SimpleNamespace(is_ahead=False, num_cached=0, growing=[], removal_bytes=0)
    none: Any = SimpleNamespace(
        size_bytes=lambda step: 0,
        is_behind=lambda turn, num: turn in behind,
        cut=lambda turn: None,
        begin_anew=lambda turn: setattr(turn, "num_cached", 0),
        drop_resident=lambda: False,
    )
    at: Any = room
    return StepChooser(scheduler, PrefillBudget(0.25, BLOCK), at, batch, none, none, starve)


def turns() -> list[DeviceTurn]:
    priorities = enumerate((0, 1, 1, 1))
    return [append(list(range(90)), name=f"s{i}", priority=priority) for i, priority in priorities]


@pytest.mark.parametrize("why", ["a restore is under way", "the disk has it"])
def test_a_step_postponed_for_lack_of_memory_does_not_change_order_and_age_of_waiting_turns(
    estimator, why: str
) -> None:
    room, scheduler, untouched = IdleKv(estimator), Scheduler(4, BLOCK), Scheduler(4, BLOCK)
    chooser = chooser_of(scheduler, room)
    some = turns()
    for turn in some:
        scheduler.add(turn)
        untouched.add(turn)
    room.is_promised = why == "a restore is under way"
    for _ in range(2 * AGE_STEPS):
        choice = chooser.choose()
        assert not choice.step
        assert choice.hopeless is None
        assert choice.pause_s
    room.is_open = True
    for _ in range(4):
        expected = untouched.next(BLOCK)
        untouched.advance(expected)
        assert chooser.choose().step == expected
    assert {turn.request.priority for turn, _ in expected.prefill} == {1}


def test_the_time_limit_of_a_prompt_that_waits_for_memory_restarts_after_each_step_that_ran(
    estimator, monkeypatch
) -> None:
    now_s, starved = [0.0], list[Any]()
    monkeypatch.setattr(step_chooser, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    room, scheduler = IdleKv(estimator), Scheduler(4, BLOCK)
    chooser = chooser_of(scheduler, room, starved.append)
    scheduler.add(append(list(range(90)), name="s"))
    for number in (1, 2):
        for _ in range(2):
            assert chooser.choose().hopeless is None
            now_s[0] += 0.6 * step_chooser.PATIENCE_S
        assert len(starved) == number
        room.is_open = True
        assert chooser.choose().step
        room.is_open = False
    chooser.choose()
    now_s[0] += step_chooser.PATIENCE_S
    assert chooser.choose().hopeless is not None


def test_if_memory_is_short_the_prompt_that_could_run_fails_and_not_a_prompt_that_waits_for_the_disk(
    estimator, monkeypatch
) -> None:
    monkeypatch.setattr(step_chooser, "PATIENCE_S", 0.0)
    scheduler, (waiting, other) = Scheduler(4, BLOCK), turns()[1:3]
    chooser = chooser_of(scheduler, IdleKv(estimator), behind=[waiting])
    waiting.num_cached = 20
    for turn in (waiting, other):
        scheduler.add(turn)
    hopeless = chooser.choose().hopeless
    assert hopeless is not None
    assert hopeless[0] is other


def test_a_device_step_that_took_more_memory_than_estimated_raises_later_estimates_for_a_while(
    estimator,
) -> None:
    room, scheduler = IdleKv(estimator), Scheduler(4, BLOCK)
    room.is_open = True
    chooser = chooser_of(scheduler, room)
    for turn in turns():
        scheduler.add(turn)
    first = chooser.choose()
    whole_bytes = first.scratch_bytes + first.growth_bytes
    chooser.learn(first, whole_bytes // 2)
    assert chooser.choose().scratch_bytes == first.scratch_bytes, "never less than the formula"
    chooser.learn(first, 3 * whole_bytes)
    second = chooser.choose()
    assert second.scratch_bytes == 3 * first.scratch_bytes
    chooser.learn(second, 3 * whole_bytes)
    assert chooser.choose().scratch_bytes == second.scratch_bytes
    room.is_promised = True
    chooser.learn(second, 9 * whole_bytes)
    assert chooser.choose().scratch_bytes == second.scratch_bytes, "a restore was measured too"
    room.is_promised = False
    chooser.learn(second, 100 * whole_bytes)
    assert chooser.choose().scratch_bytes == 4 * first.scratch_bytes
    for _ in range(400):
        chooser.learn(choice := chooser.choose(), 0)
    assert choice.scratch_bytes == pytest.approx(first.scratch_bytes, rel=0.01)
