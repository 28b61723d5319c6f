"""The commands `info` and `cancel`: requests that generate no tokens."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import click
from msgspec import UNSET

from ops.log.ending import check_open
from turnkeep_client.errors import (
    NoServerError,
    NotPermittedError,
    NoWorkerError,
    RequestFailedError,
    TurnkeepError,
)
from turnkeep_client.messages import UNLOADED, encode
from turnkeep_client.writes import LIKELY
from worker.process.datadir import TOKEN_NAME, noted_nats
from worker.process.formatting import size, span
from worker.process.settings import SettingsError
from worker.wire.credentials import running_token

from .flags import as_json, tenant_option, with_settings
from .nats_connection import CLIENT_SETTINGS, instead, named, talk, with_client
from .printing import table

if TYPE_CHECKING:
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics, SessionInfo
    from worker.process.settings import Settings

    from .flags import GivenSettings

#: How long to wait for a metrics message; workers publish one every few seconds.
_PATIENCE_S: Final = 15.0


@click.command()
@click.argument("session", required=False)
@tenant_option
@as_json
@click.option(
    "--url", is_flag=True, help="Only print the URL of the worker's own NATS server, with its token."
)
@with_settings(*CLIENT_SETTINGS)
def info(given: GivenSettings, session: str | None, tenant: str, as_json: bool, url: bool) -> None:
    """Show load and memory of a worker, or a session and its worker.

    Other programs connect to the worker's own NATS server at the URL that --url prints.
    """
    settings = given.load()
    if url:
        click.echo(_own_url(settings))
    else:
        talk(settings, tenant, lambda client: print_info(client, session, as_json=as_json))


def _own_url(settings: Settings) -> str:
    """Return the URL of the data directory's NATS server, with its token. Raises `SettingsError`."""
    try:
        token = running_token(settings.data_dir)
    except NoServerError as error:
        raise TurnkeepError(f"{error}; {instead(settings)}") from None
    if token is None:
        raise SettingsError(
            f"there is no {settings.data_dir / TOKEN_NAME}; start its worker, or name another --data-dir"
        )
    nats = noted_nats(settings.data_dir) or settings.own_port
    if isinstance(nats, str):
        raise SettingsError(
            f"the worker of {settings.data_dir} has no NATS server of its own; it uses {nats}"
        )
    return f"nats://{token}@127.0.0.1:{nats}"


async def print_info(client: Client, name: str | None, *, as_json: bool = False) -> None:
    """Print the state of the session `name` and of its worker; without a name, only the worker's state."""
    if name is None:
        metrics = await _metrics(client)
        if as_json:
            click.echo(encode(metrics))
            return
        _print_metrics(metrics)
        return
    async with named(client, name) as asked:
        session = await asked.info(snapshot=as_json)
    if as_json:
        click.echo(encode(session))
        return
    rows = [
        ("tenant", session.tenant),
        ("state", session.state + (f" ({session.active})" if session.progress else "")),
        ("position", f"{session.position} tokens"),
        *_origin(session),
        *_answered_by(session),
        *_policy(session),
        ("KV on the device", size(session.kv_live_bytes)),
        ("requests answered", str(session.requests)),
        ("requests waiting", _waiting(session)),
    ]
    table(("session", session.session), rows)
    _print_metrics(session.worker)


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
    rows = [("cache policy", str(session.cache))]
    if session.visible_tokens is not UNSET:
        visible = f"{session.visible_tokens} of at most {session.capacity_tokens} tokens"
        rows.append(("in sight", f"{visible}, all from position {session.visible_from} on"))
    return rows


def _waiting(session: SessionInfo) -> str:
    """Return the ids of waiting requests that the worker has listed, and the number of further ones.

    The active one waits too, for room on the device, unless its turn runs.
    """
    first = [session.active] if session.active and not session.progress else []
    num_more = session.num_waiting - len(session.waiting)
    return (", ".join([*first, *session.waiting]) or "none") + (
        f" and {num_more} more" if num_more > 0 else ""
    )


@click.command()
@click.argument("session")
@click.argument("request_id", metavar="[ID]", required=False)
@tenant_option
@with_client
async def cancel(client: Client, session: str, request_id: str | None) -> None:
    """Stop a request; its answer so far stays in the session.

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


def _print_metrics(metrics: Metrics) -> None:
    if metrics.device == UNLOADED:
        does = metrics.refusal or f"{metrics.model}, which its next request loads"
        table(("worker", metrics.worker), [("model", does)])
        return
    snapshots, why = metrics.snapshots, metrics.refusal or LIKELY
    rows = [
        ("model", f"{metrics.model} on {metrics.device}, turnkeep {metrics.version}"),
        *([("other workers", ", ".join(metrics.others))] if metrics.others else []),
        ("up", f"{span(metrics.uptime_s)}{', gives its sessions away' if metrics.drains else ''}"),
        *([] if metrics.recorded else [("NATS", f"stores nothing; {why}")]),
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
        ("KV on the device", f"{size(metrics.resident_kv_bytes)} of {size(metrics.kv_limit_bytes)}"),
        ("log", f"{size(metrics.log_bytes)} of {size(metrics.log_max_bytes)}"),
        ("snapshots on SSD", f"{snapshots.stored}, {size(snapshots.stored_bytes)}"),
    ]
    if snapshots.capacity_bytes:
        free, evictable = size(max(snapshots.free_bytes, 0)), size(snapshots.evictable_bytes)
        room = f"{free} free, {evictable} evictable, {size(snapshots.held_bytes)} in use"
        rows.append(("  room", f"{size(max(snapshots.capacity_bytes, 0))}: {room}"))
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
