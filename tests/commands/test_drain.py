"""`turnkeep drain`: what it prints, and its errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from command_runs import WAIT_S, command, where
from nats.js.errors import NotFoundError


@pytest.fixture
async def two(local_worker: Callable[..., Awaitable[Any]], tmp_path: Path) -> tuple[Any, Any]:
    """Start two workers of one prefix."""
    return tuple([await local_worker(data_dir=tmp_path / name, worker=name) for name in ("one", "two")])


async def test_new_sessions_avoid_a_drained_worker_and_undo_lets_it_take_sessions_again(
    two: tuple[Any, Any],
) -> None:
    one, _ = two
    done = await command("drain", "one", *where(one))
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "one gives its sessions to two\n"
        "one has nothing to do; stop it, or let it take sessions again: turnkeep drain one --undo\n"
    )
    async with asyncio.timeout(WAIT_S):
        async for metrics in one.client.metrics("one"):
            if metrics.drains:
                break
    session = one.client.session("s")
    await session.append(text="hello")
    assert (await session.info()).worker.worker == "two"
    done = await command("drain", "two", *where(one))
    assert done.stderr == "turnkeep: no other worker takes the sessions of two; start one first\n"
    done = await command("drain", "one", "--undo", *where(one))
    assert (done.returncode, done.stdout) == (0, "one takes sessions again\n")
    assert (await command("drain", "two", *where(one))).returncode == 0


async def test_draining_an_unknown_worker_fails_and_lists_the_running_ones(two: tuple[Any, Any]) -> None:
    one, _ = two
    done = await command("drain", "three", *where(one))
    prefix = one.settings.prefix
    assert done.returncode == 1
    assert done.stderr == f"turnkeep: no worker three serves the prefix {prefix!r}; there are: one, two\n"


async def test_drain_waits_for_a_worker_whose_record_a_restarted_server_has_lost(
    local_worker: Callable[..., Awaitable[Any]], tmp_path: Path, endless_model: Path
) -> None:
    """The worker is still at work, and makes its record again."""
    one = await local_worker(data_dir=tmp_path / "one", worker="one", model=str(endless_model))
    await one.client.session("s").append(text="a")  # which makes it this worker's
    await local_worker(data_dir=tmp_path / "two", worker="two", model=str(endless_model))
    js, stream = one.app._nc.jetstream(), one.app._members.stream
    answering = asyncio.create_task(busy(one))
    await asyncio.sleep(1)
    draining = asyncio.create_task(command("drain", "one", *where(one)))
    await asyncio.sleep(1)
    for _ in range(20):
        with contextlib.suppress(NotFoundError):
            await js.delete_stream(stream)
        await asyncio.sleep(0.05)
    assert not draining.done(), draining.result()
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    assert (await draining).stdout.endswith(
        "stop it, or let it take sessions again: turnkeep drain one --undo\n"
    )


async def busy(worker: Any) -> None:
    """Keep the worker at work until cancelled."""
    async with worker.client.session("s").generate(text="a", max_tokens=30_000) as answer:
        async for _ in answer:
            pass
