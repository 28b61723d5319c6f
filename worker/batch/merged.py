"""KV of running answers merged into mlx-lm's batch caches: one pass over all rows. Device thread only.

For models that cannot share a pass (`forward`), or whose caches are not all plain: recurrent states, windows,
hybrids, attention of a model's own making. Rows of different length are padded on the left. A row that joins
or leaves costs a copy of the whole batch, which `slots` spares to the models that it knows.

Only decoding is merged: a row joins with caches that hold its prompt, so that a recurrent state never sees
padding. Every step leaves behind how to get back, until `settle` says that its outcome is known: positions,
and the arrays of recurrent states, which a step replaces and does not change. So a step may run ahead, fail,
or be left by a row that ends a token earlier.

Knows nothing of answers: a row is whatever its owner calls it by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import mlx.core as mx
import structlog
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from cache.kv import states

from .forward import tolerance
from .merged_quantised import MergedQuantised
from .trials import Trials

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeAlias

    from .forward import Attention

    #: For each leaf of the batch caches the fields that a step changes, as they were before it.
    Mark: TypeAlias = list[dict[str, Any]]

log = structlog.get_logger()

RowT = TypeVar("RowT")

#: Steps whose outcome may be unknown at once: the one that is looked at, and the one that runs ahead.
_AHEAD: Final = 2
#: What a step changes beside keys and values, whose old positions it leaves alone.
_POSITIONS: Final = ("_idx", "_offset", "offset", "rotated")
#: Room that mlx-lm adds at a time.
_STEP: Final = BatchKVCache.step


class _Window(BatchRotatingKVCache):
    """A merged window with room for steps that may have to be taken back: they overwrite nothing in it."""

    def __init__(self, max_size: int, left_padding: list[int]) -> None:
        super().__init__(max_size + _AHEAD, left_padding)
        self.window = max_size

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:  # noqa: N803  # mlx-lm's name
        return super().make_mask(N, window_size or self.window, return_array)

    def extract(self, idx: int) -> Any:
        """Give a row a ring of the size that it had, in the order of time."""
        cache: Any = super().extract(idx)  # type: ignore[no-untyped-call]  # mlx-lm has no annotations
        cache.max_size = self.window
        cache.keys, cache.values = (
            mx.contiguous(part[..., -self.window :, :]) for part in (cache.keys, cache.values)
        )
        cache._idx = cache.keys.shape[2]  # noqa: SLF001  # its state
        return cache


class _Arrays(ArraysCache):
    def extract(self, idx: int) -> Any:
        """Copy a row: mlx-lm gives views, which keep the whole batch's arrays alive."""
        cache: Any = super().extract(idx)  # type: ignore[no-untyped-call]
        cache.cache = [mx.contiguous(part) for part in cache.cache]
        return cache


class _Spread(BatchKVCache):
    """Masks for attention that has its query heads in an axis of their own (gemma2).

    mlx-lm's mask of four axes would fail there, or, with as many rows as KV heads, mask the wrong ones.
    """

    def make_mask(self, N: int, return_array: bool = False, **options: Any) -> Any:  # noqa: N803
        return mx.expand_dims(super().make_mask(N, return_array, **options), 1)


_USUAL: Final = {
    KVCache: BatchKVCache,
    QuantizedKVCache: MergedQuantised,
    RotatingKVCache: _Window,
    ArraysCache: _Arrays,
}
_WAYS: Final = (_USUAL, {**_USUAL, KVCache: _Spread})


def merged_for(model: Any, trials: Trials | None = None) -> Merged[Any] | None:
    """Return an empty batch whose steps give what the model itself gives; None where there is none.

    Where that is not remembered, runs a few tokens both ways, which takes some thirty passes.
    """
    missing = next(
        (type(leaf).__name__ for leaf in _leaves(make_prompt_cache(model)) if not _known(leaf)), None
    )
    if missing is not None:
        log.info("caches of this model cannot be merged", missing=missing)
        return None
    way = (trials or Trials()).outcome("merge", lambda: _way_for(model), len(_WAYS))
    if way is None:
        log.info("caches of this model cannot be merged", missing=None)
        return None
    return Merged(model, _WAYS[way])


def _way_for(model: Any) -> int | None:
    for i, way in enumerate(_WAYS):
        try:
            worst = _deviation(model, Merged(model, way))
        except Exception as error:  # noqa: BLE001  # whatever a model raises when it is handed something new
            log.debug("caches of this model cannot be merged", error=f"{type(error).__name__}: {error}")
            continue
        if worst < tolerance(model):
            return i
        log.debug("caches of this model cannot be merged", deviation=worst)
    return None


