"""The fold: reading a session's log gives the state that it had in memory; changed logs are not continued."""

import asyncio
import json
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from msgspec import structs
from session_world import KEY, OPERATIONS, STORED, LogEntry, World, live, tampered

from cache.names.tokens import as_tokens
from turnkeep_client.log import BEGAN_HEADER, BUILD_HEADER, HISTORY_HEADER
from turnkeep_client.messages import (
    Append,
    Chunk,
    Close,
    Closed,
    Failed,
    Generate,
    Open,
    Opened,
    Rewind,
    UnknownResult,
    encode,
)
from worker.sessions import cancelling, record
from worker.sessions.answered_ids import AnsweredAt, AnsweredIds
from worker.sessions.cancelling import cancel
from worker.sessions.execution import erase_all
from worker.sessions.pending import PendingRequest
from worker.sessions.session import ServedSession
from worker.sessions.streaming import unpublished_text
from worker.wire.chunks import PublishedChunks


@given(operations=OPERATIONS)
def test_a_session_read_from_its_log_has_the_same_state_as_in_memory(tokenizer, operations) -> None:
    """After random valid and invalid requests, repeats, conflicts, cancellations, crashes and removals."""
    asyncio.run(live(World(tokenizer), operations))


@pytest.mark.parametrize(
    ("stated", "began"),
    [
        ("2020-05-06T07:08:09+00:00", datetime(2020, 5, 6, 7, 8, 9, tzinfo=UTC)),
        ("2020-05-06T07:08:09", STORED),
        ("yesterday", STORED),
        ("", STORED),
    ],
)
async def test_an_imported_session_takes_its_start_time_from_its_first_request_if_the_time_has_a_zone(
    world, stated, began
) -> None:
    world.ring(world.log.add("in", encode(Append(id="a", text="x")), {BEGAN_HEADER: stated}))
    await world.session.run()
    for session in (world.session, await world.refolded()):
        assert session.history.conversation.started == began


async def test_a_request_with_the_id_of_a_different_request_is_refused_as_an_id_conflict(world) -> None:
    await world.ask(Append(id="a", text="one"))
    for _ in range(2):
        refused = await world.ask(Append(id="a", text="two"))
        assert (refused.code, refused.id, refused.position) == ("id_conflict", "a", 3)
        world.crash()
    repeated = await world.ask(Append(id="a", text="one"))
    assert repeated.repeat_of == 1, "the first one keeps the id"


async def test_an_append_sent_after_a_close_is_refused_even_if_the_log_is_read_again_during_the_close(
    world, monkeypatch
) -> None:
    append = world.log.append

    async def lose_claim(*args: Any) -> None:
        await append(*args)
        monkeypatch.undo()
        world.session.forget()

    monkeypatch.setattr(world.log, "append", lose_claim)
    world.publish(Close(id="close", cancel=True))
    last = world.publish(Append(id="last", text="two"))
    await world.session.run()
    assert [type(result) for result in world.results] == [Closed, Failed]
    assert world.result(last).code == "unknown_session"
    await world.assert_fold_is_life()


async def test_a_request_cancelled_behind_a_queued_close_with_forget_still_gets_its_result_when_repeated(
    world,
) -> None:
    """Its result is stored before that of the close."""
    await world.ask(Append(id="a", text="one"))
    closing = world.publish(Close(id="close", forget=True))
    late = world.publish(Append(id="late", text="two"))
    assert (await cancel(world.session, "late")).was == "waiting"
    await world.session.run()
    assert [result.seq for result in world.results[1:]] == [late, closing]
    for _ in range(2):  # in memory, and read from the log
        assert (await world.ask(Append(id="late", text="two"))).repeat_of == late
        assert (await world.ask(Append(id="a", text="one"))).repeat_of != 1, "whose session is forgotten"
        world.crash()


