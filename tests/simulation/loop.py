"""An event loop over virtual time, and processes in it that can be killed or stalled at any await.

Every task and callback that a simulated process starts has the process in its `contextvars` context. The loop
drops the callbacks of a killed process, as `kill -9` would, and delays those of a stalled process until the
stall ends. Callbacks that are due at the same time run in the order in which asyncio runs them. Seeds differ
in how long everything outside of a process takes: messages, threads, faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import heapq
import inspect
import itertools
import os
import random
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import sniffio
from anyio._backends import _asyncio

from turnkeep_client.calls import Call
from worker.process import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

#: The wall clock at the virtual time 0.
BEGIN_S = 1_800_000_000.0
#: A history of up to three workers that runs more callbacks than this counts as endless.
MOST_HANDLES = 100_000

_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class DeadlockError(Exception):
    """No callback is ready or scheduled, so all waiting tasks would wait for ever."""


class Process:
    """A simulated process. Its wall clock is `skew_s` seconds ahead of the server's."""

    def __init__(self, loop: Loop, name: str, *, skew_s: float = 0.0) -> None:
        self.name = name
        self.skew_s = skew_s
        self.is_dead = False
        self.on_death: list[Callable[[], None]] = []
        self._loop = loop
        self._held: list[_Handle] | None = None

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a coroutine as a task of this process."""
        context = contextvars.copy_context()
        context.run(_process.set, self)
        return self._loop.create_task(coroutine, context=context)

    def kill(self) -> None:
        """Run no code of the process any more, not even a `finally`."""
        self.is_dead = True
        for tell in self.on_death:
            tell()

    def stall(self, for_s: float) -> None:
        """Run no code of the process for `for_s` seconds; only clocks show the process that it stalled."""
        if self._held is None and not self.is_dead:
            self._held = []
            self._loop.outside(self._loop.time() + for_s, self._go_on)

    def holds(self, handle: _Handle) -> bool:
        """Whether a due callback must not run now. Keeps the callbacks of a stalled process for later."""
        if self._held is not None:
            self._held.append(handle)
        return self.is_dead or self._held is not None

    def _go_on(self) -> None:
        held, self._held = self._held or [], None
        self._loop.ready.extend(held)


class _Task(asyncio.Task):  # type: ignore[type-arg]
    """A task that hashes to its sequence number, so that sets of tasks have the same order in each run."""

    sim_number: int
    process: Process | None

    def __hash__(self) -> int:
        return self.sim_number

    def __repr__(self) -> str:  # anyio names the task in the reason of each cancellation
        return f"<task {self.sim_number}>"


class _Handle(list[Any]):
    """A scheduled callback: its time, its number, the callback, its arguments, and its context.

    A list, because lists are made and compared fastest, and each history has thousands of handles. The
    context is None for callbacks outside of all processes.
    """

    __hash__ = object.__hash__

    def cancel(self) -> None:
        self[2] = None

    def cancelled(self) -> bool:
        return self[2] is None

    def when(self) -> float:
        return float(self[0])


def _number(self: Any) -> int:
    try:
        number: int = self.sim_number
    except AttributeError:
        number = self.sim_number = next(_numbers)
    return number


_numbers = itertools.count()


class Loop(asyncio.BaseEventLoop):
    """An event loop over virtual time. `random` makes the random choices of server, device and threads."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.num_handles = 0
        self.most_handles = MOST_HANDLES
        #: By number of a handle: a function to call before that handle runs, for crashes at any await.
        self.at_handle: dict[int, Callable[[], None]] = {}
        self.tasks: list[_Task] = []
        #: The handles that are due.
        self.ready: deque[_Handle] = deque()
        self._timers: list[_Handle] = []
        self._counted = itertools.count()
        self._now_s = 0.0
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._note_fault)
        self.faults: list[str] = []
        self.is_over = False

    def time(self) -> float:
        return self._now_s

    def _make_task(self, loop: Any, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        task: _Task = _Task.__new__(_Task)
        task.sim_number = next(_numbers)  # which `__init__` needs
        task.__init__(coroutine, loop=loop, **named)  # type: ignore[misc]
        task.process = named["context"].get(_process) if named.get("context") else _process.get()
        self.tasks.append(task)
        return task

    def unfinished(self, process: Process) -> list[str]:
        """Return the names of the coroutines that tasks of a process run."""
        return [_name(task.get_coro()) for task in self.tasks if task.process is process and not task.done()]

    def _note_fault(self, _: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.faults.append(f"{context['message']}: {error!r}")

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        if context is None:
            context = contextvars.copy_context()
        handle = _Handle((0.0, 0, callback, args, context))
        self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        if context is None:
            context = contextvars.copy_context()
        handle = _Handle((when, next(self._counted), callback, args, context))
        heapq.heappush(self._timers, handle)
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def outside(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback` at the virtual time `when`, outside of all processes."""
        heapq.heappush(self._timers, _Handle((when, next(self._counted), callback, args, None)))

    def _run_once(self) -> None:
        ready, timers, at_handle = self.ready, self._timers, self.at_handle
        while not self._stopping:  # type: ignore[attr-defined]
            if not ready:
                while timers and timers[0][2] is None:
                    heapq.heappop(timers)
                if not timers:
                    raise DeadlockError
                self._now_s = max(self._now_s, timers[0][0])
            while timers and timers[0][0] <= self._now_s:
                ready.append(heapq.heappop(timers))
            for _ in range(len(ready)):
                handle = ready.popleft()
                _, _, callback, args, context = handle
                if callback is None:
                    continue
                self.num_handles += 1
                if at_handle and (act := at_handle.pop(self.num_handles, None)) is not None:
                    act()
                if context is None:
                    callback(*args)
                elif (process := context.get(_process)) is None or not process.holds(handle):
                    try:
                        context.run(callback, *args)
                    except BaseException as error:  # as asyncio does
                        said = {"message": f"Exception in callback {callback}", "exception": error}
                        self.call_exception_handler(said)
            if self.num_handles > self.most_handles:
                raise TimeoutError("the history does not end")

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def abandon(self) -> None:
        """Close the loop: drop its callbacks, and close unfinished coroutines without warnings."""
        self.is_over = True
        # While its coroutine is closed, a task may start others, which this list then has as well.
        asyncio._set_running_loop(self)
        for task in self.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if not task.done():
                with contextlib.suppress(BaseException):
                    _close(task.get_coro())
            elif not task.cancelled():
                task.exception()
            # anyio's state of a killed task would keep the task, and with it the whole history, for ever.
            _asyncio._task_states.pop(task, None)
        asyncio._set_running_loop(None)
        self.tasks.clear()
        for _, _, callback, args, _ in self.ready:
            if callback == self.create_task:  # asyncio would end an abandoned generator so
                args[0].close()
        self.ready.clear()
        self._timers.clear()
        self.close()


def _name(coroutine: Any) -> str:
    """Return the name of a task's coroutine, or of the one that anyio has wrapped in it."""
    frame = coroutine.cr_frame
    handle = frame.f_locals.get("self") if frame is not None else None
    coroutine = handle._coro if isinstance(handle, anyio.TaskHandle) else coroutine
    return str(coroutine.__qualname__)


def _close(coroutine: Any) -> None:
    """Close a task's coroutine; if it has not started, also the coroutine that anyio has wrapped in it.

    A task that ends an abandoned generator has its `aclose()` instead, which has no frame.
    """
    is_new = inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED
    handle = coroutine.cr_frame.f_locals.get("self") if is_new else None
    coroutine.close()
    if isinstance(handle, anyio.TaskHandle):
        handle._coro.close()


class _Clock:
    """The clocks that the running process reads: virtual time, the wall clock with the process's skew."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.time()

    def time(self) -> float:
        process = _process.get()
        return BEGIN_S + self._loop.time() + (process.skew_s if process else 0.0)


def now_ns(loop: asyncio.AbstractEventLoop) -> int:
    """Return the time of the server's wall clock, in nanoseconds since 1970."""
    return int((BEGIN_S + loop.time()) * 1e6) * 1000


@contextlib.contextmanager
def simulated(seed: int) -> Iterator[Loop]:
    """Yield a loop; in the block, time, threads, random bytes and set order depend on the seed alone."""
    global _numbers  # noqa: PLW0603
    _numbers = itertools.count()
    loop = Loop(seed)
    rng = random.Random(f"bytes {seed}")

    async def run_sync(work: Callable[..., Any], *args: Any, **_: Any) -> Any:
        took_s, is_late = loop.random.expovariate(500), loop.random.random() < 0.5
        with anyio.CancelScope(shield=True):
            if is_late:
                await asyncio.sleep(took_s)
            result = work(*args)
            if not is_late:
                await asyncio.sleep(took_s)
        return result

    patches: list[tuple[Any, str, Any]] = [
        (anyio.to_thread, "run_sync", run_sync),
        (os, "urandom", rng.randbytes),
        (os, "getpid", lambda: 1),  # leases contain both, and their length enters the trace
        (socket, "gethostname", lambda: "world"),
        (clock, "source", _Clock(loop)),
        *((kind, "__hash__", _number) for kind in (asyncio.Event, Call)),
        (sniffio.thread_local, "name", "asyncio"),  # otherwise anyio searches for the running task each time
        (_asyncio.CancelScope, "__hash__", lambda _: 0),  # cannot store a number; its sets are small
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    was_collecting = gc.isenabled()
    gc.disable()  # a collection could close abandoned coroutines at any time
    try:
        for owner, name, value in patches:
            setattr(owner, name, value)
        asyncio.set_event_loop(loop)
        yield loop
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        if not loop.is_over:
            loop.abandon()
        asyncio.set_event_loop(None)
        if was_collecting:
            gc.enable()


def run(loop: Loop, main: Coroutine[Any, Any, Any]) -> Any:
    """Run a history's main coroutine to its end, outside of all processes; return its result."""
    return loop.run_until_complete(main)


__all__ = ["BEGIN_S", "DeadlockError", "Loop", "Process", "now_ns", "run", "simulated", "time"]
