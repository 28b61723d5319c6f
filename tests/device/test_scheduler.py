"""What runs next: every turn in one phase, rows in order, chunks in rotation."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from worker.scheduler import Scheduler


def test_prompts_take_chunks_in_rotation_so_that_a_short_one_passes_a_long_one() -> None:
    scheduler: Scheduler[str] = Scheduler(4)
    for turn in ("long", "short"):
        scheduler.add(turn)
    assert [scheduler.next().prefill for _ in range(4)] == ["long", "short", "long", "short"]
    scheduler.prefilled("short")
    step = scheduler.next()
    assert (step.decode, step.prefill) == (("short",), "long")


def test_ready_turns_wait_for_a_row_and_join_in_order() -> None:
    scheduler: Scheduler[int] = Scheduler(2)
    for turn in range(4):
        scheduler.add(turn)
        scheduler.prefilled(turn)
    assert scheduler.next().decode == (0, 1)
    scheduler.remove(0)
    assert scheduler.next().decode == (1, 2)


def test_a_step_with_nothing_to_run_is_false_and_so_is_the_scheduler() -> None:
    scheduler: Scheduler[int] = Scheduler(2)
    assert not scheduler
    assert not scheduler.next()
    scheduler.add(1)
    assert scheduler
    assert 1 in scheduler
    assert scheduler.next()


ACTIONS = st.sampled_from(["add", "prefilled", "remove"])


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 4), st.lists(st.tuples(ACTIONS, st.integers(0, 7))))
def test_nobody_is_lost_starved_or_run_twice(max_batch: int, script: list[tuple[str, int]]) -> None:
    """Every turn is in exactly one phase; within as many steps as there are prompts each gets its chunk."""
    scheduler: Scheduler[int] = Scheduler(max_batch)
    prefilling: set[int] = set()
    decoding: set[int] = set()
    for action, turn in script:
        if action == "add" and turn not in scheduler:
            scheduler.add(turn)
            prefilling.add(turn)
        elif action == "prefilled" and turn in prefilling:
            scheduler.prefilled(turn)
            prefilling.remove(turn)
            decoding.add(turn)
        elif action == "remove":
            scheduler.remove(turn)
            prefilling.discard(turn)
            decoding.discard(turn)
        step = scheduler.next()
        assert len(scheduler) == len(prefilling) + len(decoding)
        assert len(set(step.decode)) == len(step.decode) == min(len(decoding), max_batch)
        assert set(step.decode) <= decoding
        assert step.prefill in prefilling if prefilling else step.prefill is None
    assert {scheduler.next().prefill for _ in prefilling} == prefilling
