"""Prompt lookup drafts what followed earlier; drafts never make answers much slower.

Time is simulated: a step takes longer for each draft token, and less if launched ahead, as on a GPU.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping

import hypothesis.strategies as st
import pytest
from hypothesis import given

from worker.batch.drafter import MOST_SEEN, NGRAM, Lookup, looked_up
from worker.batch.row_sampler import DrawnToken, RowSampler, RowSampling
from worker.batch.rows import Row
from worker.batch.speculation import Speculation


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


PLAIN_S = 0.05


class Drafts(Lookup):
    """A drafter whose tokens are right with probability `right`; a pass takes `pass_share` of a step."""

    def __init__(self, world: World, right: float, pass_share: float) -> None:
        self.right, self.pass_share = right, pass_share
        self.hope = 0.7 if pass_share else 0.5
        self._world = world
        self._prepared: dict[Row, int] = {}
        self._found: dict[tuple[Row, int], int | None] = {}

    def num_missing(self, row: Row) -> int | None:
        if self.pass_share:
            return max(200 - self._prepared.get(row, 0), 0)
        return self._found.setdefault((row, len(row.known)), 0 if self._world.dice.random() < 0.5 else None)

    def prepare(self, row: Row, num_tokens: int) -> None:
        self._prepared[row] = self._prepared.get(row, 0) + num_tokens
        self._world.now_s += num_tokens * self.pass_share * PLAIN_S / 10

    def propose(self, wanted: Mapping[Row, int]) -> dict[Row, list[int]]:
        self._world.now_s += max(wanted.values()) * self.pass_share * PLAIN_S
        some = [row for row in wanted if self.pass_share or self._world.dice.random() < 0.8]
        return {row: [1] * wanted[row] for row in some}


class World:
    """Simulates answers, `num_rows` at a time, with the real `Speculation` but no model."""

    def __init__(
        self,
        num_rows: int,
        late: float,
        checked: float,
        drafts: tuple[tuple[float, float], ...],
        seed: int = 4,
        answer: int = 200,
    ) -> None:
        """A step not launched ahead takes `late` times as long; a draft token adds the share `checked`."""
        self.dice, self.now_s = random.Random(seed), 0.0
        self._num_rows, self._late, self._checked, self._answer = num_rows, late, checked, answer
        self._speculation = Speculation([Drafts(self, *one) for one in drafts], 8, lambda: self.now_s)

    def rate(self, num_answers: int) -> float:
        for _ in range(num_answers):
            samplers = [RowSampler(RowSampling()) for _ in range(self._num_rows)]
            rows = [Row([], array("I", [1]), sampler, 1, self._answer) for sampler in samplers]
            is_ahead = could = False
            while rows:
                is_ahead = self._step(rows, is_ahead, could)
                could = True
        return num_answers * self._num_rows * self._answer / self.now_s

    def _step(self, rows: list[Row], is_ahead: bool, could: bool) -> bool:
        num_rows, began_s = len(rows), self.now_s
        asked = [] if is_ahead else rows
        drafted = self._speculation.draft(asked, num_rows, ahead=could, beside=False)
        num = sum(map(len, drafted.drafts.values()))
        waits = 3.0 if self.dice.random() < 0.02 else self.dice.lognormvariate(0, 0.05)
        self.now_s += PLAIN_S * waits * (1.0 if is_ahead else self._late) * (1 + self._checked * num)
        right = {}
        for row, draft in drafted.drafts.items():
            share = drafted.sources[row].drafter.right
            right[row] = next((i for i in range(len(draft)) if self.dice.random() >= share), len(draft))
        for row in rows:
            row.append([DrawnToken(1)] * (1 + right.get(row, 0)))
        self._speculation.learn(drafted, right, num_rows, self.now_s - began_s, (is_ahead, could))
        for row in [row for row in rows if row.num_left <= 0]:
            rows.remove(row)
            self._speculation.leave(row)
        return bool(rows) and not drafted.drafts and not self._speculation.may_draft(rows, num_rows)


@pytest.mark.parametrize(
    ("late", "checked", "right", "pass_share", "least"),
    [
        (1.0, 0.01, 0.0, 0.35, 0.97),
        (1.0, 0.1, 0.3, 0.15, 0.97),
        (1.0, 0.2, 0.6, 0.9, 0.97),
        (1.3, 0.01, 0.0, 0.15, 0.97),
        (1.3, 0.1, 0.6, 0.35, 0.97),
        (1.0, 0.05, 0.8, 0.35, 1.25),
        (1.3, 0.01, 0.9, 0.15, 1.4),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 4])
def test_speculation_slows_answers_by_at_most_3_percent_and_good_drafts_make_them_faster(
    num_rows: int, late: float, checked: float, right: float, pass_share: float, least: float
) -> None:
    """The drafters are a draft model, and prompt lookup that is right half as often."""
    plain = World(num_rows, late, checked, ()).rate(20)
    drafting = World(num_rows, late, checked, ((right / 2, 0.0), (right, pass_share))).rate(20)
    assert drafting > (least if num_rows == 1 else 0.97) * plain


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_the_first_short_answers_pay_little_to_find_out_that_drafts_do_not_pay(num_rows: int) -> None:
    """Reading the prompt, of 200 tokens, with the draft model would be most of the cost."""
    drafts = ((0.3, 0.0), (0.5, 0.35))
    rates = [
        World(num_rows, 1.0, 0.1, some, seed, answer=48).rate(1) for seed in range(8) for some in ((), drafts)
    ]
    assert sum(rates[1::2]) > 0.97 * sum(rates[::2])
