"""Prompt lookup drafts the tokens that followed an earlier occurrence of the last tokens."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
from hypothesis import given

from worker.batch.drafter import MOST_SEEN, NGRAM, Lookup, looked_up
from worker.batch.row_sampler import RowSampler, RowSampling
from worker.batch.rows import Row


def draft(tokens: list[int], most: int) -> list[int]:
    return looked_up(array("I", tokens), most)


def test_prompt_lookup_drafts_the_tokens_that_followed_the_same_last_tokens_earlier() -> None:
    assert draft([1, 2, 3, 4, 5, 9, 1, 2, 3], 3) == [4, 5, 9]
    assert draft([1, 2, 3, 4, 5, 9, 1, 2, 3], 2) == [4, 5]


def test_prompt_lookup_uses_the_latest_earlier_occurrence_of_the_last_tokens() -> None:
    assert draft([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1) == [8]


def test_prompt_lookup_drafts_nothing_if_the_last_tokens_did_not_occur_before() -> None:
    assert draft([], 8) == []
    assert draft([1, 2], 8) == []
    assert draft([1, 2, 3, 4, 5], 8) == []


def test_prompt_lookup_searches_only_the_last_part_of_a_long_session() -> None:
    """So the time to draft does not grow with the session."""
    early, late = [5, 6, 7, 8], [1, 2, 3, 4]
    tokens = [*early, *late, *[9] * (MOST_SEEN - 8), 5, 6, 7]
    assert draft(tokens, 1) == [], "three tokens too far back"
    assert draft([*tokens, *late[:3]], 1) == [], "and these by now"
    assert draft([*early, *late, *[9] * (MOST_SEEN - 11), 5, 6, 7], 1) == [8], "the first of the last tokens"


def test_prompt_lookup_continues_a_repetition_beyond_the_end_of_the_session() -> None:
    assert draft([1, 2, 3] * 9, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


@given(st.lists(st.integers(0, 3), min_size=NGRAM, max_size=60))
def test_prompt_lookup_finds_the_latest_occurrence_at_any_position(tokens: list[int]) -> None:
    places = [at for at in range(NGRAM, len(tokens)) if tokens[at - NGRAM : at] == tokens[-NGRAM:]]
    assert draft(tokens, 1) == ([tokens[places[-1]]] if places else [])


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 10))
def test_every_draft_repeats_tokens_that_followed_the_same_tokens_before(
    tokens: list[int], most: int
) -> None:
    proposed = draft(tokens, most)
    assert len(proposed) <= most
    if proposed:
        run = [*tokens[-NGRAM:], *proposed]
        longer = tokens + proposed
        assert any(longer[i : i + len(run)] == run for i in range(len(tokens) - NGRAM))


@given(st.lists(st.integers(0, 3), max_size=60))
def test_lookup_is_asked_whenever_some_next_token_leads_to_a_draft(tokens: list[int]) -> None:
    for token in range(4):
        row = Row([], array("I", tokens), RowSampler(RowSampling()), len(tokens) - 1, 10)
        may = Lookup().num_missing(row) == 0
        row.known.append(token)
        assert may or not Lookup().propose({row: 4})
