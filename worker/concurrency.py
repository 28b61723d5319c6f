"""anyio's task groups, threads and shields, as the whole worker uses them.

A task group owns each task, so none outlives what it works for, and a cancel is repeated until the task is
over: nats-py swallows some (it stands on `asyncio.wait_for`, and flushes under `except CancelledError`).
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import anyio.to_thread
from anyio import CancelScope, TaskFailed, create_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anyio.abc import TaskGroup

T = TypeVar("T")
P = ParamSpec("P")


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Own tasks until all of them are over. The error that ended the group is raised as it is.

    anyio raises an `ExceptionGroup`, also for an error of the body, which is caught by its type further out.
    """
    try:
        async with create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        # Who awaits a task that fails is told so by a `TaskFailed`, beside what the task has raised.
        errors = [error for error in group.exceptions if not isinstance(error, TaskFailed)]
        error = (errors or group.exceptions)[0]
    else:
        return
    raise error  # out here, so that it keeps its cause


async def in_thread(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Run on a thread what would hold up the event loop; a cancel waits for it, as threads know none."""
    return await anyio.to_thread.run_sync(partial(work, *args, **named))


async def shielded(end: Callable[P, Awaitable[object]], *args: P.args, **named: P.kwargs) -> None:
    """Take a part down, also where what it worked for was cancelled."""
    with CancelScope(shield=True):
        await end(*args, **named)
