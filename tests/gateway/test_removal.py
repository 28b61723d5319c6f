"""What a gateway removes of its idle sessions, and what it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gateway.index import IndexedSession, SessionIndex
from gateway.removal import remove, sweep
from tests.parts import LocalWorker
from turnkeep_client.errors import NoServerError, RequestFailedError

Start = Callable[..., Awaitable[LocalWorker]]


async def indexed(worker: LocalWorker) -> tuple[SessionIndex, IndexedSession]:
    """Return an index with one session, which has one append and was last used long ago."""
    appended = await worker.client.session("s").append(text="hello")
    index, session = SessionIndex(), IndexedSession("s", appended.position, 0.0)
    index.add(session)
    return index, session


async def test_a_session_that_another_gateway_has_used_since_stays_open(local_worker: Start) -> None:
    worker = await local_worker()
    index, session = await indexed(worker)
    await worker.client.session("s").append(text="more")
    await remove(worker.client, index, session)
    await worker.client.session("s").append(text="on")
    assert not index.sessions


async def test_a_session_stays_in_the_index_until_the_log_has_its_close() -> None:
    submit = AsyncMock(side_effect=[NoServerError("the NATS server is away"), None])
    client: Any = SimpleNamespace(tenant="default", submit=submit)
    index, session = SessionIndex(), IndexedSession("s", 1, 0.0)
    index.add(session)
    await remove(client, index, session)
    assert index.sessions
    await remove(client, index, session)
    assert not index.sessions


async def test_an_idle_session_is_closed_only_while_its_model_is_loaded(local_worker: Start) -> None:
    """The close would load the model, and unload another one that is in use."""
    worker = await local_worker()
    index, _ = await indexed(worker)
    is_loaded = False

    async def asked() -> bool:
        return is_loaded

    latest: Any = SimpleNamespace(is_loaded=asked)
    sweeping = asyncio.create_task(sweep(worker.client, index, latest, 0.2))
    await asyncio.sleep(0.5)
    assert index.sessions
    await worker.client.session("s").append(text="on")
    index.sessions["s"].position = (await worker.client.session("s").info()).position
    is_loaded = True
    async with asyncio.timeout(30):
        while index.sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    sweeping.cancel()
    with pytest.raises(RequestFailedError):
        await worker.client.session("s").append(text="on")
