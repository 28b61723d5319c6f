"""Threads for I/O that may hang: daemon threads, since a hanging disk may block them for ever.

If a read exceeds its time limit, the disk hangs. Until this read returns, all other reads fail at once:
otherwise the disk would block the other threads too.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: How often a waiting restore checks for an overdue read.
_POLL_S: Final = 0.1
_NO_ANSWER: Final = "the disk does not answer"


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    limit_s: float
    future: Future[Any] = field(default_factory=Future)


class IoThreads:
    """The I/O threads. A thread that has run a job calls `on_exit` before it ends."""

    def __init__(self, name: str, num_threads: int, on_exit: Callable[[], None] = lambda: None) -> None:
        self._on_exit = on_exit
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        #: For each thread, the time (`monotonic`) by which its job must be done.
        self._until = [math.inf] * num_threads
        self._threads = [
            threading.Thread(target=self._live, args=(number,), name=f"turnkeep-{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_threads(self) -> int:
        """The number of I/O threads."""
        return len(self._threads)

    @property
    def num_waiting(self) -> int:
        """The number of jobs that wait for a thread."""
        return self._jobs.qsize()

    def are_stuck(self) -> bool:
        """Whether a job has exceeded its time limit on any thread."""
        return min(self._until) < monotonic()

    async def run(self, work: Callable[[], T], limit_s: float) -> T:
        """Run `work` on a thread; return its result or raise its exception. Waits for a free thread.

        Raises `TimeoutError` if any thread's job has exceeded its limit; that thread cannot be used until its
        job returns.
        """
        waiting = asyncio.wrap_future(self.submit(work, limit_s))
        try:
            while not (await asyncio.wait([waiting], timeout=_POLL_S))[0]:
                if self.are_stuck():
                    raise TimeoutError(_NO_ANSWER)
            return waiting.result()
        finally:
            waiting.cancel()  # else asyncio logs an error that nobody waits for any more, with its traceback

    def result(self, future: Future[T], timeout_s: float) -> T:
        """Wait on the calling thread for a future of `submit`; return its result or raise its exception.

        Raises `TimeoutError` as `run` does, and after `timeout_s`; it then cancels work that has not begun.
        """
        until = monotonic() + timeout_s
        while not future.done():
            if self.are_stuck() or monotonic() > until:
                future.cancel()
                raise TimeoutError(_NO_ANSWER)
            wait([future], _POLL_S)
        return future.result()

    def submit(self, work: Callable[[], T], limit_s: float = math.inf) -> Future[T]:
        """Queue `work`, and return its future. Safe on any thread.

        `limit_s` is its time limit, from its start on a thread. While any thread's job exceeds its limit, new
        work is not queued: its future fails with `TimeoutError` at once.
        """
        job = _Job(work, limit_s)
        if self.are_stuck():
            job.future.set_exception(TimeoutError(_NO_ANSWER))
        else:
            self._jobs.put(job)
        return job.future

    async def close(self, timeout_s: float) -> bool:
        """End the threads. False if a thread did not end in time; it then ends with the process."""
        for _ in self._threads:
            self._jobs.put(None)
        ended = [asyncio.to_thread(thread.join, timeout_s) for thread in self._threads]
        await asyncio.gather(*ended)
        return not any(thread.is_alive() for thread in self._threads)

    # The methods below run on the threads.

    def _live(self, number: int) -> None:
        has_worked = False
        while self._run_next(number):
            has_worked = True
        if has_worked:
            self._on_exit()

    def _run_next(self, number: int) -> bool:
        """Run the next job; False once the thread should end.

        This is a separate function because its return frees the job and its result.
        """
        job = self._jobs.get()
        if job is None:
            return False
        if job.future.set_running_or_notify_cancel():
            self._until[number] = monotonic() + job.limit_s
            try:
                found = job.work()
            except BaseException as error:  # noqa: BLE001  # passed on to the waiting caller
                job.future.set_exception(error)
            else:
                job.future.set_result(found)
            finally:
                self._until[number] = math.inf
        return True
