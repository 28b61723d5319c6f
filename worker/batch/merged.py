"""Keeps the KV of running answers in mlx-lm's batch caches, so that one pass runs all rows.

Device thread only.

Used for models whose rows cannot share a pass (`forward`), or whose caches are not all plain: recurrent
states, windows, hybrids, custom attention. Shorter rows are padded on the left. When a row joins or leaves,
the whole batch is copied; so models with only plain KV use `slots` instead.

Only decoding is merged: a row joins with caches that hold its prompt, so recurrent states never see padding.
Until `commit`, a step can be rolled back: positions are saved before it, and so are the arrays of recurrent
states, which a step replaces but never changes in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from cache.kv import states

from .parts import MergedPart
from .rows import CommonKv

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from .parts import Part
    from .rows import Row

    #: For each leaf of the batch caches: the fields that a step changes, with their values before the step.
    Mark: TypeAlias = list[dict[str, Any]]

#: The fields that a step changes, besides keys and values, to which it only appends.
_POSITIONS: Final = ("_idx", "_offset", "offset", "rotated")
#: Number of tokens by which mlx-lm grows a cache.
_GROWTH: Final = BatchKVCache.step


class _Window(BatchRotatingKVCache):
    """A batch cache for sliding windows, larger by one token: a step overwrites nothing and can be undone."""

    def __init__(self, max_size: int, left_padding: list[int]) -> None:
        super().__init__(max_size + 1, left_padding)
        self.window = max_size

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:  # noqa: N803  # mlx-lm's name
        return super().make_mask(N, window_size or self.window, return_array)

    def extract(self, idx: int) -> Any:
        """Copy a row to a separate sliding-window cache of the original size, oldest token first."""
        cache: Any = super().extract(idx)  # type: ignore[no-untyped-call]  # mlx-lm has no annotations
        cache.max_size = self.window
        cache.keys, cache.values = (
            mx.contiguous(part[..., -self.window :, :]) for part in (cache.keys, cache.values)
        )
        cache._idx = cache.keys.shape[2]  # noqa: SLF001  # its state
        return cache


class _Arrays(ArraysCache):
    def extract(self, idx: int) -> Any:
        """Copy a row's arrays; mlx-lm's views would keep the whole batch's arrays in memory."""
        cache: Any = super().extract(idx)  # type: ignore[no-untyped-call]
        cache.cache = [mx.contiguous(part) for part in cache.cache]
        return cache


class _Spread(BatchKVCache):
    """A batch cache for models whose queries have two axes of heads (gemma2): its masks have five axes.

    mlx-lm's mask with four axes would fail there, or, if the batch has as many rows as KV heads, mask the
    wrong tokens.
    """

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> Any:  # noqa: N803
        return mx.expand_dims(super().make_mask(N, return_array, **options), 1)


_USUAL: Final = {
    KVCache: BatchKVCache,
    RotatingKVCache: _Window,
    ArraysCache: _Arrays,
}
#: Ways to merge: the batch cache for each class of cache. A trial finds the way that fits a model.
WAYS: Final = (_USUAL, {**_USUAL, KVCache: _Spread})


