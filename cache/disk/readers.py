"""The threads that restores read on: daemons, since a disk that hangs keeps them for as long as it likes.

A read that takes longer than it may is the sign of that. Until it has returned, nothing else is read: the
disk would only get the other threads as well, and every load would wait for it in vain.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: How often it is looked whether a read takes too long.
_POLL_S: Final = 0.1


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    limit_s: float
    future: Future[Any] = field(default_factory=Future)


class Readers:
    """The threads; each calls `on_exit` before it ends, if it has worked."""

    def __init__(self, num_threads: int, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        #: Until when a thread may be at its job.
        self._until = [math.inf] * num_threads
        self._threads = [
            threading.Thread(
                target=self._live, args=(number,), name=f"turnkeep-restore-{number}", daemon=True
            )
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def are_stuck(self) -> bool:
        """Say whether one of them takes longer than it may."""
        return min(self._until) < monotonic()

    async def run(self, work: Callable[[], T], limit_s: float) -> T:
        """Run `work` on a thread, however long it waits for one, and return or raise what it does.

        Raises `TimeoutError` where it takes longer than `limit_s`, or where another one does: its thread is
        lost then for as long as that takes.
        """
        if not self.are_stuck():
            waiting = asyncio.wrap_future(self.submit(work, limit_s))
            while not self.are_stuck():
                if (await asyncio.wait([waiting], timeout=_POLL_S))[0]:
                    return waiting.result()
            waiting.cancel()
        raise TimeoutError("the disk does not answer")

    def submit(self, work: Callable[[], T], limit_s: float) -> Future[T]:
        """Have `work` run on a thread, which may take `limit_s`. Safe on any thread."""
        job = _Job(work, limit_s)
        self._jobs.put(job)
        return job.future

    async def close(self, timeout_s: float) -> bool:
        """End the threads; False where one did not in time: it ends with the process."""
        for _ in self._threads:
            self._jobs.put(None)
        ended = [asyncio.to_thread(thread.join, timeout_s) for thread in self._threads]
        await asyncio.gather(*ended)
        return not any(thread.is_alive() for thread in self._threads)

    # From here on: the threads.

    def _live(self, number: int) -> None:
        has_worked = False
        while self._run_next(number):
            has_worked = True
        if has_worked:
            self._on_exit()

    def _run_next(self, number: int) -> bool:
        """Do one job; False for the end. What it was and what came of it is kept by nobody here."""
        job = self._jobs.get()
        if job is None:
            return False
        if job.future.set_running_or_notify_cancel():
            self._until[number] = monotonic() + job.limit_s
            try:
                found = job.work()
            except BaseException as error:  # noqa: BLE001  # it is told to whoever waits
                job.future.set_exception(error)
            else:
                job.future.set_result(found)
            finally:
                self._until[number] = math.inf
        return True
