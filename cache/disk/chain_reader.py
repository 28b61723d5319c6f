"""Read the files of a match on I/O threads, each byte once: from the file into the session's KV arrays.

A file that fails verification is moved to quarantine; the prefix before it is still used.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from cache.names.errors import DoubtfulSnapshotError, PartialSnapshotError

from . import format as snapshot_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from cache.kv.arrays import Arrays, Blank
    from cache.names.blocks import Span
    from cache.names.snapshot import ModelLayout, Only, States

    from .folder import Folder

#: The average number of bytes per file from which on a second thread helps. With fewer, passing the GIL
#: between threads costs more: reading 63 files of 125 KB took 16 ms on two threads, 10 on one.
LEAST_HELPED_BYTES: Final = 512 << 10

#: A function that queues work for another I/O thread and returns its future (work that has not begun can be
#: cancelled), and the number of these threads.
Helpers: TypeAlias = "tuple[Callable[[Callable[[], None]], Future[None]], int]"


@dataclass(frozen=True, slots=True)
class ChainFile:
    """One file of a chain, and the position of its first token.

    `state` says whether to read the file's state: only of a chain's last file, and only if the model's layers
    have states. If the file also has sketches (2-bit copies of keys) of earlier tokens, `carried` are these
    tokens.
    """

    digest: bytes
    start: int
    state: bool = False
    carried: Span | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `restore` reads: the KV of the first `num_tokens` tokens, of a model with this identity.

    Memory is allocated for at least `room_tokens` tokens, since otherwise the next append would copy all KV.
    With `only` just some layers are read. The sketches of the first `num_carried` tokens are read from
    carriers, which are files that also contain the sketches of earlier blocks.
    """

    num_tokens: int
    identity: bytes
    model: ModelLayout
    room_tokens: int = 0
    only: Only | None = None
    num_carried: int = 0

    def blank(self, folder: Folder, last: ChainFile) -> Blank:
        """Allocate the arrays, also for the state in the `last` file. Raises `DoubtfulSnapshotError`."""
        from cache.kv import arrays  # imports MLX, which a process may have to prepare first

        states: States = ()
        if last.state:
            path = folder.path(last.digest)
            states = snapshot_format.peek(path, last.digest, last.start, self.identity, folder.codec)[1]
            self.model.check_states(states, self.num_tokens)
        return arrays.Blank(
            self.model.kv,
            self.num_tokens,
            states,
            room_tokens=self.room_tokens,
            reaches=self.model.reaches,
            only=self.only,
            num_carriable=len(self.model.carried),
            num_carried=self.num_carried,
        )


@dataclass(frozen=True, slots=True)
class RestoredKv:
    """The KV of the first `num_tokens` tokens: evaluated arrays, for `layers.rebuild` on the device thread.

    The arrays have unused room for more tokens, with undefined contents. Arrays of layers that see only some
    tokens hold exactly these tokens, without more room. `size_bytes` bytes were read from disk.
    """

    num_tokens: int
    tensors: Arrays
    seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """The outcome of a read: `num_read` valid files, and in `doubt` the fault of the next file, if any.

    If `is_partial`, the next file is undamaged, but lacks sections that were evicted.
    """

    restored: RestoredKv | None
    num_read: int
    doubt: str | None
    is_partial: bool = False


def release_thread() -> None:
    """Release the calling I/O thread's MLX streams, before the thread ends."""
    from cache.kv import arrays

    arrays.release_thread()


