"""The commands that talk with a worker (`chat`, `ask`, `info`): clients like any other, for a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING
from uuid import uuid4

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from turnkeep_client.errors import NoWorkerError, RequestFailedError
from turnkeep_client.messages import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from turnkeep_client.client import Client
    from turnkeep_client.generation import Generation
    from turnkeep_client.messages import Metrics
    from turnkeep_client.session import Session

_POLL_S = 0.3


async def chat(client: Client, name: str, *, max_tokens: int, temperature: float) -> None:
    """Read lines and stream answers until the input ends. Ctrl-C ends an answer, at the prompt the chat."""
    session = client.session(name)
    with contextlib.suppress(RequestFailedError):
        info = await session.info()
        if info.position:
            click.echo(f"Going on with session {name!r} at position {info.position}.", err=True)
    async for line in _lines():
        generation = session.generate(
            messages=[{"role": "user", "content": line}], max_tokens=max_tokens, temperature=temperature
        )
        try:
            await _stream(session, generation)
        except RequestFailedError as error:
            click.echo(f"turnkeep: {error}", err=True)


async def ask(
    client: Client, name: str | None, question: str, *, max_tokens: int, temperature: float
) -> None:
    """Stream the answer to one question; a session made for it is closed again."""
    session = client.session(name or f"ask-{uuid4().hex[:12]}")
    generation = session.generate(
        messages=[{"role": "user", "content": question}], max_tokens=max_tokens, temperature=temperature
    )
    await _stream(session, generation)
    if name is None:
        await session.close()


async def info(client: Client, name: str | None, *, as_json: bool) -> None:
    """Show a session and its worker, or without a session the next metrics message."""
    if name is None:
        metrics = await _next_metrics(client)
        if as_json:
            click.echo(encode(metrics))
            return
        _print_metrics(Console(), metrics)
        return
    session = await client.session(name).info()
    if as_json:
        click.echo(encode(session))
        return
    table = Table("session", str(session.session), box=None, header_style="bold")
    table.add_row("tenant", session.tenant)
    table.add_row("state", session.state + (f" ({session.active})" if session.active else ""))
    table.add_row("position", f"{session.position} tokens")
    table.add_row("KV on the device", _size(session.kv_live_bytes))
    table.add_row("requests answered", str(session.requests))
    table.add_row("requests waiting", ", ".join(session.waiting) or "none")
    console = Console()
    console.print(table)
    _print_metrics(console, session.worker)


async def pin(client: Client, name: str, position: int | None) -> None:
    """Pin what a session holds, and say what that takes."""
    pinned = await client.session(name).pin(position)
    stored = "all of them" if pinned.stored_tokens == pinned.tokens else f"{pinned.stored_tokens} of them"
    click.echo(
        f"pinned {pinned.tokens} tokens, {stored} stored in {_size(pinned.size_bytes)};"
        f" all pins together take {_size(pinned.pinned_bytes)}"
    )
    if not pinned.noted:
        click.echo("turnkeep: the disk did not confirm it in time: pin again after a restart", err=True)


async def unpin(client: Client, name: str, position: int | None) -> None:
    """Unpin what is pinned of a session."""
    unpinned = await client.session(name).unpin(position)
    lengths = ", ".join(map(str, unpinned.prefixes)) or "nothing"
    click.echo(f"unpinned {lengths}; {_size(unpinned.pinned_bytes)} stay pinned")


def _print_metrics(console: Console, metrics: Metrics) -> None:
    table = Table("worker", metrics.worker, box=None, header_style="bold")
    table.add_row("model", f"{metrics.model} on {metrics.device}, turnkeep {metrics.version}")
    table.add_row("up", f"{metrics.uptime_s:.0f} s")
    table.add_row("sessions", f"{metrics.sessions} in memory, {metrics.resident_sessions} on the device")
    table.add_row("requests", f"{metrics.running} running, {metrics.waiting} waiting")
    for kind, outcomes in metrics.requests.items():
        table.add_row(f"  {kind}", ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    table.add_row(
        "tokens",
        f"{metrics.prefilled_tokens} prefilled, {metrics.cached_tokens} found in the cache, "
        f"{metrics.generated_tokens} generated",
    )
    for what, histogram in (
        ("time to first token", metrics.time_to_first_token),
        ("time per token", metrics.time_per_output_token),
        ("event loop lag", metrics.event_loop_lag),
    ):
        if histogram.count:
            table.add_row(what, f"{1000 * histogram.sum / histogram.count:.1f} ms on average")
    resident, limit = _size(metrics.resident_kv_bytes), _size(metrics.max_memory_bytes)
    table.add_row("KV on the device", f"{resident} of {limit}")
    snapshots = metrics.snapshots
    table.add_row("snapshots on SSD", f"{snapshots.stored}, {_size(snapshots.stored_bytes)}")
    if snapshots.capacity_bytes:
        table.add_row(
            "  room",
            f"{_size(snapshots.capacity_bytes)}: {_size(max(snapshots.free_bytes, 0))} free,"
            f" {_size(snapshots.evictable_bytes)} evictable, {_size(snapshots.kept_bytes)} pinned",
        )
    table.add_row(
        "  since the start",
        f"{snapshots.durable} durable of {snapshots.accepted}, {sum(snapshots.dropped.values())} dropped, "
        f"{snapshots.failed} failed, {snapshots.evicted} evicted",
    )
    console.print(table)


async def _next_metrics(client: Client) -> Metrics:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(15):
            async for metrics in client.metrics():
                return metrics
    raise NoWorkerError("no worker has published metrics for 15 s")


async def _stream(session: Session, generation: Generation) -> None:
    """Print an answer as it comes, behind a bar while its prompt is prefilled; Ctrl-C cancels it."""
    loop = asyncio.get_running_loop()
    asides = [asyncio.create_task(_prefill_bar(session))]
    loop.add_signal_handler(signal.SIGINT, lambda: asides.append(asyncio.create_task(_cancel(generation))))
    try:
        async for chunk in generation:
            if not asides[0].done():
                asides[0].cancel()
                await asyncio.wait(asides[:1])  # the bar is gone before the text begins
            click.echo(_printable(chunk.text), nl=False)
        click.echo()
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        asides[0].cancel()
        await asyncio.gather(*asides, return_exceptions=True)


async def _cancel(generation: Generation) -> None:
    with contextlib.suppress(RequestFailedError, NoWorkerError):  # it may just have ended
        await generation.cancel()


async def _prefill_bar(session: Session) -> None:
    """Show how far the prompt of the running request is; nothing where it takes no time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    if not console.is_terminal:
        return  # elsewhere a bar that goes away leaves an empty line
    await asyncio.sleep(_POLL_S)
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("waiting", total=None)
        while True:
            with contextlib.suppress(RequestFailedError, NoWorkerError):
                progress = (await session.info()).progress
                if progress is not None:
                    done, total = progress.cached_tokens, progress.context_tokens
                    bars.update(task, description="prefill", completed=done, total=total)
            await asyncio.sleep(_POLL_S)


async def _lines() -> AsyncIterator[str]:
    """Yield what the user types, line by line, without the empty ones."""
    if not sys.stdin.isatty():
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line.strip():
                yield line.strip()
        return
    from prompt_toolkit import PromptSession

    prompt: PromptSession[str] = PromptSession()
    while True:
        try:
            line = await prompt.prompt_async("> ")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line.strip()


def _printable(text: str) -> str:
    """Leave out control characters: a model must not be able to drive the terminal."""
    return "".join(char for char in text if char in "\n\t" or char.isprintable())


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"
