"""Chooses how the running answers (rows) of a loaded model are batched. Device thread only.

The classes of the model's caches decide this, and trials: a trial runs a few tokens batched and one by one,
and compares the logits. `trials` stores the results.
"""

from __future__ import annotations

import os
import re
import time
from array import array
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import mlx.core as mx
import structlog
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from cache.kv import layers
from cache.kv.ring import RingCache
from cache.kv.states import leaves

from . import matching, metal
from .batch import Batch
from .cpu import on_cpu
from .draft_model import DraftModel
from .drafter import Lookup
from .forward import Forward
from .merged import WAYS, MergedRows, can_merge
from .own_pass import OwnPass, run_alone
from .parts import OwnPart
from .pools import Pools
from .products import products_for
from .row_sampler import RowSampler, RowSampling
from .rows import CommonKv, PrefillPiece, Row
from .trials import Trials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .drafter import Drafter

log = structlog.get_logger()

#: Allowed deviation, as a share of the largest logit: rounding stays below, a wrong mask or position exceeds
#: it. `_COARSE` is for quantised KV, whose codes change by rounding, and products less exact than float32.
_TOLERANCE: Final = 1e-3
_COARSE: Final = 0.05
#: The first generation of Apple's GPUs whose matrix units MLX uses for float32.
_ROUNDS_FROM: Final = 17
_LOOKUP: Final = Lookup()
T = TypeVar("T")


