"""The commands `close`, `rewind` and `fork`: end sessions, shorten one, or begin one like another."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from ops.log.ending import check_open, end
from turnkeep_client.errors import (
    InvalidMessageError,
    NotPermittedError,
    NoWorkerError,
    RequestFailedError,
    TurnkeepError,
)
from worker.process.installed import as_installed

from .exchanges import last_exchanges_and_position
from .flags import tag_option, tenant_option, with_result_timeout
from .nats_connection import named, with_client
from .screen import complain, printable

if TYPE_CHECKING:
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Rewound
    from turnkeep_client.session import Session

    from .exchanges import ShownExchange

#: How many characters of the first removed question a rewind prints.
_SHOWN = 60

_patience = with_result_timeout("How long to wait for the result of one request.")


@click.command()
@click.argument("sessions", metavar="SESSION...", nargs=-1, required=True)
@click.option("--forget", is_flag=True, help="Also remove its content from the log and the worker's disk.")
@click.option("--cancel", is_flag=True, help="Cancel its unanswered requests; do not wait for them.")
@_patience
@tenant_option
@with_client
async def close(
    client: Client, sessions: tuple[str, ...], forget: bool, cancel: bool, timeout_s: float
) -> bool:
    """End sessions; with --forget, erase what they said.

    Some days later the worker removes a closed session from the log. `turnkeep chat` can use the name of a
    closed session again. Tokens that belong also to another session stay on the worker's disk, even with
    --forget.
    """
    failed = False
    for name in sessions:
        try:
            await _end(client, name, timeout_s, forget=forget, cancel=cancel)
        except (NoWorkerError, NotPermittedError):
            raise
        except TurnkeepError as error:  # it concerns this session only
            complain(as_installed(str(error)))
            failed = True
    return failed


async def _end(client: Client, name: str, timeout_s: float, *, forget: bool, cancel: bool) -> None:
    """Close or remove a session, and print the outcome."""
    async with named(client, name) as session:
        if not cancel:
            await _say_what_runs(session)
        closed = await end(client, name, timeout_s, forget=forget, cancel=cancel)
    if not forget:
        click.echo(f"closed {name} at position {closed.position}")
        return
    click.echo(f"removed {name} from the log and the worker's disk")
    if not closed.settled:
        complain(f"some of {name} may stay on a disk until a worker can erase it")


async def _say_what_runs(session: Session) -> None:
    """If a request is running, print that the close waits for its end, which may take minutes."""
    with contextlib.suppress(TurnkeepError):  # the close that follows reports the error better
        if active := (await session.info(limit=0)).active:
            stops = f"turnkeep cancel {session.key.session}"
            complain(f"waiting until {active} is answered; {stops} stops it")


@click.command()
@click.argument("session")
@click.option("--last", metavar="N", type=click.IntRange(1), help="Remove the last N questions. [default: 1]")
@click.option("--position", metavar="N", type=click.IntRange(0), help="Keep the first N tokens.")
@_patience
@tenant_option
@with_client
async def rewind(
    client: Client, session: str, last: int | None, position: int | None, timeout_s: float
) -> None:
    """Remove a session's last questions and answers.

    Without options the last question with its answer; or more of them, or all from a position on.

    `turnkeep show` prints removed turns, too: they stay in the log.
    """
    if last is not None and position is not None:
        raise click.UsageError("give --last or --position, not both")

    async with named(client, session) as found:
        await check_open(found)
    if position is not None:
        rewound, note = await client.session(session).rewind(position, timeout_s=timeout_s), ""
    else:
        rewound, removed = await rewind_last(client, session, last or 1, timeout_s)
        question = printable(" ".join(removed.question.split()))
        note = f"; removed: {question if len(question) <= _SHOWN else question[:_SHOWN] + '...'}"
    click.echo(f"rewound {session} to position {rewound.position}{note}")


async def rewind_last(
    client: Client, session: str, count: int, timeout_s: float
) -> tuple[Rewound, ShownExchange]:
    """Remove the last `count` exchanges; return the result, and the first removed exchange.

    Raises `TurnkeepError`, also if the session has changed before the worker runs the rewind: that would
    remove newer exchanges too.
    """
    start, removed, position = await start_of_last(client, session, count)
    rewinding = client.session(session).rewind(start, expect_position=position, timeout_s=timeout_s)
    try:
        return await rewinding, removed
    except RequestFailedError as error:
        if error.code != "position_conflict":
            raise
        raise TurnkeepError(
            "the session has changed meanwhile, and nothing was removed; look at its last question, then"
            " try again"
        ) from None


async def start_of_last(client: Client, session: str, count: int) -> tuple[int, ShownExchange, int]:
    """Return the position before the last `count` exchanges, the first of them, and the session's position.

    Raises `InvalidMessageError` if there are fewer exchanges, or that position is unknown.
    """
    past, position = await last_exchanges_and_position(client, session, count)
    if len(past) < count:
        raise InvalidMessageError(f"the session has {len(past)} exchanges, not {count}")
    exchange = past[-count]
    if exchange.start is None:
        raise InvalidMessageError(
            "the text before it was rewritten since (other tools, chat template or model); rewind further"
        )
    return exchange.start, exchange, position


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
        now = await parent.info(limit=0)
    if position is not None and position > now.position:  # a failed open would stay in the log under the name
        until = "" if now.state == "idle" else ", until its waiting requests are answered"
        raise TurnkeepError(f"cannot fork {session} at {position}: it ends at {now.position}{until}")
    at = (await start_of_last(client, session, without_last))[0] if without_last else position
    forked = await parent.fork(name, at, tags=tags, timeout_s=timeout_s)
    info = await forked.info(limit=0)
    click.echo(f"forked {session} at position {info.position} as {name}")
