"""The commands `show` and `dead`: print the requests of a session, or those that workers gave up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from turnkeep_client.images import as_text
from turnkeep_client.messages import (
    Append,
    Appended,
    Failed,
    Generate,
    Generated,
    Open,
    Opened,
    Rewind,
    UnknownResult,
    encode,
)

from .flags import as_json, tenant_option, with_result_timeout
from .nats_connection import no_session, with_client
from .printing import in_whole_words, table
from .screen import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ops.log.conversation import LoggedTurn
    from turnkeep_client.client import Client
    from turnkeep_client.history import History
    from turnkeep_client.messages import Called, Request, ToolCall


@click.command()
@click.argument("session")
@tenant_option
@click.option("--last", metavar="N", type=click.IntRange(1), help="Only the last so many requests.")
@as_json
@with_client
async def show(client: Client, session: str, last: int | None, as_json: bool) -> None:
    """Print one session's conversation, and what each request cost.

    `turnkeep sessions` lists the names. A fork begins with the part of its parent's conversation that it
    inherits.
    """
    from ops.log.conversation import conversation
    from turnkeep_client.session_log import read

    own = client.session(session)
    if not (turns := list(conversation(await read(client.stored, own.key)))):
        raise await no_session(client, session)
    shown = turns[-last:] if last else turns
    inherited = {
        turn.seq: await own.history(before=(turn.answered_seq or 0) + 1)
        for turn in shown
        if isinstance(turn.result, Opened) and turn.result.parent
    }
    if as_json:
        messages = {seq: history.messages for seq, history in inherited.items()}
        click.echo(
            encode({"tenant": client.tenant, "session": session, "turns": shown, "inherited": messages})
        )
        return
    first = next((turn.seq for turn in shown if _model(turn, anyway=True)), None)
    for turn in shown:
        for line in _lines(turn, inherited.get(turn.seq), names_model=turn.seq == first):
            click.echo(line)


@click.group()
def dead() -> None:
    """Requests that workers gave up: show, send again or drop one.

    Each crashed the worker or failed on every attempt. `turnkeep sessions --state dead` lists them.
    """


@dead.command("show")
@click.argument("session")
@click.argument("request", metavar="ID")
@tenant_option
@as_json
@with_client
async def dead_show(client: Client, session: str, request: str, as_json: bool) -> None:
    """Print a dead letter with its request; ID is the request's id, or its sequence."""
    from ops.log.dead import find

    found = await find(client, session, request)
    if as_json:
        click.echo(encode(found))
        return
    letter = found.letter
    rows = [
        ("given up", f"{found.stored.astimezone():%Y-%m-%d %H:%M:%S}, after {letter.attempts} attempts"),
        ("by", f"{letter.worker} with {letter.model}"),
        ("reason", printable(letter.reason)),
        ("session", f"{found.key}, at position {letter.position}"),
    ]
    table(("request", f"{letter.request} {letter.id or ''} at {letter.seq}"), rows)
    for line in _asked(found.asked):
        click.echo(line)


@dead.command("retry")
@click.argument("session")
@click.argument("request", metavar="ID")
@click.option("--anyway", is_flag=True, help="Also if the session has gone on since.")
@with_result_timeout("How long to wait for the result.")
@tenant_option
@with_client
async def dead_retry(client: Client, session: str, request: str, anyway: bool, timeout_s: float) -> None:
    """Send a dead request again, under a new id. Its letter stays, until you drop it.

    Exit code 1 if it failed again. Without --anyway it fails if the session has another position by now.
    """
    from ops.log.dead import find, retry

    found = await find(client, session, request)
    result = await retry(client, found, anyway=anyway, timeout_s=timeout_s)
    if isinstance(result, Failed):
        raise result.as_error()
    click.echo(f"{result.id}: {result.__struct_config__.tag}, position {result.position}")


@dead.command("drop")
@click.argument("session")
@click.argument("request", metavar="ID")
@tenant_option
@with_client
async def dead_drop(client: Client, session: str, request: str) -> None:
    """Remove a dead letter; the request and its result stay in the log."""
    from ops.log.dead import find

    found = await find(client, session, request)
    await client.stored.delete(found.at)
    click.echo(f"dropped the letter of {request}")


