"""The commands `open`, `info`, `count`, `cancel`, `pin` and `unpin`: requests that generate no tokens."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import click
from msgspec import UNSET

from ops.log.ending import check_open
from turnkeep_client.errors import NotPermittedError, NoWorkerError, RequestFailedError, TurnkeepError
from turnkeep_client.messages import encode
from worker.process.formatting import size, span

from .flags import SpanType, as_json, tag_option, tenant_option, tool_option, with_settings
from .printing import table
from .screen import complain
from .talking import CLIENT_SETTINGS, named, talk, with_client

if TYPE_CHECKING:
    from pathlib import Path

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics, SessionInfo

    from .flags import Given

#: How long to wait for a metrics message; workers publish one every few seconds.
_PATIENCE_S: Final = 15.0


@click.command("open")
@click.argument("session")
@tenant_option
@click.option(
    "--policy",
    type=click.Choice(["full", "sink_window", "paged"]),
    help="Tokens with KV: all, the first and the last ones, or all on SSD and some on the device."
    " [default: the worker's]",
)
@click.option("--sink", metavar="N", type=int, help="First tokens that sink_window keeps. [default: 4]")
@click.option("--window", metavar="N", type=int, help="Last tokens that sink_window keeps. [default: 1024]")
@click.option(
    "--resident", metavar="N", type=int, help="Tokens that paged has on the device. [default: 4096]"
)
@click.option(
    "--pin",
    metavar="START-END",
    type=SpanType(),
    multiple=True,
    help="Tokens that paged always has there; may be given several times.",
)
@tag_option("A name for it, which `turnkeep sessions --tag` finds; may be given several times.")
@with_client
async def open_(
    client: Client,
    session: str,
    policy: str | None,
    sink: int | None,
    window: int | None,
    resident: int | None,
    pin: tuple[tuple[int, int], ...],
    tags: tuple[str, ...],
) -> None:
    """Start SESSION under a cache policy, which it keeps until it is closed.

    Not needed for the worker's default policy: a session's first request starts it. Under sink_window a
    session may grow without limit, in memory of a fixed size. Under paged the model can use all of it, up to
    its context length: prompts read all KV from SSD, answers only the KV that matters to them.
    """
    asked = {"policy": policy, "sink": sink, "window": window, "resident": resident, "pin": pin or None}
    cache = {name: value for name, value in asked.items() if value is not None}
    opened = await client.session(session).open(cache, tags=tags, timeout_s=30)
    click.echo(f"opened {session} under {opened.cache or 'full'}")


@click.command()
@click.argument("session", required=False)
@tenant_option
@as_json
@with_client
async def info(client: Client, session: str | None, as_json: bool) -> None:
    """Show a session and its worker; without SESSION, show the worker alone."""
    await print_info(client, session, as_json=as_json)


async def print_info(client: Client, name: str | None, *, as_json: bool = False) -> None:
    """Print the state of a session and of its worker; without a `name`, only the worker's state."""
    if name is None:
        metrics = await _metrics(client)
        if as_json:
            click.echo(encode(metrics))
            return
        _print_metrics(metrics)
        return
    async with named(client, name) as asked:
        session = await asked.info(snapshot=True)
    if as_json:
        click.echo(encode(session))
        return
    rows = [
        ("tenant", session.tenant),
        ("state", session.state + (f" ({session.active})" if session.active else "")),
        ("position", f"{session.position} tokens"),
        *_origin(session),
        *_answered_by(session),
        *_policy(session),
        ("KV on the device", size(session.kv_live_bytes)),
        *_pinned(session),
        ("requests answered", str(session.requests)),
        ("requests waiting", _waiting(session)),
    ]
    table(("session", session.session), rows)
    _print_metrics(session.worker)


def _pinned(session: SessionInfo) -> list[tuple[str, str]]:
    """Describe the pins of a session: how many of its first tokens stay on SSD."""
    if not session.pinned:
        return []
    return [("pinned", f"the first {', '.join(map(str, session.pinned))} tokens: their KV stays on SSD")]


def _origin(session: SessionInfo) -> list[tuple[str, str]]:
    """Describe the parent and the tags that the session was opened with."""
    parent, tags = session.parent, session.tags
    rows = [] if parent is UNSET else [("forked from", f"{parent.session} at position {parent.position}")]
    return rows if tags is UNSET else [*rows, ("tags", ", ".join(tags))]


def _answered_by(session: SessionInfo) -> list[tuple[str, str]]:
    """Name the model of a session's last turn, if it is another one than the worker's."""
    last = session.answered_by
    return [] if last is UNSET or last.name == session.model else [("last answered by", last.name)]


def _policy(session: SessionInfo) -> list[tuple[str, str]]:
    """Describe which tokens the model still sees, for a session that does not keep all of its KV."""
    if session.cache is UNSET:
        return []
    visible = f"{session.visible_tokens} of at most {session.capacity_tokens} tokens"
    return [
        ("cache policy", str(session.cache)),
        ("in sight", f"{visible}, all from position {session.visible_from} on"),
    ]


def _waiting(session: SessionInfo) -> str:
    """Return the ids of waiting requests that the worker has listed, and the number of further ones."""
    num_more = session.num_waiting - len(session.waiting)
    return (", ".join(session.waiting) or "none") + (f" and {num_more} more" if num_more > 0 else "")


