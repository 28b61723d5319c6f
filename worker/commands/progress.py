"""Progress bars of long steps on a terminal; nothing where standard error is no terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker.models.model import Progress


@contextlib.contextmanager
def terminal_progress() -> Iterator[Progress | None]:
    """Give a callback that draws a bar for one step after the other, from any thread.

    A bar is on the screen only while its step lasts: a live display that stays redraws its line for ever,
    and wipes out what others print there.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=Console(stderr=True), transient=True)

    def show(done: int, total: int, what: str) -> None:
        task = next((task for task in bars.tasks if task.description == what), None)
        if done >= total:
            for finished in bars.task_ids:
                bars.remove_task(finished)
            bars.stop()
        elif task is None:
            bars.add_task(what, total=total, completed=done)
            bars.start()
        else:
            bars.update(task.id, completed=done, total=total)

    try:
        yield show
    finally:
        bars.stop()
