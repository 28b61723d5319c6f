"""Reads the files of a chain on I/O threads, each byte once: from the file into the session's KV arrays.

A file that fails verification is moved to quarantine; the prefix before it is still used.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from cache.names.errors import DoubtfulSnapshotError
from cache.names.tokens import num_common

from . import format as snapshot_format
from .header import read_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cache.kv.arrays import Arrays, BlankTensors
    from cache.names.blocks import Span
    from cache.names.snapshot import KvPart, ModelLayout, States

    from .folder import Folder
    from .io_threads import IoThreads

#: The average number of bytes per file from which on a second thread helps. With fewer, passing the GIL
#: between threads costs more: reading 63 files of 125 KB took 16 ms on two threads, 10 on one.
LEAST_HELPED_BYTES: Final = 512 << 10


@dataclass(frozen=True, slots=True)
class ChainFile:
    """One file of a chain to read."""

    digest: bytes
    #: The position of the file's first token in the session.
    start: int
    #: Whether to read the file's state: only of a chain's last file, if the model's layers have states.
    state: bool = False
    #: The earlier tokens whose sketches (2-bit copies of keys) the file has too; None for most files.
    carried: Span | None = None


@dataclass(frozen=True, slots=True)
class ChainRead:
    """What to read: KV of a session's first `num_tokens` tokens, for a model with this identity."""

    files: Sequence[ChainFile]
    num_tokens: int
    identity: bytes
    model: ModelLayout
    #: Allocate memory for at least so many tokens, since otherwise the next append would copy all KV.
    capacity_tokens: int = 0
    #: Read only this part of the KV.
    only: KvPart | None = None
    #: Read the sketches of so many first tokens from carriers, files with the sketches of earlier blocks too.
    num_carried: int = 0

    def blank(self, folder: Folder) -> BlankTensors:
        """Allocate the arrays to fill. Raises `DoubtfulSnapshotError` if the last file's header is wrong."""
        from cache.kv import arrays  # imports MLX, which a process may have to prepare first

        states: States = ()
        last = self.files[-1]
        if last.state:
            path = folder.path(last.digest)
            states = snapshot_format.peek(path, last.digest, last.start, self.identity, folder.codec)[1]
            self.model.check_states(states, self.num_tokens)
        return arrays.BlankTensors(
            self.model,
            self.num_tokens,
            states,
            capacity_tokens=self.capacity_tokens,
            only=self.only,
            num_carried=self.num_carried,
        )


@dataclass(frozen=True, slots=True)
class RestoredKv:
    """The KV of the first `num_tokens` tokens: evaluated arrays, for `layers.rebuild` on the device thread.

    The arrays have memory for more tokens, with undefined contents. Arrays of layers that see only some
    tokens have memory for exactly these tokens. The read of `size_bytes` bytes took `seconds`.
    """

    num_tokens: int
    tensors: Arrays
    seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """The outcome of `read_chain`."""

    #: The KV of the chain, or of its valid beginning; None if a session cannot resume there.
    restored: RestoredKv | None
    #: The number of valid files at the chain's beginning.
    num_read: int
    #: Why the next file is not valid; None if all files are.
    doubt: str | None


def release_thread() -> None:
    """Release the calling I/O thread's MLX streams, before the thread ends."""
    from cache.kv import arrays

    arrays.release_thread()


