"""Searches the index for the longest stored prefix of some tokens, its files, and the blocks worth saving.

Changes nothing. Finds full blocks by their chained digests (`blocks`). The tail, which is the tokens after
the last full block, is stored in pieces; they are found by searching the tree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from cache.disk.chain_reader import ChainFile, ChainRead
from cache.names import blocks
from cache.names.blocks import DIGEST_BYTES, Span
from cache.names.policy import FULL
from cache.names.snapshot import CARRIER, carried
from cache.names.tokens import TOKEN_BYTES, Chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.names.identity import Identity
    from cache.names.snapshot import ModelLayout, Only
    from cache.names.tokens import Tokens

    from .index import Index
    from .nodes import Node

#: A match uses at least this share of its last snapshot: prefilling a few tokens is faster than reading a
#: whole block for them.
_MIN_SHARE: Final = 0.25


class Prefixes:
    """The stored prefixes of one model under one policy: its snapshots have this identity and layout."""

    def __init__(self, index: Index, identity: Identity, layout: ModelLayout) -> None:
        self.identity = identity
        self.digest = identity.digest()
        self.layout = layout
        #: Whether layers have states, which are stored only at the end of some snapshots.
        self.is_stateful = bool(layout.states)
        self._index = index
        self._block = identity.block_tokens
        self._width = self._block * TOKEN_BYTES

    def longest(self, chain: Chain, tokens: Tokens) -> tuple[int, list[Node]]:
        """Return the longest stored prefix of `tokens`: its length in tokens, and its nodes in order."""
        nodes = self._index.follow(chain.names(tokens)[1:])
        while True:
            num_tokens, found = self._end(chain, tokens, nodes)
            missing = self._missing(found, num_tokens)
            if not missing:
                return num_tokens, found
            nodes = found[: missing[-1]]
            while nodes and not nodes[-1].usable:
                nodes.pop()

    def _end(self, chain: Chain, tokens: Tokens, nodes: list[Node]) -> tuple[int, list[Node]]:
        """Extend a chain of blocks by stored pieces of the tail; return its length in tokens, and its nodes.

        If layers have states, the chain may be shortened, to end where a session can resume.
        """
        if self.is_stateful:
            nodes = [*nodes]
            self._end_resumable(chain.root, tokens, nodes)
            return nodes[-1].end if nodes else 0, nodes
        parent, at = (nodes[-1].digest, nodes[-1].end) if nodes else (chain.root, 0)
        piece = tokens.packed(at, at + self._block)
        path, num_shared = self._index.longest_path(parent, piece, usable=True, min_share=_MIN_SHARE)
        return at + num_shared, [*nodes, *path]

    def _missing(self, nodes: list[Node], num_tokens: int) -> list[int]:
        """Return the indices of unusable nodes whose KV a session of `num_tokens` tokens sees."""
        return [i for i in self._seen(len(nodes), num_tokens) if not nodes[i].usable]

    def _seen(self, num: int, num_tokens: int) -> list[int]:
        """Return which of the first `num` blocks layers with windows see after `num_tokens` tokens."""
        if self.layout.windows == FULL:
            return []  # only the end of a chain is not stored
        ends = [
            range(span.start // self._block, min(-(-span.end // self._block), num))
            for span in self.layout.seen_by_windows(num_tokens)
        ]
        return sorted(set().union(*ends))

    def needed(self, num: int, num_tokens: int, first: int) -> Sequence[int]:
        """Return which of the first `num` blocks a session needs to resume after `num_tokens` tokens.

        The blocks before number `first` are in this index; the others are in the remote tier.
        """
        seen = self._seen(num, num_tokens)
        if self.layout.reach != FULL and not self.is_stateful:  # else a session may resume earlier
            return seen
        return [*(number for number in seen if number < first), *range(first, num)]

    def _is_hollow(self, name: bytes) -> bool:
        node = self._index.get(name)
        return node is not None and node.is_hollow

    def known(self, chain: Chain, tokens: Tokens) -> tuple[tuple[int, ...], Node | None]:
        """Find the stored or queued prefix of `tokens`, up to the first block that lacks KV a session needs.

        Returns the position after the prefix's last block and after each piece of its tail, and the last
        node.
        """
        names = chain.names(tokens)
        num = self._index.num_known(names[1:])
        num = next((i for i in self._seen(num, len(tokens)) if self._is_hollow(names[i + 1])), num)
        start = num * self._block
        path = self._pieces(names[num], tokens.packed(start, start + self._block))
        return (start, *(node.end for node in path)), path[-1] if path else self._index.get(names[num])

    def wanted(self, chain: Chain, tokens: Tokens) -> list[Span]:
        """Return the spans that are worth saving: see `StoredKv.wanted`."""
        start = self.known(chain, tokens)[0][0]
        spans = blocks.spans(start, len(tokens), self._block)
        if not spans:
            return []
        first = start // self._block
        names = chain.names(tokens)[first : first + len(spans)]
        wanted = []
        seen = self.layout.seen_by_windows(spans[-1].end)
        for span, parent in zip(spans, names, strict=True):
            piece = tokens.packed(span.start, span.end)
            if not self._covered(parent, piece) and not self._is_unseen(parent, piece, span, seen):
                if span.num_tokens < self._block:
                    edges = [span.start, *(node.end for node in self._pieces(parent, piece))]
                    span = Span(blocks.tail_start(edges, span.end), span.end)  # noqa: PLW2901
                wanted.append(span)
        return wanted

    def parent(self, chain: Chain, tokens: Tokens, start: int) -> bytes | None:
        """Return the parent's name for a snapshot that begins at `start`; None if all `tokens` are stored.

        The parent is a block or a piece of a tail. If the piece that should end at `start` was removed, the
        name is all zeros, which no snapshot has.
        """
        grid = start - start % self._block
        before = chain.names(tokens)[grid // self._block]
        if self._covered(before, tokens.packed(grid)):
            return None
        if start == grid:
            return before
        path = self._pieces(before, tokens.packed(grid, start))
        return path[-1].digest if path and path[-1].end == start else bytes(DIGEST_BYTES)

    def to_read(
        self, nodes: Sequence[Node], num_tokens: int, only: Only | None = None
    ) -> tuple[list[Node], ChainRead]:
        """Return what to read for a session of `num_tokens` tokens that are stored in `nodes`.

        Reads the KV that the session's next token sees, and the state at its end; with `only`, that part of
        the KV. Also returns the nodes of the files to read, in order.
        """
        # Positions are sums of lengths, not read from files: the arrays must be filled without a gap.
        ends = list(accumulate(node.num_tokens for node in nodes))
        last = len(ends) - 1
        carriers: dict[int, Span] = {}
        if only is None:
            every = range(CARRIER - 1, len(ends), CARRIER)  # all but the last ones are whole blocks
            found = {i: self._carried(Span(nodes[i].start, nodes[i].end)) for i in every}
            carriers = {i: span for i, span in found.items() if span is not None}
        num_carried = sum(span.num_tokens for span in carriers.values())
        wanted = {*carriers, last} if self.is_stateful and only is None else {*carriers}
        for span in self.layout.seen(num_tokens, num_carried) if only is None else only.spans:
            wanted.update(range(bisect_right(ends, span.start), min(bisect_left(ends, span.end), last) + 1))
        files = []
        for i in sorted(wanted):
            span = Span(ends[i] - nodes[i].num_tokens, ends[i])
            has_state = self.is_stateful and only is None and i == last
            files.append(ChainFile(nodes[i].digest, span.start, has_state, self._carried(span)))
        chain = ChainRead(files, num_tokens, self.digest, self.layout, only=only, num_carried=num_carried)
        return [nodes[i] for i in sorted(wanted)], chain

    def _carried(self, span: Span) -> Span | None:
        """Return the earlier tokens whose sketches (2-bit keys) the file of `span` has too; mostly None."""
        return carried(span, self._block) if self.layout.carried else None

    def _covered(self, parent: bytes, packed: bytes) -> bool:
        """Whether stored or queued nodes after the block `parent` have all tokens of `packed`.

        If layers have states, the last node must also end where `packed` ends: a state cannot be shortened.
        """
        min_share = 1.0 if self.is_stateful else 0.0
        return self._index.longest_path(parent, packed, min_share=min_share)[1] * TOKEN_BYTES == len(packed)

    def _is_unseen(self, parent: bytes, piece: bytes, span: Span, seen: Sequence[Span]) -> bool:
        """Whether a block need not be saved again: it was evicted, and none of its tokens is `seen`."""
        if self.layout.windows == FULL or _overlaps(span, seen):
            return False
        return self._is_hollow(blocks.link(parent, piece))

    def _pieces(self, parent: bytes, packed: bytes) -> tuple[Node, ...]:
        """Return the pieces after a block that together are the longest prefix of `packed`."""
        return self._index.longest_path(parent, packed[: self._width], min_share=1.0)[0]

    def _end_resumable(self, root: bytes, tokens: Tokens, nodes: list[Node]) -> None:
        """Change `nodes`, a chain of blocks, to end where a session can resume: drop blocks or add pieces."""
        while True:
            parent, at = (nodes[-1].digest, nodes[-1].end) if nodes else (root, 0)
            path = self._index.resumable_path(parent, tokens.packed(at, at + self._block))
            if path:
                nodes += path
                return
            if not nodes or (nodes[-1].resumable and nodes[-1].usable):
                return
            nodes.pop()


def _overlaps(part: Span, spans: Sequence[Span]) -> bool:
    return any(span.start < part.end and part.start < span.end for span in spans)
