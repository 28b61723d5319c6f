"""Closes sessions that a gateway needs no longer, and drops them from its index."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Final

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Close
from turnkeep_client.session import build
from turnkeep_client.subjects import session_key

from .recovery import settle

if TYPE_CHECKING:
    from turnkeep_client.client import Client

    from .index import IndexedSession, SessionIndex
    from .latest_metrics import LatestMetrics

_SWEEP_S: Final = 60.0


async def sweep(client: Client, index: SessionIndex, latest: LatestMetrics, idle_s: float) -> None:
    """Remove sessions unused for `idle_s` seconds, and the oldest of too many, until cancelled.

    While the worker's model is unloaded, remove none: a close would load it.
    """
    while True:
        await asyncio.sleep(min(_SWEEP_S, idle_s / 4))
        before_s = time.monotonic() - idle_s
        for session in index.old(before_s):
            if not await latest.is_loaded():
                continue  # the close would load the model
            if session.position is None:
                with contextlib.suppress(TurnkeepError):
                    if await settle(client, index, session) and session.used_s < before_s:
                        await remove(client, index, session)
            else:
                await remove(client, index, session)


async def remove(
    client: Client, index: SessionIndex, session: IndexedSession, *, forget: bool = True
) -> None:
    """Ask the worker to close a session, with `forget` to delete it; drop it from the index.

    The worker refuses if another gateway has used the session since. A session whose position is unknown is
    only dropped. If the log cannot store the close, the session stays in the index, for the next sweep.
    """
    key = session_key(client.tenant, session.name)
    index.enter(session)
    with contextlib.suppress(TurnkeepError):
        if session.position is not None:
            forget = forget or not session.position  # one that refused all requests cannot be closed else
            await client.submit(key, build(Close, forget=forget or None, expect_position=session.position))
        index.drop(session)
    index.leave(session)