def read_chain(folder: Folder, chain: ChainRead, limit_s: float, threads: IoThreads) -> ReadOutcome:
    """Read a chain's KV from its files, in order, on the calling I/O thread and on others of `threads`.

    A file that fails verification goes to quarantine, and the tokens before it are restored, unless a layer
    has a state or sees only some tokens: a shorter session would then need another state and other files.

    Page faults of new memory take most of the time, and two threads handle them twice as fast. Raises
    `TimeoutError` after `limit_s`, and then quarantines nothing.
    """
    started = time.perf_counter()
    until = started + limit_s
    files, model = chain.files, chain.model
    has_state = files[-1].state
    blank, restored, doubt = None, None, None
    num_read = len(files) - 1  # only the last file's state is read, so a doubtful state is in that file
    try:
        blank = chain.blank(folder)
        reading = _Reading(folder, chain, blank, until)
        with reading.helped(threads, limit_s):
            reading.read_files()
        num_read = min(reading.doubts, default=len(files))
        if error := reading.doubts.get(num_read):
            doubt = error.reason
    except DoubtfulSnapshotError as error:
        doubt = str(error)
    if time.perf_counter() > until:  # the caller no longer waits
        raise TimeoutError
    # If a file is doubtful, there is no state at the end of the files before it, and no window.
    if blank is not None and num_read and not ((has_state or model.is_limited) and doubt):
        num_tokens = chain.num_tokens if doubt is None else files[num_read].start
        tensors = blank.arrays()
        try:
            if has_state and model.prove is not None:
                model.prove(tensors, num_tokens)
            seconds, size_bytes = time.perf_counter() - started, sum(reading.sizes[:num_read])
            restored = RestoredKv(num_tokens, tensors, seconds, size_bytes)
        except ValueError as error:
            num_read, doubt = len(files) - 1, str(error)
    if doubt is not None:
        folder.quarantine(files[num_read].digest)
    return ReadOutcome(restored, num_read, doubt)


def num_shared(folder: Folder, digests: Sequence[bytes], packed: bytes) -> list[int]:
    """Return how many first tokens of `packed` each of these snapshots begins with, in order.

    0 for a file that is missing, unreadable or damaged. Reads only the files' headers.
    """
    found = []
    for digest in digests:
        try:
            found.append(num_common(read_name(folder.path(digest), folder.codec).tokens, packed))
        except (DoubtfulSnapshotError, OSError):
            found.append(0)
    return found


class _Reading:
    """A chain's files as a queue: each I/O thread repeatedly reads the next unread file into `blank`."""

    def __init__(self, folder: Folder, chain: ChainRead, blank: BlankTensors, until: float) -> None:
        #: Bytes read, by file.
        self.sizes = [0] * len(chain.files)
        #: The errors of files that failed verification, by file.
        self.doubts: dict[int, DoubtfulSnapshotError] = {}
        self._folder = folder
        self._chain = chain
        self._blank = blank
        self._until = until
        self._todo = deque(range(len(chain.files)))

    @contextmanager
    def helped(self, threads: IoThreads, limit_s: float) -> Iterator[None]:
        """Let other I/O threads read files during the block, if there is enough to read for several.

        Raises `TimeoutError` if one of them does not return in time.
        """
        blank, num_files = self._blank, len(self._chain.files)
        size_bytes = sum(len(row) for buffers in (*blank.places, *blank.carried) for row in buffers.rows)
        num = min(threads.num_threads, num_files) if size_bytes >= num_files * LEAST_HELPED_BYTES else 1
        helpers = [threads.submit(partial(self._help, i, num), limit_s) for i in range(1, num)]
        try:
            with _on_share_of_processors(0, num) if helpers else nullcontext():
                yield
        finally:
            # A helper that has not begun is cancelled; one that is reading its last file is awaited.
            self._todo.clear()
            for helper in helpers:
                if not helper.cancel():
                    helper.result(max(0.0, self._until - time.perf_counter()))

    def _help(self, share: int, num_shares: int) -> None:
        with _on_share_of_processors(share, num_shares):
            self.read_files()

    def read_files(self) -> None:
        """Read unread files until none is left. Raises `TimeoutError`, `OSError`."""
        chain, blank = self._chain, self._blank
        while True:
            try:
                i = self._todo.popleft()
            except IndexError:
                return
            if time.perf_counter() > self._until:
                raise TimeoutError
            file = chain.files[i]
            try:
                self.sizes[i] = snapshot_format.read(
                    self._folder.path(file.digest),
                    file.digest,
                    file.start,
                    chain.identity,
                    self._folder.codec,
                    layout=chain.model.kv if file.carried is None else chain.model.kv + chain.model.carried,
                    places=blank.places,
                    carried=None if file.carried is None else (file.carried, blank.carried),
                    state=blank.state if file.state else None,
                )
            except DoubtfulSnapshotError as error:
                self.doubts[i] = error
                self._todo.clear()  # all later files continue the doubtful one


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