class MergedRows(CommonKv):
    """Merges the KV of enough rows; see `rows.CommonKv`. A row for which memory is short is not merged.

    If an error occurs while rows join or leave, all merged rows are dropped.
    """

    includes_ahead = True

    def __init__(self, way: Mapping[type, type], room: Callable[[int], bool], least: int) -> None:
        """`way` is one of `WAYS`; `room(n)` says whether `n` more bytes may be allocated.

        Fewer than `least` rows are not merged.
        """
        self._way = way
        self._room = room
        self._least = least
        self._caches: list[Any] = []
        self._rows: list[Row | None] = []  # None: the row has left; `tidy` frees its memory
        self._mark: Mark | None = None  # to roll back the step that is not committed

    @property
    def nbytes(self) -> int:
        """Bytes of the merged caches, including padding and memory allocated in advance."""
        return sum(int(leaf.nbytes) for leaf in _leaves(self._caches))

    @property
    def removal_bytes(self) -> int:  # type: ignore[override]
        """The most bytes that `leave` and the next `place` allocate.

        First the row is copied, then the other rows, one layer at a time.
        """
        largest = max((int(cache.nbytes) for cache in self._caches), default=0)
        return self.nbytes // len(self._rows) + largest if self._rows else 0

    @property
    def growing(self) -> list[int]:  # type: ignore[override]
        """The numbers of tokens, one per row, for which the next step allocates memory; empty if none.

        The first number is for all rows together, since the whole batch is copied; the others are 0.
        """
        full = [leaf.keys.shape[2] for leaf in _leaves(self._caches) if _is_full(leaf)]
        return [max(full) * len(self._rows)] + [0] * (len(self._rows) - 1) if full else []

    def place(self, rows: Sequence[Row]) -> None:
        """Merge the rows that are not merged yet: all at once, or one by one while memory allows it."""
        self.tidy()
        own = [row for row in rows if row.caches is not None and self.can_join(row.caches)]
        if len(own) + len(self._rows) < self._least:
            return
        for some in (own, *([row] for row in own)):
            newcomers = [row for row in some if row.caches is not None]
            if newcomers and self._room(self.joining_bytes([row.caches or [] for row in newcomers])):
                self.join(newcomers)

    def can_join(self, caches: Sequence[Any]) -> bool:
        """Say whether a row with these caches can join.

        Each cache must be of a mergeable class and not empty.
        """
        return all(can_merge(leaf) and not leaf.empty() for leaf in _leaves(caches))

    def joining_bytes(self, newcomers: Sequence[Sequence[Any]]) -> int:
        """Return the most bytes that a join allocates, besides the joining rows' own caches.

        `newcomers` are the caches of the rows that would join.
        """
        num_rows = len(self._rows) + len(newcomers)
        merged = _leaves(self._caches) or [None] * len(_leaves(newcomers[0]))
        theirs = zip(*(_leaves(caches) for caches in newcomers), strict=True)
        after = [_row_bytes(leaf, own) * num_rows for leaf, own in zip(merged, theirs, strict=True)]
        # One layer at a time exists as it was, with the newcomers, and later with room to grow.
        return max(sum(after) - self.nbytes, 0) + 3 * max(after)

    def join(self, rows: Sequence[Row]) -> None:
        """Copy rows with caches of their own into the merged caches, and set their `caches` to None."""
        if self._mark is not None:
            raise AssertionError("rows change only after the step is committed")
        try:
            for i, own in enumerate(zip(*(row.caches or () for row in rows), strict=True)):
                self._extend(i, _merge(self._way, own))
        except BaseException:
            self.clear()
            raise
        self._rows += rows
        for row in rows:
            row.caches = None

    def parts(
        self,
        rows: Sequence[Row],
        num_ahead: int,
        drafts: Mapping[Row, list[int]],  # noqa: ARG002
    ) -> list[tuple[Part, list[Row]]] | None:
        """Make one part of all merged rows, a token for each.

        Returns None if `rows` are not exactly the merged ones, or if a row left after `place`.
        """
        every = [row for row in self._rows if row is not None]
        if set(every) != set(rows) or None in self._rows:
            return None
        if not every:
            return []
        if self._mark is not None:
            raise AssertionError("a window has room for one step that is not committed")
        self._mark = [_fields(leaf) for leaf in _leaves(self._caches)]
        numbers = [row.num_cached + num_ahead for row in every]
        if numbers[0] % _GROWTH == 0:
            # Nothing reads the `offset` of a layer without rotary positions: each step adds to its graph, and
            # a small buffer, of which Metal allows 499,000 in all.
            mx.async_eval(self._mark)  # type: ignore[no-untyped-call]
        return [(MergedPart(self._caches, numbers, [row.shift for row in every]), every)]

    def caches(self, row: Row) -> list[Any]:
        """Return a row's KV, copied to separate caches, not evaluated."""
        index = self._rows.index(row)
        return [cache.extract(index) for cache in self._caches]

    def leave(self, row: Row) -> None:
        """Copy a row's KV to new caches of the row; the next `place` frees its memory in the batch."""
        row.caches = self.caches(row)
        mx.eval([cache.state for cache in row.caches])
        self._rows[self._rows.index(row)] = None
        if not any(self._rows):
            self.clear()

    def tidy(self) -> None:
        """Free the memory of rows that have left."""
        if None not in self._rows:
            return
        if self._mark is not None:
            raise AssertionError("rows change only after the step is committed")
        keep = [i for i, row in enumerate(self._rows) if row is not None]
        try:
            for cache in self._caches:
                cache.filter(keep)
                mx.eval(cache.state)  # layer by layer, so that only one layer exists twice
        except BaseException:
            self.clear()
            raise
        self._rows = [self._rows[i] for i in keep]

    def commit(self) -> None:
        """Make the last step final: it can no longer be undone."""
        self._mark = None

    def roll_back(self) -> bool:
        """Undo the last step, unless it is final; return False if an error has dropped all rows."""
        if self._mark is not None:
            for leaf, fields in zip(_leaves(self._caches), self._mark, strict=True):
                vars(leaf).update(fields)
        self._mark = None
        return bool(self._rows)

    def clear(self) -> None:
        """Drop all merged rows."""
        self._caches, self._rows, self._mark = [], [], None

    def _extend(self, layer: int, more: Any) -> None:
        if layer == len(self._caches):
            self._caches.append(more)
        else:
            self._caches[layer].extend(more)
        mx.eval(self._caches[layer].state)


