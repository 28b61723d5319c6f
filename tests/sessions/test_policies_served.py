"""Cache policies from end to end, with a worker, a real NATS server and the client: restarts, defaults."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.names.policy import Policy
from tests.parts import BLOCK
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import CachePolicy, SessionCache
from worker.sessions import record

CACHE = {"policy": "sink_window", "sink": 2, "window": 32}
SAID = SessionCache(policy="sink_window", sink=2, window=32)


@pytest.mark.simulated
async def test_a_client_session_with_a_policy_opens_under_it_and_refuses_another_one(
    local_worker: Callable,
) -> None:
    """This holds under any default policy of the worker, and after a restart."""
    worker = await local_worker()
    first = await worker.client.session("s", cache=CACHE).append(tokens=[5] * 40)
    assert (first.cache, first.visible_from) == (SAID, 8)
    second = await worker.client.session("s", cache=CachePolicy(**CACHE)).generate(max_tokens=3)
    assert (second.cache, second.position) == (SAID, 40 + len(second.tokens))
    plain = await worker.client.session("s").append(tokens=[5])
    assert plain.cache == SAID
    await worker.stop()
    worker = await local_worker(cache_policy=Policy(4, 64))
    again = await worker.client.session("s", cache=CACHE).append(tokens=[5])
    assert (again.cache, again.position) == (SAID, plain.position + 1)
    for other, named in (
        ({**CACHE, "window": 64}, "the first 2 tokens and the last 64"),
        ({"policy": "full"}, "full"),
    ):
        with pytest.raises(RequestFailedError) as caught:
            await worker.client.session("s", cache=other).append(tokens=[5])
        assert caught.value.code == "invalid_request"
        assert caught.value.message.startswith(f"the session is open under {SAID}, not under ")
        assert named in caught.value.message
    assert (await worker.client.session("s").info()).position == again.position


async def test_the_workers_default_policy_applies_to_sessions_that_choose_none(
    local_worker: Callable,
) -> None:
    worker = await local_worker(cache_policy=Policy(2, 32))
    client = worker.client
    assert (await client.session("begun").append(tokens=[5])).cache == SAID
    assert (await client.session("opened").open()).cache == SAID
    assert (await client.session("asked").open({"policy": "full"})).cache is None
    info = await client.session("begun").info()
    assert (info.policy, info.cache, info.capacity_tokens) == ("sink_window", SAID, 34)
    assert info.worker.sessions_by_policy == {"sink_window": 2, "full": 1}
    assert (await client.session("asked").info()).policy == "full"
    await client.session("begun").close()
    assert (await client.session("asked").info()).worker.sessions_by_policy == {"sink_window": 1, "full": 1}


async def test_a_sink_window_session_longer_than_the_disk_limit_answers_as_with_a_larger_limit(
    local_worker: Callable, endless_model: Path, tmp_path: Path
) -> None:
    """With restarts, and after a rewind to a position without snapshots, up to which it prefills again."""

    async def live(name: str, **changes: Any) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
        settings = {
            "model": str(endless_model),
            "data_dir": tmp_path / name,
            "prefix": f"{tmp_path.name}-{name}",
            **changes,
        }
        answers, sizes, prefilled = [], [], []
        for part in range(4):
            worker = await local_worker(**settings)
            session = worker.client.session("s", cache=CACHE)
            if part == 3:
                await session.rewind(250)
            for turn in range(3):
                answer = await session.generate(tokens=[5 + part + turn] * 80, max_tokens=20)
                answers.append(answer.tokens)
                if turn == 0:
                    prefilled.append(answer.usage.prefilled_tokens)
            store = worker.app._store
            await session.info()  # clients get a result before the worker has finished the turn
            assert await store.queue.drained(5)
            await worker.stop()
            files = (tmp_path / name).rglob("*.safetensors")
            sizes.append(sum(path.stat().st_size for path in files))
        return answers, sizes, prefilled

    expected, all_sizes, _ = await live("all")
    limit = all_sizes[0] // 2
    answers, sizes, prefilled = await live("bounded", max_disk=limit)
    assert answers == expected
    assert max(sizes) <= limit < all_sizes[2] // 5
    assert max(prefilled[1:3]) < 80 + 2 * BLOCK, "a restart restores the sinks and the window"
    assert prefilled[3] == 250 + 80 - BLOCK, "all but the block that has its sinks"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a checkpoint due with each fourth result."""
    monkeypatch.setattr(record, "_CHECKPOINT_EVERY", 4)


