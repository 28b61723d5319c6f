"""Wraps anyio's task groups, threads and shields for the whole worker, and has its locks.

Each task belongs to a task group, so no task is forgotten. A task group repeats a cancellation until the task
ends, because nats-py swallows some cancellations (it uses `asyncio.wait_for`, and flushes under `except
CancelledError`).
"""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import anyio.to_thread
from anyio import CancelScope, Event, TaskFailed, create_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from anyio.abc import TaskGroup

T = TypeVar("T")
P = ParamSpec("P")


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """Run tasks in a group; leave the block when all of them have ended.

    Raises the first error itself, not an `ExceptionGroup`: anyio raises a group even for an error of the
    body, but callers catch errors by their types.
    """
    try:
        async with create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        # A task that awaits a failed task gets a `TaskFailed`; the group has the original error too.
        errors = [error for error in group.exceptions if not isinstance(error, TaskFailed)]
        error = (errors or group.exceptions)[0]
    else:
        return
    raise error  # outside of `except`, to keep its cause


@asynccontextmanager
async def background(part: Callable[[], Coroutine[Any, Any, object]]) -> AsyncIterator[None]:
    """Run `part` as a task until the block ends, then cancel it."""
    async with task_group() as tasks:
        tasks.start_soon(part)
        yield
        tasks.cancel_scope.cancel()


async def in_thread(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Run blocking work on a thread.

    A cancelled caller still waits until the work is done, as threads cannot be cancelled.
    """
    return await anyio.to_thread.run_sync(partial(work, *args, **named))


async def step_in_thread(tasks: TaskGroup, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Run blocking work on a thread, in a task of `tasks`.

    A cancelled caller ends at once; the group `tasks` waits until the work is done.
    """
    return await tasks.start_soon(partial(in_thread, work, *args, **named))


async def shielded(end: Callable[P, Awaitable[object]], *args: P.args, **named: P.kwargs) -> None:
    """Await `end(...)` until it completes, even if the caller is cancelled."""
    with CancelScope(shield=True):
        await end(*args, **named)


class SharedLock:
    """A shared/exclusive lock, for work that must run alone. Event loop only."""

    def __init__(self) -> None:
        self._num = 0
        self._is_shut = False  # while a request runs alone, or waits for the others to end
        self._changed = Event()

    @asynccontextmanager
    async def enter(self, stopped: Callable[[], bool], *, alone: bool = False) -> AsyncIterator[None]:
        """Hold the lock inside the block: shared with others, or exclusively if `alone`.

        A caller whose `stopped()` is true enters without waiting, since it will not do the work. Call
        `recheck` when the result of `stopped()` may have changed.
        """
        while self._is_shut and not stopped():
            await self._changed.wait()
        shuts = alone and not self._is_shut
        self._is_shut = self._is_shut or shuts
        try:
            while shuts and self._num and not stopped():
                await self._changed.wait()
            self._num += 1
            try:
                yield
            finally:
                self._num -= 1
        finally:
            if shuts:
                self._is_shut = False
            if shuts or not self._num:
                self.recheck()

    def recheck(self) -> None:
        """Wake all callers that wait in `enter`, in the order of arrival, to check `stopped()` again."""
        changed, self._changed = self._changed, Event()
        changed.set()


class Rotation:
    """Places for tasks, which tenants get in turn, however many tasks of one wait. Event loop only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_taken = 0
        self._waiting: dict[str, deque[Event]] = {}  # by tenant, the next one first

    @asynccontextmanager
    async def enter(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place, and keep it inside the block."""
        if self._num_taken < self._most:
            self._num_taken += 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def in_thread(self, tenant: str, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Wait for a place, and run blocking work on a thread."""
        async with self.enter(tenant):
            return await in_thread(work, *args, **named)

    async def _wait(self, tenant: str) -> None:
        entered = Event()
        self._waiting.setdefault(tenant, deque()).append(entered)
        try:
            await entered.wait()
        except BaseException:
            if entered.is_set():  # it has the place already
                self._pass_on()
            else:
                self._waiting[tenant].remove(entered)
                if not self._waiting[tenant]:
                    del self._waiting[tenant]
            raise

    def _pass_on(self) -> None:
        """Give a place to the next tenant's first task; that tenant is last from then on."""
        if not self._waiting:
            self._num_taken -= 1
            return
        tenant = next(iter(self._waiting))
        queue = self._waiting.pop(tenant)
        queue.popleft().set()
        if queue:
            self._waiting[tenant] = queue