async def test_cancelling_a_waiting_request_stores_no_result_if_the_request_has_become_the_next_to_run(
    world,
) -> None:
    """Another worker may have begun to answer it since it was found to wait."""
    world.publish(Append(id="first", text="one"))
    world.publish(Generate(id="second", max_tokens=3))
    log = world.session.log
    await log.catch_up(beyond_bell=True)
    first, second = log.record.pending
    log.record.pending.remove(first)
    assert await log.commit(second, None, waits=True) is None
    log.record.pending.insert(0, first)
    assert await log.commit(second, None, waits=True) is not None


async def test_a_cancel_reads_the_published_tokens_again_if_its_request_has_meanwhile_become_the_next_to_run(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the next request can have been begun, and while the cancel looked the one before was answered."""
    world.publish(Append(id="first", text="one"))
    world.publish(Generate(id="second", max_tokens=3))
    were_next = list[bool]()

    async def begun(session: ServedSession, pending: PendingRequest) -> bool:
        were_next.append(session.log.record.is_next(pending))
        if len(were_next) == 1:
            session.log.record.pending.popleft()
        return False

    monkeypatch.setattr(cancelling, "_is_begun", begun)
    assert (await cancel(world.session, "second")).was == "waiting"
    assert were_next == [False, True]


async def test_a_cancel_that_waits_for_an_answer_to_end_returns_if_the_session_is_read_anew_from_the_log(
    world,
) -> None:
    world.publish(Generate(id="one", max_tokens=3))
    await world.session.log.catch_up(beyond_bell=True)
    ending = asyncio.create_task(world.session.end_early(world.session.log.record.pending[0]))
    await asyncio.sleep(0)
    assert not ending.done()
    world.session.forget()
    async with asyncio.timeout(5):
        await ending


async def test_the_result_of_a_request_cancelled_before_it_ran_is_not_used_to_verify_the_sessions_history(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that reads the log does not take it for a proof either."""
    monkeypatch.setattr(record, "_CHECKPOINT_EVERY", 1)
    await world.ask(Append(id="a", text="one"))
    proven_seq = world.session.log.record.proven_seq
    world.publish(Generate(id="b", max_tokens=3))
    assert (await cancel(world.session, "b")).was == "waiting"
    assert world.session.log.record.proven_seq == proven_seq > 0
    assert (await world.refolded()).log.record.proven_seq == proven_seq


async def test_the_close_result_that_is_left_of_an_erased_session_is_not_used_to_verify_the_sessions_history(
    world, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its digest says of is gone."""
    monkeypatch.setattr(record, "_CHECKPOINT_EVERY", 1)
    await world.ask(Append(id="a", text="one"))
    closed = await world.ask(Close(id="close", forget=True))
    world.log.entries = [one for one in world.log.entries if one.kind == "out" and closed.id in str(one.body)]
    assert len(world.log.entries) == 1
    folded = await world.refolded()
    assert folded.log.record.diverged is None
    assert folded.log.record.proven_seq == 0
    assert [one.kind for one in world.log.entries] == ["out"], "without a checkpoint"


async def test_a_repeated_request_is_not_reported_as_waiting_if_the_first_request_with_its_id_has_a_result(
    world,
) -> None:
    """That result was stored out of order, so the requests before it are not read either."""
    for name in ("first", "late", "late"):
        world.publish(Append(id=name, text="one"))
    log = world.session.log
    waiting = await log.find_waiting("late")
    assert waiting is not None
    assert waiting.seq == 2
    log.record._answered.add(2)
    assert await log.find_waiting("late") is None


async def test_cancelling_the_repeat_of_an_answered_request_fails_and_the_repeat_gets_the_recorded_result(
    world,
) -> None:
    """An id has only one result, also if it is repeated or cancelled later."""
    first = await world.ask(Append(id="a", text="one"))
    seq = world.publish(Append(id="a", text="one"))
    reply = await cancel(world.session, "a")
    assert isinstance(reply, Failed)
    assert "answered already" in reply.message
    await world.session.run()
    assert world.result(seq) == msgspec.structs.replace(first, seq=seq, repeat_of=first.seq)


@pytest.mark.parametrize("cancel_after", [None, 4])
async def test_after_a_crash_the_next_worker_ends_the_token_stream_of_an_answered_request(
    world, cancel_after
) -> None:
    """The crash came between the result and the end; text that only a cancel completed is published too."""
    world.engine.cancel_after = cancel_after
    seq = world.publish(Generate(id="g", text="down", max_tokens=6))
    await world.session.run()
    result = world.result(seq)
    said = len(result.text) // 2 if cancel_after else len(result.text)
    world.log.chunks.stored = [Chunk(0, result.tokens, result.text[:said])]
    world.crash()
    world.ring(seq, again=True)
    await world.session.run()
    assert world.outbox.ended == ["g"]
    assert world.outbox.texts == ([result.text[said:]] if cancel_after else [])


async def test_the_last_published_chunk_has_all_text_and_reasoning_not_yet_in_earlier_chunks(world) -> None:
    result = await world.ask(Generate(id="g", text="down", max_tokens=2))
    result = structs.replace(result, text="xyz", reasoning="abcd")
    first, last = (Chunk(at, (token,), "") for at, token in enumerate(result.tokens))
    chunks = [structs.replace(first, reasoning="ab"), structs.replace(last, text="x", reasoning="c")]
    assert unpublished_text(result, PublishedChunks(chunks)) == Chunk(2, (), "yz", reasoning="d")
    assert unpublished_text(result, PublishedChunks(chunks[:1])) is None


@pytest.mark.parametrize("known", [3, 6])
async def test_prompt_tokens_in_the_usage_of_a_resumed_answer_are_cached_tokens_plus_prefilled_tokens(
    world, known
) -> None:
    """Tokens published before do not count as prompt. If all were published, no prompt token is prefilled."""
    whole = await world.ask(Generate(id="whole", text="down", max_tokens=6))
    await world.ask(Rewind(id="back", position=0))
    seq = world.log.entries[-1].seq + 1
    world.log.chunks.stored = [Chunk(0, whole.tokens[:known], "", seq)]
    usage = (await world.ask(Generate(id="again", text="down", max_tokens=6))).usage
    assert usage.prompt_tokens == usage.cached_tokens + usage.prefilled_tokens == whole.usage.prompt_tokens
    assert (usage.completion_tokens, usage.prefilled_tokens == 0) == (6, known == 6)


async def diverged(world: World, entries: list[LogEntry]) -> str:
    """Read the session from these entries; return the message with which it refuses a new request."""
    world.log.entries = entries
    world.crash()
    before = world.publish(Append(id="new", text="more"))
    await world.session.run()
    refused = world.result(before)
    assert refused.code == "history_diverged"
    assert not refused.retryable
    assert "go on in a new session" in refused.message
    return refused.message


async def test_a_session_whose_tokens_do_not_match_the_digest_in_its_last_result_is_refused(world) -> None:
    """Repeats of its earlier requests still get their recorded results."""
    await world.ask(Append(id="a", text="one"))
    await world.ask(Append(id="b", text="two"))
    entries = tampered(world.log.entries, -1, headers={HISTORY_HEADER: "0" * 32})
    assert "continued from sequence 4 on" in await diverged(world, entries)
    repeated = await world.ask(Append(id="a", text="one"))
    assert repeated.repeat_of == 1


async def test_a_session_with_a_false_history_digest_can_reopen_after_a_close_with_forget(world) -> None:
    await world.ask(Append(id="a", text="one"))
    await diverged(world, tampered(world.log.entries, -1, headers={HISTORY_HEADER: "0" * 32}))
    await world.ask(Close(id="close", forget=True))
    assert isinstance(await world.ask(Open(id="o")), Opened)
    assert (await world.ask(Append(id="b", text="one"))).position == 3


@pytest.mark.parametrize(
    "found", [AnsweredAt(1, 2), AnsweredAt(3, 2)], ids=["result of another id", "result of another sequence"]
)
async def test_looking_up_a_request_id_does_not_return_the_result_of_another_id_with_the_same_hash(
    world, found: AnsweredAt
) -> None:
    await world.ask(Append(id="a", text="one"))
    ids = world.session.log.record.answered_ids = AnsweredIds()
    asked = "other" if found.in_seq == 1 else "a"
    ids.add(asked, found)
    assert await world.session.log.find_answered(asked) is None


async def test_forgetting_a_reopened_session_erases_only_token_sequences_since_the_reopening(world) -> None:
    for round_ in ("1", "2"):
        await world.ask(Open(id=f"open{round_}"))
        await world.ask(Append(id=f"a{round_}", tokens=(1, 2, 3)))
        await world.ask(Rewind(id=f"back{round_}", position=2))
        await world.ask(Append(id=f"a{round_}", tokens=(1, 2, 3)))  # a repeat
        assert [list(one) for one in await world.session.log.all_tokens()] == [[1, 2, 3], [1, 2]]
        await world.ask(Close(id=f"close{round_}", forget=True))


@pytest.mark.parametrize("crashes", [False, True])
async def test_a_closed_session_can_be_closed_with_forget_twice_without_being_opened_again(
    world, crashes: bool
) -> None:
    await world.ask(Append(id="a", tokens=(1, 2, 3)))
    await world.ask(Close(id="close"))
    for number, left in enumerate(([1, 2, 3], [])):
        if crashes:
            world.crash()
            await world.session.run()
        assert [list(one) for one in await world.session.log.all_tokens()] == [left]
        closed = await world.ask(Close(id=f"forget{number}", forget=True))
        assert isinstance(closed, Closed)
        assert (closed.position, closed.settled) == (0, True)
    assert isinstance(await world.ask(Close(id="again")), Failed)
    assert (await world.refolded()).log.record.diverged is None


async def test_forgetting_a_session_is_reported_as_incomplete_until_every_worker_has_erased_its_kv(
    world,
) -> None:
    noted = []

    async def erase_elsewhere(_: object) -> dict[str, bool]:
        return {"slow": False, "quick": True}

    async def note(*_: object) -> None:
        noted.append(_[-1])

    for name, value in {
        "erase_elsewhere": erase_elsewhere,
        "erases": ("this",),
        "erasures": SimpleNamespace(note=note),
    }.items():
        object.__setattr__(world.session.services, name, value)
    await world.ask(Append(id="a", tokens=(1, 2, 3)))
    assert (await world.ask(Close(id="c", forget=True))).settled is False
    assert noted == [["quick", "this"]]


async def test_erasing_token_sequences_with_a_common_prefix_erases_the_prefix_with_the_last_sequence() -> (
    None
):
    erased = list[tuple[list[int], int]]()

    async def erase(_: object, tokens: Any, num_shared: int) -> Any:
        erased.append((list(tokens), num_shared))
        return SimpleNamespace(num_snapshots=1, settled=True)

    async def shared(_: object) -> int:
        return 1

    had = [as_tokens(one) for one in ((1, 2, 3), (1, 2, 4, 5))]
    engine: Any = SimpleNamespace(erase=erase)
    assert await erase_all(engine, KEY, had, shared) == (2, True, [2, 1])
    assert erased == [([1, 2, 3], 2), ([1, 2, 4, 5], 1)]


async def test_a_session_refuses_further_requests_if_a_position_in_a_logged_result_was_altered(world) -> None:
    await world.ask(Append(id="a", text="one"))
    await world.ask(Append(id="b", text="two"))
    for index in (0, 1):
        entries = world.log.entries[:4]
        body = json.loads([entry for entry in entries if entry.kind == "out"][index].body)
        body["position"] += 1
        message = await diverged(world, tampered(entries, index, body=json.dumps(body).encode()))
        assert "position" in message


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kept": 9}, "keeps more tokens than there are"),
        ({"kept": 0, "input": "gA=="}, "cut off"),
        ({"kept": 0, "input": "//////8B"}, "too large"),
        ({"kept": 0, "input": "?"}, "cannot be read"),
        (None, "is no such result: Appended"),
    ],
)
async def test_a_session_refuses_further_requests_if_the_change_field_of_a_logged_result_was_altered(
    world, change: Any, why: str
) -> None:
    await world.ask(Append(id="a", tokens=(1, 2)))
    body = json.loads(world.log.entries[-1].body)
    body["change"] = change
    entries = tampered(world.log.entries, -1, body=json.dumps(body).encode())
    assert why in await diverged(world, entries)


def without(entries: list[LogEntry], *seqs: int) -> list[LogEntry]:
    """Return the entries as if the log had removed those at these sequences."""
    gone: Any = "gone"
    return [replace(entry, kind=gone, body=b"") if entry.seq in seqs else entry for entry in entries]


async def test_a_session_whose_log_lost_the_second_of_two_consecutive_results_refuses_further_requests(
    world,
) -> None:
    for id_ in "abc":
        seq = world.log.add("in", encode(Append(id=id_, text="one")))
    world.ring(seq)
    await world.session.run()
    assert [entry.kind for entry in world.log.entries] == ["in"] * 3 + ["out"] * 3
    why = await diverged(world, without(world.log.entries, 5))
    assert "has lost the result at sequence 5" in why


@pytest.mark.parametrize("lost", [(2,), (4,), (6,), (2, 4), (4, 6), (2, 4, 6)])
async def test_a_session_whose_close_is_logged_stays_closed_whichever_earlier_results_are_lost(
    world, lost: tuple[int, ...]
) -> None:
    for id_ in "abc":
        await world.ask(Append(id=id_, text="one"))
    await world.ask(Close(id="close"))
    world.log.entries = without(world.log.entries, *lost)
    world.crash()
    assert (await world.ask(Append(id="late", text="more"))).code == "unknown_session"
    await world.ask(Open(id="o"))
    await world.ask(Append(id="d", text="one"))
    await world.assert_fold_is_life()


@pytest.mark.parametrize("seed", range(4))
def test_looking_up_a_request_id_finds_the_first_of_its_results_that_is_still_in_the_index(
    seed: int,
) -> None:
    dice, ids, left = random.Random(seed), AnsweredIds(), {f"r{n}": list[AnsweredAt]() for n in range(12)}
    for number in range(1, 300):
        name = dice.choice([*left])
        if left[name] and dice.random() < 0.5:
            ids.drop(name)
            del left[name][0]
        else:
            left[name].append(AnsweredAt(number, number + 1))
            for _ in range(2 if len(left[name]) == 1 else 1):  # the log may be read again
                ids.add(name, left[name][-1])
        if dice.random() < 0.1:
            packed, ids = ids.pack(), AnsweredIds()
            ids.load(packed)
        assert {name: ids.find(name) for name in left} == {name: (*of, None)[0] for name, of in left.items()}
        assert len(ids) == sum(map(len, left.values()))
        low, high = sorted(dice.choices(range(number + 2), k=2))
        within = [at for one in left.values() for at in one if low < at.in_seq <= high]
        assert len(ids.behind(low, high)) == len(within)


#: More workers, one after the other, than any limit on attempts allows.
MANY = 20


def given_up(world: World) -> None:
    """Start a worker that no longer tries to read the session's log, since many reads have failed."""
    world.crash()
    world.session.log.num_failures = MANY
    world.session.log.drop_record()


async def again(world: World, request: Any) -> Any:
    """Publish a request that counts as redelivered; return its result."""
    seq = world.log.add("in", encode(request))
    world.ring(seq, encode(request), again=True)
    await world.session.run()
    return world.result(seq)


ASKED: dict[str, Any] = {
    "append": Append(id="a", text="one"),
    "generate": Generate(id="g", text="more", max_tokens=3),
    "rewind": Rewind(id="r", position=2),
    "close": Close(id="c"),
    "open": Open(id="o"),
}


@pytest.mark.parametrize("repeated", ASKED.values(), ids=ASKED)
async def test_a_repeat_answered_while_the_log_cannot_be_read_blocks_no_request_once_the_log_can_be_read(
    world: World, repeated: Any
) -> None:
    for request in ASKED.values():
        await world.ask(request)
    await world.ask(Append(id="last", text="one"))
    given_up(world)
    answer = await again(world, repeated)
    assert answer.repeat_of
    refused = await world.ask(Append(id="b", text="two"))
    assert (refused.code, refused.position) == ("history_diverged", 3)
    world.crash()
    appended = await world.ask(Append(id="d", text="three"))
    assert appended.position == 8


async def test_worker_crashes_while_a_request_waits_for_the_device_lock_are_not_counted_as_failed_log_reads(
    world: World,
) -> None:
    """Each of the workers reads the session's log, and none crashes because of it."""
    await world.ask(Append(id="a", text="one"))
    seq = world.log.add("in", encode(Append(id="b", text="two")))
    for _ in range(MANY):
        world.crash()
        world.ring(seq, again=True)
        async with AsyncExitStack() as alone:
            lock = world.session.services.device_lock
            await alone.enter_async_context(lock.enter(lambda: False, alone=True))
            life = asyncio.create_task(world.session.run())
            while not world.session.pending:  # noqa: ASYNC110 - the session says nothing as it begins to wait
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            life.cancel()
    world.crash()
    world.ring(seq, again=True)
    await world.session.run()
    assert world.result(seq).position == 6


def changed(world: World, **fields: Any) -> None:
    """Change fields of the last result, as if a newer worker had stored it, and start another worker."""
    body = json.loads(world.log.entries[-1].body) | fields
    build = {BUILD_HEADER: "worker=w version=9.1"}
    world.log.entries = tampered(world.log.entries, -1, body=json.dumps(body).encode(), headers=build)
    world.crash()


FAILS = Rewind(id="r", position=99)


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (Generate(id="r", text="one", max_tokens=3), {"finish_reason": "content_filter"}),
        (Append(id="r", text="one"), {"weather": {"sky": "blue"}}),
        (FAILS, {"code": "out_of_credit"}),
        (FAILS, {"retryable": "later"}),
    ],
    ids=["a finish reason", "a field", "the code of a failure", "a value in a failure"],
)
async def test_a_session_accepts_requests_after_a_logged_result_with_unknown_values_of_a_newer_version(
    world: World, request_: Any, fields: dict[str, Any]
) -> None:
    """A repeat still gets it. A failure never changes a session, whatever fields a newer version adds."""
    before = (await world.ask(Append(id="a", text="one"))).position
    position = (await world.ask(request_)).position or before
    changed(world, **fields)
    assert (await world.ask(Append(id="b", text="two"))).position == position + 3
    assert (await world.ask(request_)).repeat_of == 3
    body = json.loads(world.log.entries[-1].body)
    assert (body["seq"], {name: body[name] for name in fields}) == (7, fields)


