"""What is stored, on its way, and when it was last used: a tree in memory.

Belongs to the event loop. Knows no files; `catalog` keeps what must outlive the process.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final

from cache.disk.rows import Row
from cache.names.blocks import TOKEN_BYTES, num_common

from .nodes import BY_TOKENS, Node, Parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cache.names.snapshot import Name

#: More than the tokens of any snapshot take, packed: what follows a name is looked for in so much at a time.
MOST_BYTES: Final = 1 << 16


class Index:
    """The tree of snapshots of all tenants and models in the directory.

    Only leaves are removed, so every node has its whole chain before it. So whoever needs a chain holds its
    last node alone, and whoever uses a chain uses its last node alone: nobody walks it. A node that is
    removed leaves its last use and its holds to the node before it.
    """

    def __init__(self, clock: Callable[[], float], stored: Sequence[Row] = ()) -> None:
        self._clock = clock
        self._now = 0
        #: Hears of every node that has come or gone.
        self.changed: Callable[[Node], None] = lambda _: None
        self._fill(stored)

    def _fill(self, stored: Sequence[Row]) -> None:
        """Take in what is stored."""
        nowhere = Parent(b"")
        self._nodes = nodes = {row.digest: Node(row, nowhere, durable=True) for row in stored}
        #: What chains begin at, as long as there are some.
        self._roots: dict[bytes, Parent] = {}
        families: dict[bytes, list[Node]] = {}
        for node, row in zip(nodes.values(), stored, strict=True):
            node.up = up = nodes.get(row.parent) or self._parent(row.parent)
            if up.children:
                up.children.append(node)
                families[up.digest] = up.children
            else:
                up.children = [node]
        for siblings in families.values():
            siblings.sort(key=BY_TOKENS)
        #: Entries that a load or a turn needs, or that are on their way; all before them is needed too.
        self._held: set[Node] = set()
        self._now = max(self._now, max((row.used for row in stored), default=0))
        self.stored = len(self._nodes)
        self.stored_bytes = sum(row.size_bytes for row in stored)
        #: Of nodes that are not stored yet.
        self.on_its_way_bytes = 0
        #: Of nodes that pinned prefixes are made of.
        self.kept_bytes = 0
        #: A heap of (used, digest): at least one for each node that may be evicted, and some that are stale.
        self._eviction_heap: list[tuple[int, bytes]] = []
        self._rebuild_heap()

    def __iter__(self) -> Iterator[Node]:
        """Go through the nodes as they would be evicted: least recently used first, children first."""
        nodes = sorted(self._nodes.values(), key=lambda node: node.start, reverse=True)
        used: dict[Parent, int] = {node: node.used for node in nodes}
        for node in nodes:
            if node.up in used:
                used[node.up] = max(used[node.up], used[node])
        return iter(sorted(nodes, key=used.__getitem__))

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def is_whole(self) -> bool:
        """Whether every snapshot has its chain before it."""
        return not any(node.start for root in self._roots.values() for node in root.children)

    def get(self, digest: bytes) -> Node | None:
        """Find a node, on its way or stored."""
        return self._nodes.get(digest)

    def follow(self, digests: Sequence[bytes], *, usable: bool) -> list[Node]:
        """Find the nodes of a chain up to the first that is not there, or that a match may not end with.

        Since each of them has all before it, the last one is found by bisection.
        """
        num = bisect_left(digests, True, key=lambda digest: digest not in self._nodes)
        nodes = list(self._nodes[digests[num - 1]].chain()) if num else []
        nodes.reverse()
        while usable and nodes and not nodes[-1].usable:
            nodes.pop()
        return nodes

    def children(self, digest: bytes) -> Sequence[Node]:
        """List the nodes that continue `digest`, in the order of their tokens."""
        node = self._nodes.get(digest) or self._roots.get(digest)
        return node.children if node is not None else ()

    def next_use(self) -> int:
        """Give the next point on the clock of uses: the time of day, but never twice and never backwards."""
        self._now = max(self._now + 1, int(self._clock() * 1e6))
        return self._now

    def add(self, name: Name, size_bytes: int) -> Node:
        """Take in a new snapshot, which is on its way, as the most recently used one."""
        digest, up = name.digest, self._parent(name.parent)
        row = Row.of(digest, name, size_bytes, self.next_use())
        node = self._nodes[digest] = Node(row, up, durable=False)
        if isinstance(up.children, list):
            insort(up.children, node, key=BY_TOKENS)
        else:
            up.children = [node]
        self._held.add(node)
        self.on_its_way_bytes += size_bytes
        self.changed(node)
        return node

    def mark_durable(self, node: Node) -> None:
        """Note that a node's file is in place."""
        node.durable = True
        self.on_its_way_bytes -= node.size_bytes
        self.stored += 1
        self.stored_bytes += node.size_bytes
        self._reclassify(node)

    def remove(self, node: Node) -> None:
        """Forget a node that nothing continues."""
        del self._nodes[node.digest]
        self._held.discard(node)
        if node.durable:
            self.stored -= 1
            self.stored_bytes -= node.size_bytes
        else:
            self.on_its_way_bytes -= node.size_bytes
        up = node.up
        if isinstance(up.children, list) and len(up.children) > 1:
            del up.children[bisect_left(up.children, BY_TOKENS(node), key=BY_TOKENS)]
        else:
            up.children = ()
        if isinstance(up, Node):
            up.used = max(up.used, node.used)
            up.holds += node.holds
            self._reclassify(up)
        elif not up.children:
            del self._roots[up.digest]
        self.changed(node)

    def clear(self) -> None:
        """Forget all nodes. Those that are being loaded are on their own."""
        for node in (*self._nodes.values(), *self._roots.values()):
            node.children = ()  # else they wait for the garbage collector, from which a start keeps them
        self._fill(())

    def use(self, node: Node) -> None:
        """Note that a node, and with it its chain, was used now."""
        node.used = self.next_use()

    def hold(self, node: Node) -> None:
        """Count a load or a turn that needs a node, and with it its chain."""
        node.holds += 1
        self._reclassify(node)

    def release(self, node: Node) -> Node | None:
        """Count one less; returns the node that was held: this one, or the last one left of its chain."""
        held = next(filter(self.has, node.chain()), None)
        if held is not None:
            held.holds -= 1
            self._reclassify(held)
        return held

    def has(self, node: Node) -> bool:
        """Say whether a node is there: not removed, nor another one under its name."""
        return self._nodes.get(node.digest) is node

    def keep(self, node: Node, by: int = 1) -> None:
        """Count a pinned prefix that the node is a part of (`by` -1: one that was given up)."""
        was_kept = node.kept > 0
        node.kept += by
        self.kept_bytes += ((node.kept > 0) - was_kept) * node.size_bytes
        if self.has(node):
            self._reclassify(node)

    def held_bytes(self) -> int:
        """Measure what eviction must leave alone: what is held, stored or not, and what that continues."""
        seen: set[Node] = set()
        size_bytes = self.kept_bytes  # the whole chain of what is kept is kept
        for held in self._held:
            for node in held.chain():
                if node.kept or node in seen:
                    break
                seen.add(node)
                size_bytes += node.size_bytes
        return size_bytes

    def oldest(self) -> Node | None:
        """Find the least recently used node that may be evicted; None where none may."""
        while self._eviction_heap:
            used, digest = self._eviction_heap[0]
            node = self._nodes.get(digest)
            if node is None or not node.evictable:
                heapq.heappop(self._eviction_heap)  # it lines up anew when it may be
            elif node.used != used:
                heapq.heapreplace(self._eviction_heap, (node.used, digest))
            else:
                return node
        return None

    def _reclassify(self, node: Node) -> None:
        """Note whether a node is held, and line it up if it may be evicted, maybe once more."""
        if node.holds or not node.durable:
            self._held.add(node)
        else:
            self._held.discard(node)
        if node.evictable:
            heapq.heappush(self._eviction_heap, (node.used, node.digest))
            if len(self._eviction_heap) > 1.5 * len(self._nodes) + 64:
                self._rebuild_heap()  # a third of it at least says nothing any more

    def _rebuild_heap(self) -> None:
        """Line up all nodes that may be evicted by their last use."""
        leaves = (node for node in self._nodes.values() if not node.children)
        self._eviction_heap = [(node.used, node.digest) for node in leaves if node.evictable]
        heapq.heapify(self._eviction_heap)

    def _parent(self, digest: bytes) -> Parent:
        """Find the node of a name, or else the root."""
        return self._nodes.get(digest) or self._roots.setdefault(digest, Parent(digest))

    def closest_child(self, parent: bytes, packed: bytes, *, usable: bool = True) -> tuple[Node, int] | None:
        """Find the child of `parent` that shares the most leading tokens with `packed`, and how many.

        Siblings are sorted by their tokens, so it is one of the two next to where `packed` would stand; of
        two that share as much, the smaller one is read faster. With `usable` only what a match may count on.
        """
        siblings = self.children(parent)
        at = bisect_left(siblings, (packed, b""), key=BY_TOKENS)
        found: list[tuple[int, int, Node]] = []
        for side in (range(at, len(siblings)), range(at - 1, -1, -1)):
            node = next((siblings[i] for i in side if siblings[i].usable or not usable), None)
            if node is not None and (num_tokens := num_common(node.tokens, packed)):
                found.append((num_tokens, -node.size_bytes, node))
        num_tokens, _, node = max(found, key=lambda one: one[:2], default=(0, 0, None))
        return None if node is None else (node, num_tokens)

    def longest_path(
        self, parent: bytes, packed: bytes, *, usable: bool = False, min_share: float = 0.0
    ) -> tuple[tuple[Node, ...], int]:
        """Follow `packed` as far as nodes hold it, and count its tokens that they hold.

        The last node may hold more than it shares with `packed`; what it shares is at least `min_share` of
        it. Of several ways that reach as far, the one with the least to read.
        """
        best: tuple[tuple[Node, ...], int] = (), 0
        part = self.closest_child(parent, packed, usable=usable) if packed else None
        if part is not None and part[1] >= min_share * part[0].num_tokens:
            best = (part[0],), part[1]
        for node in self._prefix_children(parent, packed):
            if usable and not node.usable:
                continue
            rest = packed[len(node.tokens) :]
            path, num_tokens = self.longest_path(node.digest, rest, usable=usable, min_share=min_share)
            found = (node, *path), node.num_tokens + num_tokens
            best = max(best, found, key=lambda one: (one[1], -sum(node.size_bytes for node in one[0])))
        return best

    def within(self, parent: bytes, packed: bytes) -> list[Node]:
        """List the nodes after `parent` that hold nothing but a part of `packed`, children last."""
        found: list[Node] = []
        open_ends = [(parent, 0)]
        while open_ends:
            parent, at = open_ends.pop()
            for node in self._prefix_children(parent, packed[at : at + MOST_BYTES]):
                found.append(node)
                open_ends.append((node.digest, at + len(node.tokens)))
        return found

    def superseded(self, node: Node) -> list[Node]:
        """List the pieces of whose tokens this node holds all, children first."""
        return [other for other in reversed(self.within(node.parent, node.tokens)) if other is not node]

    def resumable_path(self, parent: bytes, packed: bytes) -> tuple[Node, ...]:
        """Find the way to the furthest stored node at whose end `packed` can be resumed."""
        best: tuple[Node, ...] = ()
        for node in self._prefix_children(parent, packed):
            if node.usable:
                path = (node, *self.resumable_path(node.digest, packed[len(node.tokens) :]))
                if path[-1].resumable:
                    best = max(best, path, key=lambda one: one[-1].end if one else 0)
        return best

    def _prefix_children(self, parent: bytes, packed: bytes) -> Iterator[Node]:
        """Find the children of `parent` whose tokens are a beginning of `packed`, the longest first.

        A step finds the last sibling up to `bound`; the part of it that fits bounds the next one.
        """
        siblings = self.children(parent)
        bound = packed
        while bound and (at := bisect_left(siblings, (bound + b"\0", b""), key=BY_TOKENS)):
            node = siblings[at - 1]
            fits = num_common(node.tokens, bound) * TOKEN_BYTES
            if fits == len(node.tokens):
                yield node
                fits -= TOKEN_BYTES
            bound = bound[:fits]

    def descendants(self, node: Node) -> list[Node]:
        """List all nodes that need this one, children before their parents."""
        found = [node]
        for parent in found:
            found += parent.children
        return found[:0:-1]
