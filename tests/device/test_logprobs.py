"""Log probabilities and penalties equal those of a plain loop over the model in every kind of batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import batched, begin, drafting, prefill, prompt

from worker.batch.row_sampler import RowSampling

if TYPE_CHECKING:
    from worker.batch.rows import Row

PLAIN = RowSampling()
TOLD = RowSampling(top_logprobs=3)
PENALISED = RowSampling(
    0.9, presence_penalty=0.8, frequency_penalty=0.3, repetition_penalty=1.2, top_logprobs=1, seed=4
)
BIASED = RowSampling(logit_bias=((7, 3.0), (9, -50.0)), min_tokens=30, top_logprobs=0)
MIXED = [PLAIN, TOLD, PENALISED, BIASED]


def run(model: Any, samplings: list[RowSampling], num: int, **options: Any) -> list[list[Any]]:
    """Answer prompts of several lengths in one batch; return the `num` first drawn tokens of each."""
    batch = drafting(model, **options) if options else batched(model)
    pieces = [begin(model, prompt(9 + 2 * n, salt=n), sampling) for n, sampling in enumerate(samplings)]
    drawn: dict[Row, list[Any]] = {piece.row: [] for piece in pieces}
    batch.step(pieces)
    while min(map(len, drawn.values())) < num:
        for row, found in drawn.items():
            found.extend(row.drawn)
        batch.step([], run_ahead=True)
    return [found[:num] for found in drawn.values()]


def reference(model: Any, context: list[int], tokens: list[int]) -> np.ndarray:
    """Return the log probabilities of the whole vocabulary at the position of each of `tokens`."""
    caches = make_prompt_cache(model)
    prefill(model, caches, context[:-1])
    rows = [model(mx.array([[token]]), cache=caches)[0, -1] for token in [context[-1], *tokens[:-1]]]
    logits = np.array(mx.stack(rows), np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("kind", ["llama", "exaone4", "gemma2", "qwen3_next", "mamba2", "llama4"])
def test_rows_together_get_the_same_tokens_as_alone_and_the_models_own_logprobs(make_model, kind) -> None:
    model = make_model(kind)
    together = run(model, MIXED, 24)
    for n, (sampling, found) in enumerate(zip(MIXED, together, strict=True)):
        tokens = [one.token for one in found]
        alone = batched(model)
        piece = begin(model, prompt(9 + 2 * n, salt=n), sampling)
        alone.step([piece])
        for _ in range(23):
            alone.step([])
        assert tokens == list(piece.row.known[9 + 2 * n :])
        if sampling.top_logprobs is None:
            assert {one.logprob for one in found} == {None}
            continue
        expected = reference(model, prompt(9 + 2 * n, salt=n), tokens)
        for one, row in zip(found, expected, strict=True):
            assert one.logprob == pytest.approx(row[one.token], abs=2e-3)
            assert [value for _, value in one.top] == pytest.approx(
                np.sort(row)[::-1][: sampling.top_logprobs], abs=2e-3
            )


@pytest.mark.parametrize("sampling", [TOLD, PENALISED, BIASED], ids=["told", "penalised", "biased"])
def test_speculation_changes_neither_tokens_nor_logprobs(make_model, sampling) -> None:
    """The text repeats itself, so that prompt lookup finds drafts."""
    model = make_model("llama")
    (plain,), (drafted,) = (run(model, [sampling], 80, most=most) for most in (0, 6))
    assert [one.token for one in drafted] == [one.token for one in plain]
    assert [one.logprob for one in drafted] == pytest.approx([one.logprob for one in plain], abs=1e-3)
