"""The running rows and their KV: join, step, leave. Device thread only.

A row alone steps on its session's own caches. Several rows step on merged caches, which are built as rows
join and taken apart as they leave. Both copy; the class hides it, so that slots can replace it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .sampling import Sampling, draw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(slots=True, eq=False)
class Row:
    """One running answer. `caches` is None while its KV lives in the merged caches."""

    caches: list[Any] | None
    last_token: int
    sampling: Sampling
    num_drawn: int
    num_cached: int
    seen: set[int] = field(default_factory=set)


class Batch:
    """Rows that decode together.

    Only plain `KVCache` layers are merged; rows of any other kind step one after the other. (mlx-lm's
    merged rotating cache loses its sinks, and some classes cannot be merged at all.)
    """

    def __init__(self, model: Callable[..., mx.array]) -> None:
        self._model = model
        self._rows: list[Row] = []
        self._merged: list[Any] | None = None
        self._in_merged: list[Row] = []

    @property
    def rows(self) -> tuple[Row, ...]:
        """The running rows."""
        return tuple(self._rows)

    def set_rows(self, rows: Sequence[Row]) -> None:
        """Make `rows` the running ones: who is new joins, who is missing leaves with its own caches."""
        wanted = [row for row in rows if _mergeable(row)] if len(rows) > 1 else []
        if len(wanted) < 2:
            wanted = []
        staying = [row for row in self._in_merged if row in wanted]
        leaving = [row for row in self._in_merged if row not in wanted]
        for row in leaving:
            row.caches = self._extract(row)
        if leaving:
            self._keep(staying)
        joining = [row for row in wanted if row not in staying]
        if joining:
            self._join(joining)
        self._rows = list(rows)

    def step(self) -> list[int]:
        """Run one forward pass over every row and draw a token each, in the order of the rows."""
        logits: dict[int, mx.array] = {}
        if self._merged is not None:
            tokens = mx.array([[row.last_token] for row in self._in_merged])
            out = self._model(tokens, cache=self._merged)
            logits.update({id(row): out[i, -1] for i, row in enumerate(self._in_merged)})
        for row in self._rows:
            if row.caches is not None:
                logits[id(row)] = self._model(mx.array([[row.last_token]]), cache=row.caches)[0, -1]
        drawn = mx.stack([draw(logits[id(row)], row.sampling, row.num_drawn, row.seen) for row in self._rows])
        mx.eval(drawn)
        chosen: Any = drawn.tolist()
        tokens_out: list[int] = chosen
        for row, token in zip(self._rows, tokens_out, strict=True):
            row.last_token = token
            row.num_drawn += 1
            row.num_cached += 1
            if row.sampling.repetition_penalty != 1.0:
                row.seen.add(token)
        return tokens_out

    def place(self, row: Row) -> tuple[list[Any], int | None]:
        """Say where a row's KV is: its own caches and None, or the merged ones and its index in them."""
        if row.caches is not None:
            return row.caches, None
        if self._merged is None:  # a row without caches is in the merged ones
            raise LookupError(row)
        return self._merged, self._in_merged.index(row)

    def clear(self) -> None:
        """Forget every row and its KV, after a failed step left the caches in an unknown state."""
        self._rows, self._merged, self._in_merged = [], None, []

    def _extract(self, row: Row) -> list[Any]:
        if self._merged is None:
            raise LookupError(row)
        index = self._in_merged.index(row)
        caches = [layer.extract(index) for layer in self._merged]
        mx.eval([(cache.keys, cache.values) for cache in caches])
        return caches

    def _keep(self, rows: list[Row]) -> None:
        """Shrink the merged caches to `rows`, in the order in which they stand there."""
        if not rows or self._merged is None:
            self._merged, self._in_merged = None, []
            return
        indices = mx.array([self._in_merged.index(row) for row in rows])
        for layer in self._merged:
            layer.filter(indices)
        self._in_merged = rows

    def _join(self, rows: list[Row]) -> None:
        layers = [[row.caches[i] for row in rows if row.caches] for i in range(len(rows[0].caches or ()))]
        plain: Any = KVCache
        merged = [plain.merge(layer) for layer in layers]
        if self._merged is None:
            self._merged = merged
        else:
            for layer, other in zip(self._merged, merged, strict=True):
                layer.extend(other)
        self._in_merged = self._in_merged + rows
        mx.eval([(layer.keys, layer.values) for layer in self._merged])
        for row in rows:
            row.caches = None


def _mergeable(row: Row) -> bool:
    # The merged caches hold plain ones only, so a row that is in them already (None) is of that kind.
    return row.caches is None or all(
        type(cache) is KVCache and cache.keys is not None for cache in row.caches
    )
