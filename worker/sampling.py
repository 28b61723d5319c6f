"""Choose the next token of each row from its logits.

Draws are keyed by (seed, index of the token), never by a running generator: the same request draws the
same numbers whatever else is in the batch, and an interrupted answer goes on as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request samples. `temperature` 0 takes the most likely token; `top_k` 0 and 1.0s are off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @property
    def takes_likeliest(self) -> bool:
        """Whether the choice is the likeliest token, whatever came before."""
        return self.temperature == 0.0 and self.repetition_penalty == 1.0


def draw_all(logits: mx.array, draws: Sequence[tuple[Sampling, int, Collection[int]]]) -> mx.array:
    """Build the choice of one token for each row of `logits`, (rows, vocabulary), unevaluated.

    `draws` has the arguments of `draw` for each row. Rows that take the likeliest token do so in one go.
    """
    likeliest = mx.argmax(logits, axis=-1)
    others = [i for i, (sampling, _, _) in enumerate(draws) if not sampling.takes_likeliest]
    if not others:
        return likeliest
    choices: list[mx.array] = list(likeliest)
    for i in others:
        choices[i] = draw(logits[i], *draws[i])
    return mx.stack(choices)


def draw(logits: mx.array, sampling: Sampling, index: int, seen: Collection[int]) -> mx.array:
    """Build the choice of one token, unevaluated; device thread only.

    `logits` has shape (vocabulary,); `index` counts the request's tokens from 0; `seen` are the distinct
    tokens that the repetition penalty applies to. Returns a scalar integer array.
    """
    if sampling.repetition_penalty != 1.0 and seen:
        logits = _penalised(logits, mx.array(sorted(seen)), sampling.repetition_penalty)
    if sampling.temperature == 0.0:
        return mx.argmax(logits)
    # float32 whatever the model computes in: a cumulative sum over a whole vocabulary loses bf16's few bits.
    scaled = logits.astype(mx.float32) / sampling.temperature
    return mx.random.categorical(_filtered(scaled, sampling), key=_key(sampling.seed, index))


def _key(seed: int, index: int) -> mx.array:
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return mx.random.key(int.from_bytes(digest, "little"))


def _penalised(logits: mx.array, seen: mx.array, penalty: float) -> mx.array:
    """Divide positive and multiply negative logits of seen tokens (CTRL, arXiv 1909.05858, section 4.1)."""
    chosen = logits[seen]
    logits = logits * 1  # a copy: item assignment writes into the array that it is given
    logits[seen] = mx.where(chosen > 0, chosen / penalty, chosen * penalty)
    return logits


def _filtered(scaled: mx.array, sampling: Sampling) -> mx.array:
    """Set what top_k, top_p and min_p cut off to -inf, in this order, each seeing what the last one left."""
    vocabulary = scaled.shape[-1]
    if not (0 < sampling.top_k < vocabulary or sampling.top_p < 1.0 or sampling.min_p > 0.0):
        return scaled
    order = mx.argsort(-scaled)
    ranked = scaled[order]
    if 0 < sampling.top_k < vocabulary:
        ranked = mx.where(mx.arange(vocabulary) < sampling.top_k, ranked, -mx.inf)
    if sampling.top_p < 1.0:
        probabilities = mx.softmax(ranked)
        before = mx.cumsum(probabilities) - probabilities
        ranked = mx.where(before < sampling.top_p, ranked, -mx.inf)
    if sampling.min_p > 0.0:
        # p >= min_p * p_max, written in logits: the softmax's denominator is the same on both sides.
        ranked = mx.where(ranked >= ranked[0] + mx.log(mx.array(sampling.min_p)), ranked, -mx.inf)
    return mx.put_along_axis(mx.zeros_like(scaled), order, ranked, axis=-1)
