"""Rows that join and leave at any time: each as if it were alone."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import GREEDY, alone, kv, prefill, prompt

from worker.batch import Batch, Row
from worker.sampling import Sampling

SAMPLINGS = [
    GREEDY,
    Sampling(0.8, seed=1),
    Sampling(1.2, top_k=20, seed=2),
    Sampling(0.0, repetition_penalty=1.4),
]


def new_row(model: Any, tokens: list[int], sampling: Sampling) -> Row:
    caches = make_prompt_cache(model)
    prefill(model, caches, tokens[:-1])
    return Row(caches, tokens[-1], sampling, 0, len(tokens) - 1, set(tokens))


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_come_and_go_get_the_tokens_and_the_kv_that_they_get_alone(make_model, seed) -> None:
    """Random joins, leaves and lengths; tokens, positions and keys and values of each row."""
    model, dice = make_model("llama"), random.Random(seed)
    waiting = deque(
        (prompt(dice.randint(2, 40), salt=salt), SAMPLINGS[salt % len(SAMPLINGS)]) for salt in range(8)
    )
    batch = Batch(model)
    running: dict[Row, tuple[list[int], Sampling, list[int]]] = {}
    left: list[Row] = []
    results = dict(running)
    while waiting or running:
        for _ in range(dice.randint(0, 2)):
            if waiting and len(running) < 5:
                tokens, sampling = waiting.popleft()
                running[new_row(model, tokens, sampling)] = (tokens, sampling, [])
        order = list(running)
        dice.shuffle(order)  # the batch must not rely on the order in which rows are named
        batch.set_rows(order)
        if order:
            for row, token in zip(order, batch.step(), strict=True):
                running[row][2].append(token)
        for row in order:
            if len(running[row][2]) >= 3 and dice.random() < 0.25:
                results[row] = running.pop(row)
                left.append(row)
        batch.set_rows([row for row in batch.rows if row in running])
    assert len(left) == 8
    for row, (tokens, sampling, drawn) in results.items():
        expected, caches = alone(model, tokens, len(drawn), sampling)
        assert drawn == expected
        num_cached = len(tokens) - 1 + len(drawn)
        assert row.num_cached == num_cached == row.caches[0].offset
        np.testing.assert_allclose(kv(row.caches, num_cached), kv(caches, num_cached), atol=1e-4)


@pytest.mark.parametrize("kind", ["exaone4", "mamba2", "baichuan_m1"])
def test_caches_that_cannot_be_merged_step_row_by_row(make_model, kind) -> None:
    """A merged rotating cache would lose tokens silently."""
    model = make_model(kind)
    prompts = [prompt(3), prompt(19, salt=5), prompt(11, salt=9)]
    rows = [new_row(model, tokens, GREEDY) for tokens in prompts]
    batch = Batch(model)
    batch.set_rows(rows)
    drawn = [batch.step() for _ in range(12)]
    assert [batch.place(row)[1] for row in rows] == [None] * 3
    for i, tokens in enumerate(prompts):
        assert [step[i] for step in drawn] == alone(model, tokens, 12)[0]


def test_a_row_without_kv_yet_decodes_beside_rows_with_some(make_model) -> None:
    """A prompt of one token: there is nothing to merge before its first step."""
    model = make_model("llama")
    prompts = [prompt(20), prompt(1), prompt(9, salt=7)]
    rows = [new_row(model, tokens, GREEDY) for tokens in prompts]
    batch = Batch(model)
    drawn = []
    for _ in range(6):
        batch.set_rows(rows)
        drawn.append(batch.step())
    for i, tokens in enumerate(prompts):
        assert [step[i] for step in drawn] == alone(model, tokens, 6)[0]


def test_a_row_alone_steps_on_its_own_caches(make_model) -> None:
    """So that the session that runs alone gets the same bits as one that was never interrupted."""
    model = make_model("llama")
    one, other = new_row(model, prompt(9), GREEDY), new_row(model, prompt(5), GREEDY)
    batch = Batch(model)
    own = one.caches
    batch.set_rows([one])
    batch.step()
    assert batch.place(one) == (own, None)
    batch.set_rows([one, other])
    batch.step()
    assert batch.place(one)[1] == 0
    assert one.caches is None
    batch.set_rows([one])
    assert batch.place(one)[1] is None
    assert one.caches[0].offset == one.num_cached == 10


def test_after_a_clear_new_rows_start_from_nothing(make_model) -> None:
    model = make_model("llama")
    batch = Batch(model)
    batch.set_rows([new_row(model, prompt(9), GREEDY), new_row(model, prompt(5), GREEDY)])
    batch.step()
    batch.clear()
    assert batch.rows == ()
    rows = [new_row(model, prompt(n), GREEDY) for n in (4, 14)]
    batch.set_rows(rows)
    assert batch.step() == [alone(model, prompt(n), 1)[0][0] for n in (4, 14)]
