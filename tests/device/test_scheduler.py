"""The scheduler runs tenants in rotation, and a tenant's shortest prompt first."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given

from worker.device.scheduler import AGE_STEPS, Scheduler, Step

BLOCK = 8


@dataclass(eq=False)
class Turn:
    target: int
    tenant: str = "a"
    draws: bool = True
    asks: bool = False
    scale: int = 1
    most_blocks: int = 1
    num_cached: int = 0
    priority: int = 0
    place_s: float = 0.0
    is_short: bool = False
    ran: list[int] = field(default_factory=list)

    @property
    def request(self) -> Turn:
        """This turn again, since it has the fields of its request too."""
        return self


def scheduler_of(*turns: Turn, max_rows: int = 4) -> Scheduler:
    scheduler = Scheduler(max_rows, BLOCK)
    for turn in turns:
        scheduler.add(turn)
    return scheduler


def carry_out(scheduler: Scheduler, budget: int = BLOCK) -> Step:
    """Choose the next step and update the turns as the device does; return the step."""
    step = scheduler.next(budget)
    scheduler.advance(step)
    for turn, num in step.prefill:
        turn.num_cached += num
        turn.ran.append(num)
        if turn.num_cached == turn.target:
            scheduler.start_decoding(turn) if turn.draws else scheduler.remove(turn)
    return step


def test_the_scheduler_divides_a_prompt_into_prefill_pieces_that_end_at_block_boundaries() -> None:
    turn = Turn(30, num_cached=5)
    scheduler = scheduler_of(turn)
    for _ in range(4):
        carry_out(scheduler, 100)
    assert turn.ran == [3, 8, 8, 6]


def test_the_scheduler_with_a_large_prefill_budget_runs_several_blocks_of_a_prompt_in_one_step() -> None:
    long, short = Turn(77, most_blocks=100, num_cached=5), Turn(20, most_blocks=2, place_s=1.0)
    one = Turn(20, place_s=1.0)
    scheduler = scheduler_of(long, short, one)
    step = carry_out(scheduler, 4 * BLOCK)
    assert step.prefill == ((long, 27), (short, 5)), "up to a multiple of four blocks; then what is left"
    scheduler.remove(long)
    assert carry_out(scheduler, 4 * BLOCK).prefill == ((short, 11), (one, 8))


def test_the_scheduler_runs_the_long_prefill_pieces_of_a_paged_prompt_without_other_prompts() -> None:
    long, others = Turn(75, "b", scale=4, num_cached=5), [Turn(3, draws=False), Turn(20, draws=False)]
    scheduler = scheduler_of(long, *others)
    for _ in range(9):
        carry_out(scheduler, 6)
    assert long.ran == [24, 3, 24, 8, 11], "24 tokens for a budget of 6, up to a multiple of four blocks"
    assert [one.ran for one in others] == [[3], [3, 5, 6, 2]]


def test_when_long_answers_fill_the_batch_a_short_answer_immediately_gets_an_extra_row() -> None:
    long, short, shorts = [Turn(4) for _ in range(6)], Turn(4, is_short=True), Turn(4, is_short=True)
    scheduler = scheduler_of(*long, max_rows=2)
    for _ in range(4):
        carry_out(scheduler)
    scheduler.add(short)
    scheduler.add(shorts)
    for _ in range(4):
        carry_out(scheduler)
    assert [*scheduler.decoding[:2], short] == [*scheduler.decoding]
    scheduler.remove(short)
    carry_out(scheduler)
    assert scheduler.decoding[2:] == (shorts,), "the next short one, although long ones have waited longer"
    scheduler.add(Turn(1, is_short=True, place_s=1.0))
    scheduler.remove(scheduler.decoding[0])
    assert carry_out(scheduler).prefill == ((long[2], 1),), "a long one's row is none for short ones alone"


def test_a_shorter_prompt_is_prefilled_before_longer_prompts_unless_those_have_waited_for_long() -> None:
    old, late, short = Turn(800, place_s=0.0), Turn(800, place_s=60.0), Turn(6, place_s=61.0)
    scheduler = scheduler_of(old, late, short)
    assert carry_out(scheduler).prefill == ((old, 8),)
    scheduler.remove(old)
    assert [turn for turn, _ in carry_out(scheduler).prefill] == [short, late]


def test_the_next_free_batch_row_goes_to_the_answer_that_is_first_in_the_queue() -> None:
    first, last, middle = Turn(1), Turn(2, place_s=9.0), Turn(2, place_s=5.0)
    scheduler = scheduler_of(first, last, middle, max_rows=1)
    carry_out(scheduler)
    scheduler.remove(first)
    carry_out(scheduler)
    assert scheduler.decoding == (middle,)


def test_a_tenant_gets_no_more_batch_rows_than_its_share_even_if_more_are_free() -> None:
    scheduler = Scheduler(4, BLOCK, 2)
    many, one = [Turn(3) for _ in range(4)], Turn(3, "b")
    for turn in (*many, one):
        scheduler.add(turn)
    for _ in range(8):
        carry_out(scheduler)
    assert sorted(turn.tenant for turn in scheduler.decoding) == ["a", "a", "b"]
    assert sorted(turn.num_cached for turn in many) == [2, 2, 3, 3], (
        "others wait with all but their last token"
    )
    scheduler.remove(next(turn for turn in scheduler.decoding if turn.tenant == "a"))
    carry_out(scheduler)
    assert sorted(turn.tenant for turn in scheduler.decoding) == ["a", "a", "b"]


def test_short_answers_of_one_tenant_do_not_take_the_batch_rows_of_other_tenants() -> None:
    scheduler = Scheduler(8, BLOCK, 2)
    for turn in [*(Turn(1, "b", is_short=True) for _ in range(3)), Turn(1, "a")]:
        scheduler.add(turn)
        carry_out(scheduler)
    assert [turn.tenant for turn in scheduler.decoding] == ["b", "b", "b", "a"]


@pytest.mark.parametrize("num_refused", range(4))
def test_choosing_a_step_again_with_smaller_prefill_pieces_does_not_change_the_rotation_of_tenants(
    num_refused: int,
) -> None:
    """When memory is short, a step is chosen again with smaller pieces of the same prompts."""
    turns = [Turn(400, tenant) for tenant in ("a", "b", "c")]
    scheduler = scheduler_of(*turns)
    for _ in range(12):
        for refused in range(num_refused):
            scheduler.next(BLOCK >> refused)
        carry_out(scheduler, 1)
    assert [turn.num_cached for turn in turns] == [4, 4, 4]


SCRIPT = st.lists(
    st.tuples(
        st.sampled_from(["add", "end", "step"]), st.integers(1, 40), st.sampled_from("abc"), st.booleans()
    )
)


def test_turns_of_higher_priority_are_prefilled_first_and_other_turns_get_the_rest_of_the_budget() -> None:
    low, high = Turn(30), Turn(12, priority=2)
    scheduler = scheduler_of(low, high)
    assert carry_out(scheduler).prefill == ((high, 8),)
    assert carry_out(scheduler).prefill == ((high, 4), (low, 4))


def test_a_turn_of_low_priority_regularly_gets_a_step_while_higher_priority_turns_keep_arriving() -> None:
    """A priority rises while its turns wait, even if new turns of a higher one keep coming."""
    low = Turn(1000, priority=-1)
    scheduler = scheduler_of(low)
    waits, waited = [], 0
    for _ in range(200):
        scheduler.add(Turn(BLOCK, draws=False, priority=1))
        step = carry_out(scheduler)
        if step.prefill[0][0] is low:
            waits.append(waited)
            waited = 0
        else:
            waited += 1
    assert waits == [2 * AGE_STEPS] * len(waits)
    assert len(waits) >= 5


def test_tenants_of_equal_priority_are_prefilled_in_rotation_however_long_some_have_waited() -> None:
    scheduler = scheduler_of(*(Turn(400, "many", priority=1) for _ in range(20)), Turn(400, "other"))
    for _ in range(3 * AGE_STEPS):
        carry_out(scheduler)
    late = Turn(400, "late", priority=1)
    scheduler.add(late)
    ran = [carry_out(scheduler).prefill[0][0] for _ in range(10)]
    assert 4 <= ran.count(late) <= 5


@given(st.integers(1, 4), st.integers(1, 20), SCRIPT)
def test_under_random_arrivals_the_scheduler_ends_every_turn_and_runs_none_twice_in_a_step(
    max_rows: int, budget: int, script: list[tuple[str, int, str, bool]]
) -> None:
    """No step exceeds its budget or rows, no prompt runs more tokens than it has, and every turn ends."""
    scheduler = scheduler_of(max_rows=max_rows)
    alive: list[Turn] = []
    for action, size, tenant, draws in script:
        if action == "add":
            alive.append(Turn(size, tenant, draws, priority=size % 3))
            scheduler.add(alive[-1])
        elif action == "end" and alive:
            scheduler.remove(alive.pop(size % len(alive)))
        else:
            check(carry_out(scheduler, budget), max_rows, budget, scheduler)
        alive = [turn for turn in alive if turn in scheduler]
        assert len(scheduler) == len(alive)
    steps = 0
    while alive:
        step = carry_out(scheduler, budget)
        check(step, max_rows, budget, scheduler)
        assert step
        for turn in step.decode:
            scheduler.remove(turn)
        alive = [turn for turn in alive if turn in scheduler]
        steps += 1
        assert steps < 4000
    assert not scheduler


def check(step: Step, max_rows: int, budget: int, scheduler: Scheduler) -> None:
    assert sum(num for _, num in step.prefill) <= budget
    assert len(scheduler.decoding) <= max_rows
    turns = [*step.decode, *(turn for turn, _ in step.prefill)]
    assert len(set(turns)) == len(turns)
    assert all(turn.num_cached <= turn.target for turn in turns)
