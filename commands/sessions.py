"""The commands `sessions`, `show` and `dead`: print what `ops/log` reads from the log."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from ops.log.sessions import ORDERS
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
from worker.process.formatting import size, span

from .flags import as_json, moment, tag_option, tenant_option, tenants_option, with_result_timeout
from .printing import in_whole_words, table
from .screen import printable
from .talking import no_session, with_client

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ops.log.conversation import Turn
    from ops.log.sessions import SessionRow
    from turnkeep_client.client import Client
    from turnkeep_client.history import History
    from turnkeep_client.messages import Called, Request, ToolCall

#: How many sessions' first words are read, one by one: listing 100,000 sessions must take only seconds.
_WITH_WORDS = 1000


@click.command()
@tenants_option
@click.option("--match", metavar="PATTERN", default="*", help="Only names like this: 'agent-*'.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(["idle", "running", "waiting", "failed", "closed", "forgotten", "dead"]),
    help="Only in this state; may be repeated. dead: with dead letters. [default: all but forgotten]",
)
@tag_option(
    "Only opened with this tag; may be repeated. Reads the first entries of every session. Of the gateway's"
    " sessions only forks have its tag: --match 'gw-*' finds all."
)
@click.option("--since", metavar="TIME", callback=moment, help="Only sessions active since: 2h, 2026-11-20.")
@click.option("--until", metavar="TIME", callback=moment, help="Only sessions idle since.")
@click.option("--sort", "by", type=click.Choice(ORDERS), default="last", show_default=True)
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option("--limit", metavar="N", type=click.IntRange(1), help="At most so many lines.")
@click.option("--bytes", "with_bytes", is_flag=True, help="Show sizes; this reads every entry.")
@as_json
@with_client
async def sessions(
    client: Client,
    tenants: str,
    match: str,
    states: tuple[str, ...],
    tags: tuple[str, ...],
    since: datetime | None,
    until: datetime | None,
    by: str,
    reverse: bool,
    limit: int | None,
    with_bytes: bool,
    as_json: bool,
) -> None:
    """List the sessions in the log, most recently active first.

    Workers are asked which sessions without a result are running.
    """
    from ops.log.sessions import begun, list_sessions, measured, order, running

    def wanted(row: SessionRow) -> bool:
        is_in_state = row.state in states if states else row.state != "forgotten"
        is_in_time = (since is None or row.last >= since) and (until is None or row.last < until)
        return is_in_time and (is_in_state or ("dead" in states and row.dead > 0))

    found = await running(client, await list_sessions(client, tenants, match))
    rows = [row for row in found if wanted(row)]
    if tags:
        rows = [row for row in await begun(client, rows) if set(tags) <= set(row.tags)]
    if with_bytes or by == "bytes":
        rows = await measured(client, rows, tenants)
    rows = order(rows, by)[:: -1 if reverse else 1][:limit]
    rows = [*await begun(client, rows[:_WITH_WORDS]), *rows[_WITH_WORDS:]]
    if as_json:
        click.echo(encode({"sessions": rows}))
        return
    _print_sessions(rows, by)
    hidden = 0 if states else sum(row.state == "forgotten" for row in found)
    note = f"; {hidden} more were removed: --state forgotten lists them" if hidden else ""
    click.echo(f"{len(rows)} of {len(found) - hidden} sessions{note}")


def _print_sessions(rows: list[SessionRow], by: str) -> None:
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


def telling_tags(tags: tuple[str, ...]) -> tuple[str, ...]:
    """Return tags to show; of a gateway's session only `gateway`, since its other tag is a digest."""
    return tags[:1] if tags[:1] == ("gateway",) else tags


def _begins(row: SessionRow) -> str:
    """Describe how a session begins: its tags, its parent if it is a fork, and the user's first words."""
    forked = f"fork of {row.parent.session} at {row.parent.position}" if row.parent else ""
    tags = "".join(f"[{tag}] " for tag in telling_tags(row.tags))
    return tags + ": ".join(filter(None, (forked, row.begins))) or "-"


def _state(row: SessionRow) -> str:
    state = f"waiting ({row.waiting})" if row.state == "waiting" else row.state
    if row.state == "running" and row.waiting > 1:
        state += f", {row.waiting - 1} waiting"
    return f"{state}, {row.dead} dead" if row.dead else state


@click.command()
@click.argument("session")
@tenant_option
@click.option("--last", metavar="N", type=click.IntRange(1), help="Only the last so many requests.")
@as_json
@with_client
async def show(client: Client, session: str, last: int | None, as_json: bool) -> None:
    """Print a session's conversation from the log, with the cost of each request.

    A fork begins with the part of its parent's conversation that it inherits.
    """
    from ops.log.conversation import conversation
    from ops.log.record import pair_up

    entries = await client.log(session)
    if not (turns := list(conversation(entries))):
        raise await no_session(client, session)
    shown = turns[-last:] if last else turns
    forks = {turn.seq for turn in shown if isinstance(turn.result, Opened) and turn.result.parent}
    opened = {one.asked.seq: one.answered.seq for one in pair_up(entries) if one.asked.seq in forks}
    own = client.session(session)
    inherited = {seq: await own.history(before=end + 1) for seq, end in opened.items()}
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
    """Requests that workers gave up: each crashed the worker or failed on every attempt."""


@dead.command("list")
@tenants_option
@as_json
@with_client
async def dead_list(client: Client, tenants: str, as_json: bool) -> None:
    """List the dead letters, the oldest first."""
    from ops.log.dead import letters

    found = await letters(client, tenants)
    if as_json:
        click.echo(encode({"dead": found}))
        return
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
    """Send a dead request again, under a new id; once it is answered its letter is removed.

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


def _lines(turn: Turn, inherited: History | None, *, names_model: bool) -> Iterator[str]:
    request = turn.request
    what = "?" if request is None else f"{request.__struct_config__.tag}  {request.id}"
    head = f"#{turn.number}  {what}  {turn.stored.astimezone():%Y-%m-%d %H:%M:%S}"
    yield from (click.style(part, bold=True) for part in in_whole_words(head))
    yield from _asked(request)
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
            text = _with_calls(str(message.content or ""), message.tool_calls or ())
            yield from _said(message.role, text)
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
        yield from _said(message.role, _with_calls(str(message.content or ""), message.tool_calls or ()))
    if history.turns and history.turns[-1].is_cut:
        yield f"  of the last turn only what is before position {history.position}"


def _with_calls(text: str, calls: Iterable[ToolCall | Called]) -> str:
    said = (f"{call.function.name}({call.function.arguments})" for call in calls)
    return "\n".join(filter(None, (text, *said)))


def _said(role: str, text: str) -> Iterator[str]:
    yield click.style(f"  {role}", fg="cyan")
    for line in printable(text).splitlines():
        yield from in_whole_words(f"    {line}")


def _model(turn: Turn, *, anyway: bool) -> str:
    """Name the model of a turn, if another one had the turn before it, or `anyway`."""
    from ops.log.conversation import taken_over

    result = turn.result
    if not isinstance(result, Appended | Generated) or result.repeat_of is not None or result.model is None:
        return ""
    said = taken_over(result) or (f"by {result.model.name}" if anyway else "")
    return f"; {printable(said)}" if said else ""


def _cost(turn: Turn) -> str:
    """Return a line with a request's result and cost."""
    match turn.result:
        case None:
            return "no result yet" if turn.request else "not a valid request"
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
