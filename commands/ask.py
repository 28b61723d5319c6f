"""`turnkeep ask`: answers one question from the command line and standard input."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import click
import msgspec

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import encode

from .flags import session_option, tenant_option, tool_option, with_answer_options, with_settings
from .nats_connection import CLIENT_SETTINGS, named, talk
from .pictures import content_of, parts_of
from .sampling import asked, cut
from .screen import complain, printable
from .stream import stream, while_reachable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from turnkeep_client.client import Client
    from turnkeep_client.session import Session

    from .flags import AnswerOptions, GivenSettings

#: How long to wait for the end of a temporary session.
_CLOSE_S: Final = 2.0
#: The exit code after Ctrl-C.
_INTERRUPTED: Final = 130


@click.command()
@click.argument("question", required=False)
@session_option("Session to ask in. [default: a new one, closed afterwards]")
@tenant_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print nothing until the answer has ended, then its result as one line of JSON: text, token ids,"
    " finish_reason, usage, seconds.",
)
@click.option(
    "--logprobs",
    metavar="N",
    type=click.IntRange(0, 20),
    help="With --json: logprobs, and the N likeliest tokens.",
)
@tool_option
@click.option("--answer-prefix", "prefix_", metavar="TEXT", help="Begin the answer with this text.")
@click.option(
    "-n",
    "count",
    metavar="N",
    type=click.IntRange(1),
    help="Print N answers; the session stays as it is.",
)
@click.option(
    "--schema",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Answer with JSON that this JSON schema describes.",
)
@with_answer_options
@with_settings(*CLIENT_SETTINGS)
def ask(
    given: GivenSettings,
    question: str | None,
    name: str | None,
    tenant: str,
    as_json: bool,
    logprobs: int | None,
    tools: tuple[Path, ...],
    prefix_: str | None,
    count: int | None,
    schema: Path | None,
    options: AnswerOptions,
) -> None:
    """Ask a running worker one question, also about an image.

    `turnkeep serve` starts a worker; `turnkeep run` asks without one.

    Piped input is added to QUESTION, or is the question if there is none: git diff | turnkeep ask "What
    changed?" With - for QUESTION, type the question and end it with Ctrl-D.
    """
    text, sampling = whole_question(question), options.sampling
    if tools:
        sampling["tools"] = tools_of(tools)
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs is for --json, whose result has them")
    if logprobs is not None:
        sampling |= {"logprobs": True, "top_logprobs": logprobs}
    if schema is not None:
        sampling |= {"response_format": by_schema(schema)}
    sampling |= {"prefix": prefix_} if prefix_ else {}

    async def run(client: Client) -> bool:
        return await answer(client, name, text, options, as_json=as_json, count=count)

    if not talk(given.load(), tenant, run):
        sys.exit(_INTERRUPTED)


def whole_question(argument: str | None) -> str:
    """Return the question: the argument, then standard input; or only standard input (`-`).

    Reads a terminal only for `-`. Raises `UsageError` if there is no question.
    """
    text = ""
    if argument == "-" or not sys.stdin.isatty():
        text = decoded(sys.stdin.buffer.read()).rstrip("\n")
    parts = [part for part in ("" if argument in (None, "-") else str(argument), text) if part.strip()]
    if not parts:
        raise click.UsageError("there is no question; give it as an argument, or pipe it in")
    return "\n\n".join(parts)


def tools_of(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Read tools from JSON files: each has a tool as in OpenAI's API, only its function, or a list of these.

    Raises `UsageError`.
    """
    found: list[dict[str, Any]] = []
    for file in files:
        try:
            read = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{file} is no JSON with a tool: {error}") from None
        for tool in read if isinstance(read, list) else [read]:
            is_whole = isinstance(tool, dict) and "function" in tool
            found.append(tool if is_whole else {"type": "function", "function": tool})
    return found


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
        why = getattr(error, "strerror", None) or error
        raise click.UsageError(f"{path} has no JSON schema: {why}") from None
    return {"type": "json_schema", "json_schema": {"schema": schema}}


async def answer(
    client: Client,
    name: str | None,
    text: str,
    wanted: AnswerOptions,
    *,
    as_json: bool,
    count: int | None = None,
) -> bool:
    """Ask `text` in the session `name`, and stream the answer; without a name, in a temporary session.

    Returns False if Ctrl-C ended the answer. With `as_json`, print the whole result at the end instead. With
    `count`, print that many answers, and leave the session unchanged.
    """
    instructed = [{"role": "system", "content": wanted.system}] if wanted.system else []
    messages = [*instructed, {"role": "user", "content": content_of(text, parts_of(wanted.images))}]
    options = await asked(client, wanted.sampling)
    async with named(client, name or f"ask-{uuid4().hex[:12]}", wanted.cache) as session:
        if count is None:
            return await _answer(
                client,
                session,
                messages,
                options,
                is_new=name is None,
                as_json=as_json,
                reasoning=wanted.reasoning,
            )
        await _answers(session, count, messages, options, is_new=name is None, as_json=as_json)
        return True


async def _answer(
    client: Client,
    session: Session,
    messages: Any,
    options: Any,
    *,
    is_new: bool,
    as_json: bool,
    reasoning: str | None,
) -> bool:
    """Stream one answer; return False if Ctrl-C ended it."""
    generation = session.generate(messages=messages, **options)
    finished = False
    if not as_json:
        click.echo(options.get("prefix", ""), nl=False)
    try:
        finished = await stream(
            client, session, generation, shown=not as_json, kept=not is_new, reasoning=reasoning
        )
        if finished and as_json:
            click.echo(encode(generation.result))
        elif finished and (why := cut(generation.result, options["max_tokens"])):
            complain(why)
        return finished
    finally:
        if is_new:
            with contextlib.suppress(TurnkeepError):  # a later worker closes it: the request is in the log
                await session.close(cancel=True, timeout_s=_CLOSE_S)


async def _answers(
    session: Session, count: int, messages: Any, options: Any, *, is_new: bool, as_json: bool
) -> None:
    """Print `count` answers to the same messages, each after a line with its number."""
    try:
        if is_new:
            await session.open()
        samples = session.samples(count, messages=messages, **options)
        results = await while_reachable(session, samples)
    finally:
        if is_new:
            # Those of the answers were closed before, and took up to as long; else a later worker closes it.
            with contextlib.suppress(TurnkeepError):
                await session.close(cancel=True, timeout_s=_CLOSE_S / 2)
    if as_json:
        click.echo(encode({"answers": results}))
        return
    for number, result in enumerate(results, 1):
        click.echo(click.style(f"#{number}", bold=True))
        click.echo(printable(result.text))
