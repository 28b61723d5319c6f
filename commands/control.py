"""The commands `open`, `info`, `count`, `cancel`, `pin` and `unpin`: requests that generate no tokens."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import click
from msgspec import UNSET

from ops.log.ending import check_open
from turnkeep_client.errors import NotPermittedError, NoWorkerError, RequestFailedError, TurnkeepError
from turnkeep_client.messages import encode
from worker.process.formatting import size, span

from .printing import table
from .talking import named

if TYPE_CHECKING:
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics, SessionInfo

#: How long to wait for a metrics message; workers publish one every few seconds.
_PATIENCE_S: Final = 15.0


async def open_session(client: Client, name: str, cache: dict[str, Any], tags: tuple[str, ...]) -> None:
    """Start a session under a cache policy, and print its policy."""
    opened = await client.session(name).open(cache, tags=tags, timeout_s=30)
    click.echo(f"opened {name} under {opened.cache or 'full'}")


async def info(client: Client, name: str | None, *, as_json: bool) -> None:
    """Show a session and its worker, or the worker alone."""
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
        *_policy(session),
        ("KV on the device", size(session.kv_live_bytes)),
        *([("pinned", f"the first {', '.join(map(str, session.pinned))} tokens")] if session.pinned else []),
        ("requests answered", str(session.requests)),
        ("requests waiting", _waiting(session)),
    ]
    table(("session", session.session), rows)
    _print_metrics(session.worker)


def _origin(session: SessionInfo) -> list[tuple[str, str]]:
    """Describe what the session was opened with."""
    parent, tags = session.parent, session.tags
    rows = [] if parent is UNSET else [("forked from", f"{parent.session} at position {parent.position}")]
    return rows if tags is UNSET else [*rows, ("tags", ", ".join(tags))]


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
    """Name the waiting requests, and count those that the reply leaves out."""
    num_more = session.num_waiting - len(session.waiting)
    return (", ".join(session.waiting) or "none") + (f" and {num_more} more" if num_more > 0 else "")


async def count(
    client: Client, name: str | None, text: str, *, raw: bool, tools: list[dict[str, Any]] | None
) -> None:
    """Print the number of tokens that a question would add to a session, and the position after them."""
    session = client.session(name or "any-new-session")
    said = [{"role": "user", "content": text}]
    counted = await (session.count(text=text, raw=True) if raw else session.count(messages=said, tools=tools))
    click.echo(f"{counted.tokens} tokens" + (f", to position {counted.position}" if name else ""))


async def cancel(client: Client, name: str, request_id: str | None) -> None:
    """Stop a request, or the running one, and print whether it was running."""
    async with named(client, name) as session:
        request_id = request_id or (await session.info(limit=0)).active
        if request_id is None:
            raise TurnkeepError(
                f"no request of session {name} is running; turnkeep info {name} shows those that wait"
            )
        try:
            cancelled = await session.cancel(request_id)
        except RequestFailedError:
            await check_open(session)  # the worker says the same of a session that it does not know
            raise
    click.echo(f"cancelled {cancelled.id}, which was {cancelled.was}")


async def pin(client: Client, name: str, position: int | None) -> None:
    """Pin a session's tokens, and print the size of their KV."""
    async with named(client, name) as session:
        pinned = await session.pin(position)
    stored = "all of them" if pinned.stored_tokens == pinned.tokens else f"{pinned.stored_tokens} of them"
    click.echo(
        f"pinned {pinned.tokens} tokens, {stored} stored in {size(pinned.size_bytes)};"
        f" all pins together take {size(pinned.pinned_bytes)}"
    )
    if not pinned.noted:
        click.echo("turnkeep: the disk did not confirm the pin in time; pin again after a restart", err=True)


async def unpin(client: Client, name: str, position: int | None) -> None:
    """Remove the pins of a session's tokens."""
    async with named(client, name) as session:
        unpinned = await session.unpin(position)
    lengths = ", ".join(map(str, unpinned.prefixes)) or "nothing"
    click.echo(f"unpinned {lengths}; {size(unpinned.pinned_bytes)} stay pinned")


def _print_metrics(metrics: Metrics) -> None:
    snapshots = metrics.snapshots
    rows = [
        ("model", f"{metrics.model} on {metrics.device}, turnkeep {metrics.version}"),
        *([("other workers", ", ".join(metrics.others))] if metrics.others else []),
        ("up", span(metrics.uptime_s)),
        ("sessions", f"{metrics.sessions} in memory, {metrics.resident_sessions} on the device"),
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
        *((f"  layers {numbers}", kind) for kind, numbers in metrics.kv_layers.items()),
        ("snapshots on SSD", f"{snapshots.stored}, {size(snapshots.stored_bytes)}"),
    ]
    if snapshots.capacity_bytes:
        free, evictable = size(max(snapshots.free_bytes, 0)), size(snapshots.evictable_bytes)
        room = f"{free} free, {evictable} evictable, {size(snapshots.kept_bytes)} pinned"
        rows.append(("  room", f"{size(snapshots.capacity_bytes)}: {room}"))
    written = f"{snapshots.durable} durable of {snapshots.accepted}"
    lost = f"{sum(snapshots.dropped.values())} dropped, {snapshots.failed} failed"
    rows.append(("  since the start", f"{written}, {lost}, {snapshots.evicted} evicted"))
    table(("worker", metrics.worker), rows)


async def _metrics(client: Client) -> Metrics:
    """Ask the worker for its metrics. A user without the right to ask waits for the next published ones."""
    with contextlib.suppress(NotPermittedError):
        return await client.worker_metrics()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            return await anext(client.metrics())
    raise NoWorkerError(f"no worker has published metrics for {_PATIENCE_S:g} s")
