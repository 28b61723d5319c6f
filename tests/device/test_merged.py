"""Rows with merged caches decode as if alone, whenever they join, leave or are read."""

from __future__ import annotations

import io
import random
from array import array
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, RotatingKVCache, make_prompt_cache
from structlog.testing import capture_logs
from tiny_models import GREEDY, alone, batched, begin, prefill, prompt, tried

from tests.matrices import thinned
from worker.batch import batch_kinds
from worker.batch import merged as merged_module
from worker.batch.batch_kinds import batch_for
from worker.batch.own_pass import OwnPass
from worker.batch.row_sampler import RowSampler, RowSampling
from worker.batch.rows import PrefillPiece, Row
from worker.batch.trials import Trials

#: Recurrent states, windows, hybrids of them with each other and with plain caches, attention of other kinds.
KINDS = [
    *("mamba2", "baichuan_m1", "qwen3_next", "deepseek_v3", "exaone4", "gemma2"),
    # As some of these: their merged caches are of the same classes
    *("rwkv7", "recurrent_gemma", "falcon_h1", "longcat_flash", "gemma3_text", "gpt_oss"),
]
#: Where `_no_rings` changes the trials.
NO_RINGS = "no rings"


def go_on(model: Any, caches: list[Any], last: int, num_tokens: int) -> list[int]:
    """Decode greedily after the token `last` with these caches; return the tokens."""
    tokens = []
    for _ in range(num_tokens):
        last = int(mx.argmax(model(mx.array([[last]]), cache=caches)[0, -1]).item())
        tokens.append(last)
    return tokens


@pytest.fixture(autouse=True)
def _no_rings(monkeypatch) -> None:
    """Make the trial of ring caches fail, so that models' sliding windows are merged instead."""

    def refuse(*_: Any, **__: Any) -> float:
        raise TypeError("no rings here")

    monkeypatch.setattr(batch_kinds, "_deviation_rotated", refuse)


def is_merged(row: Row) -> bool:
    return row.caches is None


class Broken:
    """A cache that raises `MemoryError` at every access."""

    def __getattr__(self, name: str) -> Any:
        raise MemoryError(name)

    def __getitem__(self, index: int) -> Any:
        raise MemoryError(index)


def test_the_unevaluated_mlx_graph_of_a_merged_kv_caches_offset_stays_small_in_a_long_answer(
    build_model,
) -> None:
    """Attention without rotary positions never reads it, so each step adds five edges and a buffer."""
    model = build_model("granitemoehybrid", position_embedding_type="nope")
    batch = batched(model, where=NO_RINGS)
    pieces = [begin(model, prompt(n, salt=n)) for n in (10, 5)]
    for step in range(300):
        batch.step([] if step else pieces)
    edges = []
    for cache in batch._keeping._caches:
        if isinstance(cache, BatchKVCache):
            graph = io.StringIO()
            mx.export_to_dot(graph, cache.offset)
            edges.append(graph.getvalue().count("->"))
    assert len(edges) == 1
    assert edges[0] <= 5 * BatchKVCache.step


