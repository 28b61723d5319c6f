"""The digests that identify conversations (`boundaries`), and the index that finds sessions by them. Pure."""

import asyncio
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from crafted import generated, user
from msgspec.structs import replace

from gateway import boundaries
from gateway.dialects.openai import chat
from gateway.index import (
    MOST_SESSIONS,
    IndexedRequest,
    IndexedSession,
    RequestName,
    SessionIndex,
    base_of,
    tags,
)
from gateway.planning import SendPlan, plan
from gateway.sending import Sender
from turnkeep_client.messages import Appended, Called, CalledFunction, Generated

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "a": 1}}}


def called(arguments: str, call_id: str = "c1", **more: Any) -> dict[str, Any]:
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def chain(*messages: dict[str, Any], **more: Any) -> list[bytes]:
    asked = [*messages, user("The end.")]  # so that no answer is taken for the beginning of the next one
    turn = chat.read(json.dumps({"messages": asked, **more}).encode())
    return boundaries.chain(turn.messages or (), turn.options)[:-1]


def result(text: str = "", calls: tuple[Called, ...] = (), position: int = 10, **more: Any) -> Generated:
    return generated(text=text, tokens=(1, 2), tool_calls=calls, position=position, **more)


def test_a_conversation_digest_ignores_json_formatting_tool_call_ids_and_sampling_options() -> None:
    one = chain(
        user("Weather?"),
        called('{"a": 1.0, "b": [2e2, {"d": 4, "c": 3}]}', reasoning_content="Hm."),
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        tools=[TOOL],
    )
    part = {"type": "text", "text": "ther?", "cache_control": {"type": "ephemeral"}}
    other = chain(
        user([{"type": "text", "text": "Wea"}, part]),
        called('{"b":[200,{"c":3,"d":4}],"a":1}', "c2", content="", status="completed"),
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "sunny"}]},
        tools=[{**TOOL, "function": dict(reversed(TOOL["function"].items()))}],  # type: ignore[attr-defined]
        user="u",
        temperature=0.3,
        max_tokens=3,
        reasoning_effort="low",
    )
    assert one == other