def _lines(turn: LoggedTurn, inherited: History | None, *, names_model: bool) -> Iterator[str]:
    request = turn.request
    what = "?" if request is None else f"{request.__struct_config__.tag}  {request.id}"
    head = f"#{turn.number}  {what}  {turn.stored.astimezone():%Y-%m-%d %H:%M:%S}"
    yield from (click.style(part, bold=True) for part in in_whole_words(head))
    yield from _asked(request)
    if turn.sent:
        yield from _said("not a valid request", turn.sent)
    if inherited:
        yield from _inherited(inherited)
    if isinstance(turn.result, Generated):
        if turn.result.reasoning:
            yield from _said("reasoning", turn.result.reasoning)
        yield from _said("assistant", _with_calls(turn.result.text, turn.result.tool_calls))
    cost = f"  {_cost(turn)}{_model(turn, anyway=names_model)}"
    yield from (click.style(part, dim=True) for part in in_whole_words(cost))
    yield ""


def _asked(request: Request | None) -> Iterator[str]:
    """Yield lines with the messages or tokens that a request adds to its session, or removes from it."""
    if isinstance(request, Append | Generate):
        for message in request.messages or ():
            yield from _said(message.role, _with_calls(as_text(message.content), message.tool_calls or ()))
        if request.text:
            yield from _said("text", request.text)
        if request.tokens:
            yield f"  {len(request.tokens)} tokens by their ids"
    if isinstance(request, Rewind):
        yield f"  back to position {request.position}"
    if isinstance(request, Open) and request.from_ is not None:
        yield f"  fork of {request.from_.session}"


def _inherited(history: History) -> Iterator[str]:
    """Yield lines with the part of its parent's conversation that a fork inherits."""
    if not history.is_whole:
        yield "  its beginning is no longer in the log"
    for message in history.messages:
        yield from _said(message.role, _with_calls(as_text(message.content), message.tool_calls or ()))
    if history.turns and history.turns[-1].is_cut:
        yield f"  of the last turn only what is before position {history.position}"


def _with_calls(text: str, calls: Iterable[ToolCall | Called]) -> str:
    said = (f"{call.function.name}({call.function.arguments})" for call in calls)
    return "\n".join(filter(None, (text, *said)))


def _said(role: str, text: str) -> Iterator[str]:
    yield click.style(f"  {role}", fg="cyan")
    for line in printable(text).splitlines():
        yield from in_whole_words(f"    {line}")


def _model(turn: LoggedTurn, *, anyway: bool) -> str:
    """Name the model of a turn, if another one had the turn before it, or `anyway`."""
    from ops.log.conversation import taken_over

    result = turn.result
    if not isinstance(result, Appended | Generated) or result.repeat_of is not None or result.model is None:
        return ""
    said = taken_over(result) or (f"by {result.model.name}" if anyway else "")
    return f"; {printable(said)}" if said else ""


def _cost(turn: LoggedTurn) -> str:
    """Return a line with a request's result and cost."""
    match turn.result:
        case None:
            return "no result yet"
        case result if result.repeat_of is not None:
            return f"repeats the request at {result.repeat_of}"
        case Failed(code=code, message=message):
            return f"{code}: {printable(message)}"
        case UnknownResult(type=kind, position=position):
            return f"{printable(kind)}, of a newer version; position {position}"
        case Generated(usage=usage) as made:
            prompt = f"prompt {usage.prompt_tokens} tokens, {usage.cached_tokens} of them cached"
            before = made.resumed_tokens
            resumed = f", {before} of them before a crash, the rest" if before else ""
            answer = f"answer {usage.completion_tokens} tokens{resumed} in {made.seconds.total:.2f} s"
            return f"{prompt}; {answer} ({made.finish_reason}); position {made.position}"
        case Appended() as added:
            cost = f"prefilled {added.prefilled_tokens} tokens in {added.seconds:.2f} s"
            return f"{cost}, {added.cached_tokens} cached; position {added.position}"
        case result:
            return f"{result.__struct_config__.tag}; position {result.position}"
