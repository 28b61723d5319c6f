"""The command `run`: chats with a model; starts a worker for this if none is running."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import click

from turnkeep_client.errors import NoWorkerError, TurnkeepError
from worker.process.children import PROGRAM
from worker.process.datadir import owner, starting_pid
from worker.process.installed import program

from .flags import reasoning_option, tenant_option, with_sampling, with_settings
from .screen import complain
from .talking import CLIENT_SETTINGS, talk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from turnkeep_client.client import Client
    from turnkeep_client.session import Sampling

    from .flags import Given

#: How long the worker of `run` may take to end, as it writes the last KV to disk.
_ENDING_S: Final = 30.0
_POLL_S: Final = 0.2
_INTERRUPTED: Final = 130


@click.command()
@click.argument("model", required=False)
@click.argument("message", required=False)
@click.option(
    "--session", "name", metavar="NAME", help="Session to continue. [default: chat; with a message a new one]"
)
@tenant_option
@reasoning_option
@with_sampling
@with_settings(*CLIENT_SETTINGS)
def run(
    given: Given,
    model: str | None,
    message: str | None,
    name: str | None,
    tenant: str,
    reasoning: str | None,
    system: str | None,
    sampling: Sampling,
) -> None:
    """Talk with MODEL, or answer MESSAGE; downloads the model, and starts a worker, if need be.

    MODEL is a name of `turnkeep model list`, a folder, a .gguf file or a hub id; by default it is the model
    of the running worker, or else the packaged one. A worker that this command starts ends with it; a worker
    that is running already stays, and changes to MODEL until it is next started.
    """
    from .ask import answer, whole_question

    settings = given.load()

    async def check_model(client: Client) -> None:
        serves = await _model_of(client, settings.data_dir)
        if model is not None and is_there and not _names(model, serves):
            await _change(client, model, serves, settings.data_dir, question)

    async def say(client: Client) -> bool:
        if text is not None:
            return await answer(client, name, text, system, sampling, as_json=False, reasoning=reasoning)
        from .chat import converse

        await converse(client, name or "chat", system, sampling, reasoning)
        return True

    is_there = settings.nats is not None or owner(settings.data_dir) is not None
    options = [*given.options(), *(() if model is None else ("--model", model))]
    question = model if message is None else None
    with contextlib.nullcontext() if is_there else _worker(options, question):
        talk(settings, tenant, check_model)
        # Read the question outside an event loop, in which no signal would end the wait for it.
        text = None if message is None and sys.stdin.isatty() else whole_question(message)
        answered = talk(settings, tenant, say)
    if not answered:
        sys.exit(_INTERRUPTED)


async def _change(client: Client, model: str, serves: str, data_dir: Path, question: str | None) -> None:
    """Let the running worker serve another model; return once it does."""
    click.echo(f"changing the worker's model from {serves} to {model}", err=True)
    try:
        await client.load(model)
    except TurnkeepError as error:
        ask = f"; or ask {serves}: {program()} ask {shlex.quote(question)}" if question is not None else ""
        raise TurnkeepError(f"{error}{ask}") from None
    while not _names(model, await _model_of(client, data_dir)):  # noqa: ASYNC110  # metrics tell it
        await asyncio.sleep(_POLL_S)


def _names(model: str, served: str) -> bool:
    return model.rstrip("/").rpartition("/")[2].casefold() in served.casefold()


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
def _worker(options: list[str], question: str | None) -> Iterator[None]:
    """Run a worker until the block ends; enter the block once the worker serves.

    Prints the steps of its start, and its warnings. If the worker cannot serve, and `question` is given
    (perhaps mistaken for a model), print how to ask it.
    The worker has its own process session, since Ctrl-C ends only an answer; it ends if this process dies.
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
                if (code := process.wait()) and question is not None:  # the worker has printed the reason
                    complain(
                        "is that a question? The first word after `run` is the model; to ask the default one:"
                        f" echo {shlex.quote(question)} | {program()} run"
                    )
                sys.exit(code)
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING_S)
            process.kill()
