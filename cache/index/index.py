"""The index: all snapshots in memory, stored or queued, each by itself, with its last use.

Belongs to the event loop; the store and its searches use it. Knows no files; `catalog` stores on disk what
must survive a restart.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import defaultdict
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from cache.names import blocks
from cache.names.tokens import TOKEN_BYTES

from .nodes import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from cache.disk.rows import Columns
    from cache.names.marks import Marks
    from cache.names.snapshot import Name


_BY_START: Final = attrgetter("start")


class SnapshotIndex:
    """The snapshots of all tenants and models in the directory, by digest.

    A node is one snapshot. Any node may be removed, whatever continues it. The least recently used node is
    evicted first; of nodes that were used together, the last one of the session. So KV that no layer sees any
    more, which no turn uses, is evicted before all that sessions still need.
    """

    def __init__(self, clock: Callable[[], float], stored: Iterable[Columns] = ()) -> None:
        """`stored` are the catalog's rows, many at a time."""
        self._clock = clock
        self._now = 0
        self._fill(stored)

    def _fill(self, stored: Iterable[Columns]) -> None:
        """Take over the catalog's rows: by column, since a start must not take long."""
        self._nodes: dict[bytes, Node] = {}
        #: By the digest of a prefix: the node that continues it, or all.
        self._children: dict[bytes, Node | set[Node]] = {}
        self.stored_bytes = 0
        #: Bytes of stored nodes that a load or a turn uses.
        self.held_bytes = 0
        #: The nodes that may be evicted, by `due`, and in the order of their positions. A node that was used
        #: since is moved only when its turn comes, so that a use costs nothing here.
        self._due: defaultdict[int, list[Node]] = defaultdict(list)
        #: One object for all equal numbers: they would take a fifth of the memory.
        only: Callable[[int, int], int] = dict[int, int]().setdefault
        for digests, parents, *numbers, resumable, marks, _ in stored:
            starts, lengths, sizes, used = ([*map(only, column, column)] for column in numbers)
            given = digests, parents, starts, lengths, sizes, used, map(bool, resumable), marks
            nodes = [*map(Node, *given, repeat(True), used)]
            self._nodes.update(zip(digests, nodes, strict=True))
            for first, node in zip(map(self._children.setdefault, parents, nodes), nodes, strict=True):
                if first is not node:
                    self._add_child(node)
            for use, node in zip(used, nodes, strict=True):
                self._due[use].append(node)
            self.stored_bytes += sum(sizes)
        self.stored = len(self._nodes)
        for nodes in self._due.values():
            nodes.sort(key=_BY_START)
        #: A heap of the keys of `_due`.
        self._uses = sorted(self._due)
        self._now = max([self._now, *self._uses[-1:]])

    def __iter__(self) -> Iterator[Node]:
        """Yield the nodes in the order of eviction."""
        return iter(sorted(self._nodes.values(), key=lambda node: (node.used, -node.start, node.digest)))

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, digest: bytes) -> Node | None:
        """Return the node with this digest, queued or stored."""
        return self._nodes.get(digest)

    def usable(self, digests: Iterable[bytes]) -> list[Node | None]:
        """Return, of each digest, the node that a match may use; None if there is none."""
        return [node if node is not None and node.usable else None for node in map(self._nodes.get, digests)]

    def _add_child(self, node: Node) -> None:
        siblings = self._children.setdefault(node.parent, node)
        if isinstance(siblings, set):
            siblings.add(node)
        elif siblings is not node:
            self._children[node.parent] = {siblings, node}

    def children(self, digest: bytes) -> Collection[Node]:
        """Return the nodes that continue `digest`."""
        found = self._children.get(digest, ())
        return (found,) if isinstance(found, Node) else found

    def chain(self, node: Node) -> Iterator[Node]:
        """Yield a node, and those before it in reverse order, up to the first that is missing."""
        before: Node | None = node
        while before is not None:
            yield before
            before = self._nodes.get(before.parent)

    @property
    def last_used(self) -> int:
        """The time of the last use, in microseconds since 1970; 0 if there was none."""
        return self._now

    def next_use(self) -> int:
        """Return the time of a use: microseconds since 1970, always later than the previous result."""
        self._now = max(self._now + 1, int(self._clock() * 1e6))
        return self._now

    def add(self, name: Name, size_bytes: int, used: int | None = None) -> Node:
        """Add a node for a snapshot that is queued for the disk, and return it.

        Its last use is that of the snapshot that it continues, so what a turn adds to a session is evicted
        before the session's beginning. If that snapshot is not in the index, the last use is `used`, or now.
        """
        digest, before = name.digest, self._nodes.get(name.parent)
        if before is not None:
            used = before.used
        elif used is None:
            used = self.next_use()
        node = self._nodes[digest] = Node(
            digest, name.parent, name.start, name.num_tokens, size_bytes, used, name.resumable, name.mark
        )
        if before is not None:
            node.parent = before.digest
        self._add_child(node)
        return node

    def mark_durable(self, node: Node) -> None:
        """Mark a node's file as complete on disk; unless a load or a turn uses the node, it is evictable."""
        node.durable = True
        self.stored += 1
        self.stored_bytes += node.size_bytes
        if node.holds:
            self.held_bytes += node.size_bytes
        else:
            self._put_due(node)

    def remove(self, node: Node) -> None:
        """Remove a node."""
        del self._nodes[node.digest]
        if node.durable:
            self.stored -= 1
            self.stored_bytes -= node.size_bytes
            self.held_bytes -= node.size_bytes if node.holds else 0
        siblings = self._children[node.parent]
        if isinstance(siblings, set) and len(siblings) > 1:
            siblings.remove(node)
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
            if node.evictable and self.has(node):
                self.held_bytes -= node.size_bytes
                if node.due is None:
                    self._put_due(node)

    def _put_due(self, node: Node) -> None:
        node.due = node.used
        if node.due not in self._due:
            heapq.heappush(self._uses, node.due)
        insort(self._due[node.due], node, key=_BY_START)

    def has(self, node: Node) -> bool:
        """Whether this node object is in the index: not removed, nor replaced by one with the same digest."""
        return self._nodes.get(node.digest) is node

    def oldest(self) -> Node | None:
        """Return the node to evict next: least recently used, and last in its session; None without one."""
        while self._uses:
            used = self._uses[0]
            nodes = self._due[used]
            while nodes:
                node = nodes[-1]
                if node.evictable and node.used == used:
                    return node
                nodes.pop().due = None
                if node.evictable:
                    self._put_due(node)  # else `release` does it
            del self._due[heapq.heappop(self._uses)]
        return None

    def furthest(self, parent: bytes, packed: bytes, *, usable: bool = False) -> tuple[Node, ...]:
        """Return the nodes after `parent`, each continuing the one before, that hold most tokens of `packed`.

        They hold no other tokens. With `usable`, only nodes that a match may use, up to one at whose end a
        session can resume. Empty if there are none.
        """
        best: tuple[Node, ...] = ()
        for node in self._continuing(parent, packed):
            if usable and not node.usable:
                continue
            rest = packed[node.num_tokens * TOKEN_BYTES :]
            path = (node, *self.furthest(node.digest, rest, usable=usable))
            if path[-1].resumable or not usable:
                best = max(best, path, key=lambda one: (one[-1].end, -len(one)) if one else (0, 0))
        return best

    def marks(self) -> frozenset[bytes]:
        """Return the marks of all nodes."""
        return frozenset(node.mark for node in self._nodes.values())

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
        found = []
        for node in self._continuing(parent, packed):
            found += [node, *self.pieces_within(node.digest, packed[node.num_tokens * TOKEN_BYTES :])]
        return found

    def pieces_after(self, node: Node, block: int) -> list[Node]:
        """Return the pieces of a tail that continue this piece, children before parents.

        Nothing finds them without this piece, because it is not known which one was before them.
        """
        found = [one for one in self.children(node.digest) if one.start % block]
        for piece in found:
            found += [one for one in self.children(piece.digest) if one.start % block]
        return found[::-1]

    def superseded(self, node: Node, packed: bytes) -> list[Node]:
        """Return the nodes that this node makes useless, since it has all their tokens.

        Children come before parents. `packed` are the packed tokens of `node`, which the index does not have.
        """
        if len(self.children(node.parent)) == 1:  # of most blocks: nothing has to be hashed
            return []
        return [one for one in reversed(self.pieces_within(node.parent, packed)) if one is not node]

    def _continuing(self, parent: bytes, packed: bytes) -> Iterator[Node]:
        """Yield the children of `parent` whose tokens are a prefix of `packed`: they are found by digest."""
        for num_tokens in sorted({child.num_tokens for child in self.children(parent)}):
            if num_tokens * TOKEN_BYTES <= len(packed):
                node = self._nodes.get(blocks.link(parent, packed[: num_tokens * TOKEN_BYTES]))
                if node is not None:
                    yield node