def restore(
    folder: Folder, files: Sequence[ChainFile], wanted: Wanted, limit_s: float, helpers: Helpers
) -> ReadOutcome:
    """Read the `wanted` KV from files in order, with the help of the other I/O threads.

    A file that fails verification goes to quarantine, and the tokens before it are restored, unless a layer
    has a state or sees only some tokens: a shorter session would then need another state and other files.

    Page faults of new memory take most of the time, and two threads handle them twice as fast. Raises
    `TimeoutError` after `limit_s`, and then quarantines nothing.
    """
    started = time.perf_counter()
    until = started + limit_s
    last, model = files[-1], wanted.model
    reading, restored, doubt, is_partial = None, None, None, False
    num_read = len(files) - 1  # only the last file's state is read, so a doubtful state is in that file
    try:
        blank = wanted.blank(folder, last)
        reading = _Reading(folder, files, wanted, blank, until)
        num_read, error = reading.run(helpers)
        doubt, is_partial = error.reason if error else None, isinstance(error, PartialSnapshotError)
    except DoubtfulSnapshotError as error:
        doubt = str(error)
    if time.perf_counter() > until:  # the caller no longer waits
        raise TimeoutError
    # If a file is doubtful, there is no state at the end of the files before it, and no window.
    if reading is not None and num_read and not ((last.state or model.is_limited) and doubt):
        num_tokens = wanted.num_tokens if doubt is None else files[num_read].start
        tensors = blank.arrays()
        try:
            if last.state and model.prove is not None:
                model.prove(tensors, num_tokens)
            seconds, size_bytes = time.perf_counter() - started, sum(reading.sizes[:num_read])
            restored = RestoredKv(num_tokens, tensors, seconds, size_bytes)
        except ValueError as error:
            num_read, doubt = len(files) - 1, str(error)
    if doubt is not None and not is_partial:
        folder.quarantine(files[num_read].digest)
    return ReadOutcome(restored, num_read, doubt, is_partial)


class _Reading:
    """The files of a restore, as a queue: each I/O thread repeatedly reads the next unread file."""

    def __init__(
        self, folder: Folder, files: Sequence[ChainFile], wanted: Wanted, blank: Blank, until: float
    ) -> None:
        #: Bytes read, by file.
        self.sizes = [0] * len(files)
        self._folder = folder
        self._files = files
        self._identity = wanted.identity
        self._layout = wanted.model.kv
        self._carrier_layout = self._layout + wanted.model.carried
        self._places = blank.places
        self._carried = blank.carried
        self._state = blank.state
        self._until = until
        self._doubts: dict[int, DoubtfulSnapshotError] = {}
        self._todo = deque(range(len(files)))

    def run(self, helpers: Helpers) -> tuple[int, DoubtfulSnapshotError | None]:
        """Read all files; return how many are valid, from the first on, and the error of the next one.

        Raises `TimeoutError` if another thread does not return in time.
        """
        help_out, num_helpers = helpers
        helping: list[Future[None]] = []
        size_bytes = sum(len(row) for place in (*self._places, *self._carried) for row in place.rows)
        num = min(num_helpers, len(self._files) - 1)
        if size_bytes >= len(self._files) * LEAST_HELPED_BYTES:
            with suppress(RuntimeError):  # no other thread is left: read alone
                helping += (help_out(partial(self._work_on_share, i, num + 1)) for i in range(1, num + 1))
        try:
            if helping:
                self._work_on_share(0, num + 1)
            else:
                self._work()
        finally:
            # A helper that has not begun is cancelled; one that is reading its last file is awaited.
            self._todo.clear()
            for helper in helping:
                if not helper.cancel():
                    helper.result(max(0.0, self._until - time.perf_counter()))
            self._places, self._carried, self._state = [], [], []
        num_read = min(self._doubts, default=len(self._files))
        return num_read, self._doubts.get(num_read)

    def _work_on_share(self, share: int, num_shares: int) -> None:
        with _on_share_of_processors(share, num_shares):
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
                self._doubts[i] = error
                self._todo.clear()  # all later files continue the doubtful one

    def _read(self, file: ChainFile) -> int:
        return snapshot_format.read(
            self._folder.path(file.digest),
            file.digest,
            file.start,
            self._identity,
            self._folder.codec,
            layout=self._layout if file.carried is None else self._carrier_layout,
            places=self._places,
            carried=None if file.carried is None else (file.carried, self._carried),
            state=self._state if file.state else None,
        )


@contextmanager
def _on_share_of_processors(share: int, num_shares: int) -> Iterator[None]:
    """Bind the calling thread to a share of the processors in the block, if the system supports it.

    Linux has been seen to run two threads on one processor for a whole restore, while another was idle.
    """
    if sys.platform == "linux":
        allowed = os.sched_getaffinity(0)
        with suppress(OSError, ValueError):  # there is only one processor
            os.sched_setaffinity(0, sorted(allowed)[share::num_shares])
        try:
            yield
        finally:
            with suppress(OSError):
                os.sched_setaffinity(0, allowed)
    else:
        yield
