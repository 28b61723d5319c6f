"""`turnkeep ask`: answers one question from the command line and standard input."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import click
import msgspec

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import encode

from .close_cli import removed
from .sampling import asked, cut
from .screen import wrapped
from .stream import stream

if TYPE_CHECKING:
    from pathlib import Path

    from turnkeep_client.client import Client
    from turnkeep_client.session import Sampling

#: How long to wait until a session that was made for one question is removed.
_CLOSE_S: Final = 2.0


def question(argument: str | None) -> str:
    """Return the question: the argument, then standard input; or only standard input (`-`).

    Reads a terminal only for `-`. Raises `UsageError` if there is no question.
    """
    text = ""
    if argument == "-" or not (sys.stdin is None or sys.stdin.isatty()):
        text = decoded(sys.stdin.buffer.read()).rstrip("\n")
    parts = [part for part in ("" if argument in (None, "-") else str(argument), text) if part.strip()]
    if not parts:
        raise click.UsageError("there is no question; give it as an argument, or pipe it in")
    return "\n\n".join(parts)


def decoded(body: bytes) -> str:
    """Decode piped input. Raises `UsageError` if it is not UTF-8."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"standard input is not UTF-8 at byte {error.start}; convert it first"
        ) from None


def by_schema(path: Path) -> dict[str, Any]:
    """Return the `response_format` for a file with a JSON schema. Raises `UsageError` if it has none."""
    try:
        schema = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise click.UsageError(f"{path} has no JSON schema: {error}") from None
    return {"type": "json_schema", "json_schema": {"schema": schema}}


async def ask(
    client: Client, name: str | None, text: str, system: str | None, sampling: Sampling, *, as_json: bool
) -> bool:
    """Stream the answer; if no session was named, remove the one that was created for the question.

    Returns False if Ctrl-C ended it.

    With `as_json`, print the whole result at the end instead.
    """
    session = client.session(name or f"ask-{uuid4().hex[:12]}")
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    options = await asked(client, sampling)
    generation = session.generate(messages=messages, **options)
    finished = False
    try:
        finished = await stream(session, generation, shown=not as_json, kept=name is not None)
        if finished and as_json:
            click.echo(encode(generation.result))
        elif finished and (why := cut(generation.result, options["max_tokens"])):
            note = f"turnkeep: {why}"
            click.echo(wrapped(note) if sys.stderr.isatty() else note, err=True)
        return finished
    finally:
        if name is None:
            if not finished:  # nobody will read the rest
                with contextlib.suppress(TurnkeepError):
                    await generation.cancel()
            with contextlib.suppress(TurnkeepError):  # the close is in the log, for the next worker
                await removed(session, _CLOSE_S)
