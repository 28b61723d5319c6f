"""The fence: a worker adds nothing to a session or an answer whose last entry it has not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from anyio import sleep

from cache.names.errors import InterruptionError
from turnkeep_client.nats_client import server_id

from .consistent_reads import RACE_S

if TYPE_CHECKING:
    from nats.aio.client import Client

#: JetStream's error code if the expected last sequence of a subject is not the last one.
WRONG_LAST_SEQUENCE: Final = 10071
#: The codes if another writer was faster; with replicas its write may still be in progress.
OVERTAKEN: Final = (WRONG_LAST_SEQUENCE, 10164)


class FencedError(InterruptionError):
    """Another worker has continued the session, or the server restarted: the state in memory is stale."""


async def check_server(nc: Client, server: str) -> bool:
    """Wait until connected; raise `FencedError` if the server process is no longer `server`.

    Without the wait, nats-py would buffer a message and send it to whichever server it connects to next.
    Returns whether it had to wait: then what was read before may have changed.
    """
    waits = not nc.is_connected
    while not nc.is_connected:  # noqa: ASYNC110  # no event
        await sleep(RACE_S)
    if server_id(nc) != server:
        raise FencedError("the server has restarted")
    return waits
