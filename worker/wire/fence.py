"""The fence: a worker stores nothing behind what it has not read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from anyio import sleep

from turnkeep_client.nats_client import server_id

from .consistent_reads import RACE_S

if TYPE_CHECKING:
    from nats.aio.client import Client

#: The server's code for an expected sequence that is not the last one.
WRONG_LAST_SEQUENCE: Final = 10071


class FencedError(Exception):
    """Another worker stored a result for this session first: the state in memory is stale."""


async def check_server(nc: Client, server: str) -> None:
    """Wait for a connection: else nats-py would keep a message for whatever server comes next.

    Raises `FencedError` if it is with another server process than `server`.
    """
    while not nc.is_connected:  # noqa: ASYNC110  # no event
        await sleep(RACE_S)
    if server_id(nc) != server:
        raise FencedError("the server has restarted")
