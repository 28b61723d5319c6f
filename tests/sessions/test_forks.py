"""Forks: a session begins with a parent's tokens, and does not prefill them again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from turnkeep_client.client import Client, connect
from turnkeep_client.errors import InvalidMessageError, RequestFailedError
from turnkeep_client.messages import ForkPoint, Metrics, Open, Parent
from turnkeep_client.session import Session, build
from turnkeep_client.subjects import SessionKey

pytestmark = pytest.mark.simulated

Start = Any  # of `local_worker`


def said(text: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


async def conversation(client: Client, name: str = "parent") -> Session:
    session = client.session(name)
    await session.append(messages=said("Answer in rhymes.", "system"))
    for number in range(2):
        await session.generate(messages=said(f"And number {number}?"), max_tokens=8)
    return session


async def settled(session: Session) -> Metrics:
    """Return the worker's metrics once all snapshots are on the disk."""
    async with asyncio.timeout(10):
        while True:
            metrics = (await session.info()).worker
            if not metrics.snapshots.in_flight:
                return metrics
            await asyncio.sleep(0.05)


async def tokens_after(session: Session) -> tuple[int, ...]:
    return (await session.generate(messages=said("Go on."), max_tokens=12)).tokens


@pytest.mark.real
async def test_a_fork_gives_the_same_answer_as_its_parent_and_prefills_no_tokens_of_the_parent_again(
    client: Client,
) -> None:
    parent = await conversation(client)
    before = (await parent.info()).position
    fork = await parent.fork("fork", tags=["try", "night shift"])
    info = await fork.info()
    assert (info.position, info.parent) == (before, Parent(session="parent", position=before))
    assert info.tags == ("try", "night shift")
    forked = await fork.generate(messages=said("Go on."), max_tokens=12)
    assert forked.usage.cached_tokens == before - 1, "all but the last token, which gives the logits"
    assert forked.tokens == await tokens_after(parent)
    other = await parent.fork("other", before)
    assert await tokens_after(other) == forked.tokens, "the parent's later turn is not in it"


async def test_a_fork_at_a_position_inside_a_turn_gives_the_same_answer_as_a_fork_rewound_to_that_position(
    client: Client,
) -> None:
    parent = await conversation(client)
    end = (await parent.info()).position
    for position in (1, 7, end - 11, end - 3, end - 1):
        fork, whole = await parent.fork(f"at-{position}", position), await parent.fork(f"whole-{position}")
        assert (await fork.info()).position == position
        await whole.rewind(position)
        assert await tokens_after(fork) == await tokens_after(whole)
        assert (await fork.info()).position == (await whole.info()).position


async def test_a_fork_of_a_session_with_a_running_answer_starts_after_the_parents_last_result(
    client: Client,
) -> None:
    parent = await conversation(client)
    before = (await parent.info()).position
    running = parent.generate(messages=said("Tell all."), max_tokens=400)
    async for _ in running:
        break
    fork = await parent.fork("fork")
    assert (await parent.info()).state == "running"
    assert (await fork.info()).position == before
    await parent.cancel(running.id)
    await running


async def test_a_fork_with_expect_position_fails_if_the_parent_is_at_another_position(client: Client) -> None:
    parent = await conversation(client)
    end = (await parent.info()).position
    fork = client.session("fork")
    await parent.append(text="on")
    for position in (end, end + 1):
        with pytest.raises(RequestFailedError, match=f"parent is at position {end + 2}, not at") as refused:
            await fork.open(fork_of=ForkPoint("parent", 3, expect_position=position))
        assert refused.value.code == "position_conflict"
    opened = await fork.open(fork_of=ForkPoint("parent", 3, expect_position=end + 2))
    assert opened.position == 3


@pytest.mark.parametrize("has_worker", [True, False])
async def test_cancelling_the_client_method_samples_stops_its_answers_and_removes_its_forks(
    local_worker: Start, endless_model: Path, *, has_worker: bool
) -> None:
    """Also if no worker has opened the forks yet: the next one removes them."""
    worker = await local_worker(model=str(endless_model))
    await worker.client.session("s").append(text="ab")
    if not has_worker:
        await worker.stop()
    clock = asyncio.get_running_loop().time
    async with connect(worker.settings.nats) as client:
        task = asyncio.create_task(client.session("s").samples(2, text="x", max_tokens=60_000))
        await asyncio.sleep(1)
        begun_s = clock()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert clock() - begun_s < 2
        if not has_worker:
            await local_worker(model=str(endless_model))
        async with asyncio.timeout(5):
            while [one.is_closed for one in await client.sessions()].count(True) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def test_a_fork_of_a_missing_or_closed_session_or_beyond_its_end_is_refused(client: Client) -> None:
    parent = await conversation(client)
    end = (await parent.info()).position
    closed = await conversation(client, "closed")
    await closed.close()
    fork = client.session("fork")
    for of, position, code, says in [
        ("nobody", None, "unknown_session", "the session nobody does not exist"),
        ("closed", None, "unknown_session", "the session closed was closed"),
        ("fork", None, "invalid_request", "a session cannot be forked from itself"),
        ("parent", end + 1, "invalid_request", f"cannot fork parent at {end + 1}: it is at position {end}"),
    ]:
        with pytest.raises(RequestFailedError, match=says) as refused:
            await client.session(of).fork("fork", position)
        assert refused.value.code == code
    with pytest.raises(RequestFailedError, match="there is no such session"):
        await fork.info()
    await parent.fork("twice")
    with pytest.raises(RequestFailedError, match=r"open already, at position \d+; fork under another"):
        await parent.fork("twice")
    for bad, says in [
        ({"from": {"session": "a.b"}}, "from.session"),
        ({"from": {"session": "a", "tenant": "b"}}, "tenant"),
        ({"from": {"session": "a", "position": -1}}, "position"),
        ({"from": {"session": "a"}, "cache": {"policy": "full"}}, "from or a cache policy, not both"),
        ({"tags": ["a\nb"]}, "tags"),
        ({"tags": [str(i) for i in range(17)]}, "tags"),
    ]:
        with pytest.raises(InvalidMessageError, match=says):
            build(Open, **bad)


async def test_forking_a_session_of_another_tenant_is_refused(local_worker: Start, nats_url: str) -> None:
    worker = await local_worker()
    await conversation(worker.client)
    async with connect(nats_url, prefix=worker.settings.prefix, tenant="other") as other:
        with pytest.raises(RequestFailedError, match="the session parent does not exist"):
            await other.session("parent").fork("fork")


async def test_a_request_to_a_fork_whose_copy_of_the_parents_tokens_was_deleted_is_refused_with_the_reason(
    local_worker: Start, endless_model: Path
) -> None:
    worker = await local_worker(model=str(endless_model))
    parent = await conversation(worker.client)
    await parent.fork("fork")
    async for _, base in worker.client.stored.every(SessionKey("default", "fork"), "checkpoint"):
        await worker.client.stored.delete(base.seq)
    await worker.stop()
    fork = (await local_worker(model=str(endless_model))).client.session("fork")
    with pytest.raises(RequestFailedError, match="took from its parent are gone from the log"):
        await tokens_after(fork)
