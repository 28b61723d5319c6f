"""The command `drain`: moves a worker's sessions to the other workers of its prefix."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import click

from turnkeep_client.errors import NoServerError, TurnkeepError
from turnkeep_client.subjects import Subjects
from worker.wire.connection import BrokerError

from .flags import with_settings
from .nats_connection import CLIENT_SETTINGS, instead, located, url_of

if TYPE_CHECKING:
    from worker.process.settings import Settings

    from .flags import GivenSettings

_POLL_S: Final = 0.5


@click.command()
@click.argument("worker")
@click.option("--undo", is_flag=True, help="Let the worker take sessions again.")
@with_settings(*CLIENT_SETTINGS)
def drain(given: GivenSettings, worker: str, *, undo: bool) -> None:
    """Let a worker give its sessions to the other workers.

    It waits until WORKER has nothing to do.

    Each session moves between two requests; running answers end where they are. The worker goes on running:
    stop it then, or let it take sessions again with --undo. `turnkeep info` names the workers of a prefix.
    """
    settings = given.load()
    try:
        asyncio.run(_drain(settings, worker, on=not undo))
    except BrokerError as error:
        unreached, for_workers, _ = str(error).partition("; start one there")
        if not for_workers:
            raise
        raise TurnkeepError(f"{unreached}; {instead(settings)}") from None
    except NoServerError as error:
        raise TurnkeepError(f"{error}; {instead(settings)}") from None


async def _drain(settings: Settings, name: str, *, on: bool) -> None:
    from worker.cluster.draining import Workers
    from worker.wire.credentials import client_options

    here, subjects = located(settings), Subjects(settings.prefix)
    async with Workers.at(url_of(here), subjects, **client_options(here)) as workers:
        there = await workers.by_name()
        if name not in there:
            names = f"; there are: {', '.join(sorted(there))}" if there else ""
            raise TurnkeepError(f"no worker {name} serves the prefix {subjects.prefix!r}{names}")
        takers = await workers.drain(there[name], on=on)
        if not on:
            click.echo(f"{name} takes sessions again")
            return
        if not takers:
            raise TurnkeepError(f"no other worker takes the sessions of {name}; start one first")
        click.echo(f"{name} gives its sessions to {', '.join(takers)}")
        shown = 0
        while load := await workers.load(name):
            if load != shown:
                shown = load
                click.echo(f"sessions at work there: {shown}", err=True)
            await asyncio.sleep(_POLL_S)
        undo = f"turnkeep drain {name} --undo"
        click.echo(f"{name} has nothing to do; stop it, or let it take sessions again: {undo}")
