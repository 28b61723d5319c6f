"""Many rows drawn at once: each as if it were alone, and as if the whole vocabulary had been sorted."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest

from worker.batch import sampling as sampling_module
from worker.batch.sampling import Sampling, draw, draw_all, waits_for_logits

VOCABULARY = 3000


def rows(seed: int, num: int, *, spread: float = 3.0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, spread, (num, VOCABULARY)).astype(np.float32))


def some_sampling(dice: random.Random) -> Sampling:
    return Sampling(
        dice.choice([0.0, 0.7, 1.0, 3.0]),
        top_p=dice.choice([1.0, 1.0, 0.999, 0.9, 0.3]),
        top_k=dice.choice([0, 0, 1, 7, 200, VOCABULARY + 1]),
        min_p=dice.choice([0.0, 0.0, 0.02, 0.5]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.3, 0.8]),
        seed=dice.randrange(2**63),
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [mx.float32, mx.bfloat16])
def test_rows_of_any_settings_are_drawn_together_as_alone(seed, kind) -> None:
    dice = random.Random(seed)
    logits = rows(seed, 24, spread=dice.choice([0.3, 3.0])).astype(kind)
    draws = [
        (some_sampling(dice), dice.randrange(100), set(dice.sample(range(VOCABULARY), dice.randrange(40))))
        for _ in range(24)
    ]
    together = draw_all(logits, draws).tolist()
    assert together == [int(draw(own, *one).item()) for own, one in zip(logits, draws, strict=True)]


@pytest.mark.parametrize("spread", [0.01, 0.5, 6.0])
def test_a_few_candidates_leave_what_a_sort_of_all_leaves(monkeypatch, spread) -> None:
    """Where they hold enough, and where the rest is needed."""
    logits = rows(1, 8, spread=spread)
    draws = [(Sampling(1.0, top_p=0.1 + 0.1 * i, seed=i), i, ()) for i in range(8)]
    found = draw_all(logits, draws).tolist()
    monkeypatch.setattr(sampling_module, "_CANDIDATES", VOCABULARY)
    assert found == draw_all(logits, draws).tolist()


@pytest.mark.parametrize("spread", [0.01, 0.5, 6.0])
def test_what_is_left_of_a_large_vocabulary_is_what_the_definition_says(spread) -> None:
    logits = rows(2, 6, spread=spread)
    samplings = [Sampling(1.0, top_p=p, top_k=k) for p, k in [(0.9, 0), (0.2, 0), (0.9, 50), (0.5, 2000)]]
    samplings += [Sampling(1.0, top_k=300), Sampling(1.0, top_p=0.99)]
    kept = np.isfinite(np.array(sampling_module._filtered(logits, samplings)))
    for values, sampling, mine in zip(np.array(logits, np.float64), samplings, kept, strict=True):
        ranking = np.argsort(-values, kind="stable")[: sampling.top_k or None]
        weights = np.exp(values[ranking] - values.max())
        before = (np.cumsum(weights) - weights) / weights.sum()
        expected = ranking[before < sampling.top_p] if sampling.top_p < 1.0 else ranking
        assert len(set(np.flatnonzero(mine)) ^ set(expected)) <= 1, "rounding may move the end by one"
        assert set(np.flatnonzero(mine)) <= set(ranking)


def test_of_equal_logits_on_the_edge_the_first_ones_stay_whoever_shares_the_batch() -> None:
    logits = mx.zeros((3, VOCABULARY))
    samplings = [Sampling(1.0, top_k=4), Sampling(1.0, top_k=900), Sampling(1.0)]
    kept = np.isfinite(np.array(sampling_module._filtered(logits, samplings)))
    assert [np.flatnonzero(row).tolist() for row in kept] == [list(range(n)) for n in (4, 900, VOCABULARY)]


def test_only_rows_that_may_end_anywhere_wait_for_their_logits() -> None:
    assert waits_for_logits(Sampling(1.0, top_p=0.9)) == (mx.default_device() == mx.cpu)
    for sampling in (Sampling(), Sampling(0.0, top_p=0.9), Sampling(1.0, top_p=0.9, top_k=40), Sampling(0.7)):
        assert not waits_for_logits(sampling)
