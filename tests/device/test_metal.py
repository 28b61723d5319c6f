"""Masks that Metal's attention need not copy in each layer. These tests run on any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import alone, batched, begin, generate, prompt

from worker.batch import metal
from worker.batch.batch import Batch
from worker.device import machine


def test_a_draft_and_the_token_before_it_fit_into_metals_attention_for_few_queries() -> None:
    assert machine._PROFILES["metal"].max_draft + 1 == metal._MOST_QUERIES


@pytest.mark.parametrize("most_queries", [8, 0], ids=["few tokens", "more than the kernel takes"])
def test_rows_of_a_pool_have_one_contiguous_mask_for_all_heads_and_layers(
    make_model, monkeypatch, most_queries: int
) -> None:
    masks: list[mx.array] = []
    spread = metal.spread

    def kept(mask: mx.array, num_heads: int) -> Any:
        masks.append(spread(mask, num_heads))
        return masks[-1]

    monkeypatch.setattr(metal, "spread", kept)
    monkeypatch.setattr(metal, "_on_metal", lambda: True)
    monkeypatch.setattr(metal, "_MOST_QUERIES", most_queries)
    model, num_steps = make_model("llama"), 6
    batch = batched(model, pooled_rows=2)
    prompts = [prompt(9), prompt(14, salt=5), prompt(21, salt=7)]
    pieces = [begin(model, tokens) for tokens in prompts]
    drawn: list[list[int]] = [[] for _ in prompts]
    for step in range(num_steps):
        batch.step(pieces if step == 0 else [])
        for piece, tokens in zip(pieces, drawn, strict=True):
            assert piece.row is not None
            tokens.extend(one.token for one in piece.row.drawn)
    assert drawn == [alone(model, tokens, num_steps)[0] for tokens in prompts]
    assert len(masks) == (num_steps - 1 if most_queries else 0), "one in each step with a pool"
    for mask in masks:
        rows, heads, num, keys = mask.shape
        assert (rows, heads, num) == (3, model.args.num_attention_heads, 1)
        assert memoryview(mask).strides == (heads * keys, keys, keys, 1)


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_worker_that_warms_up_runs_a_block_and_two_answers_and_keeps_nothing_of_them(
    make_rig, make_model, monkeypatch, kind: str
) -> None:
    """Metal compiles a kernel when it first runs. The time of that is no measure of a step."""
    steps: list[int] = []
    step = Batch.step

    def counted(self: Batch, pieces: Any, **more: Any) -> None:
        step(self, pieces, **more)
        steps.append(len(self.rows))

    monkeypatch.setattr(Batch, "step", counted)
    first = make_rig(make_model(kind)).device._runner
    assert steps == [1]
    monkeypatch.setitem(machine._PROFILES, "cpu", replace(machine._PROFILES["cpu"], warms_up=True))
    rig = make_rig(make_model(kind))
    assert steps == [1, 1, 2, 2]
    runner = rig.device._runner
    for one in (first, runner):
        assert not one._batch.rows
        assert vars(one._prefill_budget) == vars(first._prefill_budget)
        assert one._batch.speculation._times.plain_s(2, ahead=False) is None
    turn = generate(prompt(20), 5)
    rig.run(turn)
    assert rig.tokens(turn) == alone(make_model(kind), prompt(20), 5)[0]
