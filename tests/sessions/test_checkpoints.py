"""Checkpoints: a session opened from a checkpoint equals the session read from its whole log.

Damaged and forged checkpoints are ignored.
"""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from session_world import EVERY, LogEntry, World, assert_same, nothing

from cache.names.policy import FULL, Policy
from cache.names.tokens import pack
from turnkeep_client.checkpoints import CheckpointMessage, Link, digest
from turnkeep_client.log import CHECKPOINT_HEADER, HISTORY_HEADER, MODEL_HEADER
from turnkeep_client.messages import Append, Close, Closed, Generate, Message, Rewind
from worker.models.tokenizer import Tokenizer
from worker.sessions import attachments
from worker.sessions.answered_ids import AnsweredAt, AnsweredIds
from worker.sessions.attachments import _Body
from worker.sessions.session import ServedSession
from worker.wire.consistent_reads import StoredMessage
from worker.wire.written import answered_seq

WINDOW = Policy(2, 40)


@pytest.fixture
def world(request: pytest.FixtureRequest, tokenizer: Tokenizer, often: None) -> World:
    """A session under the policy full; with a parameter, under that policy."""
    world = World(tokenizer)
    world.crash(getattr(request, "param", FULL))
    return world


both = pytest.mark.parametrize("world", [FULL, WINDOW], ids=["full", "window"], indirect=True)


def question(number: int, **more: Any) -> Generate:
    return Generate(id=f"q{number}", messages=(Message(role="user", content="so?"),), max_tokens=3, **more)


async def stored(world: World) -> None:
    """Wait until all background tasks, which store checkpoints, have ended."""
    while tasks := {task for task in world.tasks.started if not task.done()}:
        await asyncio.gather(*tasks)


async def converse(world: World, turns: range) -> None:
    for number in turns:
        await world.ask(question(number))
        await stored(world)


async def opened(world: World) -> ServedSession:
    """Open the session a second time from the log, as another worker would."""
    return await world.refolded()


def checkpoints(world: World) -> list[LogEntry]:
    return [entry for entry in world.log.entries if entry.kind == "checkpoint"]


def is_first(checkpoint: LogEntry) -> bool:
    """Say whether a message of the subject `checkpoint` is the first one of its value."""
    return "before" not in json.loads(checkpoint.body)


def resumed_at(session: ServedSession) -> int:
    return session.log.record._checkpoint_seq


def without_checkpoints(world: World) -> World:
    """Make a world whose log has the same entries, but no checkpoints."""
    other = World(world._tokenizer)
    for entry in world.log.entries:
        headers = {name: text for name, text in entry.headers.items() if name != CHECKPOINT_HEADER}
        body = b"" if entry.kind == "checkpoint" else entry.body
        other.log.entries.append(replace(entry, body=body, headers=headers))
    return other


async def whole(world: World) -> ServedSession:
    """Open the session from its whole log, without checkpoints."""
    return await without_checkpoints(world).refolded()


