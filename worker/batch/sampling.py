"""Chooses the next token of each row from its logits.

The random numbers of a draw depend only on (seed, index of the token): a request draws the same numbers in
every batch, and an interrupted answer continues with the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import mlx.core as mx
import numpy as np

from .cpu import on_cpu
from .row_sampler import Draw, DrawnToken, RowSampling

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from numpy.typing import ArrayLike

    Ids: TypeAlias = Sequence[int] | np.ndarray[Any, Any]


#: Lower bounds of the repetition penalty and of top_p, as float32 needs them; top_p 0 would keep no token.
_LEAST_PENALTY: Final = 1e-10
_LEAST_SHARE: Final = 1e-37


#: Number of candidates that usually suffice for top_p, where sorting the whole vocabulary is slow.
_CANDIDATES: Final = 1024


class Choice(NamedTuple):
    """The result of drawing from rows of logits; arrays of (rows,), unevaluated."""

    #: The drawn token.
    tokens: mx.array
    #: Whether the row's highest logit is finite; otherwise the token is meaningless.
    are_sound: mx.array


def draw_all(logits: mx.array, draws: Sequence[Draw]) -> Choice:
    """Draw one token for each row of `logits`, (rows, vocabulary), unevaluated; device thread only.

    A row's draw does not depend on other rows. Bias, penalties, temperature and filters apply in this order.
    The logits of rows for which `waits_for_logits` is true are evaluated here.
    """
    likeliest = mx.argmax(logits, axis=-1)
    highest = mx.take_along_axis(logits, likeliest[:, None], axis=-1)[:, 0]
    others = [i for i, draw in enumerate(draws) if not draw.takes_likeliest]
    if not others:
        return Choice(likeliest, mx.isfinite(highest))
    # On a GPU argmax ignores NaN, but max does not; a NaN would make the draw meaningless.
    highest = _put(highest, others, mx.max(rows_of(logits, others), axis=-1))
    # Always float32: bf16 has too few bits for a cumulative sum over a whole vocabulary.
    some = _changed(rows_of(logits, others).astype(mx.float32), [draws[i] for i in others])
    hot = [i for i, at in enumerate(others) if not draws[at].sampling.is_greedy]
    drawn = mx.argmax(some, axis=-1)
    if hot:
        drawn = _put(drawn, hot, _sampled(rows_of(some, hot), [draws[others[i]] for i in hot]))
    return Choice(_put(likeliest, others, drawn), mx.isfinite(highest))


def waits_for_logits(sampling: RowSampling) -> bool:
    """Say whether `draw_all` evaluates the logits of a row with this sampling.

    A step with such a row cannot be launched before the previous tokens are read. It is true only on a CPU,
    and only if a sampling may need more than the largest logits: there MLX sorts 49,152 logits in 4 ms, so
    `draw_all` looks first whether the largest 1,024 suffice, which takes a seventh of that.
    """
    takes_any_number = not sampling.is_greedy and sampling.top_p < 1.0 and not sampling.top_k
    return on_cpu() and takes_any_number


class Logprobs:
    """The log probabilities of the tokens that rows draw; evaluate `arrays` together with the tokens.

    They are the model's own, at temperature 1, before bias, penalties and filters.
    """

    def __init__(self, logits: mx.array, choice: mx.array, draws: Sequence[Draw]) -> None:
        """`logits` are (rows, vocabulary); `choice` are the drawn tokens, (rows,)."""
        counts = [draw.sampling.top_logprobs for draw in draws]
        self._rows = [i for i, count in enumerate(counts) if count is not None]
        self._counts = [count for count in counts if count is not None]
        self.arrays: list[mx.array] = []
        if not self._rows:
            return
        some = rows_of(logits, self._rows).astype(mx.float32)
        some -= mx.logsumexp(some, axis=-1, keepdims=True)
        self.arrays.append(mx.take_along_axis(some, rows_of(choice, self._rows)[:, None], axis=-1)[:, 0])
        most = min(max(self._counts), some.shape[-1])
        if most:
            ids = mx.argpartition(-some, most - 1, axis=-1)[:, :most]
            values = mx.take_along_axis(some, ids, axis=-1)
            order = mx.argsort(-values, axis=-1)
            self.arrays += [mx.take_along_axis(part, order, axis=-1) for part in (ids, values)]

    def drawn(self, tokens: Sequence[int]) -> list[DrawnToken]:
        """Return all rows' drawn `tokens`, with log probabilities if requested. Evaluate `arrays` first."""
        found = [DrawnToken(token) for token in tokens]
        if not self.arrays:
            return found
        listed: list[Any] = [array.tolist() for array in self.arrays]
        chosen, top = listed[0], listed[1:]
        pairs: Any = zip(*top, strict=True) if top else (((), ()) for _ in self._rows)
        for row, count, logprob, (ids, values) in zip(self._rows, self._counts, chosen, pairs, strict=True):
            likeliest = tuple(zip(ids[:count], values[:count], strict=True))
            found[row] = DrawnToken(tokens[row], logprob, likeliest)
        return found


