"""The process of one worker, which `turnkeep serve` starts: `python -m worker.main SPARE_BYTES`.

Imports everything, then reads its order from standard input (`worker.reports`), so that the supervisor can
keep such a process ready. If the supervisor dies, standard input ends, and this process ends at once.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Final

import anyio
from anyio import from_thread
from anyio.lowlevel import current_token

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.redact import redact

from .models.blas import preload
from .observe.bare_structlog import structlog
from .observe.logs import configure
from .observe.progress import terminal_progress
from .process.concurrency import task_group
from .process.formatting import fault
from .process.heap import SpareMemory
from .process.installed import as_installed
from .process.open_files import raise_limit
from .process.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from io import RawIOBase

    from anyio.lowlevel import EventLoopToken

    from .app import App
    from .reports import Order, Report

#: The device thread holds the interpreter lock while it builds a step's graph; at the default of 5 ms the
#: event loop would wait that long each time that it wants to run.
_SWITCH_INTERVAL_S: Final = 0.001
#: The pause between two reports of the worker's state.
_STATE_S: Final = 0.5


def main() -> None:
    """Wait for an order and carry it out; then end this process."""
    from .reports import Refusal

    raise_limit()
    reporting = Reporter()
    try:
        _work(reporting)
    except TurnkeepError as error:  # also if MLX cannot be imported, before there is an order
        reporting.send(Refusal(as_installed(redact(str(error))), isinstance(error, SettingsError)))
        sys.exit(1)
    except PermissionError as error:  # as of a folder of models that another user has made
        reporting.send(Refusal(fault(error), is_setting=False))
        sys.exit(1)


def _work(reporting: Reporter) -> None:
    from .reports import decode_order

    spare = SpareMemory(int(sys.argv[1]))
    preload()  # before anything imports MLX
    gc.disable()  # until the start has created its many objects, none of which is garbage
    _import_all()
    # Without a buffer, whose lock would be held by the thread that reads when this process ends.
    lines = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115  # until this process ends
    if not (line := lines.readline()):
        return
    order = decode_order(line)
    spare.fill()
    if order.weighs:
        _weigh(order, reporting)
    else:
        _serve(order, lines, reporting, spare)


def _import_all() -> None:
    """Import what a worker needs, so that a process that waits for its order has done so already."""
    from .models.partial_import import import_mlx_lm

    import_mlx_lm()
    import worker.app
    import worker.device.device
    import worker.models.tokenizer
    import worker.reports  # noqa: F401


class Reporter:
    """Sends reports to the supervisor. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Reports alone go through the pipe: what a library prints comes after the log's lines.
        self._pipe = open(os.dup(1), "wb", closefd=False)  # noqa: SIM115  # until this process ends
        os.dup2(2, 1)
        #: Whether the supervisor has told this process to end, and perhaps reads no more.
        self.is_over = False

    def send(self, report: Report) -> None:
        """Write one report; without a supervisor that reads it do nothing."""
        from .reports import encode

        if self.is_over:
            return
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._pipe.write(encode(report))
            self._pipe.flush()

    def line(self, line: str) -> None:
        """Report a line of the log."""
        from .reports import ReportLine

        self.send(ReportLine(line))

    def step(self, what: str) -> None:
        """Report a step of the start."""
        from .reports import ReportLine

        self.send(ReportLine(what, is_step=True))


def _weigh(order: Order, reporting: Reporter) -> None:
    from .weighing import weigh

    configure(order.settings.log_format, order.settings.log_level)
    reporting.send(weigh(order.settings))


def _serve(order: Order, lines: RawIOBase, reporting: Reporter, spare: SpareMemory) -> None:
    from .app import App
    from .process.datadir import DataDir

    settings = order.settings
    keep = {"keep": reporting.line} if order.tells_log else {}
    configure(settings.log_format, settings.log_level, **keep)
    if order.model is not None:
        structlog.contextvars.bind_contextvars(model=order.model)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)

    def loaded() -> None:
        spare.release()
        gc.enable()
        gc.collect()
        gc.freeze()  # else each full collection visits all imported objects: a pause of 30 ms

    begins = reporting.step if order.tells_steps else structlog.get_logger().info

    async def run() -> None:
        with terminal_progress(begins) as progress:
            app = App(settings, DataDir.of_parent(settings.data_dir), progress=progress, loaded=loaded)
            starting = anyio.CancelScope()
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
                async with task_group() as tasks:
                    # A thread, as a step of the device must not delay the end of an orphan.
                    hear = threading.Thread(
                        target=_hear,
                        args=(lines, app, current_token()),
                        name="orders",
                        daemon=True,
                    )
                    hear.start()
                    tasks.start_soon(_obey, received, app, reporting, starting)
                    tasks.start_soon(_tell, app, reporting)
                    with starting:
                        await app.run()
                    tasks.cancel_scope.cancel()

    anyio.run(run)


def _hear(lines: RawIOBase, app: App, token: EventLoopToken) -> None:
    """Apply settings that have changed; end this process at the end of standard input."""
    from .reports import decode_settings

    for line in lines:
        from_thread.run_sync(app.reload, decode_settings(line), token=token)
    os._exit(1)


async def _obey(
    received: AsyncIterator[signal.Signals], app: App, reporting: Reporter, starting: anyio.CancelScope
) -> None:
    """At a signal stop the worker, at a second one exit."""
    told = False
    async for number in received:
        if told:  # threads, such as a download, cannot be interrupted
            os._exit(128 + number)
        told = reporting.is_over = True
        if app.ready.is_set():
            app.stop()
        else:
            starting.cancel()


async def _tell(app: App, reporting: Reporter) -> None:
    """Report the worker's state again and again, and once what it serves."""
    is_told = False
    while True:
        with anyio.move_on_after(_STATE_S):
            await (anyio.sleep_forever() if is_told else app.ready.wait())
        reporting.send(app.state())
        if app.ready.is_set() and not is_told:
            is_told = True
            reporting.send(app.described())


if __name__ == "__main__":
    main()
