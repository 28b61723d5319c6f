"""Loading: chooses the files to read for a match, and handles files that fail verification.

Belongs to the event loop; reads on I/O threads. Called only by the store, which makes and releases matches.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import structlog

from cache.disk.chain_reader import ChainFile, Wanted, release_thread, restore
from cache.disk.read_threads import ReadThreads
from cache.disk.stored_past import StoredPast
from cache.names.blocks import Span
from cache.names.policy import FULL
from cache.names.snapshot import CARRIER, Only, carried

from .prefixes import Prefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cache.disk.chain_reader import RestoredKv
    from cache.disk.folder import Folder
    from cache.disk.write_queue import WriteQueue
    from cache.names.identity import Identity
    from cache.names.policy import Policy
    from cache.names.snapshot import ModelLayout

    from .index import Index
    from .nodes import Node
    from .remover import Remover

_log = structlog.get_logger("turnkeep.cache")

#: Reading threads. Two read faster than one even on two processors; on sixteen processors one, two and four
#: threads read 2.1, 5.6 and 8.3 GB/s from the page cache into fresh memory.
_IO_THREADS: Final = min(max((os.cpu_count() or 1) // 2, 2), 4)
#: The time limit of a load, plus the time for its bytes at this rate; a slower load is a miss.
LOAD_S: Final = 5.0
_LOAD_BYTES_PER_S: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Match:
    """The longest stored prefix of some tokens: `num_tokens` tokens, stored in `nodes`, in order.

    The prefix may end within the last node. If the model's layers have states, the prefix ends with the last
    node, which has the state after it. The nodes are protected from eviction until `load` or `release`.
    """

    num_tokens: int
    nodes: tuple[Node, ...] = ()
    policy: Policy = FULL


class Form:
    """The identity and the layout of the model's snapshots under one cache policy."""

    def __init__(self, identity: Identity, layout: ModelLayout, index: Index) -> None:
        self.identity = identity
        self.digest = identity.digest()
        self.layout = layout
        self.stateful = bool(layout.states)
        self.prefixes = Prefixes(index, identity.block_tokens, layout)

    def carried(self, span: Span) -> Span | None:
        """Return the earlier tokens whose sketches (2-bit keys) the file of `span` has too; mostly None."""
        return carried(span, self.identity.block_tokens) if self.layout.carried else None

    def file(self, node: Node, end: int, *, state: bool = False) -> ChainFile:
        """Return the `ChainFile` of a node whose tokens end at position `end`."""
        span = Span(end - node.num_tokens, end)
        return ChainFile(node.digest, span.start, state=state, carried=self.carried(span))

    def carriers(self, match: Match) -> dict[Node, Span]:
        """Map each node whose file also has sketches (2-bit keys) of earlier tokens to these tokens."""
        every = match.nodes[CARRIER - 1 :: CARRIER]  # all but the last ones are whole blocks
        found = {node: self.carried(Span(node.start, node.end)) for node in every}
        return {node: span for node, span in found.items() if span is not None}

    def files(
        self, match: Match, seen: Sequence[Span], carriers: Mapping[Node, Span], *, state: bool
    ) -> list[tuple[Node, ChainFile]]:
        """Return the files to read for a match, in order, with their nodes.

        They are the files of `carriers` (those with sketches of earlier tokens), the files with tokens in
        `seen`, and with `state` the last file.
        """
        # Positions are sums of lengths, not read from files: the arrays must be filled without a gap.
        ends = list(accumulate(node.num_tokens for node in match.nodes))
        last = len(ends) - 1
        wanted = {last} if state else set()
        wanted |= {i for i in range(CARRIER - 1, len(ends), CARRIER) if match.nodes[i] in carriers}
        for span in seen:
            wanted.update(range(bisect_right(ends, span.start), min(bisect_left(ends, span.end), last) + 1))
        nodes = match.nodes
        return [(nodes[i], self.file(nodes[i], ends[i], state=state and i == last)) for i in sorted(wanted)]


