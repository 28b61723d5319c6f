"""What is proposed, and how much of it."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from worker.batch.drafter import MOST_SEEN, NGRAM, Drafter


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert Drafter([1, 2, 3, 4, 5, 9, 1, 2, 3], most=8).propose(8) == [4, 5, 9]
    assert Drafter([1, 2, 3, 4, 5, 9, 1, 2, 3], most=8).propose(2) == [4, 5]


def test_the_latest_place_counts() -> None:
    assert Drafter([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], most=1).propose(1) == [8]


def test_nothing_is_proposed_where_nothing_is_known() -> None:
    assert Drafter([], most=8).propose(8) == []
    assert Drafter([1, 2], most=8).propose(8) == []
    assert Drafter([1, 2, 3, 4, 5], most=8).propose(8) == []


def test_right_guesses_make_longer_ones_and_wrong_ones_make_pauses() -> None:
    drafter = Drafter([1, 2, 3] * 9, most=8)
    lengths = []
    for _ in range(3):
        lengths.append(len(drafter.propose(8)))
        drafter.learn(lengths[-1], lengths[-1])
    assert lengths == [3, 6, 8]
    assert drafter.propose(8) == [1, 2, 3, 1, 2, 3, 1, 2]  # beyond what stands there
    drafter = Drafter(list(range(50)) * 2, most=8)
    drafter.push(0)
    drafter.push(1)
    drafter.push(2)
    for expected in (3, 6, 8, 8):
        assert len(drafter.propose(8)) == expected
        drafter.learn(expected, expected)
    pauses = []
    said = 2
    for _ in range(4):
        drafter.learn(len(drafter.propose(8)), 0)
        pause = 0
        while not drafter.propose(8):
            said += 1
            drafter.push(said)
            pause += 1
        pauses.append(pause)
    assert pauses == [1, 3, 7, 15]


def test_a_draft_is_looked_for_in_a_sessions_last_tokens() -> None:
    """So a token costs as much in a session of a million tokens."""
    early, late = [5, 6, 7, 8], [1, 2, 3, 4]
    drafter = Drafter([*early, *late, *[9] * (MOST_SEEN - 8), 5, 6, 7], most=1)
    assert drafter.propose(1) == [], "three tokens too far back"
    for token in late[:3]:
        drafter.push(token)
    assert drafter.propose(1) == [], "and these by now"
    drafter = Drafter([*early, *late, *[9] * (MOST_SEEN - 11), 5, 6, 7], most=1)
    assert drafter.propose(1) == [8], "the first of the last tokens"


@given(st.lists(st.integers(0, 3), min_size=NGRAM, max_size=60))
def test_the_latest_place_is_found_wherever_it_is(tokens: list[int]) -> None:
    places = [at for at in range(NGRAM, len(tokens)) if tokens[at - NGRAM : at] == tokens[-NGRAM:]]
    assert Drafter(tokens, most=1).propose(1) == ([tokens[places[-1]]] if places else [])


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 10))
def test_a_proposal_is_what_stood_behind_the_same_tokens(tokens: list[int], most: int) -> None:
    proposed = Drafter(tokens, most=most).propose(most)
    assert len(proposed) <= most
    if proposed:
        run = [*tokens[-NGRAM:], *proposed]
        longer = tokens + proposed
        assert any(longer[i : i + len(run)] == run for i in range(len(tokens) - NGRAM))


@given(st.lists(st.integers(0, 3), max_size=60))
def test_it_is_known_before_a_token_whether_it_may_lead_to_a_proposal(tokens: list[int]) -> None:
    for token in range(4):
        before = Drafter(tokens, most=4)
        may = before.may_propose
        before.push(token)
        assert may or not before.propose(4)
