"""Rows (running answers) that join and leave a batch decode as if each were alone."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import GREEDY, WIDE, Oracle, alone, batched, begin, drafting, kv, prompt

from tests.matrices import thinned
from worker.batch import pools, slots
from worker.batch.batch_kinds import batch_for
from worker.batch.forward import Forward
from worker.batch.merged import MergedRows
from worker.batch.own_pass import OwnPass
from worker.batch.pools import Pools
from worker.batch.row_sampler import RowSampler, RowSampling
from worker.batch.rows import CommonKv, PrefillPiece, Row

if TYPE_CHECKING:
    from worker.batch.batch import Batch

SAMPLINGS = [
    GREEDY,
    RowSampling(0.8, seed=1),
    RowSampling(1.2, top_k=20, seed=2),
    RowSampling(0.0, repetition_penalty=1.4),
]


def run(
    batch: Batch, pieces: list[PrefillPiece], num_steps: int, *, run_ahead: bool = True
) -> list[list[int]]:
    """Run steps, of which the first runs `pieces` and starts their rows; return the tokens of each row."""
    rows = [piece.row for piece in pieces if piece.row is not None]
    drawn: list[list[int]] = [[] for _ in rows]
    for _ in range(num_steps):
        batch.step(pieces, run_ahead=run_ahead)
        pieces = []
        for row, tokens in zip(rows, drawn, strict=True):
            tokens.extend(one.token for one in row.drawn)
    return drawn


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_rounding_in_16_bits_does_not_make_a_model_fail_the_trial_of_the_shared_pass(
    build_model, dtype
) -> None:
    """In 12 layers bfloat16 changes logits by 0.06 to 0.11 of the largest, as much as a wrong mask does."""
    model = build_model("llama", num_hidden_layers=12, **WIDE)
    model.set_dtype(dtype)
    batch = batch_for(model)
    assert type(batch._run) is Forward
    assert batch.has_rings
    assert model.model.embed_tokens(mx.array([1])).dtype == dtype, "as it was before"


@pytest.mark.parametrize(
    ("kind", "kv_bits", "way", "keeping"),
    [
        ("llama", None, Forward, Pools),
        ("llama", 8, Forward, CommonKv),
        ("exaone4", None, Forward, Pools),
        ("exaone4", 8, Forward, CommonKv),
        ("gemma2", None, OwnPass, MergedRows),
        ("qwen3_next", None, OwnPass, MergedRows),
        ("qwen3_next", 8, OwnPass, CommonKv),
        ("llama4", None, OwnPass, CommonKv),
    ],
)
def test_a_models_cache_classes_and_attention_decide_how_its_rows_are_batched(
    make_model, kind, kv_bits, way, keeping
) -> None:
    batch = batch_for(make_model(kind, kv_bits))
    assert (type(batch._run), type(batch._keeping)) == (way, keeping)


@pytest.mark.parametrize(("seed", "ahead", "smallest"), thinned(range(4), [0.0, 0.8], [4, 256], strength=2))
def test_rows_that_join_and_leave_a_batch_get_the_same_tokens_and_kv_as_alone(
    make_model, monkeypatch, seed, smallest, ahead
) -> None:
    """Joins, leaves and lengths are random. Rows stay in one pool or move to larger ones; steps run ahead."""
    monkeypatch.setattr(slots, "SMALLEST", smallest)
    monkeypatch.setattr(pools, "_ROOM", 2)
    model, dice = make_model("llama"), random.Random(seed)
    waiting = deque(
        (prompt(dice.randint(2, 40), salt=salt), SAMPLINGS[salt % len(SAMPLINGS)]) for salt in range(12)
    )
    batch = batched(model)
    running: dict[Row, tuple[list[int], RowSampling, list[int]]] = {}
    left: dict[Row, tuple[list[int], RowSampling, list[int], list[Any]]] = {}
    while waiting or running:
        pieces = []
        for _ in range(dice.randint(0, 3)):
            if waiting and len(running) < 6 and not batch.is_ahead:
                tokens, sampling = waiting.popleft()
                pieces.append(begin(model, tokens, sampling))
                running[pieces[-1].row] = (tokens, sampling, [])
        batch.step(pieces, run_ahead=dice.random() < ahead)
        for row, (_, _, drawn) in list(running.items()):
            drawn.extend(one.token for one in row.drawn)
            if len(drawn) >= 3 and dice.random() < 0.2:
                left[row] = (*running.pop(row), batch.remove(row))
    assert len(left) == 12
    for row, (tokens, sampling, drawn, caches) in left.items():
        expected, reference = alone(model, tokens, len(drawn), sampling)
        assert drawn == expected
        num_cached = len(tokens) - 1 + len(drawn)
        assert row.num_cached == num_cached == caches[0].offset
        np.testing.assert_allclose(kv(caches, num_cached), kv(reference, num_cached), atol=1e-4)


def test_prompts_prefilled_in_one_pass_with_answers_and_other_prompts_change_no_token(make_model) -> None:
    """One pass runs pieces of three prompts and two answers; each gets the tokens that it gets alone."""
    model = make_model("llama")
    batch = batched(model)
    early = [begin(model, prompt(n, salt=n)) for n in (9, 14)]
    answers = run(batch, early, 3, run_ahead=False)
    late = [prompt(n, salt=n) for n in (30, 12, 21)]
    caches = [make_prompt_cache(model) for _ in late]
    for start in (0, 10, 20):
        pieces = []
        for tokens, own in zip(late, caches, strict=True):
            some = tokens[start : start + 10]
            if some:
                ends = start + len(some) == len(tokens)
                row = Row(own, tokens.copy(), RowSampler(GREEDY), len(tokens), 1000) if ends else None
                pieces.append(PrefillPiece(own, start, some, row))
        batch.step(pieces)
        for piece, drawn in zip(early, answers, strict=True):
            drawn.extend(one.token for one in piece.row.drawn)
    assert answers == [alone(model, prompt(n, salt=n), 6)[0] for n in (9, 14)]
    firsts = {row.num_cached: row for row in batch.rows[2:]}
    batch.step([])
    for tokens in late:
        row = next(
            row for row in firsts.values() if row.num_cached - row.sampler.num_drawn + 1 == len(tokens)
        )
        assert row.known[len(tokens) :] == alone(model, tokens, row.sampler.num_drawn)[0]


def test_one_or_two_rows_use_their_own_caches_and_three_share_a_pool(make_model) -> None:
    """A pool needs a copy of each row's KV, which does not pay for one or two rows."""
    model = make_model("llama")
    one, other = begin(model, prompt(9)), begin(model, prompt(5))
    batch = batched(model)
    batch.step([one])
    batch.step([])
    assert batch.caches(one.row) is one.caches
    batch.step([other])
    batch.step([])
    assert one.row.caches is one.caches  # two are not worth a pool either
    batch.step([begin(model, prompt(7))])
    batch.step([])
    assert one.row.caches is None
    assert batch.remove(one.row)[0].offset == one.row.num_cached == 14