def test_changing_a_message_or_tool_changes_the_conversation_digests_from_that_message_on() -> None:
    one = chain(user("a"), {"role": "assistant", "content": "b"}, user("c"))
    for num_common, other in [
        (0, chain(user("a"), {"role": "assistant", "content": "b"}, user("c"), tools=[TOOL])),
        (1, chain(user("a "), {"role": "assistant", "content": "b"}, user("c"))),
        (1, chain({"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}, user("c"))),
        (1, chain({**user("a"), "name": "n"}, {"role": "assistant", "content": "b"}, user("c"))),
        (2, chain(user("a"), {"role": "assistant", "content": "b "}, user("c"))),
        (2, chain(user("a"), called("{}", content="b"), user("c"))),
        (3, chain(user("a"), {"role": "assistant", "content": "b"}, user("d"))),
    ]:
        assert [a == b for a, b in zip(one, other, strict=True)] == [True] * num_common + [False] * (
            4 - num_common
        )
    several = ['{"a": 1}', '{"a": 1.5}', "{", '"{"', '{"a": 1e999}', '{"a": -1e999}', '{"a": null}']
    assert len({chain(user("a"), called(one))[-1] for one in several}) == len(several)


def test_a_conversation_digest_treats_developer_as_system_and_depends_on_chat_template_kwargs() -> None:
    told = {"role": "system", "content": "Be brief."}
    one = chain(told, user("a"))
    assert chain({**told, "role": "developer"}, user("a")) == one
    assert chain(told, user("a"), chat_template_kwargs={}) == one
    thinks, not_ = (chain(told, user("a"), chat_template_kwargs={"think": is_}) for is_ in (True, False))
    assert not {*one} & {*thinks}
    assert not {*not_} & {*thinks}


def test_swapping_the_results_of_two_tool_calls_changes_the_conversation_digest() -> None:
    both = called("{}", "x")
    both["tool_calls"] = [*both["tool_calls"], *called('{"a": 1}', "y")["tool_calls"]]
    ones = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("x", "y")]
    swapped = [one | {"tool_call_id": name} for one, name in zip(ones, ("y", "x"), strict=True)]
    assert chain(user("a"), both, *ones)[-1] != chain(user("a"), both, *swapped)[-1]


@pytest.mark.parametrize(("text", "sent"), [(" Yes.\n", " Yes.\n"), (" Yes.\n", "Yes."), ("\n\n", None)])
def test_an_answer_that_a_client_sends_back_with_stripped_white_space_matches_the_known_conversation(
    text: str, sent: str | None
) -> None:
    (prompt, after) = chain(user("a"), {"role": "assistant", "content": sent})[1:]
    assert after in boundaries.after_answer(prompt, result(text))
    call = Called(id="z", function=CalledFunction(name="weather", arguments='{"a":1}'))
    after = chain(user("a"), called('{ "a": 1 }'))[2]
    assert after in boundaries.after_answer(prompt, result("\n", (call,)))
    assert after not in boundaries.after_answer(prompt, result("\n"))


def test_the_gateway_decodes_only_request_ids_and_fork_tags_that_the_gateway_itself_made() -> None:
    name = RequestName(b"\xab" * 16, b"\x02" * 8, 3)
    assert RequestName.parse(str(name)) == name
    for other in ("turn-1", "a-b-c", str(name).upper(), f"{name}-1", ""):
        assert RequestName.parse(other) is None
    assert base_of(tuple(tags(b"\x05" * 16))) == b"\x05" * 16
    for other in (("at-05",), ("gateway",), ("gateway", "at-x")):
        assert base_of(other) is None


def answered(index: SessionIndex, held: IndexedSession, prompt: bytes, given: Generated) -> None:
    asked = IndexedRequest(held, RequestName(prompt, b"", 0), set(), 0)
    index.add(held)
    index.ask(asked)
    index.answer(asked, given)


@pytest.mark.parametrize("reason", ["cancelled", "expired", "model_changed", "given_up"])
def test_an_answer_that_was_cut_short_is_marked_as_failed_in_the_conversation_index(reason: str) -> None:
    """So a client that repeats the request gets a new, whole answer."""
    index, held = SessionIndex(), IndexedSession("s", 0, 1.0)
    asked = IndexedRequest(held, RequestName(b"x", b"", 0), set(), 0)
    index.add(held)
    index.ask(asked)
    index.answer(asked, replace(result("Ye"), finish_reason=reason))
    assert asked.state == "failed"


def test_the_conversation_index_drops_all_positions_after_the_point_where_a_template_rewrote_text() -> None:
    index, held = SessionIndex(), IndexedSession("s", 0, 1.0)
    answered(index, held, b"p", result("a", position=10))
    answered(index, held, b"q", result("b", position=20, rewritten_from=9))
    assert index.rewrites
    assert index.find(b"p") is None, "only the last prompt is known"
    assert index.find(b"q") == (held, (18, False))
    (before,) = boundaries.after_answer(b"p", result("a"))
    assert index.find(before) is None
    (after,) = boundaries.after_answer(b"q", result("b"))
    assert index.find(after) == (held, (20, True))
    counts = {"tokens": 5, "cached_tokens": 0, "prefilled_tokens": 5}
    rewriting = Appended(id="r", seq=6, position=30, seconds=0, kv_live_bytes=0, rewritten_from=15, **counts)
    index.append(held, b"r", rewriting)
    assert [index.find(one) for one in (after, b"q", b"r")] == [None, None, (held, (30, True))]
    index.drop(held)
    assert not index.sessions
    assert not index.asked
    assert not index._by_boundary


def begun(index: SessionIndex, *messages: dict[str, Any]) -> SendPlan:
    """Plan how to send a conversation, and begin with it."""
    return plan(index, chat.read(json.dumps({"messages": messages, "seed": 1}).encode()), 0, is_last=False)


@pytest.mark.parametrize(("rewrites", "how"), [(False, "forked"), (True, "begun")])
def test_the_gateway_forks_no_session_with_a_running_request_if_its_template_rewrites_earlier_text(
    rewrites: bool, how: str
) -> None:
    """A template that changes earlier text does so as the request runs."""
    index, said = SessionIndex(), {"role": "assistant", "content": "b"}
    first = begun(index, user("a"))
    index.answer(first.asked, result("b"))
    index.leave(first.asked.session)
    assert begun(index, user("a"), said, user("c")).how == "continued"
    index.rewrites = rewrites
    assert begun(index, user("a"), said, user("d")).how == how


@pytest.mark.parametrize(("num_waiting", "how"), [(0, "begun"), (1, "repeated"), (2, "repeated")])
def test_a_repeated_request_joins_a_running_answer_only_while_another_client_waits_for_that_answer(
    num_waiting: int, how: str
) -> None:
    """An answer that no client waits for is being cancelled."""
    index = SessionIndex()
    first = begun(index, user("a"))
    for _ in range(3):
        first.asked.join()
    for _ in range(3 - num_waiting):
        first.asked.leave()
    assert begun(index, user("a")).how == how


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_session_continued_by_another_gateway_stays_indexed_unless_its_template_rewrites_text(
    rewrites: bool,
) -> None:
    """Else the request of the other gateway may have moved them."""
    index, held = SessionIndex(), IndexedSession("s", 0, 1.0)
    answered(index, held, b"p", result("a"))
    index.rewrites = rewrites
    index.lose(held)
    (after,) = boundaries.after_answer(b"p", result("a"))
    assert index.find(after) == (None if rewrites else (held, (10, True)))
    assert ("s" in index.sessions, held.position is None) == ((False, False) if rewrites else (True, True))


@pytest.mark.parametrize(("num_running", "expected"), [(1, 9), (0, None)])
async def test_after_a_refused_fork_the_gateway_waits_for_a_running_request_or_forgets_the_sessions_position(
    num_running: int, expected: int | None
) -> None:
    index, held = SessionIndex(), IndexedSession("s", 3, 1.0)
    held.num_running = num_running
    sender: Any = SimpleNamespace(_index=index)
    catching_up = asyncio.create_task(Sender._catch_up(sender, held, 3))
    await asyncio.sleep(0.1)
    assert catching_up.done() == (not num_running)
    if num_running:
        index.move(held, 9)
    await catching_up
    assert held.position == expected


def test_of_several_sessions_with_the_same_conversation_the_gateway_picks_one_that_needs_no_fork() -> None:
    index, one, two, three = SessionIndex(), *(IndexedSession(name, 0, 1.0) for name in "abc")
    (after,) = boundaries.after_answer(b"p", result("a"))
    answered(index, one, b"p", result("a"))
    answered(index, two, b"p", result("a"))
    assert index.find(after) == (one, (10, True))
    one.position = 30
    answered(index, three, b"p", result("a"))
    assert index.find(after) == (three, (10, True))
    index.drop(one)
    assert index.find(after) == (three, (10, True))


def test_the_conversation_index_lists_idle_sessions_and_the_oldest_ones_beyond_its_limit_for_removal() -> (
    None
):
    index = SessionIndex()
    for number in range(MOST_SESSIONS + 3):
        index.add(IndexedSession(str(number), 0, float(number)))
    index.sessions["0"].num_running = 1
    assert [held.name for held in index.old(-1.0)] == ["1", "2"]
    index.use(index.sessions["1"], 9e9)
    assert [held.name for held in index.old(5.0)] == ["2", "3", "4"]


def test_requests_that_differ_in_sampling_options_or_answer_index_have_different_digests() -> None:
    options: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"logit_bias": {3: 1.0}}]
    digests = {boundaries.options_digest(one, number) for one in options for number in (0, 1)}
    assert len(digests) == 6


