"""Attention to sinks and a window equals a plain reference for any split and at any position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache
from naive_window import Naive

from cache.kv.ring import RingCache
from worker.batch.forward import Forward
from worker.batch.parts import OwnPart

SINK, WINDOW = 3, 20
TOKENS = [(i * i * 7 + i // 5) % 89 for i in range(160)]


def _rings(model: Any, grid: int | None = 32) -> list[RingCache]:
    """Make a ring for each layer: with `SINK` and `WINDOW` for plain caches, else with the model's window."""
    return [
        RingCache(SINK, WINDOW, grid=grid)
        if type(cache) is KVCache
        else RingCache(cache.keep, cache.max_size)
        for cache in make_prompt_cache(model)
    ]


def _run(forward: Forward, rings: list[RingCache], tokens: Sequence[int], lengths: Sequence[int]) -> mx.array:
    """Run tokens in pieces of these lengths behind the rings' tokens; return logits, (tokens, vocabulary)."""
    found, at = [], 0
    for length in lengths:
        found.append(forward([OwnPart(rings, rings[0].offset, length)], list(tokens[at : at + length])))
        mx.eval(found[-1])
        at += length
    return mx.concatenate(found)


@pytest.mark.parametrize("kind", ["llama", "exaone4", "gemma3_text", "gpt_oss"])
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 159), max_size=12, unique=True))
def test_ring_attention_over_any_split_of_the_tokens_equals_attention_with_masks(
    make_model, build_model, kind: str, cuts: list[int]
) -> None:
    model = make_model(kind)
    naive = Naive(model, build_model(kind), [(ring.sink, ring.window) for ring in _rings(model)])
    edges = [0, *sorted(cuts), len(TOKENS)]
    found = _run(Forward(model), _rings(model), TOKENS, [b - a for a, b in pairwise(edges)])
    expected = naive.logits(TOKENS)
    assert mx.abs(found - expected).max().item() < 1e-4 * mx.abs(expected).max().item()


def test_the_reference_model_has_other_logits_with_attention_sinks_than_without(
    make_model, build_model
) -> None:
    model = make_model("llama")
    with_sinks, without = (
        Naive(model, build_model("llama"), [(sink, WINDOW)] * 2).logits(TOKENS) for sink in (SINK, 0)
    )
    assert mx.abs(with_sinks - without).max().item() > 1e-2 * mx.abs(without).max().item()


@pytest.mark.parametrize("far", [10_000_000, 9_999_990, 2**31 // 4096 * 4096 - 100])
def test_logits_at_position_ten_million_equal_those_at_ten_thousand(make_model, far: int) -> None:
    model = make_model("llama")
    logits = []
    for start in (10_000, far):
        rings = _rings(model, grid=None)
        _run(Forward(model), rings, TOKENS, [SINK])
        for ring in rings:
            ring.offset = start
        logits.append(_run(Forward(model), rings, TOKENS, [60, 1, 1, 98])[80:])  # the gap is out of sight
    assert mx.abs(logits[0] - logits[1]).max().item() < 2e-3 * mx.abs(logits[0]).max().item()
