"""Victims: leaves first, least recently used first, and never one that is held."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from cache.index.eviction import choose


@dataclass(frozen=True)
class Node:
    digest: bytes
    parent: bytes
    size_bytes: int
    used: int
    held: bool


@st.composite
def trees(draw) -> list[Node]:
    """Draw a tree in order of use, where a parent was used no earlier than its children."""
    shape = draw(
        st.lists(st.tuples(st.integers(-1, 15), st.integers(1, 9), st.integers(0, 9), st.booleans()))
    )
    parents = [min(parent, i - 1) for i, (parent, *_) in enumerate(shape)]
    used = [when for *_, when, _ in shape]
    for i in reversed(range(len(shape))):
        if parents[i] >= 0:
            used[parents[i]] = max(used[parents[i]], used[i])
    nodes = [
        Node(bytes([i]), bytes([parents[i]]) if parents[i] >= 0 else b"root", size, used[i], held)
        for i, (_, size, _, held) in enumerate(shape)
    ]
    return sorted(nodes, key=lambda node: (node.used, -node.digest[0]))


def by_hand(tree: list[Node], need: int, limit: int) -> list[Node]:
    """Search the whole tree for the oldest free leaf, again and again."""
    left, victims = list(tree), []
    while need > 0 and len(victims) < limit:
        parents = {node.parent for node in left}
        free = [node for node in left if node.digest not in parents and not node.held]
        if not free:
            return []
        victims.append(free[0])
        left.remove(free[0])
        need -= free[0].size_bytes
    return victims


def num_children(tree: list[Node], digest: bytes) -> int:
    return sum(node.parent == digest for node in tree)


@given(trees(), st.integers(-3, 60), st.integers(0, 12))
def test_one_pass_chooses_what_a_search_of_the_whole_tree_would(tree, need, limit) -> None:
    chosen = choose(tree, lambda digest: num_children(tree, digest), need_bytes=need, limit=limit)
    assert chosen == by_hand(tree, need, limit)


@given(trees(), st.integers(1, 60))
def test_nothing_that_stays_has_lost_its_parent(tree, need) -> None:
    gone = choose(tree, lambda digest: num_children(tree, digest), need_bytes=need, limit=99)
    parents_gone = {node.digest for node in gone}
    assert not any(node.held for node in gone)
    assert not any(node.parent in parents_gone for node in tree if node not in gone)
    assert sum(node.size_bytes for node in gone) >= need or not gone
