"""Cache policies from end to end, with a worker, a real NATS server and the client: restarts, refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cache.names.policy import Policy
from tests.parts import TINY_CONTEXT, make_tiny_model
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import CachePolicy, SessionCache
from worker.app import WorkerError
from worker.sessions import record

CACHE = {"policy": "sink_window", "sink": 2, "window": 32}
SAID = SessionCache(policy="sink_window", sink=2, window=32)


@pytest.mark.simulated
async def test_a_client_session_opens_under_its_cache_policy_and_refuses_a_session_under_another_policy(
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


async def test_the_workers_default_cache_policy_applies_to_sessions_that_choose_none(
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


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a checkpoint due with each fourth result."""
    monkeypatch.setattr(record, "_CHECKPOINT_EVERY", 4)


async def _talk(worker: Any, turns: range) -> list[tuple[int, ...]]:
    session = worker.client.session("s", cache=CACHE)
    return [(await session.generate(tokens=[5 + turn % 9] * 9, max_tokens=6)).tokens for turn in turns]


async def test_after_a_restart_following_any_turn_the_kv_of_a_windowed_session_is_restored(
    often: None, local_worker: Callable, endless_model: Path
) -> None:
    """Even if a checkpoint is due when the session is opened, before any block hash is computed."""
    worker = await local_worker(model=str(endless_model))
    await _talk(worker, range(40))
    for turn in range(40, 48):
        await worker.stop()
        worker = await local_worker(model=str(endless_model))
        session = worker.client.session("s", cache=CACHE)
        answer = await session.generate(tokens=[5 + turn % 9] * (19 if turn % 3 else 9), max_tokens=6)
        assert answer.usage.prefilled_tokens <= answer.usage.prompt_tokens - answer.usage.cached_tokens
        assert answer.usage.cached_tokens > answer.position - 60, turn


PAGED_CACHE = {"policy": "paged", "resident": 516, "pin": [[70, 90]]}
PAGED_SAID = SessionCache(policy="paged", resident=516, pin=((70, 90),))


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory) -> Path:
    """A tiny model with heads of 32 dimensions, so that its keys can be stored as sketches."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "wide", hidden_size=128)


def _words(num_tokens: int) -> list[int]:
    return [3 + (7 * i + i // 11) % 90 for i in range(num_tokens)]


async def test_a_paged_session_reports_its_policy_and_restores_its_kv_after_a_restart(
    local_worker: Callable, wide_model: Path
) -> None:
    worker = await local_worker(model=str(wide_model))
    session = worker.client.session("s", cache=PAGED_CACHE)
    first = await session.append(tokens=_words(1200))
    assert (first.cache, first.visible_from) == (PAGED_SAID, 1200 - 256)
    answer = await session.generate(max_tokens=40)
    info = await session.info()
    assert (info.policy, info.cache, info.capacity_tokens) == ("paged", PAGED_SAID, 516)
    assert 0 < info.kv_live_bytes < 1200 * 2 * 2 * 32 * 4 * 2 * 0.6
    await worker.stop()
    worker = await local_worker(model=str(wide_model), cache_policy=Policy(4, 64))
    session = worker.client.session("s", cache=PAGED_CACHE)
    again = await session.generate(tokens=_words(30), max_tokens=20)
    assert again.position == answer.position + 30 + len(again.tokens)
    assert again.usage.prefilled_tokens == 30 + 1, "the prompt, and the token before it"
    assert again.usage.cached_tokens >= answer.position - 1
    metrics = (await session.info()).worker
    assert metrics.recalled_tokens > 0, "slots are empty after a restart"


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"resident": 200}, "0 pinned tokens .* leave 196 of 200 resident tokens; 256 or more"),
    ({"resident": 600, "pin": [[0, 400]]}, "448 pinned tokens .* leave 148 of 600"),
    ({"resident": 900, "pin": [[0, 90], [80, 200]]}, "pins overlap; make one"),
    ({"resident": 4096}, "4096 resident tokens exceed the context: there may be 2048"),
    ({"resident": 900, "pin": [[70, 90], [3000, 3010]]}, "pins end at 3010; the context ends at 2048"),
]


async def test_an_open_request_with_too_few_resident_or_overlapping_pinned_tokens_under_paged_is_refused(
    local_worker: Callable, wide_model: Path
) -> None:
    worker = await local_worker(model=str(wide_model))
    for cache, refusal in MISFITS:
        with pytest.raises(RequestFailedError, match=refusal) as caught:
            await worker.client.session("s").open({"policy": "paged"} | cache)
        assert caught.value.code == "invalid_request"
    assert (await worker.client.session("s").open(PAGED_CACHE)).cache == PAGED_SAID
    with pytest.raises(RequestFailedError, match="is open under paged"):
        await worker.client.session("s", cache={"policy": "paged", "resident": 700}).append(tokens=[5])
    with pytest.raises(RequestFailedError, match="context_exceeded"):
        await worker.client.session("s").append(tokens=_words(TINY_CONTEXT + 10))


async def test_workers_that_cannot_serve_paged_sessions_refuse_such_sessions_with_the_reason(
    local_worker: Callable, wide_model: Path
) -> None:
    narrow = await local_worker()
    with pytest.raises(RequestFailedError, match="this model's keys cannot be sketched"):
        await narrow.client.session("s").open({"policy": "paged", "resident": 600})
    await narrow.stop()
    diskless = await local_worker(model=str(wide_model), snapshots="off")
    with pytest.raises(RequestFailedError, match="stores no KV on disk"):
        await diskless.client.session("s").open({"policy": "paged", "resident": 600})
    await diskless.stop()
    with pytest.raises(WorkerError, match="cannot be the default here: this worker stores no KV on disk"):
        await local_worker(model=str(wide_model), snapshots="off", cache_policy=Policy.paged(600, sink=4))
