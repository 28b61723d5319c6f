"""A simulated operator, who runs the project's commands and changes the workers' limits."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ops.log import session_file
from ops.log.dead import find, letters, retry
from ops.log.importing import Import
from ops.log.sessions import list_sessions
from turnkeep_client.client import connect
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.session_log import read
from turnkeep_client.subjects import SessionKey

from .loop import Process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from random import Random

    from turnkeep_client.client import Client

    from .actors import History

    Deed = Callable[[History, Client, Random], Awaitable[Any]]

_LIMITS: Final[dict[str, tuple[Any, ...]]] = {
    "ack_wait_s": (0.5, 3.0),
    "max_attempts": (2, 3),
    "max_waiting": (1, 100),
    "max_batch": (1, 16),
    "closed_ttl_s": (None, 0.0),
}


async def operate(history: History, random: Random) -> None:
    """Start a random action of the operator, in a process of its own."""
    name = random.choice((*_DEEDS,))
    process = Process(history.loop, "operator")
    history.note("operator", name)

    async def act() -> None:
        with contextlib.suppress(TurnkeepError):  # the command line would print it
            async with await connect("nats://world:4222", tenant="t", control_timeout_s=1.0) as client:
                await _DEEDS[name](history, client, random)

    history.deeds.append(process.start(act()))


async def _retry(history: History, client: Client, random: Random) -> None:
    for dead in await letters(client, "t"):
        of = client.session(dead.session)
        found = await find(client, of.key.session, str(dead.letter.seq))
        await retry(client, found, anyway=True, timeout_s=5.0)
        await client.stored.delete(found.at)


async def _cancel(history: History, client: Client, random: Random) -> None:
    for row in await list_sessions(client, "t"):
        waiting = (await client.session(row.session).info()).waiting
        if waiting:
            await client.session(row.session).cancel(random.choice(waiting))


async def _forget(history: History, client: Client, random: Random) -> None:
    rows = await list_sessions(client, "t")
    if rows:
        await client.session(min(row.session for row in rows)).close(forget=True, timeout_s=5.0)


async def _close(history: History, client: Client, random: Random) -> None:
    for row in await list_sessions(client, "t"):
        await client.session(row.session).close(timeout_s=2.0)


async def _copy(history: History, client: Client, random: Random) -> None:
    """Export a random session, and import it under another name or over an existing session."""
    rows = await list_sessions(client, "t")
    if not rows:
        return
    key = client.session(random.choice(sorted(row.session for row in rows))).key
    log = await read(client.stored, key)
    parts = await session_file.read_parts(client, log)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "copy"
        session_file.export(file, log, parts)
        _, lines = session_file.read(file)
    into = SessionKey("t", random.choice(("copy", "copy", "b", key.session)))
    if random.random() < 0.5:
        await asyncio.sleep(random.expovariate(1))
    importing, done = Import(client, into), False
    try:
        await importing.run(lines, lambda *_: None)
        done = True
    finally:
        stored = {(into, new): (key, old) for old, new in importing._new_seqs.items()}
        history.imported = history.imported | stored if done else stored | history.imported


async def _limit(history: History, client: Client, random: Random) -> None:
    """Change a random limit of all workers, and restart them."""
    name = random.choice((*_LIMITS,))
    history.plan.settings = history.plan.settings | {name: random.choice(_LIMITS[name])}
    for one in history.supervisors:
        if one.worker is not None:
            one.worker.stop()


_DEEDS: Final[dict[str, Deed]] = {
    "retries dead letters": _retry,
    "cancels what waits": _cancel,
    "removes a session": _forget,
    "closes sessions": _close,
    "copies a session": _copy,
    "changes a limit": _limit,
}