def test_after_a_failed_repeat_the_gateway_knows_the_log_positions_of_a_request_that_may_still_run() -> None:
    """Else a client that leaves would cancel an answer that another gateway's client waits for."""
    asked = IndexedRequest(IndexedSession("s", 0, 1.0), RequestName(b"p", b"", 0), set(), 0)
    for seq in (5, 9):
        sent: Any = SimpleNamespace(seq=seq)
        asked.send(sent)
    asked.fail(may_still_run=True)
    asked.end()
    assert asked.own_seqs == {5, 9}
    asked.fail()
    asked.end()
    assert not asked.own_seqs


def test_once_the_append_of_a_large_request_has_ended_the_gateway_no_longer_cancels_that_append() -> None:
    asked = IndexedRequest(IndexedSession("s", 0, 1.0), RequestName(b"p", b"", 0), set(), 0)
    asked.begin_append("append")
    asked.end_append(b"b", 5)
    assert (asked.append, asked.bases, asked.expected) == (None, {b"b"}, 5)


def check(index: SessionIndex) -> None:
    """Check that the index finds exactly the boundaries and requests that its sessions have."""
    marks = [(one, held) for held in index.sessions.values() for one in held.marks]
    asked = [(one, held) for held in index.sessions.values() for one in held.asked]
    assert index._by_boundary == dict(marks)
    assert len(index._by_boundary) == len(marks), "each boundary is one session's"
    assert {key: one.session for key, one in index.asked.items()} == dict(asked)
    assert len(index.asked) == len(asked), "so is each request"
    assert all(one.name.key == key for key, one in index.asked.items())


