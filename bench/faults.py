"""The errors that stop a bench, each with a one-line message, and groups of coroutines that fail together.

A task group alone would raise an exception group, which a command cannot print in one line.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from turnkeep_client.errors import TurnkeepError


class BenchError(TurnkeepError):
    """A bench cannot continue, or a report cannot be used; the message is one line."""


class ReportError(BenchError):
    """A report cannot be written, read or compared."""


@asynccontextmanager
async def in_background(*work: Coroutine[Any, Any, Any], wait: bool = False) -> AsyncGenerator[None]:
    """Run coroutines while the `async with` block runs; at its end cancel them, or with `wait` await them.

    A fault in one of them cancels the others and the block, and is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
            yield
            for task in tasks if not wait else ():
                task.cancel()
    except BaseExceptionGroup as faults:
        raise faults.exceptions[0] from None


async def together(*work: Coroutine[Any, Any, Any]) -> None:
    """Run coroutines concurrently to their end; if one raises, cancel the others and raise its exception."""
    async with in_background(*work, wait=True):
        pass