class Loading:
    """Loads matches from disk, and counts loads. Calls `release` with each match after its load."""

    def __init__(
        self,
        folder: Folder,
        index: Index,
        writer: WriteQueue[Node],
        removal: Remover,
        *,
        rejected: int,
        release: Callable[[Match], None],
    ) -> None:
        self.restored_bytes = 0
        self.timed_out = 0
        self.rejected = rejected
        self._folder = folder
        self._index = index
        self._writer = writer
        self._removal = removal
        self._release = release
        self._readers = ReadThreads(_IO_THREADS, release_thread)
        #: Whether the last load timed out: logged once per episode.
        self._hangs = False

    async def load(self, form: Form, match: Match, room_tokens: int) -> RestoredKv | None:
        """Read the KV that tokens after a match will see, and the state at its end; see `Store.load`."""
        carriers = form.carriers(match)
        num_carried = sum(span.num_tokens for span in carriers.values())
        seen = form.layout.seen(match.num_tokens, num_carried)
        files = form.files(match, seen, carriers, state=form.stateful)
        return await self._read(form, match, files, room_tokens=room_tokens, num_carried=num_carried)

    async def recall(self, form: Form, match: Match, spans: tuple[Span, ...]) -> RestoredKv | None:
        """Read the KV of these spans only, for the layers to which the match's policy applies."""
        files = form.files(match, spans, {}, state=False)
        return await self._read(form, match, files, only=Only(match.policy, spans))

    async def _read(
        self,
        form: Form,
        match: Match,
        wanted: list[tuple[Node, ChainFile]],
        *,
        room_tokens: int = 0,
        only: Only | None = None,
        num_carried: int = 0,
    ) -> RestoredKv | None:
        """Read the files of the `wanted` nodes, then release the match; None after a failure.

        A damaged file's snapshot is removed, with all snapshots that continue it.
        """
        nodes, files = [node for node, _ in wanted], [file for _, file in wanted]
        limit_s = LOAD_S + sum(node.size_bytes for node in nodes) / _LOAD_BYTES_PER_S
        help_out = partial(self._readers.submit, limit_s=limit_s)
        kv = Wanted(match.num_tokens, form.digest, form.layout, room_tokens, only, num_carried)
        helpers = (help_out, self._readers.num_threads - 1)
        read = partial(restore, self._folder, files, kv, limit_s, helpers)
        try:
            outcome = await self._readers.run(read, limit_s)
            if outcome.doubt is not None:
                self._keep_no_copy(nodes[outcome.num_read])
        except TimeoutError:
            self.timed_out += 1
            if not self._hangs:
                _log.error("restores_hang", limit_s=round(limit_s, 1))
            self._hangs = True
            return None
        except (RuntimeError, MemoryError, OSError) as error:  # a lack of resources: files may be valid
            _log.error("restore_failed", error=str(error))
            return None
        finally:
            self._release(match)
        self._hangs = False
        if outcome.doubt is not None and not outcome.is_partial:
            self.rejected += self._removal.reject(nodes[outcome.num_read], outcome.doubt)
        elif outcome.doubt is not None and nodes[outcome.num_read].usable:  # a kill came before its new row
            self._removal.make_partial(nodes[outcome.num_read], form.layout, form.identity)
        if outcome.restored is not None:
            self.restored_bytes += outcome.restored.size_bytes
        return outcome.restored

    def past(self, form: Form, match: Match, end: int) -> StoredPast:
        """Return a `StoredPast`, which reads the KV of a match's first `end` tokens layer by layer."""
        ends = accumulate(node.num_tokens for node in match.nodes)
        files = [form.file(node, at) for node, at in zip(match.nodes, ends, strict=True)]
        return StoredPast(self._folder, files, end, form.digest, form.layout, match.policy, self._readers)

    def end_past(self, past: StoredPast) -> None:
        """Add the bytes that a `StoredPast` has read to the store's counts.

        If a file failed verification, remove its snapshot and all snapshots that continue it.
        """
        self.restored_bytes += past.size_bytes
        file, why = past.doubt or (None, "")
        node = self._index.get(file.digest) if file is not None else None
        if node is not None:
            self._keep_no_copy(node)
            self.rejected += self._removal.reject(node, why)

    async def close(self, timeout_s: float) -> bool:
        """End the I/O threads. False if a thread did not end in time; it then ends with the process."""
        return await self._readers.close(timeout_s)

    def _keep_no_copy(self, doubtful: Node) -> None:
        """Remove a damaged file from quarantine if its snapshot was forgotten during the read."""
        if doubtful.doomed:
            self._writer.unlink([doubtful.row], quarantined=True)
