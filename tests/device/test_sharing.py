"""Of sessions that start with the same tokens, one prefills these, and the others copy its KV."""

from __future__ import annotations

import pytest
from test_turns import Wrapped
from tiny_models import BLOCK, alone, append, generate, key, prompt

from cache.names.policy import FULL, Policy
from worker.device.starting_kv import TurnSharing
from worker.device.turn import DeviceTurn, FaultedTurn

COMMON = prompt(5 * BLOCK + 3)


@pytest.fixture
def model(make_model):
    return Wrapped(make_model("llama"))


def with_end(num_tokens: int, salt: int) -> list[int]:
    return COMMON + prompt(num_tokens, salt=salt)


def shared(name: str, context: list[int], num: int, source: str) -> DeviceTurn:
    return generate(context, num, name=name, source=key(source))


def test_a_new_session_copies_the_kv_of_the_common_prefix_from_an_idle_session(make_rig, model) -> None:
    rig = make_rig(model)
    rig.run(generate(with_end(4, 5), 6, name="a"))
    turn = shared("b", with_end(9, 6), 8, "a")
    rig.run(turn)
    assert (turn.num_reused, turn.num_prefilled) == (len(COMMON), 9)
    assert rig.tokens(turn) == alone(model, with_end(9, 6), 8)[0]


def test_a_session_whose_whole_prompt_is_in_another_sessions_kv_still_prefills_its_last_token(
    make_rig, model
) -> None:
    """Its answer is drawn from this token's logits."""
    rig = make_rig(model)
    rig.run(generate(with_end(4, 5), 6, name="a"))
    turn = shared("b", COMMON, 8, "a")
    rig.run(turn)
    assert (turn.num_reused, turn.num_prefilled) == (len(COMMON) - 1, 1)
    assert rig.tokens(turn) == alone(model, COMMON, 8)[0]


def test_of_several_sessions_that_start_together_only_one_prefills_their_common_prefix(
    make_rig, model
) -> None:
    rig = make_rig(model)
    turns = [generate(with_end(7, 5), 8, name="a")]
    turns += [shared(name, with_end(4 + i, 6 + i), 8, "a") for i, name in enumerate("bcd")]
    rig.run(*turns)
    assert sum(turn.num_prefilled for turn in turns) == len(COMMON) + 7 + 4 + 5 + 6
    for turn in turns:
        assert rig.tokens(turn) == alone(model, turn.request.context[: turn.request.num_prompt], 8)[0]


def test_a_new_session_copies_the_kv_of_the_common_prompt_from_a_session_whose_answer_runs(
    make_rig, model
) -> None:
    """Several answers run, so that their KV is in the slots of a pool."""
    rig = make_rig(model)
    turns = [generate(with_end(i, 5 + i), 60, name=f"r{i}") for i in range(4)]
    for turn in turns:
        rig.device.submit(turn)
    rig.wait(lambda _: all(len(rig.tokens(turn)) > 5 for turn in turns))
    late = shared("late", with_end(3, 30), 8, "r2")
    rig.run(late)
    rig.finish(*turns)
    assert (late.num_reused, late.num_prefilled) == (len(COMMON), 3)
    for turn, num in [*((turn, 60) for turn in turns), (late, 8)]:
        assert rig.tokens(turn) == alone(model, turn.request.context[: turn.request.num_prompt], num)[0]


@pytest.mark.parametrize("ending", ["cancelled", "failed"])
def test_sessions_waiting_for_a_shared_prefix_prefill_the_prefix_themselves_if_the_source_turn_fails(
    make_rig, model, ending
) -> None:
    rig = make_rig(model)
    calls = iter(range(100))
    model.holds = lambda tokens: next(calls) == 1
    first = generate(with_end(7, 5), 8, name="a")
    others = [shared(name, with_end(5, salt), 8, "a") for name, salt in (("b", 6), ("c", 7))]
    rig.device.submit(first)
    assert model.arrived.acquire(timeout=20)
    for turn in others:
        rig.device.submit(turn)
    if ending == "cancelled":
        rig.device.cancel(first)
    else:
        model.fails = lambda tokens: next(calls) == 2
    model.go_on.release()
    rig.finish(first, *others)
    assert isinstance(rig.end(first), FaultedTurn) == (ending == "failed")
    for turn in others:
        assert rig.tokens(turn) == alone(model, turn.request.context[: turn.request.num_prompt], 8)[0]


