"""The command `run`: chats with a model; starts a worker for this if none is running."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from turnkeep_client.errors import NoWorkerError
from worker.models.converted import source_name
from worker.process.children import PROGRAM
from worker.process.datadir import holder, starting_pid
from worker.process.installed import program

from .flags import session_option, tenant_option, with_answer_options, with_settings
from .nats_connection import CLIENT_SETTINGS, talk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnkeep_client.client import Client

    from .flags import AnswerOptions, GivenSettings

#: How long the worker of `run` may take to end, as it writes the last KV to disk.
_ENDING_S: Final = 30.0
_POLL_S: Final = 0.2
_INTERRUPTED: Final = 130
#: What a question has, and the name of a model lacks.
_MARKS: Final = re.compile(r"[\s?!]")


@click.command()
@click.argument("model", required=False)
@click.argument("message", required=False)
@session_option("Session to continue. [default: chat; with a message a new one]")
@tenant_option
@with_answer_options
@with_settings(*CLIENT_SETTINGS)
def run(
    given: GivenSettings,
    model: str | None,
    message: str | None,
    name: str | None,
    tenant: str,
    options: AnswerOptions,
) -> None:
    """Talk with a model; downloads it and starts a worker if need be.

    With MESSAGE it answers that alone. MODEL is a name of `turnkeep model list`, a folder, a .gguf file or a
    hub id; by default it is the model of the running worker, or else the packaged one. A worker that this
    command starts ends with it; a worker that is running already is used, and serves MODEL to everybody
    until it is next started.
    """
    from .ask import whole_question

    if model is not None:
        model = _checked(model)
    settings = given.load()

    async def check_model(client: Client) -> None:
        serves = await _model_of(client, settings.data_dir)
        if model is not None and is_there and not _names(model, serves):
            await _change(client, model, serves, settings.data_dir)

    is_there = settings.nats is not None or holder(settings.data_dir) is not None
    words = [*given.options(), *(() if model is None else ("--model", model))]
    with contextlib.nullcontext() if is_there else _worker(words):
        talk(settings, tenant, check_model)
        # Read the question outside an event loop, in which no signal would end the wait for it.
        text = None if message is None and sys.stdin.isatty() else whole_question(message)
        answered = talk(settings, tenant, lambda client: _say(client, name, text, options))
    if not answered:
        sys.exit(_INTERRUPTED)


def _checked(model: str) -> str:
    """Return a model's name; of a file or folder its whole path, since the worker has a folder of its own.

    Raises `click.UsageError` if the name is empty or looks like a question.
    """
    if not model.strip():
        raise click.UsageError("the first argument of run is a model, and it is empty")
    if Path(model).exists():
        return str(Path(model).absolute())
    if _MARKS.search(model):
        raise click.UsageError(
            f"the first argument of run is a model, and {model!r} is none; to ask it:"
            f" echo {shlex.quote(model)} | {program()} run"
        )
    return model


async def _say(client: Client, name: str | None, text: str | None, options: AnswerOptions) -> bool:
    """Print the answer to `text`, or hold a conversation; return whether it was answered."""
    from .ask import answer
    from .chat import converse

    if text is not None:
        return await answer(client, name, text, options, as_json=False)
    await converse(client, name or "chat", options)
    return True


async def _change(client: Client, model: str, serves: str, data_dir: Path) -> None:
    """Let the running worker serve another model; return once it does."""
    click.echo(f"changing the worker's model from {serves} to {model}", err=True)
    await client.load(model)  # when it returns, the old model's worker has ended
    await _model_of(client, data_dir)


def _names(model: str, served: str) -> bool:
    """Return whether a name or path is that of the served model, or a part of its name.

    A worker names a GGUF file and its conversion by the file's stem, and a download by its hub id.
    """
    path = Path(model)
    of_hub = [part.replace("--", "/") for part in path.parts if part.startswith("models--")]
    name = Path(of_hub[-1]).name if of_hub else path.name.removesuffix(".gguf")
    return (source_name(path) or name).casefold() in served.casefold()


async def _model_of(client: Client, data_dir: Path) -> str:
    """Ask the worker for its model; wait for a worker that is starting. Raises `NoWorkerError`."""
    while True:
        try:
            return (await client.worker_metrics()).model
        except NoWorkerError:
            if starting_pid(data_dir) is None:
                raise
        await asyncio.sleep(_POLL_S)


@contextlib.contextmanager
def _worker(options: list[str]) -> Iterator[None]:
    """Run a worker until the block ends; enter the block once the worker serves.

    Prints the steps of its start, and its warnings. The worker has its own process session, since Ctrl-C ends
    only an answer; it ends if this process dies.
    """
    click.echo("starting a worker; it ends with this command", err=True)
    command = [*PROGRAM, "serve", "--log-level", "warning", "--until-eof", *options]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            lines = iter(process.stdout or ())
            while (line := next(lines, b"")) not in {b"", b"ready\n"}:
                if not sys.stderr.isatty():  # there the worker shows a bar
                    click.echo(line.rstrip(), err=True)
            if not line:
                sys.exit(process.wait())  # the worker has printed the reason
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_S)
            process.kill()
