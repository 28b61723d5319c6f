"""Ctrl-C while modules are imported. Imports as little as possible itself."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Let Ctrl-C end the process at once until the block ends, without a traceback.

    An exception would not do: NumPy raises an ImportError of its own then, and MLX aborts the process.
    """
    interrupt = signal.getsignal(signal.SIGINT)
    # It is ignored in a shell's background job; only the main thread may change it.
    if interrupt is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
