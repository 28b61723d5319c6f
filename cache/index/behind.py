"""KV that lies far behind the ends of all sessions that continue it, which is evicted although there is room.

A session whose layers see a window has no end, so its disk would grow for ever. Owns which nodes are behind;
`room` evicts them in steps. Belongs to the event loop. Knows no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cache.names.policy import Policy

    from .index import Index
    from .nodes import Node

#: The most nodes that `take` looks at.
_MOST_NODES: Final = 256


class Behind:
    """Finds the nodes of an index more than `keep_tokens` behind; with None there are none.

    A node is behind if neither an end of a chain that contains it nor a held node, nor a place where such
    chains part, is within `keep_tokens`, or within a window, behind it. Sinks and pinned nodes never are.
    """

    def __init__(self, index: Index, keep_tokens: int | None) -> None:
        self._index = index
        self._keep_tokens = keep_tokens
        #: By root: the most that a layer with a window sees of the sessions behind it.
        self._windows: dict[bytes, Policy] = {}
        #: Nodes that may be behind, to be looked at.
        self._due: dict[Node, None] = {}
        if keep_tokens is not None:
            index.settled = self._settled

    def __len__(self) -> int:
        return len(self._due)

    def follow(self, root: bytes, windows: Policy) -> None:
        """Find nodes of a root from now on, and among those that it has: its layers see these `windows`."""
        if self._keep_tokens is None or root in self._windows:
            return
        self._windows[root] = windows
        for node in self._index.children(root):
            self._due |= dict.fromkeys((*self._index.descendants(node), node))

    def take(self, most: int) -> list[Node]:
        """Return up to `most` nodes that are behind, of some that may be."""
        found: list[Node] = []
        for _ in range(min(len(self._due), _MOST_NODES)):
            node = next(iter(self._due))
            del self._due[node]
            if self._index.has(node) and self._is_behind(node):
                found.append(node)
                if len(found) == most:
                    break
        return found

    def _is_behind(self, node: Node) -> bool:
        windows = self._windows[node.first.parent]
        if not node.usable or node.holds or node.kept or node.start < windows.sink:
            return False
        end = node.end + self._kept(windows)
        for other in _continued(node):
            if other.start >= end:
                return True
            if other.holds or not other.durable:
                return False
        return False

    def _settled(self, node: Node) -> None:
        """Note what may be behind now that this node was stored or released, or has lost a child."""
        windows = self._windows.get(node.first.parent) if self._windows else None
        if windows is None:
            return
        keep = self._kept(windows)
        last = node
        for last in _continued(node):
            if last.start >= node.end + keep:
                break
        for other in node.chain():
            if other.end + keep <= last.start and not other.is_gap:
                self._due[other] = None
            if other.end + keep <= node.start:
                return  # what is before it does not depend on this node

    def _kept(self, windows: Policy) -> int:
        return max(self._keep_tokens or 0, windows.window or 0)


def _continued(node: Node) -> Iterator[Node]:
    """Yield the nodes that continue a node, up to where chains part or end."""
    while len(node.children) == 1:
        node = node.children[0]
        yield node
