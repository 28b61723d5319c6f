"""Shows the progress of long steps: a line at the start of each step, and on a terminal a progress bar."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress as Bars

    from worker.models.model import Progress


@contextlib.contextmanager
def terminal_progress(
    begins: Callable[[str], object] = lambda _: None, *, of_bytes: bool = True
) -> Iterator[Progress]:
    """Yield a callback `(done, total, what)` that shows progress; any thread may call it.

    The numbers are bytes if `of_bytes`. Calls `begins(what)` once per step. A bar is shown only while its
    step runs: a permanent live display would keep redrawing its line and erase other output there.
    """
    begun: set[str] = set()

    def tell(done: int, total: int, what: str) -> None:
        if what not in begun and done < total:
            begun.add(what)
            begins(what)

    if not sys.stderr.isatty():
        yield tell
        return
    bars = _bars(of_bytes)

    def show(done: int, total: int, what: str) -> None:
        tell(done, total, what)
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


def _bars(of_bytes: bool) -> Bars:
    from rich import progress
    from rich.console import Console

    amount = progress.DownloadColumn() if of_bytes else progress.MofNCompleteColumn()
    columns = progress.TextColumn("{task.description}"), progress.BarColumn(), amount
    console = Console(stderr=True)
    return progress.Progress(*columns, progress.TimeRemainingColumn(), console=console, transient=True)
