"""Evicts KV that lies far before the windows of all sessions, even if there is disk space.

A session whose layers see only a window of tokens can grow for ever, and its KV on disk would grow too. So
snapshots (nodes of the index) far before the window are evicted, in steps that `quota` schedules. Belongs to
the event loop. Knows no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cache.names.policy import FULL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cache.names.policy import Policy

    from .index import Index
    from .nodes import Node
    from .prefixes import Prefixes
    from .remover import Remover

#: The most nodes that are checked in one step.
_MOST_NODES: Final = 256
#: The most files that are shortened at a time, since new snapshots wait for them.
_MOST_SHORTENED: Final = 4


class WindowEviction:
    """Evicts nodes that lie more than `keep_tokens` tokens before the end of every session; with None, none.

    A node is behind if its chain continues without a branch for `keep_tokens` more tokens, and for at least a
    window, and if no load or turn uses a node in this range. Nodes with sink tokens are never behind.
    """

    def __init__(self, index: Index, remover: Remover, keep_tokens: int | None) -> None:
        self._index = index
        self._remover = remover
        self._keep_tokens = keep_tokens
        #: The followed roots, with their windows.
        self._followed: dict[bytes, tuple[Prefixes, Policy]] = {}
        #: Nodes that may be behind, to be checked.
        self._due: dict[Node, None] = {}
        if keep_tokens is not None:
            index.settled = self._settled

    def __len__(self) -> int:
        return len(self._due)

    def follow(self, root: bytes, prefixes: Prefixes) -> None:
        """Follow a root (a tenant's chains for one model): from now on `evict` also evicts its nodes.

        If some layers have windows and others have states, no node of the root counts as behind.
        """
        layout, windows = prefixes.layout, prefixes.layout.windows
        if self._keep_tokens is None or root in self._followed or windows == FULL:
            return
        if layout.states and layout.reach == FULL:
            return
        self._followed[root] = prefixes, windows
        for node in self._index.children(root):
            self._due |= dict.fromkeys((*self._index.descendants(node), node))

    def evict(self, most: int) -> None:
        """Evict up to `most` nodes that are behind or just their KV of windowed layers."""
        found: list[Node] = []
        for _ in range(min(len(self._due), _MOST_NODES)):
            if len(found) == most or self._remover.num_shortened == _MOST_SHORTENED:
                break
            node = next(iter(self._due))
            del self._due[node]
            if not self._index.has(node):
                continue
            prefixes, windows = self._followed[node.first.parent]
            if not self._is_behind(node, windows):
                continue
            if prefixes.layout.reach == FULL:
                self._remover.make_partial(node, prefixes.layout, prefixes.identity)
            else:
                found.append(node)
        self._remover.make_gaps(found)

    def _is_behind(self, node: Node, windows: Policy) -> bool:
        if not node.usable or node.holds or node.start < windows.sink:
            return False
        end = node.end + self._kept(windows)
        for other in _continued(node):
            if other.start >= end:
                return True
            if other.holds or not other.durable:
                return False
        return False

    def _settled(self, node: Node) -> None:
        """Queue nodes that may be behind after a node was stored, released or lost a child."""
        followed = self._followed.get(node.first.parent) if self._followed else None
        if followed is None:
            return
        keep = self._kept(followed[1])
        last = node
        for last in _continued(node):
            if last.start >= node.end + keep:
                break
        for other in node.chain():
            if other.end + keep <= last.start and not other.is_hollow:
                self._due[other] = None
            if other.end + keep <= node.start:
                return  # nodes before `other` do not depend on this node

    def _kept(self, windows: Policy) -> int:
        return max(self._keep_tokens or 0, windows.window or 0)


def _continued(node: Node) -> Iterator[Node]:
    """Yield the nodes after a node, up to the point where its chain ends or branches."""
    while len(node.children) == 1:
        node = node.children[0]
        yield node
