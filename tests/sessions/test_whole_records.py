"""Results stored by workers that cannot read a session's whole log, and by workers of newer versions.

Uses the `World` of `test_fold`: a session with its log, without a device.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_fold import World, tampered

from cache.names.tokens import as_tokens
from turnkeep_client.log import BUILD_HEADER, HISTORY_HEADER
from turnkeep_client.messages import Append, Close, Generate, Open, Rewind, UnknownResult, encode
from worker.models.tokenizer import Tokenizer

#: More workers, one after the other, than any limit on attempts allows.
MANY = 20


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture
def world(tokenizer: Tokenizer) -> World:
    return World(tokenizer)


def given_up(world: World) -> None:
    """Start a worker that no longer tries to read the session's log, since many reads have failed."""
    world.crash()
    world.session.log.num_failures = MANY
    world.session.log.reset()


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
async def test_a_repeat_answered_by_a_worker_that_cannot_read_the_log_does_not_end_the_session(
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


async def test_a_session_continues_even_if_a_repeats_result_has_the_digest_of_an_empty_history(
    world: World,
) -> None:
    await world.ask(Append(id="a", text="one"))
    await world.ask(Append(id="a", text="one"))
    nothing = {HISTORY_HEADER: as_tokens().digest()}
    world.log.entries = tampered(world.log.entries, -1, headers=nothing)
    world.crash()
    assert (await world.ask(Append(id="b", text="two"))).position == 6
    await world.assert_fold_is_life()


async def test_a_failure_of_a_session_that_cannot_be_read_has_the_logged_position(world: World) -> None:
    await world.ask(Append(id="a", text="one"))
    given_up(world)
    refused = await again(world, Append(id="b", text="two"))
    assert (refused.code, refused.position) == ("history_diverged", 3)


@pytest.mark.parametrize("forget", [False, True])
async def test_a_failure_on_a_closed_session_has_position_0_before_and_after_a_restart(
    world: World, forget: bool
) -> None:
    await world.ask(Append(id="a", text="one"))
    await world.ask(Close(id="c", forget=forget))
    before = await world.ask(Append(id="b", text="two"))
    world.crash()
    after = await world.ask(Append(id="d", text="two"))
    assert (before.code, before.position) == (after.code, after.position) == ("unknown_session", 0)


async def test_waiting_for_another_sessions_last_attempt_does_not_count_as_a_failed_read_of_the_log(
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


async def test_a_session_continues_after_an_answer_with_an_unknown_finish_reason(world: World) -> None:
    asked = await world.ask(Generate(id="g", text="one", max_tokens=3))
    changed(world, finish_reason="content_filter")
    answer = await world.ask(Append(id="a", text="two"))
    assert answer.position == asked.position + 3
    assert [result.seq for result in world.results] == [1, 3]
    assert world.result(1).finish_reason == "content_filter"


async def test_a_logged_failure_with_an_unknown_code_counts_as_the_requests_result(world: World) -> None:
    await world.ask(Append(id="a", text="one"))
    await world.ask(Rewind(id="r", position=99))
    changed(world, code="out_of_credit")
    assert (await world.ask(Append(id="b", text="two"))).position == 6
    repeated = await world.ask(Rewind(id="r", position=99))
    assert (repeated.code, repeated.repeat_of) == ("out_of_credit", 3)


async def test_a_logged_failure_with_unknown_field_values_counts_as_the_requests_result(world: World) -> None:
    """A failure never changes a session, whatever fields a newer version adds."""
    await world.ask(Append(id="a", text="one"))
    await world.ask(Rewind(id="r", position=99))
    changed(world, retryable="later")
    assert (await world.ask(Append(id="b", text="two"))).position == 6
    assert [result.seq for result in world.results] == [1, 3, 5]
    repeated = await world.ask(Rewind(id="r", position=99))
    assert (repeated.type, repeated.repeat_of) == ("failed", 3)


NEW_SHAPES = {"a new type": {"type": "forked"}, "a new shape": {"seconds": {"prefill": 1}}}


@pytest.mark.parametrize("fields", NEW_SHAPES.values(), ids=NEW_SHAPES)
async def test_a_logged_result_of_an_unknown_form_stops_the_session_and_repeats_still_get_it(
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


async def test_a_repeated_result_keeps_fields_that_the_worker_does_not_know(world: World) -> None:
    await world.ask(Append(id="a", text="one"))
    changed(world, weather={"sky": "blue"})
    await world.ask(Append(id="a", text="one"))
    body = json.loads(world.log.entries[-1].body)
    assert (body["seq"], body["repeat_of"], body["weather"]) == (3, 1, {"sky": "blue"})


async def test_an_answered_request_with_an_unknown_field_stops_the_session_with_the_reason(
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