NEW_SHAPES = {"a new type": {"type": "forked"}, "a new shape": {"seconds": {"prefill": 1}}}


@pytest.mark.parametrize("fields", NEW_SHAPES.values(), ids=NEW_SHAPES)
async def test_new_requests_after_a_logged_result_of_unknown_form_are_refused_and_repeats_get_that_result(
    world: World, fields: Any
) -> None:
    await world.ask(Append(id="a", text="one"))
    await world.ask(Append(id="b", text="two"))
    changed(world, **fields)
    refused = await world.ask(Append(id="c", text="three"))
    assert (refused.code, refused.position) == ("history_diverged", 6)
    assert "newer version" in refused.message
    assert "9.1" in refused.message
    assert [result.seq for result in world.results] == [1, 3, 5]
    repeated = await world.ask(Append(id="b", text="two"))
    assert isinstance(repeated, UnknownResult)
    assert (repeated.repeat_of, repeated.position) == (3, 6)


async def test_a_session_with_an_unknown_field_in_an_answered_request_is_refused_with_the_reason(
    world: World,
) -> None:
    await world.ask(Append(id="a", text="one"))
    answered = world.log.entries[1]
    told = answered.body.replace(b'"text":"one"', b'"text":"one","mood":"good"')
    world.log.entries[1] = replace(answered, body=told)
    world.crash()
    refused = await world.ask(Append(id="b", text="two"))
    assert refused.code == "history_diverged"
    assert "newer version" in refused.message
    assert [result.seq for result in world.results] == [1, 3]
