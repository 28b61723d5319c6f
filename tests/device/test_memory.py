"""Memory estimates agree with MLX's measurements, and what happens when memory is short.

Idle sessions are dropped first; then prompts slow down, wait, and at last fail.
"""

from __future__ import annotations

import dataclasses
import gc
import queue
import random
import time
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import BLOCK, alone, append, batched, generate, key, prompt

from cache.kv.size import KvSize
from worker.batch.rows import PrefillPiece
from worker.device.machine import _PROFILES
from worker.device.memory import Estimator, Shape, attention_bytes, shape_of
from worker.device.request import NoMemoryError
from worker.device.turn import FaultedTurn, FinishedTurn

#: What 256 tokens of the tiny llama's KV take, and so one session of up to 256.
SESSION = 256 * 2 * 2 * 8 * 4 * 2


@pytest.fixture
def model(make_model) -> Any:
    return make_model("llama")


def limit_of(num_sessions: float, scratch: int = 2**20) -> int:
    gc.collect()  # what other tests have left
    return mx.get_active_memory() + round(num_sessions * SESSION) + scratch


def least_limit(estimator: Estimator, num_tokens: int, weight_bytes: int) -> int:
    """Return the least memory limit, in bytes, with room for the KV of `num_tokens` tokens."""
    wanted = estimator.kv.held(num_tokens)
    low, high = wanted, wanted + 2**26
    while low < high:
        middle = (low + high) // 2
        of = dataclasses.replace(estimator, limit_bytes=middle, weight_bytes=0)
        enough = of.kv_limit(4, 32, 4096) >= wanted
        low, high = (low, middle) if enough else (middle + 1, high)
    return weight_bytes + low


def test_a_prompt_is_prefilled_in_smaller_pieces_when_device_memory_is_short(make_rig, model) -> None:
    """The attention scores of 64 queries and 1,800 keys take 1.8 MB; those of 16 queries take a quarter."""
    rig = make_rig(model, block_tokens=64, limit_bytes=limit_of(8, scratch=2**20))
    turn = append(prompt(1800))
    rig.run(turn)
    ends = rig.chunk_ends(turn)
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert isinstance(rig.end(turn), FinishedTurn)
    assert sizes[0] == 64
    assert 16 <= min(sizes[:-1]) < 64


def test_a_prompt_too_large_for_the_device_fails_and_leaves_other_sessions_intact(make_rig, model) -> None:
    rig = make_rig(model, limit_bytes=limit_of(4, scratch=2**18))
    rig.run(append(prompt(20), name="other"))
    doomed = append(prompt(2000), name="doomed")
    rig.run(doomed)
    end = rig.end(doomed)
    assert isinstance(end, FaultedTurn)
    assert isinstance(end.error, NoMemoryError)
    assert "the limit of the device is" in str(end.error)
    after = generate(prompt(20), 4, name="other")
    rig.run(after)
    assert rig.tokens(after) == alone(model, prompt(20), 4)[0]


def test_the_device_frees_memory_for_a_restore_then_grants_and_reserves_it_until_the_restore_ends(
    make_rig, model
) -> None:
    limit = limit_of(8, scratch=2**20)
    rig = make_rig(model, block_tokens=64, limit_bytes=limit)
    rig.run(*(append(prompt(250, salt=i), name=f"s{i}") for i in range(7)))
    estimator, answers = rig.device.served.estimator, queue.SimpleQueue[bool]()
    size_bytes = estimator.restore_bytes(3200, 64)
    assert mx.get_active_memory() + size_bytes > limit
    rig.device.reserve_room(key("restored"), 3200, answers.put)
    assert answers.get(timeout=20)
    assert mx.get_active_memory() + size_bytes <= limit
    rig.wait(lambda _: bool(rig.dropped))
    beside = append(prompt(1800), name="beside")
    rig.device.submit(beside)
    time.sleep(0.5)
    assert mx.get_active_memory() + size_bytes <= limit, "what is promised is taken by nobody else"
    rig.device.release_room(key("restored"))
    rig.finish(beside)
    assert isinstance(rig.end(beside), FinishedTurn)
    assert rig.peak <= limit


def test_a_restore_larger_than_the_device_is_refused_and_idle_sessions_keep_their_kv(make_rig, model) -> None:
    rig = make_rig(model, limit_bytes=limit_of(2))
    rig.run(append(prompt(20), name="idle"))
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    rig.device.reserve_room(key("large"), 100_000, answers.put)
    assert answers.get(timeout=20) is False
    after = append(prompt(20), name="idle", num_kept=19)
    rig.run(after)
    assert after.num_reused == 19


