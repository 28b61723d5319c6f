"""Computes attention to ring caches, whose keys' rotary positions are not their positions in the session.

An endless session must not give a model large positions: float32 angles are useless beyond some 100,000. So
layers with a `RingCache` use positions modulo `RingCache.grid`, counted from a base that is a multiple of the
grid. A key that was counted from the previous base is one grid further away than its rotation says, and a
sink must appear right before the window. Rotating the query corrects both, since the dot product depends only
on the distance. So no stored key is changed, and a token's results depend only on its position. Device thread
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from . import cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from cache.kv.ring import RingCache

    #: Rotates queries, (tokens, heads, 1, head_dim), by a number of positions, (tokens,) or one for all.
    Rotate: TypeAlias = Callable[[mx.array, mx.array | int], mx.array]


def rotations(model: Any, num_caches: int) -> list[Rotate] | None:
    """Return each layer's function that rotates queries; None if they cannot be determined.

    The function of a layer without rotary positions returns the queries unchanged.
    """
    found: list[Rotate] = []
    model_layers = getattr(model, "layers", ())
    if len(model_layers) != num_caches:
        return None
    for layer in model_layers:
        modules = {
            id(child): child
            for part in layer.modules()
            for name, child in part.items()
            if ("rope" in name or "rotary" in name) and isinstance(child, Module)
        }
        if len(modules) > 1:
            return None
        found.append(_rotate_by(next(iter(modules.values()))) if modules else _leave)
    return found


def _leave(queries: mx.array, by: mx.array | int) -> mx.array:
    del by
    return queries


def _rotate_by(rope: Any) -> Rotate:
    scales: dict[int, mx.array | None] = {}  # by the head's size

    def rotate(queries: mx.array, by: mx.array | int) -> mx.array:
        size = queries.shape[-1]
        if size not in scales:  # some embeddings also scale (YaRN), but queries are scaled already
            found = rope(mx.ones((1, 1, 1, size), mx.float32), offset=0)
            scales[size] = None if mx.array_equal(found, mx.ones_like(found)).item() else found
        scale = scales[size]
        rotated: mx.array = rope(
            queries if scale is None else queries / scale.astype(queries.dtype), offset=by
        )
        return rotated

    return rotate


#: How the query is rotated for a place: not at all, by one grid, or to a sink.
_KINDS: Final = ("here", "before", "sinks")


@dataclass(frozen=True, slots=True)
class VisibleSlots:
    """Which places (indices) of a ring cache some tokens see, and how their queries are rotated for each.

    It is the same for all layers with such rings. The module explains bases and grids.
    """

    #: Only the first `num_places` places are used.
    num_places: int
    #: Whether a token sees a place, (rows, 1, tokens, places); None if all places are visible.
    seen: mx.array | None = None
    #: Which keys were counted from the previous base, (rows, 1, 1, places); None if there are none.
    before: mx.array | None = None
    #: How far queries are rotated for the first `num_sinks` places, (tokens,); None if not at all.
    to_sinks: mx.array | None = None
    num_sinks: int = 0
    grid: int = 0
    #: For a single row: the ends of runs of places that need the same rotation, with its kind.
    runs: tuple[tuple[int, str], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether no query has to be rotated for any key."""
        return self.before is None and self.to_sinks is None


