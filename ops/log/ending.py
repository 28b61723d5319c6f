"""Ends sessions: closes them, or removes them from the log and the worker's disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnkeep_client.messages import Closed
from turnkeep_client.session_log import tails

if TYPE_CHECKING:
    from turnkeep_client.client import Client
    from turnkeep_client.session import Session
    from turnkeep_client.subjects import SessionKey


async def end(client: Client, name: str, timeout_s: float, *, forget: bool, cancel: bool = False) -> Closed:
    """Close an open session or, with `forget`, remove a session that is in the log.

    With `cancel`, first cancel the session's requests that have no result. Raises `TurnkeepError`, also for a
    session that does not exist or was removed before.
    """
    session = client.session(name)
    if not (forget and await _is_in_log(client, session.key)):
        await check_open(session)
    return await session.close(forget=forget, cancel=cancel, timeout_s=timeout_s)


async def check_open(session: Session) -> None:
    """Raise `RequestFailedError` unless the session is open or has waiting requests.

    Without this check, a request to a session that does not exist would stay in the log under its name.
    """
    await session.info(limit=0)


async def _is_in_log(client: Client, key: SessionKey) -> bool:
    """Return whether the log has a session, and not only the close that removed it."""
    async for log in tails(client.stored, key):
        if log.answers:
            last = log.answers[-1].result
            return not (isinstance(last, Closed) and last.forgotten is not None)
        if log.asked:
            return True
    return False
