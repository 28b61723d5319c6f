"""Sessions with sinks and a window have bounded KV and exact tokens, at any position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, make_prompt_cache
from naive_window import Naive, kinds_of
from tiny_models import append, generate, prompt

from cache.kv.ring import RingCache
from cache.names.policy import SLACK, Policy
from worker.batch.forward import Forward
from worker.batch.parts import OwnPart
from worker.batch.slots import Pool, form_of

POLICY = Policy(sink=3, window=20)


def test_the_kv_of_a_windowed_session_stays_at_the_size_of_its_sinks_and_window(
    make_model, build_model, make_rig
) -> None:
    model = make_model("llama")
    naive, rig = Naive(model, build_model("llama"), kinds_of(model, POLICY)), make_rig(model)
    per_token = rig.device.served.estimator.kv.bytes_per_token
    session: list[int] = []
    for i in range(40):
        added = prompt(9, i)
        turn = generate(session + added, 3, num_kept=max(len(session) - 1, 0), policy=POLICY)
        rig.run(turn)
        session += [*added, *rig.tokens(turn)]
        end = rig.end(turn)
        assert end.live_bytes == min(len(session) - 1, 23) * per_token
        assert turn.num_prefilled == len(added) + (i > 0)
    assert rig.tokens(turn) == naive.logits(session)[-4:-1].argmax(axis=-1).tolist(), "each the likeliest"
    assert rig.device.kv(POLICY).held(10**6) == (23 + SLACK) * per_token


def test_batch_rows_of_windowed_sessions_join_a_shared_kv_array_once_and_never_move_to_another_array(
    make_model, make_rig, monkeypatch
) -> None:
    joined: list[int] = []
    join = Pool.join
    monkeypatch.setattr(Pool, "join", lambda pool, caches: joined.append(pool.capacity) or join(pool, caches))
    rig = make_rig(make_model("llama"))
    turns = [generate(prompt(num), 400, name=f"s{num}", policy=POLICY) for num in (200, 30, 90, 250)]
    rig.run(*turns)
    assert joined == [0] * 4
    assert all(rig.end(turn).cost.num_cached > SLACK + 23 for turn in turns)


def test_a_restored_ring_buffer_that_leaves_a_shared_kv_array_does_not_claim_tokens_that_it_never_had() -> (
    None
):
    """It has room for more tokens than the last ones, with which it was restored."""
    ring = RingCache(POLICY.sink, POLICY.window or 0)
    restored = [mx.ones((1, 2, 23, 8))]
    ring.fill(restored, restored, 100)
    pool = Pool(form_of([ring]) or (), 0)
    (left,) = pool.leave(pool.join([ring]), 101)
    assert left.first_held == ring.first_held == 80


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_a_windowed_prompt_with_quantised_kv_gives_the_same_tokens_prefilled_in_pieces_as_in_one_piece(
    make_model, make_rig, kv_bits
) -> None:
    """Its KV has the size of the codes, and of a scale and a bias for each group."""
    rig = make_rig(make_model("llama", kv_bits))
    context = prompt(300)
    turn = generate(context, 12, name="whole", policy=POLICY)
    rig.run(turn)
    whole = rig.tokens(turn)
    for before, end in pairwise((1, 7, 100, 101, 260)):
        rig.run(append(context[:end], name="pieces", num_kept=before - 1, policy=POLICY))
    turn = generate(context, 12, name="pieces", num_kept=259, policy=POLICY)
    rig.run(turn)
    assert rig.tokens(turn) == whole
    assert rig.end(turn).live_bytes == 23 * rig.device.served.estimator.kv.bytes_per_token


def test_a_step_of_a_long_windowed_prompt_takes_no_more_memory_than_estimated(make_model, make_rig) -> None:
    """Scores over a ring are concatenated from runs, so they exist twice for a while."""
    rig = make_rig(make_model("llama"), block_tokens=128)
    rig.run(append(prompt(3000), policy=Policy(4, 1024)))
    assert len(rig.steps) > 20
    assert all(measured <= estimated for estimated, measured in rig.steps)


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
def test_ring_buffer_attention_over_any_split_of_the_prompt_equals_attention_with_window_masks(
    make_model, build_model, kind: str, cuts: list[int]
) -> None:
    model = make_model(kind)
    naive = Naive(model, build_model(kind), [(ring.sink, ring.window) for ring in _rings(model)])
    edges = [0, *sorted(cuts), len(TOKENS)]
    found = _run(Forward(model), _rings(model), TOKENS, [b - a for a, b in pairwise(edges)])
    expected = naive.logits(TOKENS)
    assert mx.abs(found - expected).max().item() < 1e-4 * mx.abs(expected).max().item()


@pytest.mark.parametrize("far", [10_000_000, 9_999_990, 2**31 // 4096 * 4096 - 100])
def test_windowed_logits_at_position_ten_million_equal_those_at_position_ten_thousand(
    make_model, far: int
) -> None:
    model = make_model("llama")
    logits = []
    for start in (10_000, far):
        rings = _rings(model, grid=None)
        _run(Forward(model), rings, TOKENS, [SINK])
        for ring in rings:
            ring.offset = start
        logits.append(_run(Forward(model), rings, TOKENS, [60, 1, 1, 98])[80:])  # the gap is out of sight
    assert mx.abs(logits[0] - logits[1]).max().item() < 2e-3 * mx.abs(logits[0]).max().item()