def test_rows_of_very_different_lengths_do_not_share_a_pool(make_model, monkeypatch) -> None:
    """In a shared pool, attention for a short row would take as long as for a long one."""
    monkeypatch.setattr(slots, "SMALLEST", 64)
    model = make_model("llama")
    batch = batched(model)
    pieces = [begin(model, prompt(n, salt=n)) for n in (5, 9, 12, 100)]
    run(batch, pieces, 3)
    short, other, _, long = (piece.row for piece in pieces)
    places = batch._keeping._slots
    assert places[short][0] is places[other][0]
    assert long not in places
    assert places[short][0].capacity == 64


@pytest.mark.parametrize("sampling", [GREEDY, RowSampling(0.9, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_speculation_changes_only_the_number_of_steps(make_model, sampling, num_rows) -> None:
    """Some drafts are wrong. One or two answers run, and their KV is compared, too."""
    model = make_model("llama")
    contexts = [prompt(20 + 7 * i, salt=i) for i in range(num_rows)]
    answers = [alone(model, tokens, 150, sampling)[0] for tokens in contexts]
    dice = random.Random(num_rows)
    oracle = Oracle(answers, lambda here: [(one + (dice.random() < 1 / 6)) % 90 for one in here])
    batch = drafting(model, 6, drafters=(oracle,))
    pieces = [begin(model, tokens, sampling) for tokens in contexts]
    drawn = run(batch, pieces, 20)
    spoken = batch.speculation
    assert 0 < spoken.num_accepted < spoken.num_drafted
    assert sum(map(len, drawn)) == 20 * num_rows + spoken.num_accepted
    for tokens, mine, answer, piece in zip(contexts, drawn, answers, pieces, strict=True):
        assert mine == answer[: len(mine)]
        num_cached = len(tokens) - 1 + len(mine)
        caches = batch.remove(piece.row)
        assert num_cached == piece.row.num_cached == caches[0].offset
        reference = alone(model, tokens, len(mine), sampling)[1]
        np.testing.assert_allclose(kv(caches, num_cached), kv(reference, num_cached), atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_models_whose_caches_cannot_be_trimmed_never_speculate(make_model, kind) -> None:
    model = make_model(kind)
    batch = drafting(model, 8)
    drawn = run(batch, [begin(model, prompt(9))], 30)[0]
    assert batch.speculation.num_drafted == 0
    assert drawn == alone(model, prompt(9), 30)[0]
