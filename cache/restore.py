"""Read the files of a match, on an I/O thread: verify each, load it, join them along the tokens.

Decides what a doubt costs: the file goes to quarantine, the prefix before it is still good.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import format as snapshot_format
from .format import DoubtfulSnapshotError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .folder import Folder
    from .format import Arrays, Layout


@dataclass(frozen=True, slots=True)
class Piece:
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

    `size_bytes` is what was read for it.
    """

    num_tokens: int
    tensors: Arrays
    seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of reading a match. `doubt` is what was wrong with the piece after the first `num_read`."""

    restored: Restored | None
    num_read: int
    doubt: str | None
    quarantined_bytes: int


def leave(together: threading.Barrier) -> None:
    """Prepare an I/O thread for its end; waits for the others, so that each of them gets its turn."""
    with suppress(threading.BrokenBarrierError):
        together.wait(timeout=5.0)
    snapshot_format.leave_thread()


def restore(folder: Folder, pieces: Sequence[Piece], identity: bytes) -> Outcome:
    """Read as many pieces as are beyond doubt."""
    started = time.perf_counter()
    parts: list[Arrays] = []
    layout: Layout | None = None
    doubt = None
    size_bytes = num_tokens = 0
    for piece in pieces:
        path = folder.path(piece.digest)
        try:
            layout, arrays = snapshot_format.load(
                path, piece.digest, piece.start, identity, like=layout, state=piece.state
            )
            size_bytes += path.stat().st_size
        except (DoubtfulSnapshotError, OSError) as error:
            doubt = str(error)
            folder.quarantine(piece.digest)
            break
        parts.append(arrays)
        num_tokens += piece.num_tokens
    num_read = len(parts)
    if doubt is not None and pieces[-1].state:
        parts.clear()  # what was read has no state at its end
    restored = None
    if parts:
        tensors = snapshot_format.join(parts, num_tokens)
        restored = Restored(num_tokens, tensors, time.perf_counter() - started, size_bytes)
    return Outcome(restored, num_read, doubt, folder.quarantined_bytes() if doubt else 0)