def batch_for(
    model: Any,
    room: Callable[[int], bool] = lambda _: True,
    *,
    max_draft: int = 0,
    drafters: Sequence[Drafter] = (_LOOKUP,),
    pooled_rows: int = 3,
    merged_rows: int = 2,
    runs_ahead: bool = True,
    trials: Trials | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Batch:
    """Return an empty batch of the fastest kind that the model supports; log a warning for the slowest kind.

    `room(n)` says whether `n` more bytes may be allocated. The `drafters` draft up to `max_draft` tokens for
    a row. At least `pooled_rows` rows of similar length form a pool; in models without pools, at least
    `merged_rows` rows are merged. `runs_ahead` allows to launch a step before the previous tokens are read.
    `clock` times the steps, in seconds.
    """
    trials = trials or Trials()
    forward = Forward(model)
    shares = _shares(model, forward, trials)
    has_rings = _has_rings(model, forward, trials, shares=shares)
    classes = {type(cache) for cache in layers.make(model, rings=has_rings)}
    is_plain = classes <= {KVCache, QuantizedKVCache, RingCache}
    sharing = shares and is_plain
    keeping: CommonKv | None = None
    if not sharing:
        keeping = merged_for(model, trials, room, merged_rows)
    elif QuantizedKVCache not in classes:
        keeping = Pools(room, pooled_rows)
    if not shares:
        _log_order(is_merged=keeping is not None)
    forward.products = products_for(model)
    return Batch(
        forward if shares else OwnPass(model, forward.rotations if has_rings else None),
        keeping or CommonKv(),
        is_plain=is_plain,
        drafters=drafters,
        max_draft=max_draft if sharing else 0,
        runs_ahead=runs_ahead,
        has_rings=has_rings,
        windows_are_rings=sharing and has_rings,
        sketched=_sketched(model, forward, trials) if sharing and has_rings else (),
        clock=clock,
    )


def _log_order(*, is_merged: bool) -> None:
    """Log how a model runs whose rows cannot share a pass."""
    if is_merged:
        log.info("this model's prompts run one after the other; its answers decode together")
    else:
        log.warning("this model's sessions run one after the other: they cannot share a pass or be merged")


def draft_model_for(
    model: Any, pass_share: float, vocabularies: tuple[int, int], trials: Trials
) -> DraftModel:
    """Return a drafter that uses a draft model; `pass_share` is its size as a share of the target model's.

    `vocabularies` are the numbers of logits of the target model and of the draft model.

    Raises `ValueError` with the reason if the draft model's rows cannot share a pass, or if it has layers
    from which the last tokens cannot be removed.
    """
    forward = Forward(model)
    shares = _shares(model, forward, trials)
    has_rings = shares and _has_rings(model, forward, trials, shares=True)
    make = partial(layers.make, model, rings=has_rings)
    if others := {
        type(leaf).__name__ for _, leaf in leaves(make()) if type(leaf) not in (KVCache, RingCache)
    }:
        raise ValueError(f"its layers of {', '.join(sorted(others))} cannot undo a draft")
    if not shares:
        raise ValueError("its rows cannot share a pass")
    forward.products = products_for(model)
    return DraftModel(forward, make, pass_share, vocabularies)


def _shares(model: Any, forward: Forward, trials: Trials) -> bool:
    """Say whether a model's rows and pieces of prompts can share a forward pass, by a trial."""
    return _passes(model, trials, "share", partial(_deviation_shared, model, forward))


def _has_rings(model: Any, forward: Forward, trials: Trials, *, shares: bool) -> bool:
    """Say, by a trial, whether sessions of a model can have a `RingCache` (a window).

    Logs a message if they cannot.
    """
    rotates = partial(_deviation_rotated, model, forward, shares=shares)
    has_rings = forward.rotations is not None and _passes(model, trials, "rings", rotates)
    if not has_rings:
        log.info("this model's sessions cannot have a window: all policies but full are refused")
    return has_rings


def _sketched(model: Any, forward: Forward, trials: Trials) -> tuple[int, ...]:
    """Return the indices of the layers with induction heads, whose keys are sketched; empty on an error.

    `trials` stores the layers as one number, with a bit for each layer.
    """
    num_layers = len(make_prompt_cache(model))

    def find() -> int:
        return sum(1 << layer for layer in matching.find(model, forward))

    bits = trials.way("sketches", lambda: _result("sketches", find), 1 << num_layers)
    return tuple(layer for layer in range(num_layers) if (bits or 0) >> layer & 1)


def merged_for(
    model: Any, trials: Trials, room: Callable[[int], bool] = lambda _: True, least: int = 1
) -> MergedRows | None:
    """Return a `MergedRows` that leaves the model's logits unchanged; None if no way to merge does."""
    caches = make_prompt_cache(model)
    missing = next((type(leaf).__name__ for _, leaf in leaves(caches) if not can_merge(leaf)), None)
    if missing is None:
        tried = (
            i
            for i, way in enumerate(WAYS)
            if _fits(model, "merge", partial(_deviation_merged, model, MergedRows(way, lambda _: True, 1)))
        )
        found = trials.way("merge", lambda: next(tried, None), len(WAYS))
        if found is not None:
            return MergedRows(WAYS[found], room, least)
    log.debug("caches of this model cannot be merged", missing=missing)
    return None


def _passes(model: Any, trials: Trials, trial: str, deviation: Callable[[], float]) -> bool:
    """Say whether a model passes a trial that has only two results, or has passed it at an earlier start."""
    return trials.way(trial, lambda: 0 if _fits(model, trial, deviation) else None, 1) is not None


def _fits(model: Any, trial: str, deviation: Callable[[], float]) -> bool:
    """Run a trial, which returns a deviation of logits; say whether that is no more than rounding."""
    with _in_float32(model):
        worst = _result(trial, deviation)
    if worst is None:
        return False
    if not worst < _tolerance(model):  # NaN passes no trial
        log.debug("a trial of this model failed", trial=trial, deviation=worst)
        return False
    return True


def _result(trial: str, run: Callable[[], T]) -> T | None:
    """Run a trial and return its result; None if the model raises an error."""
    try:
        return run()
    except Exception as error:  # a model may raise anything on unknown caches
        if metal.has_failed(error):
            raise
        log.debug("a trial of this model failed", trial=trial, error=f"{type(error).__name__}: {error}")
        return None


def _deviation_shared(model: Any, forward: Forward) -> float:
    """Return how far logits of a shared pass deviate from logits of rows that run alone.

    Runs a prompt of 21 tokens in two pieces, a prompt of 3 tokens, and one token after each.
    """
    alone = _prefilled(model, 16, 5), _prefilled(model, 3)
    one, other = make_prompt_cache(model), make_prompt_cache(model)
    forward([], (), [PrefillPiece(one, 0, _ids(16)), PrefillPiece(other, 0, _ids(3))])
    forward([], (), [PrefillPiece(one, 16, _ids(5))])
    found = forward([OwnPart(one, 21, 1), OwnPart(other, 3, 1)], (1, 1))
    return _deviation(found, mx.concatenate([_alone(model, own, (1,)) for own in alone]))


def _deviation_rotated(model: Any, forward: Forward, *, shares: bool) -> float:
    """Return how far logits with ring caches deviate from logits with mlx-lm's windows.

    Runs 45 tokens in four pieces. Layers without a window get a window of 16 tokens. The rings restart their
    position count every 16 tokens, so most keys were rotated before the last restart. If the model `shares` a
    pass, its own windows become rings too.
    """
    windows: list[Any] = [_windowed(cache, RotatingKVCache) for cache in make_prompt_cache(model)]
    rings = [_windowed(cache, _ring, own=shares) for cache in make_prompt_cache(model)]
    found, expected, tokens = [], [], _ids(45)
    for start, num in ((0, 21), (21, 3), (24, 20), (44, 1)):
        piece = tokens[start : start + num]
        if shares:
            found.append(forward([OwnPart(rings, start, num)], piece))
        else:
            found.append(run_alone(model, rings, mx.array(piece), forward.rotations)[0])
        expected.append(model(mx.array([piece]), cache=windows)[0])
    return _deviation(mx.concatenate(found), mx.concatenate(expected))


def _ring(size: int) -> RingCache:
    return RingCache(0, size, grid=1 << (size - 1).bit_length())


def _windowed(cache: Any, window: Callable[[int], Any], *, own: bool = False) -> Any:
    """Return the cache that a trial uses instead of `cache`.

    A plain cache becomes `window(16)`. If `own` is true, a sliding-window cache of the model becomes `window`
    of the same size. Any other known cache is returned unchanged.
    """
    match cache:
        case CacheList():
            members = [_windowed(member, window, own=own) for member in cache.caches]
            return CacheList(*members)  # type: ignore[no-untyped-call]
        case RotatingKVCache():
            return window(cache.max_size) if own else cache
        case KVCache() | QuantizedKVCache():
            return window(16)
        case ArraysCache():
            return cache
        case _:
            raise TypeError(f"layers of {type(cache).__name__}")


def _deviation_merged(model: Any, merged: MergedRows) -> float:
    """Return how far logits of merged rows deviate from logits of rows that run alone.

    Uses sessions of three lengths. The third session joins after one step. The second one leaves after two
    steps and continues alone. Then one step is rolled back.
    """
    lengths, tokens = (7, 3, 5), (2, 3, 4, 5)
    first = (0, 0, 1)  # index of each row's first token in `tokens`
    expected = [_alone(model, _prefilled(model, n), tokens[i:]) for n, i in zip(lengths, first, strict=True)]
    rows = [Row(_prefilled(model, n), array("I"), RowSampler(RowSampling()), n, 0) for n in lengths]
    found: dict[Row, list[mx.array]] = {row: [] for row in rows}
    run = OwnPass(model)

    def step(token: int, together: Sequence[Row]) -> None:
        merged.place(together)
        for part, kept in merged.parts(together, 0, {}) or ():
            logits = run([part], [token] * len(kept))
            for i, row in enumerate(kept):
                found[row].append(logits[i : i + 1])

    step(tokens[0], rows[:2])
    merged.commit()
    step(tokens[1], rows)
    merged.commit()
    merged.leave(rows[1])
    found[rows[1]].append(_alone(model, rows[1].caches or [], tokens[2:]))
    others = [rows[0], rows[2]]
    step(tokens[2], others)
    merged.roll_back()
    for row in others:
        found[row].pop()
    for token in tokens[2:]:
        step(token, others)
        merged.commit()
    merged.clear()
    return _deviation(mx.concatenate([one for row in rows for one in found[row]]), mx.concatenate(expected))


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Make a 16-bit model compute in float32 within the context, without changing its weights.

    Embeddings are widened to float32, and all later results then have that type. In 16 bits, rounding alone
    changes logits as much as a wrong mask: by 0.02 to 0.11 of the largest logit in random models.
    """
    narrow = [module for module in model.modules() if type(module) in _WIDE]
    for module in narrow:
        module.__class__ = _WIDE[type(module)]
    try:
        yield
    finally:
        for module in narrow:
            module.__class__ = type(module).__base__


class _WideEmbedding(Embedding):
    def __call__(self, x: mx.array) -> Any:
        narrow: Any = super().__call__(x)  # type: ignore[no-untyped-call]
        return narrow.astype(mx.float32)


class _WideQuantizedEmbedding(QuantizedEmbedding):
    def __call__(self, x: mx.array) -> Any:
        narrow: Any = super().__call__(x)  # type: ignore[no-untyped-call]
        return narrow.astype(mx.float32)


_WIDE: Final[dict[type, type]] = {Embedding: _WideEmbedding, QuantizedEmbedding: _WideQuantizedEmbedding}


def _tolerance(model: Any) -> float:
    """Return by how much logits of the same tokens may differ in a trial, relative to the largest logit.

    More is allowed on a GPU that multiplies float32 with 11 bits, for quantised KV, and for a model without a
    known embedding class, which `_in_float32` cannot widen.
    """
    quantised = any(type(cache) is QuantizedKVCache for _, cache in leaves(make_prompt_cache(model)))
    is_widened = any(isinstance(module, tuple(_WIDE)) for module in model.modules())
    return _COARSE if _rounds() or quantised or not is_widened else _TOLERANCE


def _rounds() -> bool:
    """Say whether the device multiplies float32 with 11 bits: CUDA, and Metal from the M5 on (generation 17).

    `MLX_ENABLE_TF32` set to 0 prevents it on both.
    """
    if on_cpu() or os.environ.get("MLX_ENABLE_TF32") == "0":
        return False
    generation = re.match(r"applegpu_g(\d+)", str(mx.device_info().get("architecture")))
    return generation is None or int(generation[1]) >= _ROUNDS_FROM


def _deviation(found: mx.array, expected: mx.array) -> float:
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    worst: Any = (mx.abs(found - expected).max() / (mx.abs(expected).max() + 1e-6)).item()
    return float(worst)


def _prefilled(model: Any, *lengths: int) -> list[Any]:
    """Return new caches after a prefill in pieces, of which `lengths` are the numbers of tokens."""
    caches: list[Any] = make_prompt_cache(model)
    for length in lengths:
        model(mx.array([_ids(length)]), cache=caches)
    return caches


def _alone(model: Any, caches: list[Any], tokens: Sequence[int]) -> mx.array:
    """Run tokens one at a time through the model; return their logits, (tokens, vocabulary)."""
    return mx.concatenate([model(mx.array([[token]]), cache=caches)[:, -1] for token in tokens])


def _ids(num: int) -> list[int]:
    return list(range(1, num + 1))
