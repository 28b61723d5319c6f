"""Shows the progress of long steps: a line at the start of each, then a bar or, in a pipe, more lines."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Final

from worker.process.formatting import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress as Bars

#: The pause between two lines about one step.
_EVERY_S: Final = 5.0


@contextlib.contextmanager
def terminal_progress(
    begins: Callable[[str], object] = lambda _: None, *, of_bytes: bool = True
) -> Iterator[Callable[[int, int, str], None]]:
    """Yield a callback `(done, total, what)` that shows progress; any thread may call it.

    The numbers are bytes if `of_bytes`. Calls `begins(what)` once per step; without a terminal also with how
    far a step is, every 5 s. A bar is shown only while its step runs: a permanent live display would keep
    redrawing its line and erase other output there.
    """
    has_bars = sys.stderr.isatty()
    told_s: dict[str, float] = {}

    def tell(done: int, total: int, what: str) -> None:
        now_s = time.monotonic()
        if done >= total:
            return
        if what not in told_s:
            begins(what)
        elif not has_bars and now_s - told_s[what] >= _EVERY_S:
            begins(f"{what}: {size(done)} of {size(total)}" if of_bytes else f"{what}: {done} of {total}")
        else:
            return
        told_s[what] = now_s

    if not has_bars:
        yield tell
        return
    bars = _bars(of_bytes)

    def show(done: int, total: int, what: str) -> None:
        tell(done, total, what)
        _show(bars, done, total, what)

    try:
        yield show
    finally:
        bars.stop()


def _show(bars: Bars, done: int, total: int, what: str) -> None:
    """Show a step's bar while it runs."""
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


def _bars(of_bytes: bool) -> Bars:
    from rich import progress
    from rich.console import Console

    amount = progress.DownloadColumn() if of_bytes else progress.MofNCompleteColumn()
    columns = progress.TextColumn("{task.description}"), progress.BarColumn(), amount
    console = Console(stderr=True)
    return progress.Progress(*columns, progress.TimeRemainingColumn(), console=console, transient=True)
