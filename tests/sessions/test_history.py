"""A session's log as workers and clients read it: its conversation, lists of sessions, its size."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from raw_wire import Start, generate, user

from tests.simulation import device
from tests.simulation.world import Server
from turnkeep_client.client import Client
from turnkeep_client.history import History
from turnkeep_client.messages import Generate, Generated, Message
from worker.wire.journal import Journal


def said(history: History) -> list[tuple[str, object]]:
    return [(one.role, one.content) for one in history.messages]


@pytest.mark.simulated
async def test_the_history_of_a_session_leaves_out_a_request_that_was_cancelled_before_its_first_token(
    client: Client,
) -> None:
    session = client.session("s")
    running = await client.submit(session.key, Generate(id="a", text="a?", max_tokens=60_000))
    waiting = await client.submit(session.key, Generate(id="b", text="b?", max_tokens=3))
    await asyncio.sleep(1)
    for request_id in ("b", "a"):
        await session.cancel(request_id)
    first, second = await running, await waiting
    assert isinstance(first, Generated)
    assert isinstance(second, Generated)
    assert (second.tokens, second.finish_reason) == ((), "cancelled")
    assert said(await session.history()) == [("user", "a?"), ("assistant", first.text)]


@pytest.mark.simulated
async def test_the_history_of_a_rewound_session_ends_at_the_position_of_the_rewind(client: Client) -> None:
    session = client.session("s")
    first = await session.generate(messages=user("a?"), max_tokens=3)
    second = await session.generate(messages=user("b?"), max_tokens=3)
    await session.rewind(second.position - len(second.tokens) + 1)
    cut = (await session.history()).turns[-1]
    assert (cut.is_cut, cut.answer, cut.position) == (True, second, second.position - 2)
    await session.rewind(second.position - len(second.tokens))
    asked = (await session.history()).turns[-1]
    assert (asked.is_cut, asked.answer) == (False, None)
    assert asked.messages == (Message("user", "b?"),)
    await session.rewind(first.position)
    assert said(await session.history()) == [("user", "a?"), ("assistant", first.text)]
    await session.close()
    assert len((await session.history()).turns) == 1, "it can be read until the log drops it"
    await session.open()
    assert (await session.history()).turns == ()


@pytest.mark.simulated
async def test_the_history_of_a_forked_session_begins_with_the_turns_of_its_parent(client: Client) -> None:
    """They are those at the time of the fork. After a forget of the parent, the history is not whole."""
    parent = client.session("parent")
    first = await parent.generate(messages=user("a?"), max_tokens=3)
    await parent.generate(messages=user("b?"), max_tokens=3)
    fork = await parent.fork("fork", first.position)
    child = await fork.fork("child")
    await parent.rewind(0)
    await parent.generate(messages=user("z?"), max_tokens=3)
    last = await child.generate(messages=user("c?"), max_tokens=3)
    history = await child.history()
    assert said(history) == [
        ("user", "a?"),
        ("assistant", first.text),
        ("user", "c?"),
        ("assistant", last.text),
    ]
    assert history.is_whole
    assert history.turns[-1].start == first.position
    await parent.close(forget=True)
    async with asyncio.timeout(20):
        while (rest := await child.history()).is_whole:  # noqa: ASYNC110  # its entries are removed after the result
            await asyncio.sleep(0.01)
    assert said(rest) == [("user", "c?"), ("assistant", last.text)]
    assert rest.position == history.position


@pytest.mark.simulated
async def test_the_history_of_a_fork_has_the_parents_turns_that_a_rewind_removed_while_the_fork_was_made(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, commit = client.session("parent"), Journal.commit
    first = await parent.generate(messages=user("a?"), max_tokens=3)
    await parent.generate(messages=user("b?"), max_tokens=3)

    async def later(self: Journal, key: Any, *entry: Any, **server: Any) -> int:
        if key.session == "fork":
            await parent.rewind(2)
        return await commit(self, key, *entry, **server)

    monkeypatch.setattr(Journal, "commit", later)
    fork = await parent.fork("fork", first.position)
    history = await fork.history()
    assert (said(history), history.is_whole) == ([("user", "a?"), ("assistant", first.text)], True)


@pytest.mark.simulated
async def test_the_client_lists_a_tenants_sessions_most_recently_used_first(client: Client) -> None:
    for name in ("one", "two", "three"):
        await client.session(name).append(text="ab")
    await client.stored._api.api(f"{client.subjects.prefix}.default.b!d.in", b"{}")  # a name that is none
    await client.session("one").close()
    pending = await client.submit(client.session("two").key, Generate(id="g", max_tokens=60_000))
    waiting, closed, idle = await client.sessions()
    assert (waiting.name, waiting.is_waiting, waiting.position) == ("two", True, 2)
    assert (closed.name, closed.is_closed, closed.is_waiting) == ("one", True, False)
    assert (idle.name, idle.is_closed, idle.is_waiting, idle.position) == ("three", False, False, 2)
    await client.session("two").cancel("g")
    await pending


TURNS = 100
MAX_TOKENS = 32


@pytest.mark.simulated
async def test_the_log_of_100_turns_has_one_request_and_one_result_per_turn_and_at_most_191_kilobytes(
    wire: Start, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CONTEXT", 100_000)
    w = await wire()
    question = {"role": "user", "content": "And what would you say about the second point of it?"}
    for number in range(TURNS):
        result = await w.send("s", generate(f"g{number}", messages=[question], max_tokens=MAX_TOKENS))
        assert len(result["tokens"]) == MAX_TOKENS
    log, chunks = (server.jetstream.streams[f"turnkeep_{name}"] for name in ("log", "tok"))
    kinds, sizes = Counter[str](), Counter[str]()
    for one in log.matching("turnkeep.default.s.>"):
        kind = one.subject.rpartition(".")[2]
        kinds[kind] += 1
        sizes[kind] += one.size_bytes
    assert kinds == {"in": TURNS, "out": TURNS}
    assert sizes.total() <= 191_000, sizes
    assert len(chunks.matching("turnkeep.default.s.tok.>")) <= TURNS * (MAX_TOKENS + 1), (
        "the last one ends it"
    )
