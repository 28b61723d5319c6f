"""`turnkeep serve`: a worker in the foreground, from settings to exit."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import anyio
import click
import structlog

from worker.models.blas import computes_on_linux_cpu, preload
from worker.observe.logs import configure
from worker.process.concurrency import task_group
from worker.process.heap import Spare
from worker.process.settings import SettingsError, describe

from .progress import terminal_progress
from .talking import CLIENT_SETTINGS, command_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from worker.app import App
    from worker.process.settings import Settings

log = structlog.get_logger()

#: The device thread holds the interpreter while it builds a step's graph; at the default of 5 ms the event
#: loop would wait that long for each of its own turns.
_SWITCH_INTERVAL_S = 0.001
#: How long a gateway may take to end; its clients ask the next one again.
_GATEWAY_S = 3.0


def serve(settings: Settings, read_again: Callable[[], Settings], gateway_port: int | None = None) -> None:
    """Run a worker until SIGINT or SIGTERM; a second signal ends the process at once.

    With a `gateway_port` a gateway runs as a process of its own, which ends with this one.
    Without a terminal, SIGHUP applies the disk limits that `read_again` returns. On a terminal SIGHUP means
    that the terminal was closed, and stops the worker like SIGTERM.
    """
    configure(settings.log_format, settings.log_level)
    if _for_people(settings):
        log.info("starting", version=importlib.metadata.version("turnkeep"), data_dir=str(settings.data_dir))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.disable()  # until the start has made its many objects: there is no garbage among them
    spare = Spare(settings.spare_memory if computes_on_linux_cpu() else 0)
    preload()  # before anything imports MLX
    anyio.run(_serve, settings, read_again, spare, gateway_port)


async def _serve(
    settings: Settings, read_again: Callable[[], Settings], spare: Spare, gateway_port: int | None
) -> None:
    from worker.app import App

    with terminal_progress(log.info) as progress:

        def loaded() -> None:
            spare.release()
            gc.enable()
            gc.collect()
            gc.freeze()  # else each full collection looks at all that was imported: 30 ms of nobody's turn

        app = App(settings, progress=progress, loaded=loaded)
        starting = anyio.CancelScope()
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as received:
            async with task_group() as tasks:
                tasks.start_soon(_obey, received, app, starting, read_again)
                if _for_people(settings):
                    tasks.start_soon(_say_what_next, settings, app)
                if gateway_port is not None:
                    tasks.start_soon(_run_gateway, settings, app, gateway_port)
                with starting:
                    await app.run()
                tasks.cancel_scope.cancel()


def _for_people(settings: Settings) -> bool:
    """Whether the log goes to a terminal, for a person to read."""
    return settings.log_format != "json" and sys.stderr.isatty()


async def _say_what_next(settings: Settings, app: App) -> None:
    """Once the worker serves, print how to talk with it."""
    await app.ready.wait()
    chat, ask = (command_line(settings, command) for command in ("chat", "ask"))
    click.secho(
        f'\nIn another terminal:\n  {chat}\n  {ask} "What is the capital of France?"\n'
        "Ctrl-C stops the worker and keeps its sessions.\n",
        err=True,
    )


async def _run_gateway(settings: Settings, app: App, port: int) -> None:
    """Run a gateway once the worker serves. It gets the settings by its environment, as some are secrets."""
    await app.ready.wait()
    standard, environment = type(settings)(), {**os.environ}
    for setting in describe():
        value = getattr(settings, setting.name)
        if setting.name in CLIENT_SETTINGS and value != getattr(standard, setting.name):
            environment[setting.variable] = str(value)
    # Its own session: Ctrl-C is for the worker. If this process is killed, its end of the pipe is closed.
    command = [sys.executable, "-P", "-m", "worker", "gateway", "--port", str(port), "--until-eof"]
    pipe = subprocess.PIPE
    async with await anyio.open_process(
        command, stdin=pipe, stdout=None, stderr=None, env=environment, start_new_session=True
    ) as process:
        try:
            code = await process.wait()
            log.error("the gateway has ended, the worker goes on", code=code)
        finally:
            with contextlib.suppress(ProcessLookupError), anyio.CancelScope(shield=True):
                process.terminate()
                with anyio.move_on_after(_GATEWAY_S):
                    await process.wait()
                process.kill()


async def _obey(
    received: AsyncIterator[signal.Signals],
    app: App,
    starting: anyio.CancelScope,
    read_again: Callable[[], Settings],
) -> None:
    """Handle signals: cancel a worker that is still starting, stop one that serves."""
    told = False
    async for number in received:
        if number == signal.SIGHUP and not os.isatty(0):
            _reload(app, read_again)
        elif told:  # threads cannot be interrupted: a download, say
            os._exit(128 + number)
        else:
            told = True
            if app.ready.is_set():
                app.stop()
            else:
                starting.cancel()


def _reload(app: App, read_again: Callable[[], Settings]) -> None:
    try:
        app.reload(read_again())
    except SettingsError as error:
        log.error("the settings stay as they are", reason=str(error))  # noqa: TRY400  # a user's fault
