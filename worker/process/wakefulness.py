"""Keeps macOS from sleeping while requests are at work, by its program `caffeinate`."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Final

import structlog
from anyio import sleep, sleep_forever

if TYPE_CHECKING:
    from collections.abc import Callable

log = structlog.get_logger(__name__)

_LOOK_S: Final = 1.0


async def keep_awake(is_busy: Callable[[], bool]) -> None:
    """Prevent idle sleep while `is_busy`, until cancelled. A closed lid still puts the machine to sleep."""
    process: subprocess.Popen[bytes] | None = None
    try:
        while True:
            if not is_busy():
                _end(process)
                process = None
            elif process is None:
                # With -w it ends with this process, even if that is killed.
                words = ["caffeinate", "-i", "-w", str(os.getpid())]
                process = subprocess.Popen(words, stdin=subprocess.DEVNULL)  # noqa: ASYNC220  # it is short
            await sleep(_LOOK_S)
    except OSError as error:
        log.warning("this machine may sleep while it answers", error=str(error))
        await sleep_forever()
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        process.terminate()
        process.wait()
