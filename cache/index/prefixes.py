"""Searches in the index: what is stored of some tokens, and what of them is worth saving.

Changes nothing. Finds full blocks by their chained digests (`blocks`), and the pieces of a tail by searching
the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cache.names import blocks
from cache.names.blocks import DIGEST_BYTES, TOKEN_BYTES, Span
from cache.names.policy import FULL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.names.blocks import Chain
    from cache.names.snapshot import ModelLayout

    from .index import Index
    from .nodes import Node

#: A match uses at least this share of its last snapshot: prefilling a few tokens is faster than reading a
#: whole block for them.
_MIN_SHARE: Final = 0.25


class Prefixes:
    """Searches an index, for a model of this layout with blocks of `block` tokens."""

    def __init__(self, index: Index, block: int, layout: ModelLayout) -> None:
        self._index = index
        self._block = block
        self._width = block * TOKEN_BYTES
        self._layout = layout
        self._stateful = bool(layout.states)

    def longest(self, chain: Chain, packed: bytes) -> tuple[int, list[Node]]:
        """Return the longest stored prefix: its length in tokens, and its nodes in order."""
        nodes = self._index.follow(chain.names(packed)[1:], usable=True)
        while True:
            num_tokens, found = self._end(chain, packed, nodes)
            missing = self._missing(found, num_tokens)
            if not missing:
                return num_tokens, found
            nodes = found[: missing[-1]]
            while nodes and not nodes[-1].usable:
                nodes.pop()

    def _end(self, chain: Chain, packed: bytes, nodes: list[Node]) -> tuple[int, list[Node]]:
        """Add to blocks what continues them, or with states end where a session can be resumed."""
        if self._stateful:
            nodes = [*nodes]
            self._end_resumable(chain.root, packed, nodes)
            return nodes[-1].end if nodes else 0, nodes
        parent, at = (nodes[-1].digest, nodes[-1].end) if nodes else (chain.root, 0)
        piece = _piece(packed, at, self._block)
        path, num_shared = self._index.longest_path(parent, piece, usable=True, min_share=_MIN_SHARE)
        return at + num_shared, [*nodes, *path]

    def _missing(self, nodes: list[Node], num_tokens: int) -> list[int]:
        """Return the indices of nodes that a session of `num_tokens` tokens sees and that are not stored."""
        if self._layout.reach == FULL:
            return []  # without gaps, only the end of a chain is not stored
        seen = self._layout.seen(num_tokens)
        return [i for i, node in enumerate(nodes) if not node.usable and _overlaps(node, seen)]

    def known(self, chain: Chain, packed: bytes) -> tuple[tuple[int, ...], list[Node]]:
        """Return what is stored or on its way: the edges of the tail's pieces, and all nodes in order.

        Ends before the first gap that a session of these tokens sees.
        """
        nodes = self._index.follow(chain.names(packed)[1:], usable=False)
        gaps = (i for i in self._missing(nodes, len(packed) // TOKEN_BYTES) if nodes[i].is_gap)
        nodes = nodes[: next(gaps, None)]
        start = len(nodes) * self._block
        path = self._pieces(nodes[-1].digest if nodes else chain.root, packed[start * TOKEN_BYTES :])
        return (start, *(node.end for node in path)), [*nodes, *path]

    def wanted(self, chain: Chain, packed: bytes, start: int) -> list[Span]:
        """Return the spans from position `start` on that are worth saving: see `Store.wanted`."""
        spans = blocks.spans(start, len(packed) // TOKEN_BYTES, self._block)
        if not spans:
            return []
        first = spans[0].start // self._block
        names = chain.names(packed)[first : first + len(spans)]
        if spans[0].start and self._index.get(names[0]) is None:
            return []
        wanted = []
        seen = self._layout.seen(spans[-1].end)
        for span, parent in zip(spans, names, strict=True):
            piece = packed[span.start * TOKEN_BYTES : span.end * TOKEN_BYTES]
            if not self._covered(parent, piece) and not self._is_unseen_gap(parent, piece, span, seen):
                if span.num_tokens < self._block:
                    edges = [span.start, *(node.end for node in self._pieces(parent, piece))]
                    span = Span(blocks.tail_start(edges, span.end), span.end)  # noqa: PLW2901
                wanted.append(span)
        return wanted

    def parent(self, chain: Chain, packed: bytes, start: int) -> bytes | None:
        """Return the name of what a snapshot from `start` on continues; None if all of `packed` is stored.

        The name is that of a block or of a piece of a tail; it is all zeros, which nothing is called, if the
        piece that should end at `start` is gone.
        """
        grid = start - start % self._block
        before = chain.names(packed)[grid // self._block]
        if self._covered(before, packed[grid * TOKEN_BYTES :]):
            return None
        if start == grid:
            return before
        path = self._pieces(before, packed[grid * TOKEN_BYTES : start * TOKEN_BYTES])
        return path[-1].digest if path and path[-1].end == start else bytes(DIGEST_BYTES)

    def _covered(self, parent: bytes, packed: bytes) -> bool:
        """Whether nodes, stored or on their way, hold all of `packed` behind the block `parent`.

        If layers have states the last node must also end with `packed`: a state has no parts.
        """
        min_share = 1.0 if self._stateful else 0.0
        return self._index.longest_path(parent, packed, min_share=min_share)[1] * TOKEN_BYTES == len(packed)

    def _is_unseen_gap(self, parent: bytes, piece: bytes, span: Span, seen: Sequence[Span]) -> bool:
        if self._layout.reach == FULL or _overlaps(span, seen):
            return False
        node = self._index.get(blocks.link(parent, piece))
        return node is not None and node.is_gap

    def _pieces(self, parent: bytes, packed: bytes) -> tuple[Node, ...]:
        """Return the pieces behind a block that hold the longest beginning of `packed`, and nothing else."""
        return self._index.longest_path(parent, packed[: self._width], min_share=1.0)[0]

    def _end_resumable(self, root: bytes, packed: bytes, nodes: list[Node]) -> None:
        """Shorten a chain of blocks, or add pieces of a tail, so that a session can resume at its end."""
        while True:
            parent, at = (nodes[-1].digest, nodes[-1].end) if nodes else (root, 0)
            path = self._index.resumable_path(parent, _piece(packed, at, self._block))
            if path:
                nodes += path
                return
            if not nodes or (nodes[-1].resumable and nodes[-1].usable):
                return
            nodes.pop()


def _overlaps(part: Node | Span, spans: Sequence[Span]) -> bool:
    return any(span.start < part.end and part.start < span.end for span in spans)


def _piece(packed: bytes, start: int, num_tokens: int) -> bytes:
    return packed[start * TOKEN_BYTES : (start + num_tokens) * TOKEN_BYTES]
