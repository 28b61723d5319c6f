"""The command `sessions`: lists what `ops/log` finds in the log, as a table or as trees, or verifies it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from ops.log.sessions import ORDERS
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import encode
from worker.observe.progress import terminal_progress
from worker.process.formatting import size, span

from .flags import as_json, moment, tag_option, tenants_option
from .nats_connection import with_client
from .printing import table
from .screen import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ops.log.sessions import Branch, SessionRow
    from turnkeep_client.client import Client

#: How many sessions' first words are read, one by one: listing 100,000 sessions must take only seconds.
_WITH_WORDS = 1000
_ENDED = ("closed", "forgotten")


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@tenants_option
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(["idle", "running", "waiting", "failed", "closed", "forgotten", "dead"]),
    help="Only in this state; may be repeated. dead: the dead letters. [default: those not ended]",
)
@tag_option("Only opened with this tag; may be repeated. The gateway tags only forks.")
@click.option("--since", metavar="TIME", callback=moment, help="Only sessions active since: 2h, 2026-11-20.")
@click.option("--until", metavar="TIME", callback=moment, help="Only sessions idle since.")
@click.option("--sort", "by", type=click.Choice(ORDERS), default="last", show_default=True)
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="At most so many lines.")
@click.option("--bytes", "with_bytes", is_flag=True, help="Show sizes; this reads every entry.")
@click.option("--tree", "as_tree", is_flag=True, help="Show which sessions were forked from which.")
@click.option(
    "--verify", is_flag=True, help="Has the log lost or changed any entry? Exit code 1 if so; reads all."
)
@as_json
@with_client
async def sessions(
    client: Client,
    names: tuple[str, ...],
    tenants: str,
    states: tuple[str, ...],
    tags: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
    by: str,
    reverse: bool,
    limit: int | None,
    with_bytes: bool,
    as_tree: bool,
    verify: bool,
    as_json: bool,
) -> bool:
    """List the sessions in the log, most recently active first.

    A NAME may be a pattern, such as 'agent-*'. Ended ones are hidden: --state closed and --state forgotten
    list them. Workers are asked which sessions with unanswered requests are running.
    """
    from ops.log.sessions import begun, list_sessions, measured, order, running

    others = (as_tree, _print_trees), (verify, _verify), ("dead" in states, _print_letters)
    if other := next((print_ for is_wanted, print_ in others if is_wanted), None):
        if sum([as_tree, verify, len(states), *map(bool, (tags, since, until, limit, with_bytes))]) > 1:
            raise click.UsageError("--tree, --verify and --state dead take only names, --tenant and --json")
        return await other(client, names, tenants, as_json=as_json)

    def wanted(row: SessionRow) -> bool:
        is_in_state = row.state in states if states else row.state not in _ENDED
        return is_in_state and (since is None or row.last >= since) and (until is None or row.last < until)

    found = await running(client, await list_sessions(client, tenants, names))
    rows = [row for row in found if wanted(row)]
    if tags:
        rows = [row for row in await begun(client, rows) if set(tags) <= set(row.tags)]
    if with_bytes or by == "bytes":
        rows = await measured(client, rows, tenants)
    rows = order(rows, by)[:: -1 if reverse else 1][:limit]
    rows = [*await begun(client, rows[:_WITH_WORDS]), *rows[_WITH_WORDS:]]
    if as_json:
        click.echo(encode({"sessions": rows}))
    else:
        _print_sessions(rows, by, len(found), 0 if states else sum(row.state in _ENDED for row in found))
    return False


async def _verify(client: Client, names: Sequence[str], tenants: str, *, as_json: bool) -> bool:
    """Look for entries that the log has lost or changed; return whether a session is damaged."""
    from ops.log.verifying import verify

    with terminal_progress(of_bytes=False) as show:
        report = await verify(
            client, tenants, names, lambda done, total: show(done, total, "verifying sessions")
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


async def _print_letters(client: Client, names: Sequence[str], tenants: str, *, as_json: bool) -> bool:
    """Print the dead letters of sessions, the oldest first."""
    from ops.log.dead import letters
    from ops.log.sessions import is_named

    found = [one for one in await letters(client, tenants) if is_named(one.session, names)]
    if as_json:
        click.echo(encode({"dead": found}))
        return False
    now = datetime.now(UTC)
    rows = [
        (
            one.session,
            one.tenant,
            one.letter.id or str(one.letter.seq),
            one.letter.request,
            str(one.letter.attempts),
            f"{span(max((now - one.stored).total_seconds(), 0))} ago",
            printable(one.letter.reason),
        )
        for one in found
    ]
    if rows:
        heads = ("session", "tenant", "request", "type", "attempts", "given up", "reason")
        table(heads, rows, same=("tenant",), spare=("type", "attempts", "given up"))
    else:
        click.echo("there are no dead letters")
    return False


async def _print_trees(client: Client, names: Sequence[str], tenants: str, *, as_json: bool) -> bool:
    """Print which sessions were forked from which; reads the first entries of all sessions."""
    from ops.log.sessions import begun, is_named, list_sessions, trees

    found = trees(await begun(client, await list_sessions(client, tenants)))
    shown = [one for one in found if any(is_named(part.session, names) for part in one)]
    if as_json:
        click.echo(encode({"trees": shown}))
    elif names and not shown:
        raise TurnkeepError(f"{' '.join(names)} is not forked, and no fork; see turnkeep sessions")
    elif shown:
        table(
            ("session", "forked at", "position", "state", "tags"),
            [row for one in shown for row in _branches(one, "", "")],
        )
    else:
        click.echo("no session is forked")
    return False


def _print_sessions(rows: list[SessionRow], by: str, num_found: int, num_hidden: int) -> None:
    """Print some of the sessions that were found; `num_hidden` have ended and are not counted."""
    sized = any(row.size_bytes is not None for row in rows)
    heads = ["session", "tenant", "state", "position", "last", "entries", "worker", "model"]
    heads += ["size", "begins"] if sized else ["begins"]
    now = datetime.now(UTC)
    lines = [
        [
            row.session,
            row.tenant,
            _state(row),
            "-" if row.position is None else str(row.position),
            f"{span(max((now - row.last).total_seconds(), 0))} ago",
            str(row.entries),
            row.worker or "-",
            row.model or "-",
            *([size(row.size_bytes or 0)] if sized else []),
            printable(_begins(row)),
        ]
        for row in rows
    ]
    if lines:
        spare = [head for head in ("worker", "model", "entries", "position") if head != by]
        table(heads, lines, cut="begins", same=("tenant", "worker", "model"), spare=spare)
    note = f"; {num_hidden} ended: --state closed and --state forgotten list them" if num_hidden else ""
    click.echo(f"{len(rows)} of {num_found - num_hidden} sessions{note}")


def _telling_tags(tags: tuple[str, ...]) -> tuple[str, ...]:
    """Return tags to show; of a gateway's session only `gateway`, since its other tag is a digest."""
    return tags[:1] if tags[:1] == ("gateway",) else tags


