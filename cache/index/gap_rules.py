"""Gaps: nodes in the middle of a chain whose files were evicted, while the nodes stay in the index's tree.

A session whose layers see only some of its tokens needs the first and the last blocks of its chain. The
blocks between them may be evicted earlier. The tree stays complete, so that holds and bisection work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .nodes import Node

#: A search stops after this many nodes, and assumes that the node is needed.
_MOST_NODES: Final = 1000


def may_become_gap(node: Node) -> bool:
    """Whether a node's file may be evicted although other nodes continue it, since no session sees its KV.

    This is true if every chain through the node continues for at least a window after it, and if no load or
    turn uses a node in that range. Nodes with sink tokens never become gaps.
    """
    window = _window(node)
    if window is None or node.reach is None or node.start < node.reach.sink:
        return False
    if not (node.children and node.usable) or node.holds:
        return False
    to_do, num_done = [*node.children], 0
    while to_do:
        other = to_do.pop()
        num_done += 1
        if other.start >= node.end + window:
            continue
        if not other.children or other.holds or not other.durable or num_done > _MOST_NODES:
            return False
        to_do += other.children
    return True


def needed_by(node: Node) -> Iterator[Node]:
    """Yield the nodes whose KV a session needs to resume at the end of `node`, in reverse order."""
    window = _window(node)
    sink, first = (0 if node.reach is None else node.reach.sink), node.first
    for other in node.chain():
        if window is None or other.start < sink or other.end > node.start - window:
            yield other
        elif sink <= first.end:
            if sink:
                yield first
            return


def passed_by(node: Node) -> Iterator[Node]:
    """Yield the earlier nodes of the chain that may become gaps when `node` is added, released or removed."""
    window = _window(node)
    if window is None:
        return
    for other in node.chain():
        if other is not node:
            yield other
        if other.end <= node.start - window:
            return


def _window(node: Node) -> int | None:
    return None if node.reach is None else node.reach.window
