"""Chooses the next token of each row from its logits.

Draws are keyed by (seed, index of the token), never by a running generator: a request draws the same numbers
in every batch, and an interrupted answer continues with the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import TypeAlias

    #: How a row samples, the index of the token in the answer, and the tokens that are penalised.
    Draw: TypeAlias = tuple["Sampling", int, Collection[int]]


#: Bounds for what float32 can compute: divided by less, logits of 1e5 overflow, and a share of 0 keeps no
#: token. A lower temperature counts as 0; a lower penalty or share counts as the bound.
_LEAST_TEMPERATURE: Final = 1e-20
_LEAST_PENALTY: Final = 1e-10
_LEAST_SHARE: Final = 1e-37


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request samples tokens. `temperature` 0 is greedy.

    `top_k` 0, `top_p` 1.0, `min_p` 0.0 and `repetition_penalty` 1.0 have no effect.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the token with the highest logit, after the penalty, is chosen."""
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def takes_likeliest(self) -> bool:
        """Whether the token with the highest logit is chosen, without a penalty."""
        return self.is_greedy and self.repetition_penalty == 1.0


#: Candidates that mostly suffice for top_p, where a sort of the whole vocabulary is slow.
_CANDIDATES: Final = 1024


def draw_all(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Build the choice of one token for each row of `logits`, (rows, vocabulary); device thread only.

    `draws` has each row's sampling, the index of the token in the answer, from 0, and the distinct tokens
    that the repetition penalty applies to. Returns integers, (rows,). A row's draw does not depend on other
    rows. The result is unevaluated; but the logits of rows for which `waits_for_logits` is true are evaluated
    here.
    """
    likeliest = mx.argmax(logits, axis=-1)
    others = [i for i, (sampling, _, _) in enumerate(draws) if not sampling.takes_likeliest]
    if not others:
        return likeliest
    # float32 whatever the model computes in: a cumulative sum over a whole vocabulary loses bf16's few bits.
    some = _penalised(_rows(logits, others).astype(mx.float32), [draws[i] for i in others])
    hot = [i for i, at in enumerate(others) if not draws[at][0].is_greedy]
    drawn = mx.argmax(some, axis=-1)
    if hot:
        drawn[mx.array(hot)] = _sampled(_rows(some, hot), [draws[others[i]] for i in hot])
    likeliest[mx.array(others)] = drawn
    return likeliest


def waits_for_logits(sampling: Sampling) -> bool:
    """Say whether `draw_all` evaluates the logits of a row with this sampling; it cannot run ahead then.

    On a CPU sorting 49,152 logits takes 4 ms a row; finding the largest 1,024 takes a seventh of that.
    """
    return mx.default_device() == mx.cpu and _needs_every_rank(sampling)


def draw(logits: mx.array, sampling: Sampling, index: int, seen: Collection[int]) -> mx.array:
    """Build the choice of one token from `logits` of shape (vocabulary,), as `draw_all` does; a scalar."""
    return draw_all(logits[None], [(sampling, index, seen)])[0]


def _penalised(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Apply the repetition penalty to seen tokens: divide positive logits by it, multiply negative ones.

    See CTRL, arXiv 1909.05858, section 4.1.
    """
    rows = [i for i, (sampling, _, seen) in enumerate(draws) if sampling.repetition_penalty != 1.0 and seen]
    if not rows:
        return logits
    vocabulary, lengths = logits.shape[-1], [len(draws[i][2]) for i in rows]
    starts = np.repeat(np.array(rows, np.uint32) * np.uint32(vocabulary), lengths)
    seen = np.fromiter((token for i in rows for token in draws[i][2]), np.uint32, len(starts))
    factors = [max(draws[i][0].repetition_penalty, _LEAST_PENALTY) for i in rows]
    penalties = mx.array(np.repeat(np.array(factors, np.float32), lengths))
    at = mx.array(starts + seen)
    flat = logits.reshape(-1) * 1  # a copy: item assignment writes into the array that it is given
    chosen = flat[at]
    flat[at] = mx.where(chosen > 0, chosen / penalties, chosen * penalties)
    return flat.reshape(logits.shape)


def _sampled(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Draw from the tokens that the filters keep, each row with its own noise (Gumbel-max)."""
    samplings = [sampling for sampling, _, _ in draws]
    scaled = logits / mx.array([[sampling.temperature] for sampling in samplings])
    keys = mx.array([_key(sampling.seed, index) for sampling, index, _ in draws], mx.uint32)
    vocabulary = logits.shape[-1]
    noise: mx.array = mx.vmap(lambda key: mx.random.gumbel((vocabulary,), key=key))(keys)
    return mx.argmax(_filtered(scaled, samplings) + noise, axis=-1)


def _key(seed: int, index: int) -> tuple[int, int]:
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return divmod(int.from_bytes(digest, "little"), 1 << 32)


def _filtered(scaled: mx.array, samplings: Sequence[Sampling]) -> mx.array:
    """Apply top_k, top_p and min_p in this order.

    Each filter sees only the tokens that the previous one kept. The logits of the others become -inf.
    """
    vocabulary = scaled.shape[-1]
    few = [i for i, sampling in enumerate(samplings) if 0 < sampling.top_k < vocabulary]
    any_number = [i for i, sampling in enumerate(samplings) if i not in few and sampling.top_p < 1.0]
    rest = [i for i in range(len(samplings)) if i not in few and i not in any_number]
    groups = []
    for rows, rank in ((few, _first), (any_number, _until_enough), (rest, None)):
        if rows:
            mine, own = _rows(scaled, rows), [samplings[i] for i in rows]
            groups.append(mine if rank is None else _nucleus(mine, *rank(mine, own), own))
    # Concatenated and reordered: assigning to rows takes ten times as long on a CPU.
    order = [*few, *any_number, *rest]
    kept = _rows(mx.concatenate(groups), [order.index(i) for i in range(len(order))])
    if any(sampling.min_p > 0.0 for sampling in samplings):
        # p >= min_p * p_max, written in logits: the softmax's denominator is the same on both sides.
        least = mx.max(scaled, axis=-1, keepdims=True) + mx.log(mx.array([[s.min_p] for s in samplings]))
        kept = mx.where(kept >= least, kept, -mx.inf)
    return kept


def _first(scaled: mx.array, samplings: Sequence[Sampling]) -> tuple[mx.array, mx.array]:
    """Rank as many logits as the largest top_k needs; ranks beyond a row's own top_k become -inf.

    Returns the ranked logits, and the logarithm of the sum of their exponentials, (rows, 1).
    """
    ranked = _ranked(scaled, max(64, 1 << (max(s.top_k for s in samplings) - 1).bit_length()))
    within = mx.arange(ranked.shape[-1]) < mx.array([[s.top_k] for s in samplings])
    ranked = mx.where(within, ranked, -mx.inf)
    return ranked, mx.logsumexp(ranked, axis=-1, keepdims=True)


def _until_enough(scaled: mx.array, samplings: Sequence[Sampling]) -> tuple[mx.array, mx.array]:
    """Rank as many logits as top_p needs.

    On a CPU, rank a few first; rank all only if the sum of the few is too small.
    """
    total = mx.logsumexp(scaled, axis=-1, keepdims=True)
    if waits_for_logits(samplings[0]):
        ranked = _ranked(scaled, _CANDIDATES)
        enough = mx.exp(ranked - total).sum(axis=-1, keepdims=True) > mx.array([[s.top_p] for s in samplings])
        if enough.all().item():
            return ranked, total
    return _ranked(scaled, scaled.shape[-1]), total


def _nucleus(scaled: mx.array, ranked: mx.array, total: mx.array, samplings: Sequence[Sampling]) -> mx.array:
    """Keep the likeliest tokens until top_p is reached, or `ranked` ends.

    Of equally likely tokens the first is kept.
    """
    probabilities = mx.exp(ranked - total)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    # With top_p off only the end of `ranked` counts: rounding may bring a sum to 1 earlier.
    top_p = mx.array([[max(s.top_p, _LEAST_SHARE) if s.top_p < 1.0 else mx.inf] for s in samplings])
    num_kept = ((before < top_p) & (ranked > -mx.inf)).sum(axis=-1, keepdims=True)
    last = mx.take_along_axis(ranked, mx.maximum(num_kept, 1) - 1, axis=-1)
    equal = scaled == last
    num_equal = num_kept - (scaled > last).sum(axis=-1, keepdims=True)
    kept = (scaled > last) | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= num_equal))
    return mx.where(kept, scaled, -mx.inf)


def _ranked(scaled: mx.array, num: int) -> mx.array:
    """Sort the `num` largest logits of each row, or all if there are fewer, largest first."""
    if num < scaled.shape[-1]:
        return -mx.sort(mx.partition(-scaled, num - 1, axis=-1)[:, :num], axis=-1)
    return -mx.sort(-scaled, axis=-1)


def _rows(array: mx.array, rows: list[int]) -> mx.array:
    return array if rows == list(range(array.shape[0])) else array[mx.array(rows)]


def _needs_every_rank(sampling: Sampling) -> bool:
    """Say whether top_p may keep any number of tokens, so that all logits may have to be ranked."""
    return not sampling.is_greedy and sampling.top_p < 1.0 and not sampling.top_k