@pytest.mark.parametrize("seed", range(20))
def test_after_random_requests_and_removals_the_conversation_index_has_nothing_of_removed_sessions(
    seed: int,
) -> None:
    """Two sessions may have equal prompts, and a session may be removed before its answer comes."""
    chance, index, running = random.Random(seed), SessionIndex(), list[SendPlan]()
    known: list[tuple[dict[str, Any], ...]] = [()]
    for number in range(150):
        sessions = [*index.sessions.values()]
        match chance.choice([*["begin"] * 3, *["answer"] * 2, "append", "drop", "lose", "cut"]):
            case "begin":
                said = *chance.choice(known[-6:]), user(chance.choice("ab"))
                options = {"temperature": 0} if chance.random() < 0.5 else {}
                turn = chat.read(json.dumps({"messages": said, **options}).encode())
                made = plan(index, turn, 0, is_last=chance.random() < 0.3)
                if made.how != "repeated":
                    running.append(made)
                known.append((*said, {"role": "assistant", "content": "b"}))
            case "answer" if running:
                made = running.pop(chance.randrange(len(running)))
                index.answer(made.asked, result("b", position=made.position + 10))
                index.leave(made.asked.session, number)
            case "append" if running:
                made = chance.choice(running)
                position, before = made.position + 5, made.asked.session.position
                counts = {"tokens": 5, "cached_tokens": 0, "prefilled_tokens": 5}
                done = Appended(id="a", seq=6, position=position, seconds=0, kv_live_bytes=0, **counts)
                index.append(made.asked.session, made.known[-1], replace(done, repeat_of=5))
                assert made.asked.session.position == before, "what is repeated, the session has behind it"
                index.append(made.asked.session, made.known[-1], done)
            case "drop" if sessions:
                index.drop(chance.choice(sessions))
            case "lose" if sessions:
                index.lose(chance.choice(sessions), history=chance.random() < 0.5)
            case "cut" if sessions:
                index.cut(chance.choice(sessions), chance.randrange(30))
        check(index)
