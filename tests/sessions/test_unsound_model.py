"""A model with broken weights is refused when the worker starts, or the answers that use them fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.parts import make_tiny_model
from turnkeep_client.errors import RequestFailedError
from worker.models.model_files import ModelError

#: The id of `~` in the tiny model.
TILDE = 96


def broken(folder: Path, token: int, **changes: Any) -> Path:
    """Make a tiny model whose embedding of one token is NaN."""
    import mlx.core as mx

    make_tiny_model(folder, **changes)
    path = str(folder / "model.safetensors")
    weights: dict[str, mx.array] = mx.load(path)
    weights["model.embed_tokens.weight"][token] = math.nan
    mx.eval(weights)
    mx.save_safetensors(path, weights, metadata={"format": "mlx"})
    return folder


async def test_a_worker_with_a_model_whose_logits_are_not_finite_does_not_start_and_says_why(
    local_worker: Any, tmp_path: Path
) -> None:
    """The embeddings are also the output's weights, so a NaN in one row reaches all logits."""
    folder = broken(tmp_path / "broken", TILDE)
    with pytest.raises(ModelError, match=r"^/\S+/broken is broken: the model's logits .*; get [^\n]*$"):
        await local_worker(model=str(folder))


async def test_an_answer_that_uses_a_broken_weight_fails_and_other_answers_do_not(
    local_worker: Any, tmp_path: Path
) -> None:
    folder = broken(tmp_path / "broken", TILDE, tie_word_embeddings=False)
    client = (await local_worker(model=str(folder))).client
    for more in ({}, {"temperature": 0.8}):
        session = client.session(f"s{len(more)}")
        options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, **more}
        with pytest.raises(
            RequestFailedError, match=r"internal: the forward pass failed: .*no finite numbers"
        ):
            await session.generate(text="Hi ~ there", **options)
    sound = await client.session("sound").generate(text="Hi there", max_tokens=1)
    assert len(sound.tokens) == 1