async def _talk(worker: Any, turns: range, name: str = "s") -> list[tuple[int, ...]]:
    session = worker.client.session(name, cache=CACHE)
    return [(await session.generate(tokens=[5 + turn % 9] * 9, max_tokens=6)).tokens for turn in turns]


async def test_a_long_session_under_a_window_goes_on_after_restarts_and_a_rewind_with_the_same_tokens(
    often: None, local_worker: Callable, endless_model: Path, tmp_path: Path
) -> None:
    """Restarts with and without the KV on SSD."""
    settings = {"model": str(endless_model), "data_dir": tmp_path / "one"}
    worker = await local_worker(**settings)
    said = await _talk(worker, range(40))
    await worker.stop()

    worker = await local_worker(**settings)
    session = worker.client.session("s", cache=CACHE)
    answer = await session.generate(tokens=[9] * 9, max_tokens=6)
    assert answer.usage.prefilled_tokens <= 9 + BLOCK, "what is on SSD was found by names alone"
    assert isinstance((await session.info(snapshot=True)).snapshot, str)
    said += [answer.tokens, *await _talk(worker, range(41, 60))]
    await worker.stop()

    shutil.rmtree(tmp_path / "one" / "snapshots")
    worker = await local_worker(**settings)
    session = worker.client.session("s", cache=CACHE)
    answer = await session.generate(tokens=[7] * 9, max_tokens=6)
    assert answer.usage.prefilled_tokens == answer.usage.prompt_tokens > 800
    said += [answer.tokens, *await _talk(worker, range(61, 70))]
    back = await session.rewind(300)
    said.append((await session.generate(tokens=[6] * 9, max_tokens=6)).tokens)
    assert (back.position, (await session.info()).position) == (300, 309 + len(said[-1]))
    assert (await session.close(forget=True)).forgotten

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "_CHECKPOINT_EVERY", 1000)
        alone = await local_worker(model=str(endless_model), data_dir=tmp_path / "alone", prefix="alone")
        session = alone.client.session("s", cache=CACHE)
        expected = [*await _talk(alone, range(40))]
        expected.append((await session.generate(tokens=[9] * 9, max_tokens=6)).tokens)
        expected += await _talk(alone, range(41, 60))
        expected.append((await session.generate(tokens=[7] * 9, max_tokens=6)).tokens)
        expected += await _talk(alone, range(61, 70))
        await session.rewind(300)
        expected.append((await session.generate(tokens=[6] * 9, max_tokens=6)).tokens)
    assert said == expected


async def test_a_restart_after_any_turn_finds_the_kv_of_a_session_under_a_window(
    often: None, local_worker: Callable, endless_model: Path
) -> None:
    """Even if a checkpoint is due when the session is opened, before any block hash is computed."""
    worker = await local_worker(model=str(endless_model))
    await _talk(worker, range(40))
    for turn in range(40, 52):
        await worker.stop()
        worker = await local_worker(model=str(endless_model))
        session = worker.client.session("s", cache=CACHE)
        answer = await session.generate(tokens=[5 + turn % 9] * (19 if turn % 3 else 9), max_tokens=6)
        assert answer.usage.prefilled_tokens <= answer.usage.prompt_tokens - answer.usage.cached_tokens
        assert answer.usage.cached_tokens > answer.position - 60, turn
