"""Searches the index for the longest stored prefix of some tokens, its files, and the blocks worth saving.

Changes nothing. Finds full blocks, and the pieces of the tail, which is the tokens after the last full block,
by their chained digests (`blocks`). So it finds snapshots that have only tokens of the session.
"""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, NamedTuple

from cache.disk.chain_reader import ChainFile, ChainRead
from cache.names import blocks
from cache.names.blocks import DIGEST_BYTES, Span
from cache.names.policy import FULL, Policy
from cache.names.snapshot import carried

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.names.identity import Identity
    from cache.names.snapshot import KvPart, ModelLayout
    from cache.names.tokens import Chain, Tokens

    from .index import SnapshotIndex
    from .nodes import Node


class PrefixMatch(NamedTuple):
    """The longest stored prefix of some tokens, and the snapshots from which a session resumes at its end."""

    #: The prefix's length. It ends with the last snapshot, or within one that `StoredKv.extend` has added.
    num_tokens: int
    #: The snapshots that a session needs, in order, each with the position of its first token. If layers have
    #: states, the last snapshot has them.
    placed: tuple[tuple[int, Node], ...] = ()
    policy: Policy = FULL

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The snapshots, in order."""
        return tuple(node for _, node in self.placed)


class KnownPrefix(NamedTuple):
    """The longest prefix of some tokens that is stored or queued for the disk."""

    #: The end of the last full block, then the end of each piece after it; the last edge is the prefix's end.
    edges: tuple[int, ...]
    #: The snapshots that a session needs to resume at the prefix's end.
    nodes: tuple[Node, ...]


class Prefixes:
    """The stored prefixes of one model under one policy: its snapshots have this identity and layout."""

    def __init__(self, index: SnapshotIndex, identity: Identity, layout: ModelLayout) -> None:
        self.identity = identity
        self.digest = identity.digest()
        self.layout = layout
        #: Whether layers have states, which are stored only at the end of some snapshots.
        self.is_stateful = bool(layout.states)
        #: Whether a session needs all its blocks, because some layer sees all tokens, or may recall any.
        self._sees_all = layout.sees_all
        self._index = index
        self._block = identity.block_tokens

    def longest(self, chain: Chain, tokens: Tokens) -> PrefixMatch:
        """Return the longest stored prefix of `tokens`, at whose end a session can resume."""
        names = chain.names(tokens)
        found = self._index.usable(names[1:])
        num = len(found)
        while True:
            num, num_tokens, path = self._end(names, tokens, found, num)
            needed = self._needed(num, num_tokens)
            missing = next((i for i in reversed(needed) if found[i] is None), None)
            if missing is None:
                break
            num = self._first_missing(found) if self._sees_all else missing
        kept = [(i * self._block, node) for i in needed if (node := found[i]) is not None]
        for node in path:
            kept.append((kept[-1][0] + kept[-1][1].num_tokens if kept else 0, node))
        return PrefixMatch(num_tokens, tuple(kept), chain.policy)

    def branches(self, match: PrefixMatch, chain: Chain, tokens: Tokens, most: int) -> list[Node]:
        """Return the `most` last used snapshots that continue a match, the last used first.

        Empty if no session can resume within a snapshot, since layers have states; or if the match has all
        `tokens`.
        """
        if self.is_stateful or match.num_tokens == len(tokens):
            return []
        parent = match.nodes[-1].digest if match.placed else chain.root
        found = (node for node in self._index.children(parent) if node.usable)
        return nlargest(most, found, key=lambda node: (node.used, node.num_tokens, node.digest))

    def _end(
        self, names: Sequence[bytes], tokens: Tokens, found: Sequence[Node | None], num: int
    ) -> tuple[int, int, tuple[Node, ...]]:
        """Extend the first `num` blocks by stored pieces of the tail.

        Returns the number of blocks, the position after the pieces, and the pieces. If layers have states,
        there may be fewer blocks, since a session must be able to resume at the end.
        """
        while True:
            at = num * self._block
            piece = tokens.packed(at, at + self._block)
            path = self._index.furthest(names[num], piece, usable=True)
            if path:
                return num, path[-1].end, path
            last = found[num - 1] if num else None
            if not self.is_stateful or not num or (last is not None and last.resumable):
                return num, at, ()
            num -= 1

    def _needed(self, num: int, num_tokens: int) -> Sequence[int]:
        """Return which of the first `num` blocks some layer sees after `num_tokens` tokens, in order."""
        if self._sees_all:
            return range(num)
        seen = {num - 1} if self.is_stateful and num else set[int]()
        for span in self.layout.seen(num_tokens):
            seen.update(range(span.start // self._block, min(-(-span.end // self._block), num)))
        return sorted(seen)

    def needed(self, num: int, num_tokens: int, first: int) -> Sequence[int]:
        """Return which of the first `num` blocks a session needs to resume after `num_tokens` tokens.

        The blocks from number `first` on are in the remote tier. If layers have states, all of these count:
        which of them have a state, where a session can resume, is known only after the fetch.
        """
        needed = self._needed(num, num_tokens)
        return sorted({*needed, *range(first, num)}) if self.is_stateful else needed

    def window(self, chain: Chain, tokens: Tokens) -> list[Node]:
        """Return the blocks that layers still see after `tokens`; empty if some layer sees all tokens."""
        if self._sees_all:
            return []
        names = chain.names(tokens)[1:]
        found = (self._index.get(names[i]) for i in self._needed(len(names), len(tokens)))
        return [node for node in found if node is not None]

    def known(self, chain: Chain, tokens: Tokens) -> KnownPrefix:
        """Find the longest prefix of `tokens` whose KV is stored or queued, for all layers that see it.

        Does not check that layers' states are stored at its end.
        """
        names = chain.names(tokens)
        there = [self._index.get(name) for name in names[1:]]
        num = len(there)
        while True:
            at = num * self._block
            path = self._index.furthest(names[num], tokens.packed(at, at + self._block))
            needed = self._needed(num, path[-1].end if path else at)
            missing = next((i for i in reversed(needed) if there[i] is None), None)
            if missing is None:
                break
            num = self._first_missing(there) if self._sees_all else missing
        nodes = (*(node for i in needed if (node := there[i]) is not None), *path)
        return KnownPrefix((at, *(node.end for node in path)), nodes)

    @staticmethod
    def _first_missing(there: Sequence[Node | None]) -> int:
        return next((i for i, node in enumerate(there) if node is None), len(there))

    def wanted(self, chain: Chain, tokens: Tokens) -> list[Span]:
        """Return the spans that are worth saving: see `StoredKv.wanted`."""
        names = chain.names(tokens)
        there = [self._index.get(name) is not None for name in names[1:]]
        # A block that is missing between others was evicted; it is of use only if some layer sees it.
        first = next((i + 1 for i in reversed(range(len(there))) if there[i]), 0)
        needed = set(self._needed(len(there), len(tokens)))
        wanted = []
        for i, is_there in enumerate(there):
            span = Span(i * self._block, (i + 1) * self._block)
            if not is_there and (i >= first or i in needed):
                wanted.append(span)
        start, end = len(there) * self._block, len(tokens)
        tail = tokens.packed(start, end)
        edges = [start, *(node.end for node in self._index.furthest(names[-1], tail))]
        if edges[-1] < end:
            wanted.append(Span(blocks.tail_start(edges, end), end))
        return wanted

    def parent(self, chain: Chain, tokens: Tokens, start: int) -> bytes | None:
        """Return the parent's name for a snapshot that begins at `start`; None if all `tokens` are stored.

        The parent is a block or a piece of a tail. If the piece that should end at `start` was removed, the
        name is all zeros, which no snapshot has.
        """
        grid = start - start % self._block
        before = chain.names(tokens)[grid // self._block]
        path = self._index.furthest(before, tokens.packed(grid))
        if path and path[-1].end == len(tokens):
            return None
        if start == grid:
            return before
        path = self._index.furthest(before, tokens.packed(grid, start))
        return path[-1].digest if path and path[-1].end == start else bytes(DIGEST_BYTES)

    def to_read(self, match: PrefixMatch, only: KvPart | None = None) -> tuple[list[Node], ChainRead]:
        """Return the nodes of the files to read, in order, and what to read, to resume at the end of a match.

        That is the KV that the session's next token sees, and the states at the match's end; with `only`,
        that part of the KV and no states.
        """
        # Positions are computed, not read from files: the arrays must be filled without a gap.
        found = [(Span(start, start + node.num_tokens), node) for start, node in match.placed]
        carriers = [] if only is not None else [of for span, _ in found if (of := self._carried(span))]
        num_carried = sum(of.num_tokens for of in carriers)
        spans = self.layout.seen(match.num_tokens, num_carried) if only is None else only.spans
        files, nodes = [], []
        for span, node in found:
            is_last = node is found[-1][1]
            has_state = self.is_stateful and only is None and is_last
            of = self._carried(span)
            # The last file has all tokens up to the match's end, even if it has more.
            if has_state or (of in carriers) or _overlaps(span, spans):
                files.append(ChainFile(node.digest, span.start, has_state, of))
                nodes.append(node)
        read = ChainRead(
            files, match.num_tokens, self.digest, self.layout, only=only, num_carried=num_carried
        )
        return nodes, read

    def _carried(self, span: Span) -> Span | None:
        """Return the earlier tokens whose sketches (2-bit keys) the file of `span` has too; mostly None."""
        return carried(span, self._block) if self.layout.carried else None


def _overlaps(part: Span, spans: Sequence[Span]) -> bool:
    return any(span.start < part.end and part.start < span.end for span in spans)