def _held(ring: RingCache, end: Any, num_places: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return whose KV each place of rows' rings holds, with `end` tokens; a place never written has `end`."""
    places, last = np.arange(num_places), end - 1
    held = np.where(places < ring.sink, places, last - (last - places) % (ring.capacity - ring.sink))
    return np.where((places >= ring.sink) & (held < ring.sink), end, held)


def sight(
    ring: RingCache,
    ends: Sequence[int],
    num: int,
    last_seen: np.ndarray[Any, np.dtype[np.int64]] | None = None,
) -> VisibleSlots:
    """Return which places of rings like `ring` are visible to the last `num` tokens of each row.

    `ends` has each row's number of tokens. A row's last `num` tokens must lie between the same multiples of
    the ring's grid. Recalled chunks in slots are visible before the window; with slots there is only one row.
    A token sees those up to itself, or up to the one in `last_seen`, (rows, tokens).
    """
    end = np.array(ends)[:, None]
    at = end - num + np.arange(num)  # (rows, tokens)
    slots = ring.slot_positions()
    num_places = ring.capacity if len(slots) else int(min(end.max(), ring.capacity))
    held = _held(ring, end, num_places)
    is_sink = (np.arange(num_places) < ring.sink) & (held < end)
    held, here = held[:, None, :], at[:, :, None]
    seen = held <= (here if last_seen is None else last_seen[:, :, None])
    seen &= (held > here - ring.window) | is_sink[:, None, :]
    if not ring.grid:  # rotary positions are the session's
        recalled = (slots >= ring.sink) & (slots <= here - ring.window)
        seen = np.concatenate([seen, recalled], axis=-1)
        return VisibleSlots(num_places + len(slots), None if seen.all() else mx.array(seen[:, None]))
    first = at[:, :1] // ring.grid * ring.grid
    before = (held[:, 0] < first) & (held[:, 0] >= ring.sink) & seen.any(axis=1)
    passed = at - (ring.sink + ring.window - 1)
    has_far_sinks = bool(ring.sink) and bool((passed > 0).any())
    return VisibleSlots(
        num_places,
        None if seen.all() else mx.array(seen[:, None]),
        mx.array(before[:, None, None]) if before.any() else None,
        mx.array((first - np.maximum(passed, 0)).reshape(-1)) if has_far_sinks else None,
        ring.sink,
        ring.grid,
        _runs(before[0], ring.sink * has_far_sinks) if len(before) == 1 else (),
    )


def _runs(before: np.ndarray[Any, np.dtype[np.bool_]], num_far_sinks: int) -> tuple[tuple[int, str], ...]:
    """Return the ends of runs of a row's places that need the same rotation, each with its kind."""
    kinds = np.where(before, 1, 0)
    kinds[:num_far_sinks] = 2
    ends = [*(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(kinds)]
    return tuple((end, _KINDS[kinds[end - 1]]) for end in ends)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    sight: VisibleSlots,
    *,
    scale: float,
    rotate: Rotate,
    to_rows: Callable[[mx.array], mx.array],
    sink_logits: mx.array | None = None,
) -> mx.array:
    """Compute attention of queries to a ring's places; return (rows, heads, tokens, head_dim).

    `queries` are (all rows' tokens, heads, 1, head_dim), and `to_rows` converts this shape to (rows, heads,
    tokens, head_dim); keys and values are (rows, KV heads, places, head_dim). Some models have a learned
    attention sink without a key: `sink_logits` are its scores, one per head.
    """

    def scored(asking: mx.array, columns: mx.array) -> mx.array:
        by_row = to_rows(asking * scale)
        rows, heads, num, size = by_row.shape
        return (by_row.reshape(rows, keys.shape[1], -1, size) @ columns).reshape(rows, heads, num, -1)

    scores = _scores(queries, keys.swapaxes(-1, -2), sight, rotate, scored)
    if sink_logits is None and cpu.faster_weighted(scores):
        return cpu.weighted(scores, values, sight.seen)
    if sight.seen is not None:
        scores = mx.where(sight.seen, scores, mx.finfo(scores.dtype).min)
    if sink_logits is not None:
        column = mx.broadcast_to(sink_logits[None, :, None, None], (*scores.shape[:3], 1))
        scores = mx.concatenate([scores, column.astype(scores.dtype)], axis=-1)
    rows, heads, num, _ = scores.shape
    weights = mx.softmax(scores, axis=-1, precise=True)[..., : keys.shape[2]]
    grouped = weights.reshape(rows, keys.shape[1], -1, weights.shape[-1])
    return (grouped @ values).reshape(rows, heads, num, -1)


def _scores(
    queries: mx.array,
    transposed: mx.array,
    sight: VisibleSlots,
    rotate: Rotate,
    scored: Callable[[mx.array, mx.array], mx.array],
) -> mx.array:
    """Return the attention scores of all keys; for each key the query is rotated as `sight` says.

    `transposed` are the keys, (rows, KV heads, head_dim, places); `scored` multiplies queries by keys.
    """
    rotated = {"here": queries}
    if sight.before is not None:
        rotated["before"] = rotate(queries, sight.grid)
    if sight.to_sinks is not None:
        rotated["sinks"] = rotate(queries, sight.to_sinks)
    if sight.runs:  # one row: score each place only once
        starts = [0, *(end for end, _ in sight.runs)]
        parts = [
            scored(rotated[kind], transposed[..., start:end])
            for start, (end, kind) in zip(starts, sight.runs, strict=False)
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
    scores = scored(queries, transposed)
    if sight.before is not None:
        scores = mx.where(sight.before, scored(rotated["before"], transposed), scores)
    if sight.to_sinks is not None:
        of_sinks = scored(rotated["sinks"], transposed[..., : sight.num_sinks])
        scores = mx.concatenate([of_sinks, scores[..., sight.num_sinks :]], axis=-1)
    return scores
