"""The index: a tree in memory of all snapshots, stored or queued, with their last use.

Belongs to the event loop; the store and its searches use it. Knows no files; `catalog` stores on disk what
must survive a restart.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from cache.disk.rows import Row
from cache.names.snapshot import MOST_TOKEN_BYTES
from cache.names.tokens import TOKEN_BYTES, num_common

from . import gap_rules
from .nodes import BY_TOKENS, Node, Parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cache.names.policy import Policy
    from cache.names.snapshot import Name


class Index:
    """The tree of snapshots of all tenants and models in the directory.

    A node is one snapshot; its parent is the snapshot that it continues. A root is a tenant's empty prefix,
    a chain the path from a root to a node. Only leaves are removed, so no chain lacks a node. Only the last
    node stores the time of last use and the holds (uses by loads and turns) of its chain; both pass to the
    parent of a removed node. A node whose KV no session sees may become a gap, without a file.
    """

    def __init__(self, clock: Callable[[], float], stored: Sequence[Row] = ()) -> None:
        self._clock = clock
        self._now = 0
        #: By root: the largest reach of any layer of its sessions.
        self._reaches: dict[bytes, Policy] = {}
        #: Called with every node that was stored or released, or lost a child, unless it is held.
        self.settled: Callable[[Node], None] = lambda _: None
        self._fill(stored)

    def _fill(self, stored: Sequence[Row]) -> None:
        """Build the tree from the catalog's rows."""
        nowhere = Parent(b"")
        self._nodes = nodes = {row.digest: Node(row, nowhere, durable=True) for row in stored}
        #: The roots that have chains.
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
        #: Nodes that a load or a turn holds, or that are queued for the disk; their chains are held too.
        self._held: set[Node] = set()
        self._now = max(self._now, max((row.used for row in stored), default=0))
        self.stored = sum(row.size_bytes > 0 for row in stored)
        self.stored_bytes = sum(row.size_bytes for row in stored)
        #: Bytes of nodes that are not stored yet.
        self.on_its_way_bytes = 0
        #: A heap of (used, digest): at least one item for each evictable node, and some stale ones.
        self._eviction_heap: list[tuple[int, bytes]] = []
        self._rebuild_heap()

    def __iter__(self) -> Iterator[Node]:
        """Yield the nodes in the order of eviction: least recently used first, children before parents."""
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
        """Whether the whole chain of every snapshot is in the tree."""
        return not any(node.start for root in self._roots.values() for node in root.children)

    def get(self, digest: bytes) -> Node | None:
        """Return the node with this digest, queued or stored."""
        return self._nodes.get(digest)

    def follow(self, digests: Sequence[bytes]) -> list[Node]:
        """Return a chain's nodes, by their digests, up to the last one with which a match may end."""
        num = self.num_known(digests)
        nodes = list(self._nodes[digests[num - 1]].chain()) if num else []
        nodes.reverse()
        while nodes and not nodes[-1].usable:
            nodes.pop()
        return nodes

    def num_known(self, digests: Sequence[bytes]) -> int:
        """Return how many of a chain's first nodes, given by their digests, are in the index.

        Uses bisection: if a node is in the index, so are all nodes before it.
        """
        return bisect_left(digests, True, key=lambda digest: digest not in self._nodes)

    def children(self, digest: bytes) -> Sequence[Node]:
        """Return the nodes that continue `digest`, in the order of their tokens."""
        node = self._nodes.get(digest) or self._roots.get(digest)
        return node.children if node is not None else ()

    def limit(self, root: bytes, reach: Policy) -> None:
        """Record that no layer sees more tokens than `reach` in the sessions of a root (tenant and model)."""
        if root in self._reaches:
            return
        self._reaches[root] = reach
        parent = self._roots.get(root)
        if parent is not None:
            parent.reach = reach
            nodes = self.descendants(parent)
            for node in nodes:
                node.reach = reach
            self._push(node for node in nodes if node.children and not node.is_gap)

    def next_use(self) -> int:
        """Return the time of a use: microseconds since 1970, always later than the previous result."""
        self._now = max(self._now + 1, int(self._clock() * 1e6))
        return self._now

    def add(self, name: Name, size_bytes: int) -> Node:
        """Add a snapshot that is queued for the disk, as the most recently used one; it may fill a gap."""
        digest, up = name.digest, self._parent(name.parent)
        row = Row.of(digest, name, size_bytes, self.next_use())
        node = self._nodes.get(digest)
        if node is not None:
            self._uncount(node)
            node.size_bytes, node.used, node.resumable = size_bytes, row.used, name.resumable
            node.durable = False
        else:
            node = self._nodes[digest] = Node(row, up, durable=False)
            if isinstance(up.children, list):
                insort(up.children, node, key=BY_TOKENS)
            else:
                up.children = [node]
        self._held.add(node)
        self.on_its_way_bytes += size_bytes
        return node

    def undo_add(self, node: Node) -> None:
        """Undo `add`: remove the node, or restore the gap or the partial file that it would have replaced."""
        if node.rest_bytes:
            self.leave_partial(node)
        elif node.children:
            self.make_gap(node)
        else:
            self.remove(node)

    def mark_durable(self, node: Node) -> None:
        """Mark a node's file as complete on disk."""
        node.durable, node.rest_bytes = True, 0
        self.on_its_way_bytes -= node.size_bytes
        self.stored += 1
        self.stored_bytes += node.size_bytes
        self._reclassify(node)

    def make_gap(self, node: Node) -> None:
        """Turn a node into a gap, a node without a file, after its file was evicted or not written."""
        self._uncount(node)
        node.size_bytes, node.durable = 0, True
        self._reclassify(node)

    def leave_partial(self, node: Node) -> None:
        """Record that a node keeps its partial file, because its complete file could not be written."""
        self.resize(node, node.rest_bytes)
        self._reclassify(node)

    def resize(self, node: Node, size_bytes: int) -> None:
        """Record that a node's file now has this size."""
        self._uncount(node)
        node.size_bytes, node.durable = size_bytes, True
        self.stored += 1
        self.stored_bytes += size_bytes

    def _uncount(self, node: Node) -> None:
        if node.durable:
            self.stored -= not node.is_gap
            self.stored_bytes -= node.size_bytes
        else:
            self.on_its_way_bytes -= node.size_bytes

    def remove(self, node: Node) -> None:
        """Remove a leaf; its parent takes over its last use and its holds."""
        del self._nodes[node.digest]
        self._held.discard(node)
        if node.durable:
            self.stored -= not node.is_gap
            self.stored_bytes -= node.size_bytes
        else:
            self.on_its_way_bytes -= node.size_bytes
        self._push(gap_rules.passed_by(node))
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

    def clear(self) -> None:
        """Remove all nodes. A running load is not stopped."""
        for node in (*self._nodes.values(), *self._roots.values()):
            node.children = ()  # breaks reference cycles: a start may have frozen them (gc.freeze)
        self._fill(())

    def use(self, node: Node) -> None:
        """Record that a node and all nodes before it were used now."""
        node.used = self.next_use()

    def hold(self, node: Node) -> None:
        """Protect a node and all nodes before it from eviction, for a load or a turn, until `release`."""
        node.holds += 1
        self._reclassify(node)

    def release(self, node: Node) -> Node | None:
        """Undo one `hold` of a node; if the node was removed, of its nearest ancestor. Return the node."""
        held = next(filter(self.has, node.chain()), None)
        if held is not None:
            held.holds -= 1
            self._reclassify(held)
        return held

    def has(self, node: Node) -> bool:
        """Whether this node object is in the tree: not removed, nor replaced by one with the same digest."""
        return self._nodes.get(node.digest) is node

    def held_bytes(self) -> int:
        """Return the total bytes of held nodes, and of the nodes that their sessions need."""
        seen: set[Node] = set()
        size_bytes = 0
        for held in self._held:
            for node in held.chain() if held.reach is None else gap_rules.needed_by(held):
                if node in seen:
                    if held.reach is None:
                        break  # and so are all nodes before it
                    continue
                seen.add(node)
                size_bytes += node.size_bytes
        return size_bytes

    def oldest(self) -> Node | None:
        """Return the least recently used node that may be evicted: a leaf, or one that may become a gap."""
        while self._eviction_heap:
            used, digest = self._eviction_heap[0]
            node = self._nodes.get(digest)
            if node is None or not (node.evictable or gap_rules.may_become_gap(node)):
                heapq.heappop(self._eviction_heap)  # pushed again once it is evictable
            elif node.used != used:
                heapq.heapreplace(self._eviction_heap, (node.used, digest))
            else:
                return node
        return None

    def _reclassify(self, node: Node) -> None:
        """Update whether a node is held, and push it on the heap if it is evictable; duplicates are fine."""
        if node.holds or not node.durable:
            self._held.add(node)
        else:
            self._held.discard(node)
        self._push((node,) if node.evictable else ())
        if node not in self._held:
            self._push(gap_rules.passed_by(node))
            self.settled(node)

    def _push(self, nodes: Iterable[Node]) -> None:
        """Push nodes on the eviction heap; `oldest` skips those that may not be evicted after all."""
        for node in nodes:
            heapq.heappush(self._eviction_heap, (node.used, node.digest))
        if len(self._eviction_heap) > 1.5 * len(self._nodes) + 64:
            self._rebuild_heap()  # at least a third of the items are stale

    def _rebuild_heap(self) -> None:
        """Rebuild the heap from all nodes that may be evicted."""
        self._eviction_heap = [
            (node.used, node.digest)
            for node in self._nodes.values()
            if (node.evictable if node.reach is None or not node.children else not node.is_gap)
        ]
        heapq.heapify(self._eviction_heap)

    def _parent(self, digest: bytes) -> Parent:
        """Return the node with this digest; if there is none, the root with this digest, made if needed."""
        return self._nodes.get(digest) or self._roots.setdefault(
            digest, Parent(digest, self._reaches.get(digest))
        )

    def closest_child(self, parent: bytes, packed: bytes, *, usable: bool) -> tuple[Node, int] | None:
        """Return the child of `parent` with the longest prefix in common with `packed`, and that length.

        Siblings are sorted by their tokens, so this child is a neighbour of the position where `packed` would
        be inserted. Of two equally good children the smaller one is returned, since it is read faster. Gaps
        and partial files are skipped; with `usable`, all nodes with which no match may end.
        """
        siblings = self.children(parent)
        at = bisect_left(siblings, (packed, b""), key=BY_TOKENS)
        found: list[tuple[int, int, Node]] = []
        for side in (range(at, len(siblings)), range(at - 1, -1, -1)):
            near = (siblings[i] for i in side if siblings[i].usable or not usable)
            node = next((one for one in near if not one.is_hollow), None)
            if node is not None and (num_tokens := num_common(node.tokens, packed)):
                found.append((num_tokens, -node.size_bytes, node))
        num_tokens, _, node = max(found, key=lambda one: one[:2], default=(0, 0, None))
        return None if node is None else (node, num_tokens)

    def longest_path(
        self, parent: bytes, packed: bytes, *, usable: bool = False, min_share: float = 0.0
    ) -> tuple[tuple[Node, ...], int]:
        """Return the path of nodes with the longest prefix of `packed`, and the length of that prefix.

        The last node may have further tokens, but at least the share `min_share` of its tokens is in the
        prefix. Of several paths that reach equally far, return the one with the fewest bytes to read.
        """
        best: tuple[tuple[Node, ...], int] = (), 0
        part = self.closest_child(parent, packed, usable=usable) if packed else None
        if part is not None and part[1] >= min_share * part[0].num_tokens:
            best = (part[0],), part[1]
        for node in self._prefix_children(parent, packed):
            if node.is_hollow or (usable and not node.usable):
                continue
            rest = packed[len(node.tokens) :]
            path, num_tokens = self.longest_path(node.digest, rest, usable=usable, min_share=min_share)
            found = (node, *path), node.num_tokens + num_tokens
            best = max(best, found, key=lambda one: (one[1], -sum(node.size_bytes for node in one[0])))
        return best

    def within(self, parent: bytes, packed: bytes) -> list[Node]:
        """Return the descendants of `parent` whose tokens are all in `packed`, parents before children."""
        found: list[Node] = []
        open_ends = [(parent, 0)]
        while open_ends:
            parent, at = open_ends.pop()
            for node in self._prefix_children(parent, packed[at : at + MOST_TOKEN_BYTES]):
                found.append(node)
                open_ends.append((node.digest, at + len(node.tokens)))
        return found

    def superseded(self, node: Node) -> list[Node]:
        """Return the other nodes whose tokens this node contains too, children before parents."""
        return [other for other in reversed(self.within(node.parent, node.tokens)) if other is not node]

    def resumable_path(self, parent: bytes, packed: bytes) -> tuple[Node, ...]:
        """Return the path to the last usable node within `packed` at whose end a session can resume."""
        best: tuple[Node, ...] = ()
        for node in self._prefix_children(parent, packed):
            if node.usable:
                path = (node, *self.resumable_path(node.digest, packed[len(node.tokens) :]))
                if path[-1].resumable:
                    best = max(best, path, key=lambda one: one[-1].end if one else 0)
        return best

    def _prefix_children(self, parent: bytes, packed: bytes) -> Iterator[Node]:
        """Yield the children of `parent` whose tokens are a prefix of `packed`, the longest first.

        Each round finds the last sibling that is not sorted after `bound`. The tokens that this sibling and
        `bound` have in common are the `bound` of the next round.
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

    def descendants(self, node: Parent) -> list[Node]:
        """Return all nodes that continue this one, children before parents."""
        found = [*node.children]
        for parent in found:
            found += parent.children
        return found[::-1]
