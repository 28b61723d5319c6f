"""Sampling equals a reference in plain numpy; draws depend only on logits, settings, seed and index."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from tiny_models import draw

from worker.batch.row_sampler import Draw, RowSampling
from worker.batch.sampling import draw_all

VOCABULARY = 24


def logits(seed: int, vocabulary: int = VOCABULARY) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, vocabulary).astype(np.float32)


def distribution(values: np.ndarray, sampling: RowSampling, seen: set[int]) -> np.ndarray:
    """Compute each token's probability in float64, by the definition of each filter."""
    values = values.astype(np.float64)
    for token in seen if sampling.repetition_penalty != 1 else ():
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    values = values / sampling.temperature
    allowed = np.ones(len(values), bool)
    ranking = np.argsort(-values, kind="stable")
    if sampling.top_k:
        allowed[ranking[sampling.top_k :]] = False
    if sampling.top_p < 1:
        probabilities = softmax(np.where(allowed, values, -np.inf))
        before = np.cumsum(probabilities[ranking]) - probabilities[ranking]
        allowed[ranking[before >= sampling.top_p]] = False
    if sampling.min_p:
        probabilities = softmax(np.where(allowed, values, -np.inf))
        allowed &= probabilities >= sampling.min_p * probabilities.max()
    return softmax(np.where(allowed, values, -np.inf))


def softmax(values: np.ndarray) -> np.ndarray:
    exponents = np.exp(values - values.max())
    return exponents / exponents.sum()


def draws(values: np.ndarray, sampling: RowSampling, num: int, seen: set[int] = frozenset()) -> np.ndarray:
    rows = mx.broadcast_to(mx.array(values), (num, len(values)))
    return np.array(draw_all(rows, [Draw(sampling, index, [*seen]) for index in range(num)]).tokens)


@given(st.integers(0, 10_000))
@settings(deadline=None, max_examples=30)
def test_temperature_0_takes_the_most_likely_token_whatever_else_is_set(seed: int) -> None:
    values = logits(seed)
    sampling = RowSampling(0.0, top_p=0.1, top_k=2, min_p=0.5, seed=seed)
    assert draws(values, sampling, 3).tolist() == [values.argmax()] * 3


FILTERS = [
    RowSampling(1.0),
    RowSampling(0.5),
    RowSampling(2.0, top_k=5),
    RowSampling(1.0, top_p=0.7),
    RowSampling(1.0, min_p=0.1),
    RowSampling(0.8, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
    RowSampling(1.0, repetition_penalty=0.7),
    RowSampling(1.0, top_k=1),
    RowSampling(1.0, top_k=VOCABULARY + 5),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_draws_follow_the_distribution_that_the_filters_define(sampling: RowSampling) -> None:
    """Filtered tokens are never drawn, all others as often as their probability says (chi-squared)."""
    values, seen, num = logits(5), {0, 3, 7, 11}, 1500
    expected = distribution(values, sampling, seen)
    counts = np.bincount(draws(values, sampling, num, seen), minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    common = expected * num >= 5
    chi_squared = ((counts - expected * num)[common] ** 2 / (expected * num)[common]).sum()
    # Five deviations above the mean of a chi-squared variable; the draws are the same in every run.
    degrees = max(common.sum() - 1, 1)
    assert chi_squared < degrees + 5 * np.sqrt(2 * degrees)


@given(
    st.integers(0, 10_000),
    st.integers(0, VOCABULARY),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.sets(st.integers(0, VOCABULARY - 1)),
)
def test_no_combination_of_filters_draws_a_token_that_it_excludes(
    seed, top_k, top_p, min_p, temperature, seen
) -> None:
    values = logits(seed)
    sampling = RowSampling(temperature, top_p, top_k, min_p, repetition_penalty=1.5, seed=seed)
    expected = distribution(values, sampling, seen)
    assert expected[draws(values, sampling, 20, seen)].min() > 0


def test_equal_logits_at_the_edge_of_top_k_leave_exactly_k_tokens() -> None:
    values = np.zeros(VOCABULARY, np.float32)
    assert len(set(draws(values, RowSampling(1.0, top_k=4), 200).tolist())) == 4


def test_min_p_1_and_a_tiny_top_p_leave_only_the_most_likely_token() -> None:
    values = logits(2)
    for sampling in (RowSampling(5.0, min_p=1.0), RowSampling(5.0, top_p=1e-6)):
        assert set(draws(values, sampling, 50).tolist()) == {int(values.argmax())}


@pytest.mark.parametrize("temperature", [5e-324, 1e-46, 1e-40, 1e-38, 1e-30])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 3, "min_p": 0.1}], ids=str)
def test_a_temperature_that_float32_cannot_divide_by_takes_the_most_likely_token(
    temperature: float, filters: dict[str, float]
) -> None:
    """This includes the largest logits of half precision, and -inf for ids without a token."""
    for values in (logits(4), logits(4) * 30_000, np.where(logits(4) < 0, -np.inf, logits(4))):
        drawn = draws(values, RowSampling(temperature, **filters), 5)
        assert drawn.tolist() == [values.argmax()] * 5


