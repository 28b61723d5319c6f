"""Read the files of a match, on I/O threads, each byte once: from the file to its place in the session's KV.

Decides what a doubt costs: the file goes to quarantine, the prefix before it is still good.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from cache.names.errors import DoubtfulSnapshotError

from . import format as snapshot_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from cache.kv.arrays import Arrays, Blank
    from cache.names.snapshot import Layout, ModelLayout, States

    from .folder import Folder

#: Hands work to another I/O thread; cancelled where that has not begun with it.
Help: TypeAlias = "Callable[[Callable[[], None]], Future[None]]"


@dataclass(frozen=True, slots=True)
class ChainFile:
    """One file of a chain, and how many of its tokens are used: all, unless it is the last.

    `state` is what the whole chain is resumed from: the last one's, where the model has such layers.
    """

    digest: bytes
    start: int
    num_tokens: int
    state: bool = False


@dataclass(frozen=True, slots=True)
class Restored:
    """The KV of the first `num_tokens` tokens: evaluated arrays, for `layers.rebuild` on the device thread.

    The arrays have room for more tokens, and what they hold there is undefined. `size_bytes` is what was
    read for it.
    """

    num_tokens: int
    tensors: Arrays
    seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """What came of reading a match. `doubt` is what was wrong with the file after the first `num_read`."""

    restored: Restored | None
    num_read: int
    doubt: str | None


def release_thread() -> None:
    """Prepare an I/O thread for its end."""
    from cache.kv import arrays

    arrays.release_thread()


def restore(
    folder: Folder,
    files: Sequence[ChainFile],
    identity: bytes,
    model: ModelLayout,
    room_tokens: int,
    limit_s: float,
    help_out: Help,
) -> ReadOutcome:
    """Read as many files as are beyond doubt, with the help of another I/O thread where one is free.

    The arrays get room for `room_tokens` at the least: a session that goes on and has none copies all its KV.

    Most of the time goes into pages of fresh memory, which two threads get twice as fast. `help_out` hands
    work to such a thread. Raises `TimeoutError` where it took longer than `limit_s`, and moves no file then.
    """
    from cache.kv import arrays  # MLX, which a process may have to prepare before it is first imported

    started = time.perf_counter()
    until = started + limit_s
    last = files[-1]
    reading, restored, doubt = None, None, None
    num_read = len(files) - 1  # that is the one in doubt, where its state is
    try:
        states: States = ()
        num_tokens = sum(file.num_tokens for file in files)
        if last.state:
            states = snapshot_format.peek(folder.path(last.digest), last.digest, last.start, identity)[1]
            model.check_states(states, num_tokens)
        blank = arrays.Blank(model.kv, max(num_tokens, room_tokens), states)
        reading = _Reading(folder, files, identity, model.kv, blank, until)
        num_read, doubt = reading.run(help_out)
    except DoubtfulSnapshotError as error:
        doubt = str(error)
    if time.perf_counter() > until:  # who wanted it has gone on without it
        raise TimeoutError
    # With a doubt there is no state at the end of what was read.
    if reading is not None and num_read and not (last.state and doubt):
        num_tokens = sum(file.num_tokens for file in files[:num_read])
        size_bytes = sum(reading.sizes[:num_read])
        tensors = blank.arrays()
        try:
            if last.state and model.prove is not None:
                model.prove(tensors, num_tokens)
            restored = Restored(num_tokens, tensors, time.perf_counter() - started, size_bytes)
        except ValueError as error:
            num_read, doubt = len(files) - 1, str(error)
    if doubt is not None:
        folder.quarantine(files[num_read].digest)
    return ReadOutcome(restored, num_read, doubt)


class _Reading:
    """The files of a restore, taken one after the other by the threads that read them."""

    def __init__(
        self,
        folder: Folder,
        files: Sequence[ChainFile],
        identity: bytes,
        layout: Layout,
        blank: Blank,
        until: float,
    ) -> None:
        #: What was read, by file; 0 where it was not.
        self.sizes = [0] * len(files)
        self._folder = folder
        self._files = files
        self._identity = identity
        self._layout = layout
        self._places = blank.places
        self._state = blank.state
        self._until = until
        self._doubts: dict[int, str] = {}
        self._todo = deque(range(len(files)))

    def run(self, help_out: Help) -> tuple[int, str | None]:
        """Read all; return how many files in a row are beyond doubt, and what is wrong with the next.

        Raises `TimeoutError` where the other thread does not return in time.
        """
        helper = None
        if len(self._files) > 1:
            with suppress(RuntimeError):  # the threads are ending: this one reads alone
                helper = help_out(lambda: self._work_on_half(1))
        try:
            if helper is None:
                self._work()
            else:
                self._work_on_half(0)
        finally:
            # It may be at its last file, or still wait for a thread: then nobody needs it any more.
            self._todo.clear()
            if helper is not None and not helper.cancel():
                helper.result(max(0.0, self._until - time.perf_counter()))
            self._places, self._state = [], []
        num_read = min(self._doubts, default=len(self._files))
        return num_read, self._doubts.get(num_read)

    def _work_on_half(self, half: int) -> None:
        with _on_half_of_processors(half):
            self._work()

    def _work(self) -> None:
        while True:
            try:
                i = self._todo.popleft()
            except IndexError:
                return
            if time.perf_counter() > self._until:
                raise TimeoutError
            try:
                self.sizes[i] = self._read(self._files[i])
            except DoubtfulSnapshotError as error:
                self._doubts[i] = str(error)
                self._todo.clear()  # whatever comes after it continues what is in doubt

    def _read(self, file: ChainFile) -> int:
        return snapshot_format.read(
            self._folder.path(file.digest),
            file.digest,
            file.start,
            self._identity,
            layout=self._layout,
            places=self._places,
            num_tokens=file.num_tokens,
            state=self._state if file.state else None,
        )


@contextmanager
def _on_half_of_processors(half: int) -> Iterator[None]:
    """Keep the calling thread to one half (0 or 1) of the processors, as far as the system lets it.

    Linux was seen to wake the second of two threads on the processor of the first, and to leave both there
    for as long as a restore takes, with the other one idle.
    """
    if sys.platform != "linux":
        yield
        return
    allowed = os.sched_getaffinity(0)
    with suppress(OSError, ValueError):  # there is only one
        os.sched_setaffinity(0, sorted(allowed)[half::2])
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, allowed)