@both
async def test_opening_a_long_session_from_a_checkpoint_reads_only_the_end_of_its_log(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await converse(world, range(60))
    read: list[int] = []
    page = world.log.page

    async def counting(*arguments: Any, **more: Any) -> tuple[list[LogEntry], bool]:
        entries, is_more = await page(*arguments, **more)
        read.extend(entry.seq for entry in entries)
        return entries, is_more

    monkeypatch.setattr(world.log, "page", counting)
    session = await opened(world)
    last = world.log.entries[-1].seq
    assert session.history.tokens == world.session.history.tokens
    assert len(set(read)) <= 4 * EVERY
    assert min(read) > last - 10 * EVERY
    assert session.log.record.num_foreign == 0, "the worker's own log has no warning"


async def test_each_checkpoint_of_a_session_stores_only_the_turns_since_the_previous_checkpoint(
    world: World,
) -> None:
    """All that is read for the last one is at most twice the session, also if that is rewound often."""
    await converse(world, range(60))
    assert len(changes(world)) > 60 // EVERY - 3
    for number in range(60, 90):
        await world.ask(Rewind(id=f"back{number}", position=20 + number))
        await stored(world)
        await converse(world, range(number, number + 1))
    for _ in range(2):
        read = sum(len(one.conversation.parts) for one in changes(world))
        assert read <= 2 * (world.session.history.conversation.num_segments // 3 + 1) + 1
        await converse(world, range(90, 130))
    assert_same((await opened(world)).history, (await whole(world)).history)


async def test_an_open_session_takes_no_more_memory_than_its_reported_size(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, counted = [], []
    for turns in (range(60), range(60, 150)):
        await converse(world, turns)
        await opened(world)  # fills caches that later openings share
        found = []
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(world.log, "store_checkpoint", nothing)  # the log is in memory too
                tracemalloc.start()
                session = await opened(world)
            gc.collect()
            found.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
        sizes.append(min(found))  # other threads of this process may have allocated memory meanwhile
        counted.append(session.log.record.size_bytes)
        del session
    assert sizes[1] - sizes[0] < counted[1] - counted[0]


async def test_a_log_read_is_repeated_if_another_worker_removes_the_session_meanwhile(
    world: World, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await converse(world, range(2 * EVERY))
    begun_seq, log, num_looks = len(world.log.entries) + 1, world.log, 0
    look = log.entry

    async def entry(seq: int) -> StoredMessage | None:
        nonlocal num_looks
        if log.entries[seq - 1].kind == "checkpoint":
            return await look(seq)
        num_looks += 1
        gone: Any = "gone"
        log.entries = [one if one.seq >= begun_seq else replace(one, kind=gone) for one in log.entries]
        return await look(seq)

    monkeypatch.setattr(log, "entry", entry)
    world.crash(world.fold.policy)
    other = World(tokenizer)
    other.crash(world.fold.policy)
    request = Append(id="new", text="two")
    assert (await world.ask(request)).position == (await other.ask(request)).position
    assert (await world.ask(request)).repeat_of == begun_seq
    assert num_looks


@pytest.mark.parametrize("forget", [False, True])
async def test_no_checkpoint_is_stored_after_a_session_is_closed(world: World, forget: bool) -> None:
    """The log is to lose the session's text: a checkpoint in flight must not bring it back."""
    store = world.log.store_checkpoint
    begun, release = asyncio.Event(), asyncio.Event()

    async def slowly(*arguments: Any) -> int:
        begun.set()
        await release.wait()
        return await store(*arguments)

    world.log.store_checkpoint = slowly  # type: ignore[method-assign]
    for number in range(2 * EVERY - 1):
        await world.ask(question(number))
    await begun.wait()
    world.publish(Rewind(id="back", position=20))
    asyncio.get_running_loop().call_later(0.1, release.set)
    closed = await world.ask(Close(id="close", forget=forget))
    assert isinstance(closed, Closed)
    await stored(world)
    assert checkpoints(world)
    assert checkpoints(world)[-1].seq < world.log.entries[-1].seq


async def test_a_checkpoint_contains_only_the_answered_request_ids_before_its_log_position(
    world: World,
) -> None:
    """They were answered out of order."""
    await converse(world, range(1))
    ids = AnsweredIds()
    for seq in (1, 7):
        ids.add(f"r{seq}", AnsweredAt(seq, 9))
    packed, _ = attachments.Checkpoint(3, world.session.history, ids).pack()
    found = attachments.Checkpoint.unpack([packed], world._tokenizer)
    assert found is not None
    assert (found.answered.find("r1"), found.answered.find("r7")) == (AnsweredAt(1, 9), None)


def forged(world: World, **fields: Any) -> dict[str, str]:
    """Add a copy of the last checkpoint with other `fields` to the log; return a header that links to it."""
    body = msgspec.structs.replace(changes(world)[0], **fields)
    message = CheckpointMessage(msgspec.msgpack.encode(body)).pack()
    return {CHECKPOINT_HEADER: str(Link(world.log.add("checkpoint", message), digest(message)))}


def changes(world: World) -> list[_Body]:
    """Read the last checkpoint and all that it changes, in reverse order."""
    link, found = Link.parse(last_named(world)), []
    while link is not None:
        parts = []
        while link is not None:
            piece = CheckpointMessage.unpack(world.log.entries[link.seq - 1].body, link)
            parts.append(piece.part)
            link = Link.parse(piece.before)
        found.append(msgspec.msgpack.decode(b"".join(parts[::-1]), type=_Body))
        link = Link.parse(found[-1].before)
    return found


def last_named(world: World) -> str:
    return next(
        entry.headers[CHECKPOINT_HEADER]
        for entry in reversed(world.log.entries)
        if CHECKPOINT_HEADER in entry.headers
    )


def damage_message(world: World) -> None:
    """Change bytes of a checkpoint's message."""
    index = Link.parse(last_named(world)).seq - 1
    entry = world.log.entries[index]
    world.log.entries[index] = replace(entry, body=entry.body.replace(b"a", b"b"))


def replace_message(world: World) -> None:
    """Replace a checkpoint by a valid one with the same tokens, but without the answered ids."""
    index = Link.parse(last_named(world)).seq - 1
    forged(world, ids=b"")
    world.log.entries[index] = replace(world.log.entries[index], body=world.log.entries[-1].body)


def lose_one(world: World) -> None:
    """Remove the first message of the last checkpoint from the log."""
    begun = [each for each in checkpoints(world) if is_first(each)][-1]
    world.log.entries[begun.seq - 1] = replace(begun, body=b"")


def lose_what_it_changes(world: World) -> None:
    """Remove the checkpoint that the last one changes."""
    seq = Link.parse(changes(world)[0].before).seq
    world.log.entries[seq - 1] = replace(world.log.entries[seq - 1], body=b"")


def name_nonsense(world: World) -> None:
    rename_last(world, {CHECKPOINT_HEADER: "x"})


def name_another_entry(world: World) -> None:
    rename_last(world, {CHECKPOINT_HEADER: str(Link(1, bytes(16)))})


def rename_last(world: World, headers: dict[str, str]) -> None:
    index = max(i for i, entry in enumerate(world.log.entries) if entry.kind == "out")
    entry = world.log.entries[index]
    world.log.entries[index] = replace(entry, headers={**entry.headers, **headers})


def other_tokens(world: World) -> None:
    """Let the last result link to a checkpoint whose tokens are not those of the log."""
    rename_last(world, forged(world, tokens=pack([5] * 12)))


def other_request(world: World) -> None:
    rename_last(world, forged(world, in_seq=3))


def other_version(world: World) -> None:
    rename_last(world, forged(world, version=0))


def forged_result(world: World) -> None:
    """Add a forged result for no request, which links to a valid checkpoint."""
    ours = world.log.entries[-1]
    assert ours.kind == "out"
    body = json.dumps({**json.loads(ours.body), "seq": ours.seq - 3 * EVERY}).encode()
    headers = {MODEL_HEADER: "m", HISTORY_HEADER: ours.headers[HISTORY_HEADER]}
    world.log.add("out", body, headers | {CHECKPOINT_HEADER: last_named(world)})


def second_result_for_a_request(world: World) -> None:
    ours = world.log.entries[-1]
    world.log.add("out", ours.body, ours.headers | {CHECKPOINT_HEADER: last_named(world)})


@pytest.mark.parametrize(
    "tamper",
    [
        damage_message,
        replace_message,
        lose_one,
        lose_what_it_changes,
        name_nonsense,
        name_another_entry,
        other_tokens,
        other_request,
        other_version,
        forged_result,
        second_result_for_a_request,
    ],
)
async def test_opening_a_session_ignores_a_damaged_or_forged_checkpoint_and_logs_the_fault_in_one_line(
    world: World, tamper: Callable[[World], None], capsys: pytest.CaptureFixture[str]
) -> None:
    await converse(world, range(22))
    tamper(world)
    capsys.readouterr()
    session = await opened(world)
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("its checkpoint is not one of this log") == 1
    assert resumed_at(session) == 0
    assert session.log.record.diverged is None
    assert_same(session.history, world.session.history)


@both
async def test_a_result_missing_from_the_log_is_detected_even_if_a_later_checkpoint_includes_the_result(
    world: World,
) -> None:
    await converse(world, range(22))
    request = resumed_at(await opened(world))
    (seq,) = [one.seq for one in world.log.entries if one.kind == "out" and answered_seq(one) == request]
    world.log.entries[seq - 1] = replace(world.log.entries[seq - 1], kind="gone", body=b"")
    session = await opened(world)
    assert resumed_at(session) == 0
    assert f"lost the result at sequence {seq}" in str(session.log.record.diverged)


async def test_requests_are_answered_while_the_log_refuses_checkpoints_and_later_checkpoints_are_stored(
    world: World,
) -> None:
    """A full log, for example, refuses them. The attempts to store one are few."""
    store, refused = world.log.store_checkpoint, []

    async def refuse(*_: Any) -> None:
        refused.append(1)

    world.log.store_checkpoint = refuse  # type: ignore[method-assign,assignment]
    await converse(world, range(20))
    assert len(refused) == 20 // EVERY
    assert not checkpoints(world)
    world.log.store_checkpoint = store  # type: ignore[method-assign]
    await converse(world, range(20, 30))
    assert resumed_at(await opened(world)) > 20
    await world.assert_fold_is_life()


async def test_a_chat_template_that_numbers_all_messages_renders_the_same_after_opening_from_a_checkpoint(
    often: None, model_with_template: Callable[[str, str], Path]
) -> None:
    template = "{% for m in messages %}{{ loop.index }}. {{ m.content }}\n{% endfor %}"
    world = World(Tokenizer.from_folder(model_with_template("counting", template)))
    await converse(world, range(14))
    world.crash()
    await converse(world, range(14, 20))
    assert resumed_at(world.session) > 0
    assert_same(world.session.history, (await whole(world)).history)


async def test_a_session_that_is_unloaded_after_each_request_still_gets_checkpoints(world: World) -> None:
    """Rarely used sessions are unloaded from memory after each answer."""
    for number in range(8 * EVERY):
        await world.ask(question(number))
        world.crash(world.fold.policy)
    results = [result.seq or 0 for result in world.results]
    assert resumed_at(await opened(world)) in results[-2 * EVERY :]
    assert sum(map(is_first, checkpoints(world))) <= 2 * 8


def test_each_part_of_a_large_checkpoint_fits_into_one_log_message() -> None:
    """Including base64 and the fields around the part, for a small and the usual message limit."""
    for size in (64 * 2**10, 2**20):
        assert len(CheckpointMessage(bytes(attachments.part_bytes(size)), before="9" * 60).pack()) < size
