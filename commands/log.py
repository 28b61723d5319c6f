"""The group `log`: prints the results of `ops/log/verifying`, which checks the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from turnkeep_client.messages import encode

from .flags import as_json, tenants_option
from .progress import terminal_progress
from .screen import printable
from .talking import with_client

if TYPE_CHECKING:
    from turnkeep_client.client import Client


@click.group()
def log() -> None:
    """The log as a whole: verify it."""


@log.command()
@click.argument("sessions", nargs=-1, metavar="[SESSION...]")
@tenants_option
@as_json
@with_client
async def verify(client: Client, sessions: tuple[str, ...], tenants: str, as_json: bool) -> bool:
    """Check all sessions, or these: has the log lost or changed any of their entries?

    Reads every entry, and needs no model. Exit code 1 if a session is damaged.
    """
    from ops.log.verifying import verify as check

    with terminal_progress(of_bytes=False) as show:
        report = await check(
            client, tenants, sessions, lambda done, total: show(done, total, "verifying sessions")
        )
    if as_json:
        click.echo(encode(report))
    else:
        for one in report.damaged:
            for fault in one.faults:
                click.echo(f"{one.tenant}/{one.session} at {fault.seq}: {printable(fault.what)}")
        damaged = len(report.damaged)
        click.echo(f"{report.sessions} sessions, {damaged} damaged; {report.entries} entries read")
    return bool(report.damaged)
