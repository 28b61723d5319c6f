"""Where in the index some tokens are found: what is stored of them, and what is worth saving.

Changes nothing. Names tokens by a chain and their packed ids, as `blocks` does: full blocks by one digest
after the other, then the pieces of a tail by the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cache.names import blocks
from cache.names.blocks import DIGEST_BYTES, TOKEN_BYTES, Span

if TYPE_CHECKING:
    from cache.names.blocks import Chain

    from .index import Index
    from .nodes import Node

#: A part of a snapshot is used if it is at least this share of it: reading a block for a few of its tokens
#: takes longer than computing them.
_MIN_SHARE: Final = 0.25


class Prefixes:
    """Looks into an index for a model with blocks of `block` tokens; `stateful` is as `Store.open` says."""

    def __init__(self, index: Index, block: int, *, stateful: bool) -> None:
        self._index = index
        self._block = block
        self._width = block * TOKEN_BYTES
        self._stateful = stateful

    def longest(self, chain: Chain, packed: bytes) -> tuple[int, list[Node]]:
        """Find the longest stored prefix: its length in tokens, and the nodes that hold it, in order."""
        nodes = self._index.follow(chain.names(packed)[1:], usable=True)
        if self._stateful:
            self._end_resumable(chain.root, packed, nodes)
            return nodes[-1].end if nodes else 0, nodes
        parent, at = (nodes[-1].digest, nodes[-1].end) if nodes else (chain.root, 0)
        piece = _piece(packed, at, self._block)
        path, num_shared = self._index.longest_path(parent, piece, usable=True, min_share=_MIN_SHARE)
        return at + num_shared, [*nodes, *path]

    def known(self, chain: Chain, packed: bytes) -> tuple[tuple[int, ...], list[Node]]:
        """Find what is stored or on its way: where the pieces of the tail start and end, and all nodes."""
        nodes = self._index.follow(chain.names(packed)[1:], usable=False)
        start = len(nodes) * self._block
        path = self._pieces(nodes[-1].digest if nodes else chain.root, packed[start * TOKEN_BYTES :])
        return (start, *(node.end for node in path)), [*nodes, *path]

    def wanted(self, chain: Chain, packed: bytes, start: int) -> list[Span]:
        """List the spans from position `start` on that are worth saving: see `Store.wanted`."""
        spans = blocks.spans(start, len(packed) // TOKEN_BYTES, self._block)
        if not spans:
            return []
        first = spans[0].start // self._block
        names = chain.names(packed)[first : first + len(spans)]
        if spans[0].start and self._index.get(names[0]) is None:
            return []
        wanted = []
        for span, parent in zip(spans, names, strict=True):
            piece = packed[span.start * TOKEN_BYTES : span.end * TOKEN_BYTES]
            if not self._covered(parent, piece):
                if span.num_tokens < self._block:
                    edges = [span.start, *(node.end for node in self._pieces(parent, piece))]
                    span = Span(blocks.tail_start(edges, span.end), span.end)  # noqa: PLW2901
                wanted.append(span)
        return wanted

    def parent(self, chain: Chain, packed: bytes, start: int) -> bytes | None:
        """Name what a snapshot from `start` on continues; None where all of `packed` is there already.

        That is a block, or a piece of a tail. Where the pieces end elsewhere, those that it continues are
        gone: nothing has a name of zeros.
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
        """Tell whether nodes, on their way or stored, hold all of `packed` after the block `parent`.

        Where layers have states they also have to end with it: a state is no part of another one.
        """
        min_share = 1.0 if self._stateful else 0.0
        return self._index.longest_path(parent, packed, min_share=min_share)[1] * TOKEN_BYTES == len(packed)

    def _pieces(self, parent: bytes, packed: bytes) -> tuple[Node, ...]:
        """Follow `packed` from the end of a block as far as pieces hold it that hold nothing else."""
        return self._index.longest_path(parent, packed[: self._width], min_share=1.0)[0]

    def _end_resumable(self, root: bytes, packed: bytes, nodes: list[Node]) -> None:
        """Cut a chain of blocks back, or add a tail to it, so that it ends where it can be resumed."""
        while True:
            parent, at = (nodes[-1].digest, nodes[-1].end) if nodes else (root, 0)
            path = self._index.resumable_path(parent, _piece(packed, at, self._block))
            if path:
                nodes += path
                return
            if not nodes or nodes[-1].resumable:
                return
            nodes.pop()


def _piece(packed: bytes, start: int, num_tokens: int) -> bytes:
    return packed[start * TOKEN_BYTES : (start + num_tokens) * TOKEN_BYTES]
