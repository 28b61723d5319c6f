"""The commands that talk with a worker (`chat`, `ask`): clients like any other, for a terminal."""

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

from turnkeep_client.errors import NoWorkerError, RequestFailedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from turnkeep_client.client import Client
    from turnkeep_client.generation import Generation
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
