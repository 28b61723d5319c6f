"""Ends asyncio tasks for sure. On Python 3.11 `asyncio.wait_for`, which nats-py uses, can lose a cancel."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterable

log = structlog.get_logger()

_AGAIN_S = 0.5


async def end(tasks: Iterable[asyncio.Task[Any]], timeout_s: float = 5.0) -> None:
    """Cancel tasks again and again until they are over, or time is up; what they raise is dropped."""
    running = set(tasks)
    deadline = asyncio.get_running_loop().time() + timeout_s
    while running and asyncio.get_running_loop().time() < deadline:
        for task in running:
            task.cancel()
        done, running = await asyncio.wait(running, timeout=_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # looked at, so that asyncio does not complain of it
    for task in running:
        log.warning("a task did not end in time", task=task.get_name())