class Merged(Generic[RowT]):
    """Rows that decode together, in the order in which they joined."""

    def __init__(self, model: Any, way: dict[type, type]) -> None:
        self._model = model
        self._way = way
        self._caches: list[Any] = []
        self._rows: list[RowT | None] = []  # None: it left, and goes with the next change
        self._marks: list[Mark] = []  # of the steps that are not settled, oldest first

    @property
    def rows(self) -> list[RowT]:
        """The rows, in the order of a step's logits once `tidy` has been called."""
        return [row for row in self._rows if row is not None]

    @property
    def is_tidy(self) -> bool:
        """Whether the next step runs for `rows` alone, and not for some that have left."""
        return None not in self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of the merged caches, with padding and what is allocated ahead."""
        return sum(int(leaf.nbytes) for leaf in _leaves(self._caches))

    @property
    def leaving_bytes(self) -> int:
        """What a row takes as it leaves: its copy, and afterwards one layer of the rest at a time."""
        largest = max((int(cache.nbytes) for cache in self._caches), default=0)
        return self.nbytes // len(self._rows) + largest if self._rows else 0

    @property
    def growing(self) -> list[int]:
        """Lengths for which the next step allocates, one a row; the first one is for what is copied."""
        full = [leaf.keys.shape[2] for leaf in _leaves(self._caches) if _is_full(leaf)]
        return [max(full) * len(self._rows)] + [0] * (len(self._rows) - 1) if full else []

    def takes(self, caches: Sequence[Any]) -> bool:
        """Say whether a row with these caches can join: of the classes that were tried, and not empty."""
        leaves = list(_leaves(caches))
        return all(map(_known, leaves)) and not any(leaf.empty() for leaf in leaves)

    def joining_bytes(self, newcomers: Sequence[Sequence[Any]]) -> int:
        """Say what is allocated at the most if rows with these caches join, beside what they hold now."""
        num_rows = len(self._rows) + len(newcomers)
        merged = list(_leaves(self._caches)) or [None] * len(list(_leaves(newcomers[0])))
        theirs = zip(*(_leaves(caches) for caches in newcomers), strict=True)
        after = [_row_bytes(leaf, own) * num_rows for leaf, own in zip(merged, theirs, strict=True)]
        # A layer at a time: as it was, with the newcomers, and later with room to grow.
        return max(sum(after) - self.nbytes, 0) + 3 * max(after)

    def join(self, rows: Sequence[tuple[RowT, list[Any]]]) -> None:
        """Copy rows in, with caches that stay as they are. If that fails, all rows that were in are lost."""
        if self._marks:
            raise AssertionError("a step that is not settled has other rows")
        try:
            for i in range(len(rows[0][1])):
                self._extend(i, _merge(self._way, [caches[i] for _, caches in rows]))
        except BaseException:
            self.clear()
            raise
        self._rows += [row for row, _ in rows]

    def leave(self, row: RowT) -> list[Any]:
        """Copy a row out into caches of its own, as they were before what is not settled."""
        caches = self.show(row)
        mx.eval([cache.state for cache in caches])
        self._rows[self._rows.index(row)] = None
        if not self.rows:
            self.clear()
        return caches

    def show(self, row: RowT) -> list[Any]:
        """Build caches like a row's own, unevaluated, as they were before what is not settled."""
        index = self._rows.index(row)
        fields = iter(self._marks[0]) if self._marks else None
        return [_extracted(cache, index, fields) for cache in self._caches]

    def tidy(self) -> None:
        """Give back the room of rows that have left. If that fails, all rows are lost."""
        if self.is_tidy:
            return
        if self._marks:
            raise AssertionError("a step that is not settled has other rows")
        keep = [i for i, row in enumerate(self._rows) if row is not None]
        try:
            for cache in self._caches:
                cache.filter(keep)
                mx.eval(cache.state)  # one by one: the old and the new of a single layer at a time
        except BaseException:
            self.clear()
            raise
        self._rows = list(self.rows)

    def run(self, tokens: mx.array) -> mx.array:
        """Build a step: the logits, (rows, vocabulary), after one token for each of `rows`."""
        self._mark()
        last: mx.array = self._model(tokens[:, None], cache=self._caches)[:, -1]
        return last

    def part(self, lengths: list[int]) -> MergedPart:
        """Begin a step as a part of a pass; the rows hold so many tokens each."""
        self._mark()
        return MergedPart(self._caches, lengths)

    def settle(self) -> None:
        """Take the oldest step for done."""
        del self._marks[:1]

    def roll_back(self) -> None:
        """Take back every step that is not settled."""
        if self._marks:
            for leaf, fields in zip(_leaves(self._caches), self._marks[0], strict=True):
                vars(leaf).update(fields)
        self._marks = []

    def clear(self) -> None:
        """Forget all rows and their KV."""
        self._caches, self._rows, self._marks = [], [], []

    def _mark(self) -> None:
        if len(self._marks) == _AHEAD:
            raise AssertionError("more steps ahead than a window has room for")
        self._marks.append([_fields(leaf) for leaf in _leaves(self._caches)])

    def _extend(self, layer: int, more: Any) -> None:
        if layer == len(self._caches):
            self._caches.append(more)
        else:
            self._caches[layer].extend(more)
        mx.eval(self._caches[layer].state)