@pytest.mark.parametrize("share", [5e-324, 1e-46, 1e-40])
def test_a_top_p_too_small_for_float32_leaves_only_the_most_likely_token(share: float) -> None:
    values = logits(5)
    for top_k in (0, 4):
        drawn = draws(values, RowSampling(1.0, top_p=share, top_k=top_k), 5)
        assert drawn.tolist() == [values.argmax()] * 5


@pytest.mark.parametrize("penalty", [5e-324, 1e-46, 1e-40])
def test_a_penalty_too_small_for_float32_keeps_the_order_of_the_tokens_that_it_favours(
    penalty: float,
) -> None:
    values, sampling = logits(6), RowSampling(1e-3, repetition_penalty=penalty)
    favoured = np.argsort(values)[-3:]
    assert draws(values, sampling, 5, set(favoured.tolist())).tolist() == [favoured[-1]] * 5
    assert (
        draws(values, RowSampling(0.0, repetition_penalty=penalty), 1, set(favoured.tolist())) == favoured[-1]
    )


def test_for_given_logits_a_draw_depends_only_on_the_seed_and_the_tokens_index() -> None:
    """A draw depends neither on earlier draws nor on MLX's own random generator."""
    values, sampling = mx.array(logits(1)), RowSampling(1.5, seed=42)
    forwards = [int(draw(values, sampling, index, ()).item()) for index in range(30)]
    mx.random.seed(99)
    mx.eval(mx.random.normal((5,)))
    backwards = [int(draw(values, sampling, index, ()).item()) for index in reversed(range(30))]
    assert forwards == backwards[::-1]
    others = [int(draw(values, RowSampling(1.5, seed=43), index, ()).item()) for index in range(30)]
    assert others != forwards
    assert len(set(forwards)) > 3


@pytest.mark.parametrize("seed", [0, 2**32, 2**63 - 1])
def test_the_smallest_and_the_largest_seed_of_a_request_are_accepted(seed: int) -> None:
    assert 0 <= int(draw(mx.array(logits(1)), RowSampling(1.0, seed=seed), 2**31, ()).item()) < VOCABULARY


def test_the_high_bits_of_a_seed_change_the_draws() -> None:
    values, seeds = logits(1), [5, *(5 | 1 << bit for bit in (31, 32, 48, 62))]
    drawn = [tuple(draws(values, RowSampling(1.5, seed=seed), 20).tolist()) for seed in seeds]
    assert len({*drawn}) == len(seeds)


def test_the_repetition_penalty_does_not_change_the_models_own_logits() -> None:
    values = mx.array(logits(3))
    before = np.array(values)
    mx.eval(draw(values, RowSampling(0.0, repetition_penalty=9.0), 0, {1, 2, 3}))
    assert np.array_equal(np.array(values), before)


def test_half_precision_logits_are_changed_and_filtered_in_float32() -> None:
    """In bfloat16 a cumulative sum over a large vocabulary stalls long before top_p, and 20 - 0.01 is 20."""
    values = mx.full((4096,), 20.0, mx.bfloat16)
    drawn = draws(values, RowSampling(1.0, top_p=0.5), 400)
    assert len(set(drawn.tolist())) > 300
    penalised = Draw(RowSampling(presence_penalty=0.01), 0, counts=Counter([0]))
    assert draw_all(values[None], [penalised]).tokens.item() == 1