@pytest.mark.parametrize(
    ("kind", "num_steps", "built"),
    thinned(
        ["mamba2", "recurrent_gemma", "baichuan_m1", "deepseek_v3", "exaone4"],
        [1, 8],
        [True, False],
        strength=2,
    ),
)
def test_batch_rows_with_merged_kv_caches_are_rolled_back_after_a_failed_step_and_lose_no_token(
    make_model, monkeypatch, kind, num_steps, built
) -> None:
    """The step fails while it is built, or while it runs; windows have wrapped in some cases."""
    model = make_model(kind)
    batch = batched(model, where=NO_RINGS)
    contexts = [prompt(n, salt=n) for n in (10, 5)]
    pieces = [begin(model, tokens) for tokens in contexts]
    rows = [piece.row for piece in pieces]
    batch.step(pieces)
    for _ in range(num_steps):
        batch.step([])
    assert all(map(is_merged, rows))
    before = [row.known.copy() for row in rows]
    if built:

        def fail(*_: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", fail)
            with pytest.raises(MemoryError):
                batch.step([])
    else:
        batch.step([])
        before = [row.known.copy() for row in rows]
        with pytest.raises(MemoryError):
            batch.step([PrefillPiece([Broken() for _ in make_prompt_cache(model)], 0, prompt(4))])
    assert batch.roll_back()
    assert [row.known for row in rows] == before
    for _ in range(5):
        batch.step([])
    for row, tokens in zip(rows, contexts, strict=True):
        drawn = row.known[len(tokens) :]
        assert drawn == alone(model, tokens, len(drawn))[0]
        assert go_on(model, batch.remove(row), row.known[-1], 4) == alone(model, row.known, 4)[0]


@pytest.mark.parametrize("kind", ["mamba2", "exaone4"])
def test_a_batch_row_with_unmerged_recurrent_or_windowed_caches_cannot_be_rolled_back(
    make_model, kind
) -> None:
    model = make_model(kind)
    batch = batched(model, where=NO_RINGS)
    batch.step([begin(model, prompt(9))])
    batch.step([])
    assert not batch.roll_back()


def test_a_batch_whose_merged_kv_caches_were_dropped_by_an_error_cannot_be_rolled_back(
    make_model, monkeypatch
) -> None:
    """The error occurs while another row's memory is freed; some layers lack that row already."""
    model = make_model("qwen3_next")
    batch = batched(model)
    pieces = answered_as_alone(batch, model, (9, 5, 14), 3)
    batch.remove(pieces[0].row)

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(BatchKVCache, "filter", fail)
    with pytest.raises(MemoryError):
        batch.step([])
    assert not batch.roll_back()


def answered_as_alone(batch: Any, model: Any, lengths: tuple[int, ...], num: int) -> list[PrefillPiece]:
    """Answer prompts of these lengths together, each with the first `num` tokens that it gets alone."""
    contexts = [prompt(length, salt=length) for length in lengths]
    pieces = [begin(model, tokens) for tokens in contexts]
    batch.step(pieces)
    for _ in range(num - 1):
        batch.step([])
    for piece, tokens in zip(pieces, contexts, strict=True):
        assert piece.row is not None
        assert piece.row.known[len(tokens) :] == alone(model, tokens, num)[0]
    return pieces


def test_batch_rows_run_one_after_the_other_if_memory_to_merge_their_kv_caches_is_lacking(
    make_model,
) -> None:
    model = make_model("recurrent_gemma")
    batch = batched(model, lambda _: False, where=NO_RINGS)
    for piece in answered_as_alone(batch, model, (9, 5, 14), 6):
        assert piece.row.caches is piece.caches


def test_batch_rows_of_a_windowed_model_that_failed_its_merging_self_test_decode_separately(
    make_model, monkeypatch
) -> None:
    model = make_model("exaone4")
    monkeypatch.setattr(batch_kinds, "WAYS", ({},))
    batch = batch_for(model)
    answered_as_alone(batch, model, (9, 5, 14), 10)
    assert not any(map(is_merged, batch.rows))
    assert not batch.roll_back()


def test_batch_rows_of_a_cache_class_that_cannot_be_merged_run_one_by_one_with_a_warning(make_model) -> None:
    """The class is that of chunked attention (llama4). Tokens are those of rows alone."""
    model = make_model("llama4")
    with capture_logs() as lines:
        batch = batch_for(model)
    assert {"missing": "ChunkedKVCache"}.items() <= lines[-2].items()
    assert lines[-1]["log_level"] == "warning"
    assert lines[-1]["event"].startswith("this model's sessions run one after the other")
    answered_as_alone(batch, model, (4, 3, 13), 8)


class Careless(BatchKVCache):
    def make_mask(self, N: int, **options: Any) -> None:  # noqa: N803  # mlx-lm's name
        """Return no mask, so that tokens see the padding, too."""


class Swapped(merged_module._Arrays):
    def filter(self, batch_indices: list[int]) -> None:
        super().filter(batch_indices[::-1])


class Forgetful(merged_module._Window):
    def extract(self, idx: int) -> Any:
        cache = super().extract(idx)
        cache.offset -= 1
        return cache


@pytest.mark.parametrize(
    ("kind", "like"), [("deepseek_v3", Careless), ("mamba2", Swapped), ("exaone4", Forgetful)]
)
def test_a_model_whose_merged_kv_caches_give_other_logits_than_single_ones_is_batched_without_merging(
    make_model, monkeypatch, kind, like
) -> None:
    """The trial at model load detects a wrong mask, order or position."""
    model = make_model(kind)
    assert batch_kinds.merged_for(model, Trials()) is not None
    wrong = {own: like if issubclass(like, of) else of for own, of in merged_module._USUAL.items()}
    monkeypatch.setattr(batch_kinds, "WAYS", (wrong,))
    assert batch_kinds.merged_for(model, Trials()) is None


def test_sliding_window_caches_with_sink_tokens_are_not_merged_in_a_batch(make_model, monkeypatch) -> None:
    """mlx-lm would drop those tokens, silently (mlx-lm#1631)."""
    model = make_model("exaone4")
    sinks = [RotatingKVCache(8, keep=2)]
    assert batch_kinds.merged_for(model, Trials()).can_join(make_prefilled(model))
    sinks[0].update_and_fetch(mx.zeros((1, 2, 1, 8)), mx.zeros((1, 2, 1, 8)))
    assert not batch_kinds.merged_for(model, Trials()).can_join(sinks)
    monkeypatch.setattr(batch_kinds, "make_prompt_cache", lambda _: sinks)
    assert batch_kinds.merged_for(model, Trials()) is None


def row_of(caches: list[Any]) -> Row:
    return Row(caches, array("I"), RowSampler(GREEDY), 0, 0)


def merged_step(model: Any, merged: merged_module.MergedRows, rows: list[Row]) -> mx.array:
    ((part, _),) = merged.parts(rows, 0, {})
    logits = OwnPass(model)([part], [1] * len(rows))
    merged.commit()
    return logits


def make_prefilled(model: Any, num_tokens: int = 5) -> list[Any]:
    caches = make_prompt_cache(model)
    prefill(model, caches, prompt(num_tokens))
    return caches


@pytest.mark.parametrize("kind", ["qwen3_next", "baichuan_m1"])
def test_a_batch_row_that_leaves_merged_kv_caches_does_not_keep_the_whole_batch_in_memory(
    make_model, kind
) -> None:
    """Its arrays are copies: a view would pin the buffers of the whole batch."""
    model = make_model(kind)
    merged = batch_kinds.merged_for(model, tried(model, NO_RINGS))
    own = make_prefilled(model)
    rows = [row_of(own) for _ in range(200)]
    merged.join(rows)
    merged_step(model, merged, rows)
    all_bytes = merged.nbytes
    merged.leave(rows[3])
    merged.clear()
    before = mx.get_active_memory()
    rows[3].caches = None
    assert 0 < before - mx.get_active_memory() < all_bytes / 8


@pytest.mark.parametrize("kind", ["qwen3_next", "baichuan_m1"])
def test_a_batch_row_that_joins_merged_kv_caches_takes_no_more_memory_than_estimated(
    make_model, kind
) -> None:
    """The estimate is `joining_bytes`; a row joins only if so much memory is free."""
    model = make_model(kind)
    merged, rows = batch_kinds.merged_for(model, tried(model, NO_RINGS)), []
    for i in range(4):
        caches = make_prefilled(model, 20 + 90 * i)
        said, before = merged.joining_bytes([caches]), mx.get_active_memory()
        mx.reset_peak_memory()
        rows.append(row_of(caches))
        merged.join(rows[-1:])
        assert mx.get_peak_memory() - before <= said + 20_000
        for _ in range(3):
            mx.eval(merged_step(model, merged, rows))
        assert mx.get_active_memory() - before <= said + 20_000


def test_all_batch_rows_are_listed_as_needing_memory_before_a_step_that_enlarges_their_merged_kv_caches(
    make_model,
) -> None:
    """Merged KV grows by 256 tokens for all rows at once; the first time right after a join."""
    model = make_model("deepseek_v3")
    merged = batch_kinds.merged_for(model, tried(model, NO_RINGS))
    own = make_prefilled(model)
    rows = [row_of(own) for _ in range(3)]
    merged.join(rows)
    num_grown = 0
    for _ in range(270):
        told, before = merged.growing, merged.nbytes
        mx.eval(merged_step(model, merged, rows))
        if merged.nbytes > before:
            assert len(told) == 3
            num_grown += 1
    assert num_grown == 2


@pytest.mark.parametrize(
    ("kind", "merged_rows"),
    [*thinned(KINDS[:6], [1, 2]), *(pytest.param(kind, 1, marks=pytest.mark.soak) for kind in KINDS[6:])],
)
def test_batch_rows_with_a_step_in_flight_keep_their_tokens_when_a_row_leaves_or_its_kv_is_copied(
    make_model, kind, merged_rows
) -> None:
    """If a row leaves or its KV is read, the step in flight is undone and repeated with the same tokens.

    Windows wrap. KV that was read, and KV that left, continue alone.
    """
    model, dice = make_model(kind), random.Random(merged_rows)
    batch = batched(model, where=NO_RINGS, merged_rows=merged_rows, runs_ahead=True)
    samplings = [GREEDY, RowSampling(0.9, seed=3), GREEDY, RowSampling(0.9, seed=4)]
    contexts = [prompt(5 + 3 * n, salt=n) for n in range(4)]
    pieces = [begin(model, tokens, sampling) for tokens, sampling in zip(contexts, samplings, strict=True)]
    drawn: dict[Row, list[int]] = {piece.row: [] for piece in pieces}
    sessions = {piece.row: n for n, piece in enumerate(pieces)}
    read: list[tuple[list[int], list[int]]] = []
    num_ahead = 0
    while drawn:
        waiting = [] if batch.is_ahead else pieces[:1]
        pieces = pieces[len(waiting) :]
        batch.step(waiting, run_ahead=True)
        num_ahead += batch.is_ahead
        for row in tuple(batch.rows):
            drawn[row] += [one.token for one in row.drawn]
            if dice.random() < 0.1:
                known, shown = [*contexts[sessions[row]], *drawn[row]], batch.caches(row)
                mx.eval([cache.state for cache in shown])
                if is_merged(row):  # else these are the row's own
                    read.append((known, go_on(model, shown, known[-1], 3)))
            if len(drawn[row]) > 8 and dice.random() < 0.2:
                n, mine = sessions[row], drawn.pop(row)
                caches = batch.remove(row)
                expected = alone(model, contexts[n], len(mine), samplings[n])[0]
                assert mine == expected
                more = go_on(model, caches, mine[-1], 3)
                assert more == alone(model, [*contexts[n], *mine], 3)[0]
    assert num_ahead > 3
    for known, more in read:
        assert more == alone(model, known, 3)[0]
