"""What is proposed, and how much of it."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from worker.batch.lookup import NGRAM, Lookup


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert Lookup([1, 2, 3, 4, 5, 9, 1, 2, 3], most=8).propose(8) == [4, 5, 9]
    assert Lookup([1, 2, 3, 4, 5, 9, 1, 2, 3], most=8).propose(2) == [4, 5]


def test_the_latest_place_counts() -> None:
    assert Lookup([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], most=1).propose(1) == [8]


def test_nothing_is_proposed_where_nothing_is_known() -> None:
    assert Lookup([], most=8).propose(8) == []
    assert Lookup([1, 2], most=8).propose(8) == []
    assert Lookup([1, 2, 3, 4, 5], most=8).propose(8) == []


def test_right_guesses_make_longer_ones_and_wrong_ones_make_pauses() -> None:
    lookup = Lookup([1, 2, 3] * 9, most=8)
    lengths = []
    for _ in range(3):
        lengths.append(len(lookup.propose(8)))
        lookup.learn(lengths[-1], lengths[-1])
    assert lengths == [3, 6, 8]
    assert lookup.propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]  # beyond what stands there
    lookup = Lookup(list(range(50)) * 2, most=8)
    lookup.push(0)
    lookup.push(1)
    lookup.push(2)
    for expected in (3, 6, 8, 8):
        assert len(lookup.propose(8)) == expected
        lookup.learn(expected, expected)
    pauses = []
    said = 2
    for _ in range(4):
        lookup.learn(len(lookup.propose(8)), 0)
        pause = 0
        while not lookup.propose(8):
            said += 1
            lookup.push(said)
            pause += 1
        pauses.append(pause)
    assert pauses == [1, 3, 7, 15]


class Counted(int):
    """A token that counts how often a table was asked for it, or got it."""

    num_hashed = 0

    def __hash__(self) -> int:
        Counted.num_hashed += 1
        return int(self)


def test_a_long_sessions_tokens_are_entered_a_few_with_each_token_of_the_answer() -> None:
    """A step that entered all of them would keep every other answer waiting."""
    tokens = [Counted(i % 50_000) for i in range(100_000)]
    Counted.num_hashed = 0
    lookup = Lookup(tokens, most=4)
    most = Counted.num_hashed
    for token in range(100):
        Counted.num_hashed = 0
        lookup.push(Counted(token))
        lookup.propose(4)
        most = max(most, Counted.num_hashed)
    assert most < 10_000
    assert lookup.propose(4) == [100, 101, 102], "what has long been entered is found all the same"


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 10))
def test_a_proposal_is_what_stood_behind_the_same_tokens(tokens: list[int], most: int) -> None:
    proposed = Lookup(tokens, most=most).propose(most)
    assert len(proposed) <= most
    if proposed:
        run = [*tokens[-NGRAM:], *proposed]
        longer = tokens + proposed
        assert any(longer[i : i + len(run)] == run for i in range(len(tokens) - NGRAM))


@given(st.lists(st.integers(0, 3), max_size=60))
def test_it_is_known_before_a_token_whether_it_may_lead_to_a_proposal(tokens: list[int]) -> None:
    for token in range(4):
        before = Lookup(tokens, most=4)
        may = before.may_propose
        before.push(token)
        assert may or not before.propose(4)
