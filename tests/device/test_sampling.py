"""Sampling equals a reference in plain numpy, for rows alone and together.

Draws depend only on logits, settings, seed and index.
"""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from tiny_models import draw

from worker.batch import sampling as sampling_module
from worker.batch.row_sampler import Draw, RowSampler, RowSampling
from worker.batch.sampling import draw_all

VOCABULARY = 3000


def rows(seed: int, num: int, *, spread: float = 3.0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, spread, (num, VOCABULARY)).astype(np.float32))


def some_sampling(dice: random.Random) -> RowSampling:
    return RowSampling(
        dice.choice([0.0, 0.7, 1.0, 3.0]),
        top_p=dice.choice([1.0, 1.0, 0.999, 0.9, 0.3]),
        top_k=dice.choice([0, 0, 1, 7, 200, VOCABULARY + 1]),
        min_p=dice.choice([0.0, 0.0, 0.02, 0.5]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.3, 0.8]),
        presence_penalty=dice.choice([0.0, 0.0, 0.5, -1.0]),
        frequency_penalty=dice.choice([0.0, 0.0, 0.3, -0.2]),
        logit_bias=dice.choice([(), (), ((5, 4.0), (77, -100.0), (9, 0.5))]),
        min_tokens=dice.choice([0, 0, 60]),
        seed=dice.randrange(2**63),
    )


def some_draw(dice: random.Random) -> Draw:
    answered = [dice.choice((5, 9, dice.randrange(VOCABULARY))) for _ in range(dice.randrange(40))]
    prompt = dice.sample(range(VOCABULARY), dice.randrange(40))
    sampler = RowSampler(some_sampling(dice), answered=answered, prompt=prompt, end_tokens=frozenset((1, 2)))
    return sampler.draws()[0]


@pytest.mark.parametrize("seed", range(12))
def test_penalties_biases_and_min_tokens_change_logits_exactly_as_a_plain_python_reference_does(seed) -> None:
    """The reference is plain Python: presence and frequency as OpenAI's API, repetition as CTRL."""
    dice = random.Random(seed)
    logits = rows(seed, 8)
    samplers = []
    for _ in range(8):
        answered = [dice.choice((5, 9, dice.randrange(VOCABULARY))) for _ in range(30)]
        samplers.append(
            (RowSampler(some_sampling(dice), answered=answered, prompt=[9, 40], end_tokens={1, 2}), answered)
        )
    found = np.array(sampling_module._changed(logits, [one.draws()[0] for one, _ in samplers]))
    for mine, values, (sampler, answered) in zip(found, np.array(logits), samplers, strict=True):
        sampling, expected = sampler.sampling, values.astype(np.float64)
        for token, bias in sampling.logit_bias:
            expected[token] += bias
        for token in {9, 40, *answered} if sampling.repetition_penalty != 1.0 else ():
            positive = expected[token] > 0
            expected[token] *= sampling.repetition_penalty ** (-1 if positive else 1)
        for token in set(answered):
            expected[token] -= sampling.presence_penalty
            expected[token] -= answered.count(token) * sampling.frequency_penalty
        if len(answered) < sampling.min_tokens:
            expected[[1, 2]] = -np.inf
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)


def test_draft_tokens_before_a_sampled_token_count_towards_its_penalties_and_min_tokens() -> None:
    sampling = RowSampling(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, min_tokens=12)
    sampler = RowSampler(sampling, answered=[7] * 10, prompt=[3], end_tokens=frozenset((1,)))

    def known(draw: Draw) -> tuple[object, ...]:
        return draw.index, sorted(draw.seen), dict(draw.counts), draw.banned

    drafted = [known(draw) for draw in sampler.draws([8, 9, 8])]  # copied before the tokens are the answer's
    for draft_known, token in zip(drafted, [8, 9, 8, 8], strict=True):
        (plain,) = sampler.draws()
        assert draft_known == known(plain)
        sampler.push([token])
    assert [banned for *_, banned in drafted] == [[1], [1], (), ()]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [mx.float32, mx.bfloat16])