class MergedPart:
    """One token for each of the merged rows, as a part of a pass; see `forward.Part`."""

    def __init__(self, caches: Sequence[Any], lengths: list[int]) -> None:
        self.offsets = lengths
        self._caches = caches
        self._fetched: tuple[Any, Any] = (None, None)

    def masks(self, layer: int, options: dict[str, Any]) -> Any:
        """Let the merged cache make it: for each row another one."""
        return self._caches[layer].make_mask(1, **options)

    def update(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Hand them on: a token is a row in both."""
        self._fetched = self._caches[layer].update_and_fetch(keys, values)

    def attend(self, layer: int, queries: mx.array, mask: Any, attention: Attention) -> mx.array:
        """Attend with every row at once."""
        keys, values = self._fetched
        return attention(queries, keys, values, cache=self._caches[layer], mask=mask)

    def states(self) -> list[Any]:
        """Nothing: the rows' own logits depend on all that was written."""
        return []


#: The trial: sessions of these lengths. The second one leaves after two steps, the third one joins after one.
_LENGTHS: Final = (7, 3, 5)
_TOKENS: Final = (2, 3, 4, 5)


def _deviation(model: Any, merged: Merged[int]) -> float:
    """Say how far the logits of merged rows lie from those of the rows alone, as a share of the largest."""
    first = (0, 0, 1)  # of the tokens that each gets
    expected = [
        _alone(model, _prefilled(model, length), _TOKENS[i:])
        for length, i in zip(_LENGTHS, first, strict=True)
    ]
    found: list[list[mx.array]] = [[], [], []]

    def step(token: int) -> None:
        merged.tidy()
        rows = list(merged.rows)
        logits = merged.run(mx.array([token] * len(rows))).astype(mx.float32)
        for i, row in enumerate(rows):
            found[row].append(logits[i])

    merged.join([(i, _prefilled(model, _LENGTHS[i])) for i in (0, 1)])
    step(_TOKENS[0])
    merged.settle()
    merged.join([(2, _prefilled(model, _LENGTHS[2]))])
    step(_TOKENS[1])
    step(_TOKENS[2])  # ahead; for the row that leaves it has not happened
    merged.settle()
    del found[1][2:]
    found[1] += _alone(model, merged.leave(1), _TOKENS[2:])
    merged.settle()
    step(_TOKENS[3])
    merged.settle()
    merged.clear()
    mine, theirs = (mx.stack([logits for row in rows for logits in row]) for rows in (found, expected))
    worst: Any = (mx.abs(mine - theirs).max() / (mx.abs(theirs).max() + 1e-6)).item()
    return float(worst)


def _prefilled(model: Any, length: int) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array([list(range(1, length + 1))]), cache=caches)
    return caches


def _alone(model: Any, caches: list[Any], tokens: Sequence[int]) -> list[mx.array]:
    return [model(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32) for token in tokens]


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from _leaves(cache.caches)
        else:
            yield cache


def _known(leaf: Any) -> bool:
    """Say whether a class can be merged. Of a window that keeps its first tokens mlx-lm would lose them."""
    return type(leaf) in _USUAL and not getattr(leaf, "keep", 0)


def _merge(way: dict[type, type], caches: Sequence[Any]) -> Any:
    if isinstance(caches[0], CacheList):
        members = zip(*(cache.caches for cache in caches), strict=True)
        return CacheList(*(_merge(way, some) for some in members))  # type: ignore[no-untyped-call]
    kind: Any = way[type(caches[0])]
    return kind.merge(caches)


def _fields(leaf: Any) -> dict[str, Any]:
    """Take down what the next step changes, in arrays that it does not change in place."""
    if isinstance(leaf, ArraysCache):
        return {"cache": list(leaf.cache)}
    fields = {name: value for name, value in vars(leaf).items() if name in _POSITIONS}
    # `a -= 1` changes the array that both names have; this one is another, of the same contents.
    return {**fields, "left_padding": mx.array(leaf.left_padding)}


def _extracted(cache: Any, index: int, fields: Iterator[dict[str, Any]] | None) -> Any:
    if isinstance(cache, CacheList):
        members = [_extracted(member, index, fields) for member in cache.caches]
        return CacheList(*members)  # type: ignore[no-untyped-call]
    if fields is not None:
        then: Any = object.__new__(type(cache))
        vars(then).update(vars(cache), **next(fields))
        cache = then
    return cache.extract(index)


def _is_full(leaf: Any) -> bool:
    """Say whether one of the next two steps makes room: one may run before anybody asks again."""
    if isinstance(leaf, ArraysCache):
        return False
    length = leaf.keys.shape[2]
    return bool(leaf.size() + 1 >= length and length < getattr(leaf, "max_size", length + 1))


def _row_bytes(merged: Any, own: Sequence[Any]) -> int:
    """Count what a row takes in one leaf of the batch once rows with these caches are in it."""
    if isinstance(own[0], ArraysCache):
        return int(own[0].nbytes)
    lengths = [cache.offset if type(cache) is QuantizedKVCache else cache.size() for cache in own]
    longest: int = max([*lengths, *([merged.size()] if merged is not None else [])])
    per_token = sum(part.nbytes // part.shape[2] for part in states.parts(own[0]).values())
    return per_token * (longest + _STEP)
