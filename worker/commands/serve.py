"""`turnkeep serve`: a worker in the foreground, from settings to exit."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from typing import TYPE_CHECKING

import structlog

from worker.heap import Spare
from worker.logs import configure
from worker.models.blas import computes_on_linux_cpu, preload
from worker.settings import SettingsError

from .progress import terminal_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.app import App
    from worker.settings import Settings

log = structlog.get_logger()

#: The device thread holds the interpreter while it builds a step's graph; at the default of 5 ms the event
#: loop would wait that long for each of its own turns.
_SWITCH_INTERVAL_S = 0.001


def serve(settings: Settings, read_again: Callable[[], Settings]) -> None:
    """Run a worker until SIGINT or SIGTERM; a second signal ends the process at once.

    SIGHUP takes the limits that may change from `read_again`, where the worker has no terminal. On a
    terminal it means that this was closed, and stops the worker like SIGTERM.
    """
    configure(settings.log_format, settings.log_level)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    spare = Spare(settings.spare_memory if computes_on_linux_cpu() else 0)
    preload()  # before anything imports MLX
    asyncio.run(_serve(settings, read_again, spare))


async def _serve(settings: Settings, read_again: Callable[[], Settings], spare: Spare) -> None:
    from worker.app import App

    loop = asyncio.get_running_loop()
    told = False
    with terminal_progress(log.info) as progress:

        def loaded() -> None:
            spare.release()
            gc.collect()
            gc.freeze()  # else each full collection looks at all that was imported: 30 ms of nobody's turn

        app = App(settings, progress=progress, loaded=loaded)
        running = asyncio.create_task(app.run())

        def stop(number: signal.Signals) -> None:
            nonlocal told
            if told:  # threads cannot be interrupted: a download, say
                os._exit(128 + number)
            told = True
            if app.ready.is_set():
                app.stop()
            else:
                running.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        if os.isatty(0):
            loop.add_signal_handler(signal.SIGHUP, stop, signal.SIGHUP)
        else:
            loop.add_signal_handler(signal.SIGHUP, _reload, app, read_again)
        try:
            await running
        except asyncio.CancelledError:
            if not told:
                raise


def _reload(app: App, read_again: Callable[[], Settings]) -> None:
    try:
        app.reload(read_again())
    except SettingsError as error:
        log.error("the settings stay as they are", reason=str(error))  # noqa: TRY400  # a user's fault
