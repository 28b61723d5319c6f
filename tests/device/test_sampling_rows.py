"""Rows that are drawn together get the same tokens as alone, and as with a full sort of the vocabulary."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from worker.batch import sampling as sampling_module
from worker.batch.row_sampler import Draw, RowSampler, RowSampling
from worker.batch.sampling import Logprobs, draw_all, waits_for_logits

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
def test_penalties_biases_and_min_tokens_change_logits_as_their_definitions_say(seed) -> None:
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


def test_draws_after_drafted_tokens_count_these_for_penalties_and_min_tokens() -> None:
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


@pytest.mark.parametrize("kind", [mx.float32, mx.bfloat16])
def test_logprobs_are_the_models_own_whatever_the_penalties_biases_and_filters(kind) -> None:
    logits = rows(3, 5).astype(kind)
    samplings = [
        RowSampling(top_logprobs=3),
        RowSampling(),
        RowSampling(1.5, top_p=0.7, logit_bias=((11, 50.0),), top_logprobs=0, seed=4),
        RowSampling(repetition_penalty=1.5, top_logprobs=20),
        RowSampling(0.7, top_k=5, top_logprobs=1, seed=9),
    ]
    draws = [RowSampler(sampling, prompt=[4]).draws()[0] for sampling in samplings]
    choice = draw_all(logits, draws).tokens
    tokens = choice.tolist()
    assert tokens[2] == 11
    found = Logprobs(logits, choice, draws).drawn(tokens)
    exact = np.array(logits.astype(mx.float32), np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    assert found[1] == (tokens[1], None, ())
    for row, sampling in enumerate(samplings):
        if sampling.top_logprobs is None:
            continue
        drawn = found[row]
        assert drawn.token == tokens[row]
        assert drawn.logprob == pytest.approx(exact[row, drawn.token], abs=1e-4)
        best = np.sort(exact[row])[::-1][: sampling.top_logprobs]
        assert [value for _, value in drawn.top] == pytest.approx(best, abs=1e-4)
        assert [exact[row, token] for token, _ in drawn.top] == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [mx.float32, mx.bfloat16])
def test_rows_with_any_settings_draw_the_same_tokens_together_as_alone(seed, kind) -> None:
    dice = random.Random(seed)
    logits = rows(seed, 24, spread=dice.choice([0.3, 3.0])).astype(kind)
    draws = [some_draw(dice) for _ in range(24)]
    together = draw_all(logits, draws).tokens.tolist()
    assert together == [
        draw_all(own[None], [one]).tokens.item() for own, one in zip(logits, draws, strict=True)
    ]


@pytest.mark.parametrize("spread", [0.01, 0.5, 6.0])
def test_top_p_among_a_few_candidates_draws_the_same_tokens_as_a_full_sort(monkeypatch, spread) -> None:
    """In some cases the candidates suffice, in others the rest of the vocabulary is needed."""
    logits = rows(1, 8, spread=spread)
    draws = [Draw(RowSampling(1.0, top_p=0.1 + 0.1 * i, seed=i), i) for i in range(8)]
    found = draw_all(logits, draws).tokens.tolist()
    monkeypatch.setattr(sampling_module, "_CANDIDATES", VOCABULARY)
    assert found == draw_all(logits, draws).tokens.tolist()


@pytest.mark.parametrize("spread", [0.01, 0.5, 6.0])
def test_top_k_and_top_p_keep_the_tokens_of_their_definition_in_a_large_vocabulary(spread) -> None:
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


def test_top_k_keeps_the_first_of_equal_logits_whichever_rows_share_the_batch() -> None:
    logits = mx.zeros((3, VOCABULARY))
    samplings = [RowSampling(1.0, top_k=4), RowSampling(1.0, top_k=900), RowSampling(1.0)]
    kept = np.isfinite(np.array(sampling_module._filtered(logits, samplings)))
    assert [np.flatnonzero(row).tolist() for row in kept] == [list(range(n)) for n in (4, 900, VOCABULARY)]


def test_on_a_cpu_only_sampled_rows_with_top_p_and_no_top_k_wait_for_their_logits() -> None:
    assert waits_for_logits(RowSampling(1.0, top_p=0.9)) == (mx.default_device() == mx.cpu)
    for sampling in (
        RowSampling(),
        RowSampling(0.0, top_p=0.9),
        RowSampling(1.0, top_p=0.9, top_k=40),
        RowSampling(0.7),
    ):
        assert not waits_for_logits(sampling)