def test_batch_rows_with_random_sampling_settings_draw_the_same_tokens_as_alone(seed, kind) -> None:
    dice = random.Random(seed)
    logits = rows(seed, 24, spread=dice.choice([0.3, 3.0])).astype(kind)
    draws = [some_draw(dice) for _ in range(24)]
    together = draw_all(logits, draws).tokens.tolist()
    assert together == [
        draw_all(own[None], [one]).tokens.item() for own, one in zip(logits, draws, strict=True)
    ]


@pytest.mark.parametrize("spread", [0.01, 0.5, 6.0])
def test_top_p_computed_on_a_few_candidates_draws_the_same_tokens_as_with_a_full_sort(
    monkeypatch, spread
) -> None:
    """In some cases the candidates suffice, in others the rest of the vocabulary is needed."""
    logits = rows(1, 8, spread=spread)
    draws = [Draw(RowSampling(1.0, top_p=0.1 + 0.1 * i, seed=i), i) for i in range(8)]
    found = draw_all(logits, draws).tokens.tolist()
    monkeypatch.setattr(sampling_module, "_CANDIDATES", VOCABULARY)
    assert found == draw_all(logits, draws).tokens.tolist()


@pytest.mark.parametrize("spread", [0.01, 0.5, 6.0])
def test_top_k_and_top_p_keep_exactly_the_tokens_of_a_large_vocabulary_that_their_definitions_name(
    spread,
) -> None:
    logits = rows(2, 6, spread=spread)
    samplings = [RowSampling(1.0, top_p=p, top_k=k) for p, k in [(0.9, 0), (0.2, 0), (0.9, 50), (0.5, 2000)]]
    samplings += [RowSampling(1.0, top_k=300), RowSampling(1.0, top_p=0.99)]
    kept = np.isfinite(np.array(sampling_module._filtered(logits, samplings)))
    for values, sampling, mine in zip(np.array(logits, np.float64), samplings, kept, strict=True):
        ranking = np.argsort(-values, kind="stable")[: sampling.top_k or None]
        weights = np.exp(values[ranking] - values.max())
        before = (np.cumsum(weights) - weights) / weights.sum()
        expected = ranking[before < sampling.top_p] if sampling.top_p < 1.0 else ranking
        assert len(set(np.flatnonzero(mine)) ^ set(expected)) <= 1, "rounding may move the end by one"
        assert set(np.flatnonzero(mine)) <= set(ranking)


SMALL = 24


def few_logits(seed: int, vocabulary: int = SMALL) -> np.ndarray:
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
def test_at_temperature_0_the_most_likely_token_is_sampled_whatever_the_other_sampling_settings_are(
    seed: int,
) -> None:
    values = few_logits(seed)
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
    RowSampling(1.0, top_k=SMALL + 5),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_sampled_tokens_follow_the_distribution_that_temperature_top_p_top_k_and_min_p_define(
    sampling: RowSampling,
) -> None:
    """Filtered tokens are never drawn, all others as often as their probability says (chi-squared)."""
    values, seen, num = few_logits(5), {0, 3, 7, 11}, 1500
    expected = distribution(values, sampling, seen)
    counts = np.bincount(draws(values, sampling, num, seen), minlength=SMALL)
    assert counts[expected == 0].sum() == 0
    common = expected * num >= 5
    chi_squared = ((counts - expected * num)[common] ** 2 / (expected * num)[common]).sum()
    # Five deviations above the mean of a chi-squared variable; the draws are the same in every run.
    degrees = max(common.sum() - 1, 1)
    assert chi_squared < degrees + 5 * np.sqrt(2 * degrees)


@given(
    st.integers(0, 10_000),
    st.integers(0, SMALL),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.sets(st.integers(0, SMALL - 1)),
)
def test_no_token_is_sampled_that_the_combination_of_sampling_filters_excludes(
    seed, top_k, top_p, min_p, temperature, seen
) -> None:
    values = few_logits(seed)
    sampling = RowSampling(temperature, top_p, top_k, min_p, repetition_penalty=1.5, seed=seed)
    expected = distribution(values, sampling, seen)
    assert expected[draws(values, sampling, 20, seen)].min() > 0