def _begins(row: SessionRow) -> str:
    """Describe how a session begins: its tags, its parent if it is a fork, and the user's first words."""
    forked = f"fork of {row.parent.session} at {row.parent.position}" if row.parent else ""
    tags = "".join(f"[{tag}] " for tag in _telling_tags(row.tags))
    return tags + ": ".join(filter(None, (forked, row.begins))) or "-"


def _state(row: SessionRow) -> str:
    state = f"waiting ({row.waiting})" if row.state == "waiting" else row.state
    if row.state == "running" and row.waiting > 1:
        state += f", {row.waiting - 1} waiting"
    return f"{state}, {row.dead} dead" if row.dead else state


def _branches(branch: Branch, before: str, below: str) -> Iterator[tuple[str, ...]]:
    """Yield the table row of a branch, indented by `before`, and of its forks, indented by `below`."""
    row = branch.row
    yield (
        f"{before}{branch.session}",
        str(row.parent.position) if row and row.parent else "-",
        str(row.position) if row and row.position is not None else "-",
        row.state if row else "gone",
        ", ".join(_telling_tags(row.tags)) if row else "",
    )
    for number, fork_ in enumerate(branch.forks, 1):
        is_last = number == len(branch.forks)
        yield from _branches(
            fork_, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  ")
        )