def test_a_turn_with_an_invalid_token_cancelled_while_it_waits_for_a_shared_prefix_ends_exactly_once(
    make_rig, model
) -> None:
    rig = make_rig(model)
    model.holds = lambda tokens: True
    first = generate(with_end(7, 5), 8, name="a")
    rig.device.submit(first)
    assert model.arrived.acquire(timeout=20)
    waiting = shared("b", [*with_end(4, 6), 10**6], 8, "a")
    rig.device.submit(waiting)
    rig.device.cancel(waiting)
    model.holds = lambda tokens: False
    model.go_on.release()
    rig.finish(first, waiting)
    assert isinstance(rig.end(waiting), FaultedTurn)


def test_a_turn_cancelled_while_it_waits_for_a_shared_prefix_copies_no_kv(make_rig, model) -> None:
    """It ends at once, so the copy would only take memory."""
    rig = make_rig(model)
    calls = iter(range(100))
    model.holds = lambda tokens: next(calls) == 2
    first, waiting = generate(with_end(7, 5), 8, name="a"), shared("b", with_end(4, 6), 8, "a")
    rig.device.submit(first)
    assert model.arrived.acquire(timeout=20)
    rig.device.submit(waiting)
    rig.device.cancel(waiting)
    model.go_on.release()
    rig.finish(first, waiting)
    assert (waiting.num_reused, waiting.num_prefilled) == (0, 0)


WINDOWS = Policy(3, 20), Policy(3, 40)


@pytest.mark.parametrize(
    ("own", "other"), [WINDOWS, WINDOWS[::-1], (FULL, WINDOWS[0]), (WINDOWS[0], FULL)], ids=str
)
@pytest.mark.parametrize("is_running", [False, True], ids=["idle source", "running source"])
def test_a_source_session_that_was_reopened_under_another_cache_policy_shares_no_kv(
    make_rig, model, own: Policy, other: Policy, *, is_running: bool
) -> None:
    """Its KV has the right tokens, but is of what these tokens saw, and at other places."""
    rig, context = make_rig(model), prompt(300)
    first = generate(context, 6, name="first", policy=own)
    source = generate(context, 40, name="a", policy=other)
    turn = generate(context, 6, name="b", policy=own, source=key("a"))
    rig.run(first)
    for turns in [(source, turn)] if is_running else [(source,), (turn,)]:
        rig.run(*turns)
    assert turn.num_reused == 0
    assert rig.tokens(turn) == rig.tokens(first)


def test_a_recurrent_state_that_cannot_be_trimmed_to_the_prefix_is_not_shared(make_rig, make_model) -> None:
    model = make_model("mamba2")
    rig = make_rig(model)
    rig.run(append(COMMON, name="a"))
    turn = shared("b", with_end(3, 6), 8, "a")
    rig.run(turn)
    assert turn.num_reused == 0
    assert rig.tokens(turn) == alone(model, with_end(3, 6), 8)[0]


def test_a_turn_does_not_wait_for_a_shared_prefix_from_a_turn_of_lower_priority() -> None:
    sharing = TurnSharing()
    leader = generate(COMMON, 8, name="a")
    sharing.add(leader)
    urgent, idle = (
        generate(with_end(3, 6), 8, name=name, source=key("a"), priority=priority)
        for name, priority in (("b", 1), ("c", -1))
    )
    assert not sharing.add(urgent)
    assert sharing.add(idle)


def test_a_fork_waits_for_its_sources_latest_turn_unless_the_fork_already_has_the_shared_prefix() -> None:
    """The turn before it, which was abandoned, ends later."""
    sharing = TurnSharing()
    abandoned, leader = generate(COMMON, 8, name="a"), generate(COMMON, 8, name="a")
    waiting, owner = (generate(with_end(3, 6), 8, name=name, source=key("a")) for name in "bc")
    owner.num_kept = len(COMMON)
    sharing.add(abandoned)
    sharing.add(leader)
    assert sharing.add(waiting)
    assert not sharing.add(owner)
    sharing.remove(abandoned)
    assert sharing.ready() == []
    sharing.remove(leader)
    assert sharing.ready() == [waiting]
