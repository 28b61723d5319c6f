"""How the next step is chosen when memory is short. The memory is simulated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import append, loaded

from worker.device.memory import Estimator, shape_of
from worker.device.prefill_budget import PrefillBudget
from worker.device.scheduler import AGE_STEPS, Scheduler
from worker.device.step_chooser import StepChooser
from worker.device.turn import DeviceTurn

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


def chooser_of(scheduler: Scheduler, room: IdleKv) -> StepChooser:
    batch: Any = SimpleNamespace(is_ahead=False, num_cached=0, growing=[], removal_bytes=0)
    none: Any = SimpleNamespace(
        size_bytes=lambda step: 0,
        is_behind=lambda turn, num: False,
        cut_noted=lambda turn: None,
        drop_resident=lambda: False,
    )
    at: Any = room
    return StepChooser(scheduler, PrefillBudget(0.25, BLOCK), at, batch, none, none, lambda event: None)


def turns() -> list[DeviceTurn]:
    priorities = enumerate((0, 1, 1, 1))
    return [append(list(range(90)), name=f"s{i}", priority=priority) for i, priority in priorities]


@pytest.mark.parametrize("why", ["a restore is under way", "the disk has it"])
def test_a_step_postponed_for_lack_of_memory_leaves_order_and_age_of_waiting_turns_unchanged(
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


def test_a_step_that_took_more_memory_than_estimated_raises_later_estimates_for_a_while(estimator) -> None:
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
