"""Workers that share a remote tier restore each other's sessions; forgotten sessions leave the tier."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from worker.process.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    Start = Callable[..., Awaitable[Any]]

PATIENCE_S = 30
TEXT = "x" * 300


@pytest.fixture
def cluster(local_worker: Start, tmp_path: Path, endless_model: Path) -> Start:
    """Return a function that starts a worker of the prefix under a name."""

    async def start(name: str, **settings: Any) -> Any:
        settings = {"ack_wait_s": 60.0, "model": str(endless_model)} | settings
        settings |= {"remote_tier": str(tmp_path / "tier"), "data_dir": tmp_path / name}
        return await local_worker(worker=name, **settings)

    return start


def in_tier(tmp_path: Path) -> list[str]:
    files = (tmp_path / "tier" / "snapshots").glob("*/*")
    return [path.name for path in files if not path.name.startswith(("identities.", "erased."))]


async def stored(worker: Any) -> None:
    """Wait until all snapshots of the worker are on its disk and in the remote tier."""
    assert await worker.app._store.queue.drained(PATIENCE_S)
    uploading = worker.app._store.remote._uploading
    await asyncio.to_thread(uploading.submit(lambda: None).result, PATIENCE_S)


async def test_a_worker_that_takes_over_a_windowed_session_fetches_only_its_visible_blocks(
    cluster: Start, tmp_path: Path
) -> None:
    first = await cluster("first")
    cache = {"policy": "sink_window", "sink": 4, "window": 256}
    session = first.client.session("s", cache=cache)
    appended = await session.append(text=TEXT * 10, timeout_s=PATIENCE_S)
    await stored(first)
    second = await cluster("second")
    await first.stop()
    session = second.client.session("s", cache=cache)
    usage = (await session.generate(text="eee", max_tokens=4, timeout_s=PATIENCE_S)).usage
    assert usage.prefilled_tokens <= usage.prompt_tokens - appended.position + 1, usage
    num_files = {name: len(list((tmp_path / name).rglob("*.safetensors"))) for name in ("first", "second")}
    assert num_files["first"] >= len(TEXT) * 10 // 32
    assert num_files["second"] <= 12, "sinks, 256 tokens, and what the answer adds"


async def test_an_answer_continues_at_another_worker_with_the_same_tokens_and_restored_kv(
    cluster: Start,
) -> None:
    first = await cluster("first")
    asked = {"text": TEXT, "max_tokens": 600, "timeout_s": PATIENCE_S}
    whole = await first.client.session("whole").generate(**asked)
    generation = first.client.session("s").generate(**asked)
    tokens: list[int] = []
    async for chunk in generation:
        tokens += chunk.tokens
        if len(tokens) > 200 and not first.task.done():
            await cluster("second")
            first.app.stop()
            await first.task
    assert tuple(tokens) == whole.tokens == generation.result.tokens
    assert generation.result.usage.prefilled_tokens < 40


async def test_forgetting_all_sessions_at_one_worker_leaves_nothing_in_the_remote_tier(
    cluster: Start, tmp_path: Path
) -> None:
    first, second = await cluster("first"), await cluster("second")
    for name in ("one", "two"):
        await first.client.session(name).append(text=TEXT, timeout_s=PATIENCE_S)
    for worker in (first, second):
        await stored(worker)
    assert in_tier(tmp_path)
    for name in ("one", "two"):
        assert (await second.client.session(name).close(forget=True)).settled
    assert not in_tier(tmp_path)


async def test_an_unusable_remote_tier_fails_the_start_and_says_why(
    cluster: Start, local_worker: Start, tmp_path: Path
) -> None:
    (tmp_path / "tier").write_text("a file")
    with pytest.raises(SettingsError, match=r"remote_tier: .*tier cannot be used: .*; name a directory"):
        await cluster("first")
    for place in ("data", "data/snapshots/tier"):
        with pytest.raises(SettingsError, match="is this worker's own directory; choose another"):
            await local_worker(remote_tier=str(tmp_path / place))
    with pytest.raises(SettingsError, match="remote_tier is for snapshots, and snapshots is off"):
        await local_worker(remote_tier=str(tmp_path / "else"), snapshots="off")