def test_a_second_try_of_a_restore_gets_memory_although_the_first_try_still_has_its_reservation(
    make_rig, model
) -> None:
    """A damaged file ends the first try; the second one asks for memory although the first one has some."""
    rig = make_rig(model, limit_bytes=limit_of(8))
    estimator, answers = rig.device.served.estimator, queue.SimpleQueue[bool]()
    left = estimator.limit_bytes - mx.get_active_memory()
    num_tokens = next(num for num in range(100_000) if estimator.restore_bytes(num, BLOCK) > left // 2 + 1)
    for _ in range(2):
        rig.device.reserve_room(key("restored"), num_tokens, answers.put)
        assert answers.get(timeout=5)


def test_a_restore_without_enough_memory_waits_until_running_answers_end(make_rig, model) -> None:
    rig = make_rig(model, limit_bytes=limit_of(8))
    running = generate(prompt(250), 1000, name="running")
    rig.device.submit(running)
    rig.wait(lambda _: len(rig.tokens(running)) > 2)
    estimator, answers = rig.device.served.estimator, queue.SimpleQueue[bool]()
    left = estimator.limit_bytes - mx.get_active_memory()
    num_tokens = next(num for num in range(100_000) if estimator.restore_bytes(num, BLOCK) > left + 2**14)
    rig.device.reserve_room(key("large"), num_tokens, answers.put)
    rig.wait(lambda _: len(rig.tokens(running)) > 20)
    assert answers.empty()
    rig.device.cancel(running)
    rig.finish(running)
    assert answers.get(timeout=20)


def test_long_prompts_that_do_not_fit_in_memory_together_all_finish_after_some_of_them_restart(
    make_rig, model
) -> None:
    """Prompts of several tenants start even if they do not fit together, so some lose their progress."""
    estimator = make_rig(model, max_batch=4).device.served.estimator
    gc.collect()
    limit = least_limit(estimator, 1500, weight_bytes=mx.get_active_memory())
    rig = make_rig(model, max_batch=4, limit_bytes=limit)
    rig.run(*(append(prompt(65, salt=i), tenant=f"t{i}") for i in range(6)))
    turns = [append(prompt(1500, salt=i), tenant=f"t{i}", num_kept=64) for i in range(6)]
    rig.run(*turns)
    assert rig.peak <= limit
    assert all(turn.num_reused + turn.num_prefilled == turn.num_cached for turn in turns), "what was dropped"
    assert {type(rig.end(turn)) for turn in turns} == {FinishedTurn}
    assert any(ends != sorted(ends) for ends in map(rig.chunk_ends, turns))
    last = [event for event in rig.events if isinstance(event, FinishedTurn)][-1].turn
    again = generate(last.request.context, 3, num_kept=1900, tenant=last.request.tenant)
    rig.run(again)
    assert rig.tokens(again) == alone(model, again.request.context, 3)[0]


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.soak) for i in range(1, 20))])
def test_peak_device_memory_stays_within_the_limit_under_random_prompts(make_rig, model, seed: int) -> None:
    """Short and long prompts arrive at random, and all are answered."""
    dice, limit = random.Random(seed), limit_of(14)
    rig = make_rig(model, block_tokens=64, max_batch=4, limit_bytes=limit)
    turns = []
    for i in range(60):
        length = dice.choice((5, 30, 120, 600, 1200))
        name = f"s{dice.randrange(20)}-{i}"
        turn = generate(prompt(length, salt=i), dice.randint(1, 20), name=name)
        turns.append(turn)
        rig.device.submit(turn)
        if dice.random() < 0.6:
            rig.finish(*turns)
    rig.finish(*turns)
    assert rig.peak <= limit
    assert {type(rig.end(turn)) for turn in turns} == {FinishedTurn}
    for turn in turns[::7]:
        assert rig.tokens(turn) == alone(model, turn.request.context, turn.request.answer.max_tokens)[0]


GIB = 2**30


def test_the_memory_estimate_leaves_out_attention_scores_only_for_head_sizes_with_fused_attention() -> None:
    small, large = (Shape(8, dim, 512, 1, 1) for dim in (128, 129))
    assert attention_bytes(small, 10, 1000, fused=True) == 8 * 10 * 128 * 4
    assert attention_bytes(small, 10, 1000, fused=False) == 8 * 10 * (128 + 1000) * 4
    metal = _PROFILES["metal"].fused_head_dims
    assert small.fuses(metal)
    assert not large.fuses(metal)
    assert not Shape(8, 112, 512, 1, 1).fuses(metal)
    assert not Shape(8, 128, 512, 1, 1, value_dim=64).fuses(metal)
    assert not small.fuses(_PROFILES["cpu"].fused_head_dims)