def _leaves(caches: Sequence[Any]) -> list[Any]:
    return [leaf for _, leaf in states.leaves(caches)]


def can_merge(leaf: Any) -> bool:
    """Say whether a cache can be merged. A window with sink tokens cannot: mlx-lm would lose the sinks."""
    return type(leaf) in _USUAL and not getattr(leaf, "keep", 0)


def _merge(way: Mapping[type, type], caches: Sequence[Any]) -> Any:
    if isinstance(caches[0], CacheList):
        members = zip(*(cache.caches for cache in caches), strict=True)
        return CacheList(*(_merge(way, some) for some in members))  # type: ignore[no-untyped-call]
    kind: Any = way[type(caches[0])]
    return kind.merge(caches)


def _fields(leaf: Any) -> dict[str, Any]:
    """Return the cache's fields that the next step changes, with their values, to restore them later."""
    if isinstance(leaf, ArraysCache):
        return {"cache": list(leaf.cache)}
    fields = {name: value for name, value in vars(leaf).items() if name in _POSITIONS}
    # mlx-lm's `left_padding -= 1` changes the array in place: keep a copy.
    return {**fields, "left_padding": mx.array(leaf.left_padding)}


def _is_full(leaf: Any) -> bool:
    """Say whether the next step has to allocate memory for this cache."""
    if isinstance(leaf, ArraysCache):
        return False
    length = leaf.keys.shape[2]
    return bool(leaf.size() >= length and length < getattr(leaf, "max_size", length + 1))


def _row_bytes(merged: Any, own: Sequence[Any]) -> int:
    """Count the bytes of one row in a merged cache, after rows with the caches `own` have joined."""
    if isinstance(own[0], ArraysCache):
        return int(own[0].nbytes)
    lengths = [cache.size() for cache in own]
    longest: int = max([*lengths, *([merged.size()] if merged is not None else [])])
    per_token = sum(part.nbytes // part.shape[2] for part in states.parts(own[0]).values())
    return per_token * (longest + _GROWTH)