def test_equal_logits_at_the_edge_of_top_k_leave_exactly_k_tokens() -> None:
    values = np.zeros(SMALL, np.float32)
    assert len(set(draws(values, RowSampling(1.0, top_k=4), 200).tolist())) == 4


def test_min_p_1_and_a_tiny_top_p_leave_only_the_most_likely_token() -> None:
    values = few_logits(2)
    for sampling in (RowSampling(5.0, min_p=1.0), RowSampling(5.0, top_p=1e-6)):
        assert set(draws(values, sampling, 50).tolist()) == {int(values.argmax())}


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-30])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 3, "min_p": 0.1}], ids=str)
def test_with_a_temperature_too_small_for_float32_division_the_most_likely_token_is_sampled(
    temperature: float, filters: dict[str, float]
) -> None:
    """This includes the largest logits of half precision, and -inf for ids without a token."""
    for values in (
        few_logits(4),
        few_logits(4) * 30_000,
        np.where(few_logits(4) < 0, -np.inf, few_logits(4)),
    ):
        drawn = draws(values, RowSampling(temperature, **filters), 5)
        assert drawn.tolist() == [values.argmax()] * 5


@pytest.mark.parametrize("share", [5e-324, 1e-46, 1e-40])
def test_a_top_p_too_small_for_float32_leaves_only_the_most_likely_token(share: float) -> None:
    values = few_logits(5)
    for top_k in (0, 4):
        drawn = draws(values, RowSampling(1.0, top_p=share, top_k=top_k), 5)
        assert drawn.tolist() == [values.argmax()] * 5


@pytest.mark.parametrize("penalty", [5e-324, 1e-46, 1e-40])
def test_the_most_likely_token_seen_before_is_sampled_if_the_repetition_penalty_underflows_float32(
    penalty: float,
) -> None:
    values, sampling = few_logits(6), RowSampling(1e-3, repetition_penalty=penalty)
    favoured = np.argsort(values)[-3:]
    assert draws(values, sampling, 5, set(favoured.tolist())).tolist() == [favoured[-1]] * 5
    assert (
        draws(values, RowSampling(0.0, repetition_penalty=penalty), 1, set(favoured.tolist())) == favoured[-1]
    )


def test_for_given_logits_a_sampled_token_depends_only_on_the_seed_and_the_token_index() -> None:
    """A draw depends neither on earlier draws nor on MLX's own random generator."""
    values, sampling = mx.array(few_logits(1)), RowSampling(1.5, seed=42)
    forwards = [int(draw(values, sampling, index, ()).item()) for index in range(30)]
    mx.random.seed(99)
    mx.eval(mx.random.normal((5,)))
    backwards = [int(draw(values, sampling, index, ()).item()) for index in reversed(range(30))]
    assert forwards == backwards[::-1]
    others = [int(draw(values, RowSampling(1.5, seed=43), index, ()).item()) for index in range(30)]
    assert others != forwards
    assert len(set(forwards)) > 3


def test_seeds_that_differ_only_in_their_high_bits_draw_different_tokens() -> None:
    values, seeds = few_logits(1), [0, 2**63 - 1, 5, *(5 | 1 << bit for bit in (31, 32, 48, 62))]
    drawn = [tuple(draws(values, RowSampling(1.5, seed=seed), 20).tolist()) for seed in seeds]
    assert len({*drawn}) == len(seeds)


def test_penalties_and_filters_of_half_precision_logits_are_computed_in_float32() -> None:
    """In bfloat16 a cumulative sum over a large vocabulary stalls long before top_p, and 20 - 0.01 is 20."""
    values = mx.full((4096,), 20.0, mx.bfloat16)
    drawn = draws(values, RowSampling(1.0, top_p=0.5), 400)
    assert len(set(drawn.tolist())) > 300
    penalised = Draw(RowSampling(presence_penalty=0.01), 0, counts=Counter([0]))
    assert draw_all(values[None], [penalised]).tokens.item() == 1
