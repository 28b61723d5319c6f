"""`turnkeep replay`: finds the recorded sessions and the tenant to replay them in; prints the report."""

from __future__ import annotations

import math
import sys
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import click

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import encode
from turnkeep_client.session_log import read
from turnkeep_client.subjects import session_key
from worker.observe.progress import terminal_progress

from .flags import as_json, moment, tenant_option, with_result_timeout, with_settings
from .nats_connection import CLIENT_SETTINGS, connected, no_session, talk
from .printing import table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from ops.log.replay import ReplayReport
    from turnkeep_client.client import Client
    from turnkeep_client.session_log import SessionLog

    from .flags import GivenSettings

#: Most characters of a session's name.
_MOST_NAME: Final = 64


def _speed(_: Any, __: Any, value: str) -> float:
    try:
        speed = math.inf if value == "max" else float(value)
    except ValueError:
        speed = 0.0
    if not speed > 0:
        raise click.BadParameter(f"{value!r} is neither a number above 0 nor max")
    return speed


@click.command()
@click.argument("sessions", nargs=-1, metavar="[SESSION]...")
@tenant_option
@click.option(
    "--file",
    "source",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Take the record from this file of turnkeep export.",
)
@click.option("--since", metavar="TIME", callback=moment, help="Sessions that began since: 2h, 2026-11-20.")
@click.option("--until", metavar="TIME", callback=moment, help="Only requests from before.")
@click.option(
    "--speed", metavar="X", default="1", show_default=True, callback=_speed, help="So much faster, or max."
)
@click.option("--into-tenant", metavar="NAME", help="Tenant of the replayed sessions. [default: a new one]")
@click.option("--into-prefix", metavar="PREFIX", help="Prefix of the worker to ask. [default: --prefix]")
@click.option("--keep", is_flag=True, help="Leave the replayed sessions in the log.")
@with_result_timeout("A request that takes longer has failed.")
@as_json
@with_settings(*CLIENT_SETTINGS)
def replay(
    given: GivenSettings,
    sessions: tuple[str, ...],
    tenant: str,
    source: Path | None,
    since: datetime | None,
    until: datetime | None,
    speed: float,
    into_tenant: str | None,
    into_prefix: str | None,
    keep: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Play recorded sessions again, and compare every token.

    Without SESSION: all sessions of the tenant. Requests keep their ids, order and spacing. After its first
    difference a session is replayed but not compared. Exit code 0: the same tokens; 1: others, or a fault.
    """
    from ops.log.record import fold, within
    from ops.log.replay import Replay

    settings, run = given.load(), uuid4().hex[:8]
    rename = partial(_renamed, run) if into_tenant else str

    async def play(client: Client) -> ReplayReport:
        logs, images = await _logs(client, sessions, source)
        record = fold(within(one, since, until) for one in logs)
        how: Any = {"speed": speed, "timeout_s": timeout_s, "keep": keep, "rename": rename}
        async with await connected(settings, into_tenant or f"replay-{run}", into_prefix) as target:
            with terminal_progress(of_bytes=False) as progress:
                return await Replay(target, record, progress=progress, images=images, **how).run()

    report = talk(settings, tenant, play)
    if as_json:
        click.echo(encode(report))
    else:
        _print_replay(report, keep=keep)
    sys.exit(0 if report.same else 1)


def _renamed(run: str, name: str) -> str:
    """Return the name of a session's replay; if shortened to 64 characters, it has a digest of the whole."""
    whole = f"replay-{run}-{name}"
    digest = blake2b(name.encode(), digest_size=8).hexdigest()
    return whole if len(whole) <= _MOST_NAME else f"{whole[: _MOST_NAME - len(digest)]}{digest}"


async def _logs(
    client: Client, sessions: Sequence[str], source: Path | None
) -> tuple[list[SessionLog], dict[str, dict[str, bytes]]]:
    """Read these sessions, or all, and the entries of their images, from the file `source` or the log."""
    from ops.log import session_file

    if source is not None:
        found = session_file.of_file(source)
        if other := next((name for name in sessions if name != found.key.session), None):
            raise TurnkeepError(f"there is no session {other} in {source}")
        return [found], {found.key.session: session_file.read(source)[1][0].images}
    names = sessions or [one.name for one in await client.sessions()]
    logs = [await read(client.stored, session_key(client.tenant, name)) for name in dict.fromkeys(names)]
    for log in logs:
        if sessions and not log.asked:
            raise await no_session(client, log.key.session)
    return logs, {log.key.session: await client.stored.image_entries(log.key) for log in logs}


def _print_replay(report: ReplayReport, *, keep: bool) -> None:
    sides = {"recorded": report.recorded} | ({"replayed": report.replayed} if report.replayed else {})
    times = {
        "turnaround, median": [side.turnaround[0] for side in sides.values()],
        "turnaround, 99th percentile": [side.turnaround[1] for side in sides.values()],
        "first token, median": [side.first_token[0] for side in sides.values()],
        "first token, 99th percentile": [side.first_token[1] for side in sides.values()],
        "all of it": [side.total for side in sides.values()],
    }
    table(("", *sides), [(name, *(f"{value:.3f} s" for value in values)) for name, values in times.items()])
    left_out = ", ".join(f"{number} {reason}" for reason, number in report.left_out.items())
    if left_out:
        click.echo(f"left out: {left_out}")
    if keep:
        click.echo(f"the replayed sessions are those of the tenant {report.tenant}")
    whole = f"{report.sessions} sessions, {report.requests} requests, {report.tokens} tokens of answers"
    if report.same:
        click.echo(f"the same: {whole}")
        return
    click.echo(f"different: {len(report.differences)} of {whole}; {report.not_compared} requests behind that")
    first = report.differences[0]
    where = "before the answer" if first.token is None else f"token {first.token} of the answer"
    click.echo(f"first: session {first.session}, request {first.number} ({first.id}), {where}")
    click.echo(f"  recorded: {first.recorded!r}")
    click.echo(f"  replayed: {first.replayed!r}")
    click.echo(f"  likely cause: {first.cause}")