@click.command()
@click.argument("question", required=False)
@click.option("--session", "name", metavar="NAME", help="As the next question of this session.")
@click.option("--raw", is_flag=True, help="Count the text alone, without the chat template.")
@tool_option
@tenant_option
@with_settings(*CLIENT_SETTINGS)
def count(
    given: Given,
    question: str | None,
    name: str | None,
    tenant: str,
    raw: bool,
    tools: tuple[Path, ...],
) -> None:
    """Count the tokens that a question would add to a session, without asking it.

    Piped input is added to QUESTION, or is the question if there is none.
    """
    from .ask import tools_of, whole_question

    if raw and tools:
        raise click.UsageError("--tool is for a conversation, not for --raw text")
    text, known = whole_question(question), tools_of(tools) or None
    said = [{"role": "user", "content": text}]

    async def run(client: Client) -> None:
        session = client.session(name or "any-new-session")
        counted = await (
            session.count(text=text, raw=True) if raw else session.count(messages=said, tools=known)
        )
        click.echo(f"{counted.tokens} tokens" + (f", to position {counted.position}" if name else ""))

    talk(given.load(), tenant, run)


@click.command()
@click.argument("session")
@click.argument("request_id", metavar="[ID]", required=False)
@tenant_option
@with_client
async def cancel(client: Client, session: str, request_id: str | None) -> None:
    """Stop request ID of SESSION; the tokens of its answer so far stay in the session.

    Without ID: the request that is running. `turnkeep info SESSION` shows the ids.
    """
    async with named(client, session) as found:
        request_id = request_id or (await found.info(limit=0)).active
        if request_id is None:
            raise TurnkeepError(
                f"no request of session {session} is running; turnkeep info {session} shows those that wait"
            )
        try:
            cancelled = await found.cancel(request_id)
        except RequestFailedError:
            await check_open(found)  # the worker gives the same answer for a session that it does not know
            raise
    click.echo(f"cancelled {cancelled.id}, which was {cancelled.was}")


@click.command()
@click.argument("session")
@tenant_option
@click.option("--position", type=click.IntRange(1), help="Number of first tokens to pin. [default: all]")
@with_client
async def pin(client: Client, session: str, position: int | None) -> None:
    """Keep the KV of SESSION's tokens on disk, safe from eviction, until they are unpinned.

    A pin belongs to the tenant and outlives the session: it serves every session that begins with these
    tokens.
    """
    async with named(client, session) as found:
        pinned = await found.pin(position)
    stored = "all of them" if pinned.stored_tokens == pinned.tokens else f"{pinned.stored_tokens} of them"
    click.echo(
        f"pinned {pinned.tokens} tokens, {stored} stored in {size(pinned.size_bytes)};"
        f" all pins together take {size(pinned.pinned_bytes)}"
    )
    if not pinned.noted:
        complain("the disk did not confirm the pin in time; pin again after a restart")


@click.command()
@click.argument("session")
@tenant_option
@click.option("--position", type=click.IntRange(1), help="Only the pin with N tokens. [default: all]")
@with_client
async def unpin(client: Client, session: str, position: int | None) -> None:
    """Remove the pins of SESSION's tokens; their KV may then be evicted."""
    async with named(client, session) as found:
        unpinned = await found.unpin(position)
    lengths = ", ".join(map(str, unpinned.prefixes)) or "nothing"
    click.echo(f"unpinned {lengths}; {size(unpinned.pinned_bytes)} stay pinned")


def _print_metrics(metrics: Metrics) -> None:
    snapshots = metrics.snapshots
    rows = [
        ("model", f"{metrics.model} on {metrics.device}, turnkeep {metrics.version}"),
        *([("other workers", ", ".join(metrics.others))] if metrics.others else []),
        ("up", f"{span(metrics.uptime_s)}{', gives its sessions away' if metrics.drains else ''}"),
        ("sessions", f"{metrics.sessions} in use, {metrics.resident_sessions} with KV on the device"),
        ("requests", f"{metrics.running} running, {metrics.waiting} waiting"),
    ]
    for kind, outcomes in metrics.requests.items():
        rows.append((f"  {kind}", ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())))
    tokens = f"{metrics.prefilled_tokens} prefilled, {metrics.cached_tokens} found in the cache"
    rows.append(("tokens", f"{tokens}, {metrics.generated_tokens} generated"))
    for what, histogram in (
        ("mean time to first token", metrics.time_to_first_token),
        ("mean time per token", metrics.time_per_output_token),
        ("mean event loop lag", metrics.event_loop_lag),
    ):
        if histogram.count:
            mean_s = histogram.sum / histogram.count
            rows.append((what, f"{mean_s:.1f} s" if mean_s >= 1 else f"{1000 * mean_s:.1f} ms"))
    rows += [
        ("KV on the device", f"{size(metrics.resident_kv_bytes)} of {size(metrics.max_memory_bytes)}"),
        ("snapshots on SSD", f"{snapshots.stored}, {size(snapshots.stored_bytes)}"),
    ]
    if snapshots.capacity_bytes:
        free, evictable = size(max(snapshots.free_bytes, 0)), size(snapshots.evictable_bytes)
        kept = size(snapshots.kept_bytes)
        room = f"{free} free, {evictable} evictable, {kept} never evicted (pinned)"
        rows.append(("  room", f"{size(snapshots.capacity_bytes)}: {room}"))
    written = f"{snapshots.durable} durable of {snapshots.accepted}"
    lost = f"{sum(snapshots.dropped.values())} dropped, {snapshots.failed} failed"
    rows.append(("  since the start", f"{written}, {lost}, {snapshots.evicted} evicted"))
    table(("worker", metrics.worker), rows)


async def _metrics(client: Client) -> Metrics:
    """Ask the worker for its metrics; a user without permission to ask waits for the next published ones."""
    with contextlib.suppress(NotPermittedError):
        return await client.worker_metrics()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            return await anext(client.metrics())
    raise NoWorkerError(f"no worker has published metrics for {_PATIENCE_S:g} s")