def test_the_memory_of_latent_attention_is_estimated_as_unfused_with_the_latent_head_sizes() -> None:
    """In such configurations (deepseek_v3) the field `head_dim` has only the size of the rotary part."""
    config = {
        "num_attention_heads": 128,
        "hidden_size": 7168,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    shape = shape_of(config)
    assert (shape.head_dim, shape.value_dim) == (576, 512)
    assert not shape.fuses(_PROFILES["metal"].fused_head_dims)


def test_estimated_scratch_memory_grows_with_the_number_of_layers_whose_arrays_are_kept_at_a_time() -> None:
    """Metal frees a command buffer's inputs only after it has run, and ten buffers may be in flight."""
    shape = Shape(num_heads=8, head_dim=64, hidden=512, intermediate=2048, vocabulary=1000)
    one, ten, four = (
        Estimator(shape, GIB, 0, KvSize(1024), layers, fused=True, kept_layers=kept).scratch_bytes(
            1, [(128, 4096)]
        )
        for layers, kept in ((24, 1), (24, 10), (4, 10))
    )
    rest = 64 * 2**10 + 2 * 2 * 1000 * 4
    assert [ten - rest, four - rest] == [10 * (one - rest), 4 * (one - rest)]


@pytest.mark.parametrize(
    "config",
    [
        {"n_head": 8, "n_embd": 512, "n_inner": 1024, "vocab_size": 99},
        {
            "hidden_size": 7,
            "vision_config": {"hidden_size": 9},
            "text_config": {
                "num_attention_heads": 8,
                "hidden_size": 512,
                "intermediate_size": 1024,
                "vocab_size": 99,
            },
        },
    ],
    ids=["legacy", "nested"],
)
def test_the_memory_estimator_reads_a_models_sizes_from_legacy_and_nested_configurations(
    config: dict[str, Any],
) -> None:
    assert shape_of(config) == Shape(8, 64, 512, 1024, 99)


def test_the_memory_estimator_uses_default_values_for_sizes_that_a_models_config_leaves_out() -> None:
    assert shape_of({"hidden_size": 64}) == Shape(1, 64, 64, 256, 1)


def test_memory_of_a_step_is_reserved_for_the_longest_session_whose_kv_can_fit_into_memory() -> None:
    """No session can be longer than the KV that fits into memory, so no step needs more than that."""
    shape = Shape(num_heads=8, head_dim=64, hidden=512, intermediate=2048, vocabulary=1000)
    estimator = Estimator(
        shape=shape,
        limit_bytes=GIB,
        weight_bytes=GIB // 2,
        kv=KvSize(2**16),
        num_layers=8,
        fused=False,
    )

    def needed(num_tokens: int, longest: int) -> int:
        step = estimator.scratch_bytes(4, [(128, longest)]) + estimator.growth_bytes([longest] * 4)
        return estimator.kv.held(num_tokens) + step

    room = estimator.kv_limit(4, 128, 65_536)
    num_tokens = room // 2**16
    assert needed(num_tokens, num_tokens) <= GIB // 2 < needed(num_tokens + 1, num_tokens + 1)
    assert room > GIB // 2 - needed(0, 65_536)
    short = estimator.kv_limit(4, 128, 1000)
    assert short == GIB // 2 - needed(0, 1000)


@pytest.mark.parametrize(("num_cached", "num_new"), [(0, 256), (512, 64), (1536, 256)])
def test_a_prefill_step_takes_no_more_memory_than_estimated(
    make_model, num_cached: int, num_new: int
) -> None:
    """It takes at least a fifth of the estimate: one far too high would refuse prompts that fit."""
    model = make_model("llama")
    batch, caches = batched(model), make_prompt_cache(model)
    for start in range(0, num_cached, 256):
        batch.step([PrefillPiece(caches, start, prompt(256))])
    estimator = Estimator(shape_of(vars(model.args)), GIB, 0, KvSize(2 * 2 * 8 * 4 * 2), 2, fused=False)
    expected = estimator.scratch_bytes(0, [(num_new, num_cached + num_new)])
    batch.step([PrefillPiece(make_prompt_cache(model), 0, prompt(num_new))])  # whatever is made once
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    batch.step([PrefillPiece(caches, num_cached, prompt(num_new))])
    after = mx.get_active_memory()  # its caches may have grown
    assert expected / 5 <= mx.get_peak_memory() - max(before, after) <= expected
