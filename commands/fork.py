"""The commands `fork` and `tree`: start a session with the tokens of another, and show all such forks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ops.log.ending import check_open
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import encode

from .close import start_of_last
from .flags import as_json, tag_option, tenant_option, tenants_option, with_result_timeout, with_settings
from .printing import table
from .sessions import telling_tags
from .talking import CLIENT_SETTINGS, named, talk, with_client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ops.log.tree import Branch
    from turnkeep_client.client import Client

    from .flags import Given


@click.command()
@click.argument("session")
@click.argument("name", metavar="NEW")
@click.option("--position", metavar="N", type=click.IntRange(0), help="Begin with the first N tokens.")
@click.option("--without-last", metavar="N", type=click.IntRange(1), help="Leave out the last N questions.")
@tag_option("A name for it, which `turnkeep sessions --tag` finds; may be given several times.")
@with_result_timeout("How long to wait for the result.")
@tenant_option
@with_settings(*CLIENT_SETTINGS)
def fork(
    given: Given,
    session: str,
    name: str,
    position: int | None,
    without_last: int | None,
    tags: tuple[str, ...],
    timeout_s: float,
    tenant: str,
) -> None:
    """Open the session NEW with the tokens of SESSION: all, or those up to a position.

    Nothing is prefilled again. Both sessions go on apart: either may be closed or removed.
    """
    if without_last is not None and position is not None:
        raise click.UsageError("give --without-last or --position, not both")

    async def run(client: Client) -> None:
        async with named(client, session) as parent:
            await check_open(parent)
        at = (await start_of_last(client, session, without_last))[0] if without_last else position
        forked = await parent.fork(name, at, tags=tags, timeout_s=timeout_s)
        info = await forked.info(limit=0)
        click.echo(f"forked {session} at position {info.position} as {name}")

    talk(given.load(), tenant, run)


@click.command()
@click.argument("session", required=False)
@tenants_option
@as_json
@with_client
async def tree(client: Client, session: str | None, tenants: str, as_json: bool) -> None:
    """Show which sessions were forked from which; with SESSION, only the tree that it is in.

    Reads the first entries of all sessions.
    """
    from ops.log.sessions import begun, list_sessions
    from ops.log.tree import trees

    found = trees(await begun(client, await list_sessions(client, tenants)))
    shown = [one for one in found if session is None or any(part.session == session for part in one)]
    if as_json:
        click.echo(encode({"trees": shown}))
    elif shown:
        table(
            ("session", "forked at", "position", "state", "tags"),
            [row for one in shown for row in _rows(one, "", "")],
        )
    elif session is not None:
        raise TurnkeepError(f"{session} is not forked, and no fork; see turnkeep sessions")
    else:
        click.echo("no session is forked")


def _rows(branch: Branch, before: str, below: str) -> Iterator[tuple[str, ...]]:
    """Yield the table row of a branch, indented by `before`, and of its forks, indented by `below`."""
    row = branch.row
    yield (
        f"{before}{branch.session}",
        str(row.parent.position) if row and row.parent else "-",
        str(row.position) if row and row.position is not None else "-",
        row.state if row else "gone",
        ", ".join(telling_tags(row.tags)) if row else "",
    )
    for number, fork_ in enumerate(branch.forks, 1):
        is_last = number == len(branch.forks)
        yield from _rows(fork_, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  "))
