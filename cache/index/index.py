"""The index: all snapshots in memory, stored or queued, each by itself, with its last use.

Belongs to the event loop; the store and its searches use it. Knows no files; `catalog` stores on disk what
must survive a restart.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from cache.disk.rows import SnapshotRow
from cache.names import blocks
from cache.names.tokens import TOKEN_BYTES, num_common

from .nodes import BY_TOKENS, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cache.names.marks import Marks
    from cache.names.snapshot import Name


_BY_START: Final = attrgetter("start")


class SnapshotIndex:
    """The snapshots of all tenants and models in the directory, by digest.

    A node is one snapshot. Any node may be removed, whatever continues it. The least recently used node is
    evicted first; of nodes that were used together, the last one of the session. So KV that no layer sees any
    more, which no turn uses, is evicted before all that sessions still need.
    """

    def __init__(self, clock: Callable[[], float], stored: Sequence[SnapshotRow] = ()) -> None:
        self._clock = clock
        self._now = 0
        self._fill(stored)

    def _fill(self, stored: Sequence[SnapshotRow]) -> None:
        """Take over the catalog's rows."""
        self._nodes = {row.digest: Node(row, durable=True) for row in stored}
        #: By the digest of a prefix: the node that continues it, or all, in the order of `BY_TOKENS`.
        self._children: dict[bytes, Node | list[Node]] = {}
        families: dict[bytes, list[Node]] = {}
        for node in self._nodes.values():
            other = self._children.setdefault(node.parent, node)
            if other is not node:
                families.setdefault(node.parent, []).append(node)
        for parent, siblings in families.items():
            self._children[parent] = sorted([*self.children(parent), *siblings], key=BY_TOKENS)
        self._now = max(self._now, max((row.used for row in stored), default=0))
        self.stored = len(self._nodes)
        self.stored_bytes = sum(row.size_bytes for row in stored)
        #: Bytes of nodes that are not stored yet.
        self.on_its_way_bytes = 0
        #: Bytes of nodes that a load or a turn uses, or that are queued for the disk.
        self.held_bytes = 0
        #: The nodes that may be evicted, by `due`, and in the order of their positions. A node that was used
        #: since is moved only when its turn comes, so that a use costs nothing here.
        self._due: dict[int, list[Node]] = {}
        for node in self._nodes.values():
            if (nodes := self._due.get(node.used)) is None:
                self._due[node.used] = [node]
            else:
                nodes.append(node)
                node.used = nodes[0].used  # one object for all
            node.due = node.used
        for nodes in self._due.values():
            nodes.sort(key=_BY_START)
        #: A heap of the keys of `_due`.
        self._uses = sorted(self._due)

    def __iter__(self) -> Iterator[Node]:
        """Yield the nodes in the order of eviction."""
        return iter(sorted(self._nodes.values(), key=lambda node: (node.used, -node.start, node.digest)))

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, digest: bytes) -> Node | None:
        """Return the node with this digest, queued or stored."""
        return self._nodes.get(digest)

    def children(self, digest: bytes) -> Sequence[Node]:
        """Return the nodes that continue `digest`, in the order of their tokens."""
        found = self._children.get(digest, ())
        return (found,) if isinstance(found, Node) else found

    def chain(self, node: Node) -> Iterator[Node]:
        """Yield a node, and those before it in reverse order, up to the first that is missing."""
        before: Node | None = node
        while before is not None:
            yield before
            before = self._nodes.get(before.parent)

    def next_use(self) -> int:
        """Return the time of a use: microseconds since 1970, always later than the previous result."""
        self._now = max(self._now + 1, int(self._clock() * 1e6))
        return self._now

    def add(self, name: Name, size_bytes: int) -> Node:
        """Add a snapshot that is queued for the disk, used with the one that it continues, if that is here.

        So what a turn adds to a session is evicted before the beginning of the session.
        """
        digest, before = name.digest, self._nodes.get(name.parent)
        used = self.next_use() if before is None else before.used
        node = self._nodes[digest] = Node(SnapshotRow.of(digest, name, size_bytes, used), durable=False)
        siblings = self._children.setdefault(name.parent, node)
        if isinstance(siblings, list):
            insort(siblings, node, key=BY_TOKENS)
        elif siblings is not node:
            self._children[name.parent] = sorted((siblings, node), key=BY_TOKENS)
        self.on_its_way_bytes += size_bytes
        self.held_bytes += size_bytes
        return node

    def mark_durable(self, node: Node) -> None:
        """Mark a node's file as complete on disk."""
        node.durable = True
        self.on_its_way_bytes -= node.size_bytes
        self.stored += 1
        self.stored_bytes += node.size_bytes
        self._let_go(node)

    def remove(self, node: Node) -> None:
        """Remove a node."""
        del self._nodes[node.digest]
        if node.durable:
            self.stored -= 1
            self.stored_bytes -= node.size_bytes
        else:
            self.on_its_way_bytes -= node.size_bytes
        if not node.evictable:
            self.held_bytes -= node.size_bytes
        siblings = self._children[node.parent]
        if isinstance(siblings, list) and len(siblings) > 1:
            del siblings[bisect_left(siblings, BY_TOKENS(node), key=BY_TOKENS)]
        else:
            del self._children[node.parent]
        if node.due is not None:
            self._due[node.due].remove(node)

    def clear(self) -> None:
        """Remove all nodes. A running load is not stopped."""
        self._fill(())

    def use(self, nodes: Iterable[Node]) -> int:
        """Record that these nodes were used now, together; return the time of the use."""
        used = self.next_use()
        for node in nodes:
            node.used = used
        return used

    def hold(self, nodes: Iterable[Node]) -> None:
        """Protect nodes from eviction, for a load or a turn, until `release`."""
        for node in nodes:
            if node.durable and not node.holds:
                self.held_bytes += node.size_bytes
            node.holds += 1

    def release(self, nodes: Iterable[Node]) -> None:
        """Undo one `hold` of these nodes, some of which may have been removed meanwhile."""
        for node in nodes:
            node.holds -= 1
            if node.durable and not node.holds and self.has(node):
                self._let_go(node)

    def _let_go(self, node: Node) -> None:
        """Count a node that is on disk as evictable, unless a load or a turn uses it."""
        if node.holds:
            return
        self.held_bytes -= node.size_bytes
        if node.due is None:
            self._put_due(node)

    def _put_due(self, node: Node) -> None:
        node.due = node.used
        if node.due not in self._due:
            self._due[node.due] = []
            heapq.heappush(self._uses, node.due)
        insort(self._due[node.due], node, key=_BY_START)

    def has(self, node: Node) -> bool:
        """Whether this node object is in the index: not removed, nor replaced by one with the same digest."""
        return self._nodes.get(node.digest) is node

    def oldest(self) -> Node | None:
        """Return the node to evict next: least recently used, and last in its session."""
        while self._uses:
            used = self._uses[0]
            nodes = self._due[used]
            while nodes:
                node = nodes[-1]
                if node.evictable and node.used == used:
                    return node
                nodes.pop().due = None
                if node.evictable:
                    self._put_due(node)  # else `_let_go` does it
            del self._due[heapq.heappop(self._uses)]
        return None

    def closest_child(self, parent: bytes, packed: bytes, *, usable: bool) -> tuple[Node, int] | None:
        """Return the child of `parent` with the longest prefix in common with `packed`, and that length.

        Siblings are sorted by their tokens, so this child is a neighbour of the position where `packed` would
        be inserted. Of two equally good children the smaller one is returned, since it is read faster. With
        `usable`, nodes that no match may use are skipped.
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
        """Return the path of nodes with the longest prefix of `packed`, and the length of that prefix.

        The last node may have further tokens, but at least the share `min_share` of its tokens is in the
        prefix. Of several paths that reach equally far, return the one with the fewest bytes to read.
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

    def marked(self, marks: Marks) -> list[Node]:
        """Return the nodes that are to be erased according to the marks of a forgotten session."""
        return [node for node in self._nodes.values() if marks.has(node.mark, node.end)]

    def within(self, root: bytes, packed: bytes, block: int) -> list[Node]:
        """Return the nodes that hold only tokens of `packed`, first ones first, whatever is missing between.

        `root` is the name of the empty prefix, `block` the number of tokens per block.
        """
        found, parent = [], root
        for at in range(0, len(packed), block * TOKEN_BYTES):
            part = packed[at : at + block * TOKEN_BYTES]
            found += self.pieces_within(parent, part)
            parent = blocks.link(parent, part)
        return found

    def pieces_within(self, parent: bytes, packed: bytes) -> list[Node]:
        """Return the nodes that continue `parent` with tokens of `packed` only, parents before children."""
        found: list[Node] = []
        open_ends = [(parent, 0)]
        while open_ends:
            parent, at = open_ends.pop()
            for node in self._prefix_children(parent, packed[at:]):
                found.append(node)
                open_ends.append((node.digest, at + len(node.tokens)))
        return found

    def pieces_after(self, node: Node, block: int) -> list[Node]:
        """Return the pieces of a tail that continue this piece, children before parents.

        Nothing finds them without this piece, because it is not known which one was before them.
        """
        found = [one for one in self.children(node.digest) if one.start % block]
        for piece in found:
            found += [one for one in self.children(piece.digest) if one.start % block]
        return found[::-1]

    def superseded(self, node: Node) -> list[Node]:
        """Return the other nodes whose tokens this node contains too, children before parents."""
        return [one for one in reversed(self.pieces_within(node.parent, node.tokens)) if one is not node]

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
