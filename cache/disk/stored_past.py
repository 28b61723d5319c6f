"""Reads the KV of a session's first tokens from disk, one layer at a time, some blocks at a time.

Used to prefill prompts that attend to all earlier tokens while the device has the KV of only some of them.
Each block is verified at every read. While one part is used, an I/O thread reads the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from cache.names.blocks import Span
from cache.names.errors import LostPastError
from cache.names.policy import PART
from cache.names.snapshot import KvPart, layer_path

from .chain_reader import read_chain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future
    from typing import TypeAlias

    import mlx.core as mx

    from cache.kv.arrays import Arrays
    from cache.names.policy import Policy

    from .chain_reader import ChainFile, ChainRead, ReadOutcome
    from .folder import Folder
    from .io_threads import IoThreads

    _Part: TypeAlias = tuple[Sequence[ChainFile], Future[ReadOutcome]]

#: The time limit for reading one part, and for its wait for a thread. The device waits, with all answers.
_READ_S: Final = 5.0


@dataclass(slots=True, eq=False)
class StoredPast:
    """A reader of the KV of a session's first tokens. Made by `StoredKv.past`, then used by one thread."""

    folder: Folder
    chain: ChainRead
    policy: Policy
    threads: IoThreads
    #: Bytes read so far.
    size_bytes: int = 0
    #: The file that failed verification, if any, and the reason.
    doubt: tuple[ChainFile, str] | None = None
    #: The layer and the position of the part that is being read in advance, and the read.
    ahead: tuple[tuple[str, int], _Part] | None = None

    @property
    def end(self) -> int:
        """The number of the session's first tokens whose KV can be read."""
        return self.chain.num_tokens

    def parts(self, layer: str, then: str | None = None) -> Iterator[tuple[list[mx.array], list[mx.array]]]:
        """Yield the arrays of a layer's keys and those of its values, for some of the tokens at a time.

        Each array is (1, KV heads, tokens, size). Keys, like values, are one array, or codes, scales and
        biases if KV is quantised. `layer` is the layer's path in snapshots. During its last part, the layer
        `then` is read in advance, if given. Raises `LostPastError` if a file is missing or damaged, or the
        disk does not answer.
        """
        todo = [(layer, at) for at in range(0, self.end, PART)]
        for this, following in zip(todo, [*todo[1:], (then, 0)], strict=True):
            part = self.ahead[1] if self.ahead and self.ahead[0] == this else self._begin(*this)
            after, num = following
            self.ahead = ((after, num), self._begin(after, num)) if after is not None else None
            arrays = self._taken(*part)
            held = [arrays[name] for name, _, _ in self.chain.model.kv if layer_path(name) == layer]
            yield held[: len(held) // 2], held[len(held) // 2 :]

    def _begin(self, layer: str, start: int) -> _Part:
        span, whole = Span(start, min(start + PART, self.end)), self.chain
        ends = (*(one.start for one in whole.files[1:]), self.end)
        files = [
            file
            for file, end in zip(whole.files, ends, strict=True)
            if file.start < span.end and span.start < end
        ]
        part = replace(whole, files=files, only=KvPart(self.policy, (span,), layer))
        read = partial(read_chain, self.folder, part, _READ_S, self.threads)
        return files, self.threads.submit(read, _READ_S)

    def _taken(self, files: Sequence[ChainFile], future: Future[ReadOutcome]) -> Arrays:
        try:
            outcome = self.threads.result(future, 2 * _READ_S)
        except (TimeoutError, RuntimeError, MemoryError, OSError) as error:
            raise LostPastError(f"the KV of earlier tokens could not be read: {error}") from error
        if outcome.restored is None or outcome.doubt is not None:
            self.doubt = files[outcome.num_read], outcome.doubt or ""
            raise LostPastError(f"the KV of earlier tokens is damaged or gone: {outcome.doubt}")
        self.size_bytes += outcome.restored.size_bytes
        return outcome.restored.tensors
