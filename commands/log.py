"""The group `log`: `ops/log/verifying` checks the log, and this module prints what it finds."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from turnkeep_client.messages import encode

from .flags import as_json, load_settings, with_settings
from .progress import terminal_progress
from .screen import printable
from .talking import CLIENT_SETTINGS, talk

if TYPE_CHECKING:
    from pathlib import Path

    from ops.log.verifying import Report
    from turnkeep_client.client import Client


@click.group()
def log() -> None:
    """The log as a whole: verify it."""


@log.command()
@click.argument("sessions", nargs=-1, metavar="[SESSION...]")
@click.option("--tenant", metavar="NAME", default="*", help="Only of this tenant. [default: all]")
@as_json
@with_settings(*CLIENT_SETTINGS)
def verify(config: Path | None, sessions: tuple[str, ...], tenant: str, as_json: bool, **flags: Any) -> None:
    """Check all sessions, or these: has the log lost or changed any of their entries?

    Reads every entry, and needs no model. Exit code 1 if a session is damaged.
    """
    from ops.log.verifying import verify as check

    async def read(client: Client) -> Report:
        with terminal_progress(of_bytes=False) as show:
            return await check(
                client, tenant, sessions, lambda done, total: show(done, total, "verifying sessions")
            )

    report = talk(load_settings(config, flags), "default", read)
    if as_json:
        click.echo(encode(report))
    else:
        for one in report.damaged:
            for fault in one.faults:
                click.echo(f"{one.tenant}/{one.session} at {fault.seq}: {printable(fault.what)}")
        damaged = len(report.damaged)
        click.echo(f"{report.sessions} sessions, {damaged} damaged; {report.entries} entries read")
    sys.exit(1 if report.damaged else 0)
