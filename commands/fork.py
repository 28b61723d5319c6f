"""The command `fork`: starts a session with the tokens of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ops.log.ending import check_open

from .close import start_of_last
from .flags import tag_option, tenant_option, with_result_timeout
from .nats_connection import named, with_client

if TYPE_CHECKING:
    from turnkeep_client.client import Client


@click.command()
@click.argument("session")
@click.argument("name", metavar="NEW")
@click.option("--position", metavar="N", type=click.IntRange(0), help="Begin with the first N tokens.")
@click.option("--without-last", metavar="N", type=click.IntRange(1), help="Leave out the last N questions.")
@tag_option("A name for it, which `turnkeep sessions --tag` finds; may be given several times.")
@with_result_timeout("How long to wait for the result.")
@tenant_option
@with_client
async def fork(
    client: Client,
    session: str,
    name: str,
    position: int | None,
    without_last: int | None,
    tags: tuple[str, ...],
    timeout_s: float,
) -> None:
    """Open a session that begins with the tokens of another one.

    NEW begins with all tokens of SESSION, or those up to a position. Nothing is prefilled again. Both
    sessions go on apart: either may be closed or removed.
    """
    if without_last is not None and position is not None:
        raise click.UsageError("give --without-last or --position, not both")

    async with named(client, session) as parent:
        await check_open(parent)
    at = (await start_of_last(client, session, without_last))[0] if without_last else position
    forked = await parent.fork(name, at, tags=tags, timeout_s=timeout_s)
    info = await forked.info(limit=0)
    click.echo(f"forked {session} at position {info.position} as {name}")