def _changed(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Apply bias, repetition penalty, presence and frequency penalties, bans and masks, in this order.

    The repetition penalty divides positive logits and multiplies negative ones: CTRL, arXiv 1909.05858,
    section 4.1. The others are OpenAI's: the logit of a token that occurs n times is reduced by
    `presence_penalty` and n times `frequency_penalty`.
    """
    biases, factors, losses, bans = (
        _changes(logits.shape[-1], [of(draw) for draw in draws]) for of in (_biases, _factors, _losses, _bans)
    )
    if biases is factors is losses is bans is None:
        return _masked(logits, draws)
    flat = logits.reshape(-1) * 1  # a copy: item assignment changes the array in place
    if biases is not None:
        flat[biases[0]] = flat[biases[0]] + biases[1]
    if factors is not None:
        seen = flat[factors[0]]
        flat[factors[0]] = mx.where(seen > 0, seen / factors[1], seen * factors[1])
    if losses is not None:
        flat[losses[0]] = flat[losses[0]] - losses[1]
    if bans is not None:
        flat[bans[0]] = bans[1]
    return _masked(flat.reshape(logits.shape), draws)


def _masked(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Set the logits of tokens that a row's mask forbids to -inf."""
    if all(draw.mask is None for draw in draws):
        return logits
    allowed = np.ones(logits.shape, np.bool_)
    for row, draw in enumerate(draws):
        if draw.mask is not None:  # may have fewer bits than there are logits
            allowed[row] = np.unpackbits(draw.mask, count=logits.shape[-1], bitorder="little")
    return mx.where(mx.array(allowed), logits, -mx.inf)


def _changes(vocabulary: int, of_rows: Sequence[tuple[Ids, ArrayLike]]) -> tuple[mx.array, mx.array] | None:
    """Join all rows' (ids, values) into two arrays: flat indices into all rows' logits, and values.

    Returns None if there are none.
    """
    some = [(row, *found) for row, found in enumerate(of_rows) if len(found[0])]
    if not some:
        return None
    at = np.concatenate([row * vocabulary + np.asarray(ids, np.uint32) for row, ids, _ in some])
    values = [np.broadcast_to(np.asarray(of, np.float32), len(ids)) for _, ids, of in some]
    return mx.array(at.astype(np.uint32)), mx.array(np.concatenate(values))


def _biases(draw: Draw) -> tuple[Ids, ArrayLike]:
    return [token for token, _ in draw.sampling.logit_bias], [bias for _, bias in draw.sampling.logit_bias]


def _factors(draw: Draw) -> tuple[Ids, ArrayLike]:
    penalty = draw.sampling.repetition_penalty
    return (draw.seen if penalty != 1.0 else ()), max(penalty, _LEAST_PENALTY)


def _losses(draw: Draw) -> tuple[Ids, ArrayLike]:
    sampling, counts = draw.sampling, draw.counts or Counter[int]()
    nums = np.fromiter(counts.values(), np.float32, len(counts))
    return list(counts), sampling.presence_penalty + nums * sampling.frequency_penalty


def _bans(draw: Draw) -> tuple[Ids, ArrayLike]:
    return draw.banned, -math.inf


def _sampled(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Draw one of the tokens that the filters keep, for each row with its own noise (Gumbel-max)."""
    samplings = [draw.sampling for draw in draws]
    scaled = logits / mx.array([[sampling.temperature] for sampling in samplings])
    keys = mx.array([_key(draw.sampling.seed, draw.index) for draw in draws], mx.uint32)
    vocabulary = logits.shape[-1]
    noise: mx.array = mx.vmap(lambda key: mx.random.gumbel((vocabulary,), key=key))(keys)
    return mx.argmax(_filtered(scaled, samplings) + noise, axis=-1)


def _key(seed: int, index: int) -> tuple[int, int]:
    digest = blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return divmod(int.from_bytes(digest, "little"), 1 << 32)


def _filtered(scaled: mx.array, samplings: Sequence[RowSampling]) -> mx.array:
    """Apply top_k, top_p and min_p in this order.

    Each filter considers only the tokens that the previous one kept. All other logits become -inf.
    """
    vocabulary = scaled.shape[-1]
    few = [i for i, sampling in enumerate(samplings) if 0 < sampling.top_k < vocabulary]
    any_number = [i for i, sampling in enumerate(samplings) if i not in few and sampling.top_p < 1.0]
    rest = [i for i in range(len(samplings)) if i not in few and i not in any_number]
    groups = []
    for rows, rank in ((few, _first), (any_number, _until_enough), (rest, None)):
        if rows:
            mine, own = rows_of(scaled, rows), [samplings[i] for i in rows]
            groups.append(mine if rank is None else _nucleus(mine, *rank(mine, own), own))
    # Concatenate and reorder: assigning to rows takes ten times as long on a CPU.
    order = [*few, *any_number, *rest]
    kept = rows_of(mx.concatenate(groups), [order.index(i) for i in range(len(order))])
    if any(sampling.min_p > 0.0 for sampling in samplings):
        # p >= min_p * p_max, written in logits: the softmax's denominator is the same on both sides.
        least = mx.max(scaled, axis=-1, keepdims=True) + mx.log(mx.array([[s.min_p] for s in samplings]))
        kept = mx.where(kept >= least, kept, -mx.inf)
    return kept


def _first(scaled: mx.array, samplings: Sequence[RowSampling]) -> tuple[mx.array, mx.array]:
    """Sort as many logits as the largest top_k needs; set those beyond a row's own top_k to -inf.

    Returns the sorted logits, and the logarithm of the sum of their exponentials, (rows, 1).
    """
    ranked = _ranked(scaled, max(64, 1 << (max(s.top_k for s in samplings) - 1).bit_length()))
    within = mx.arange(ranked.shape[-1]) < mx.array([[s.top_k] for s in samplings])
    ranked = mx.where(within, ranked, -mx.inf)
    return ranked, mx.logsumexp(ranked, axis=-1, keepdims=True)


def _until_enough(scaled: mx.array, samplings: Sequence[RowSampling]) -> tuple[mx.array, mx.array]:
    """Sort as many logits as top_p needs; return them and the logsumexp of all, (rows, 1).

    On a CPU, sort a few first; sort all only if the sum of the few is too small.
    """
    total = mx.logsumexp(scaled, axis=-1, keepdims=True)
    if waits_for_logits(samplings[0]):
        ranked = _ranked(scaled, _CANDIDATES)
        enough = mx.exp(ranked - total).sum(axis=-1, keepdims=True) > mx.array([[s.top_p] for s in samplings])
        if enough.all().item():
            return ranked, total
    return _ranked(scaled, scaled.shape[-1]), total


def _nucleus(
    scaled: mx.array, ranked: mx.array, total: mx.array, samplings: Sequence[RowSampling]
) -> mx.array:
    """Keep the likeliest tokens until top_p is reached or `ranked` ends; set other logits to -inf.

    Of equally likely tokens the first ones are kept.
    """
    probabilities = mx.exp(ranked - total)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    # Without top_p only the end of `ranked` is a limit: a rounded sum may reach 1 earlier.
    top_p = mx.array([[max(s.top_p, _LEAST_SHARE) if s.top_p < 1.0 else mx.inf] for s in samplings])
    num_kept = ((before < top_p) & (ranked > -mx.inf)).sum(axis=-1, keepdims=True)
    last = mx.take_along_axis(ranked, mx.maximum(num_kept, 1) - 1, axis=-1)
    equal = scaled == last
    num_equal = num_kept - (scaled > last).sum(axis=-1, keepdims=True)
    kept = (scaled > last) | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= num_equal))
    return mx.where(kept, scaled, -mx.inf)


def _ranked(scaled: mx.array, num: int) -> mx.array:
    """Return the `num` largest logits of each row, or all if there are fewer, largest first."""
    if num < scaled.shape[-1]:
        return -mx.sort(mx.partition(-scaled, num - 1, axis=-1)[:, :num], axis=-1)
    return -mx.sort(-scaled, axis=-1)


def rows_of(array: mx.array, rows: list[int]) -> mx.array:
    """Return these rows of an array; the array itself if they are all its rows in order."""
    return array if rows == list(range(array.shape[0])) else array[mx.array(rows)]


def _put(array: mx.array, rows: list[int], values: mx.array) -> mx.array:
    """Return `array` with `values` in these rows; `array` itself may change."""
    if rows == list(range(array.shape[0])):
        return values
    array[mx.array(rows)] = values
    return array
