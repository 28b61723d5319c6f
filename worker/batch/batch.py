"""Holds the running answers and runs steps: the interface of `SharedPass`, `MergedRows` and `OneByOne`.

The runner uses only this interface; `choosing` chooses one of the three for a model. Device thread only.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from cache.kv import layers

from .sampling import draw_all

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from .lookup import Lookup
    from .sampling import Draw, Sampling
    from .slots import Form, Pool


@dataclass(slots=True, eq=False)
class Row:
    """One running answer.

    `known` are the session's last tokens; drafts are looked up in them. The last token has no KV yet. The
    first `num_cached` tokens of the session have KV: in `caches`, or, if that is None, in a slot of a pool or
    in merged caches. `drawn` are the tokens of the last step. `num_drawn` counts the answer's tokens,
    `num_left` the tokens that it may still get. The repetition penalty applies to the tokens in `seen`. If
    the session has a window, its caches hold KV of at most `most_held` tokens.
    """

    caches: list[Any] | None
    known: array[int]
    sampling: Sampling
    num_drawn: int
    num_cached: int
    num_left: int
    seen: set[int] = field(default_factory=set)
    most_held: int = sys.maxsize
    drawn: list[int] = field(default_factory=list)
    # `SharedPass` alone sets these:
    lookup: Lookup | None = None
    form: Form | None = None
    pool: Pool | None = None
    slot: int = 0

    def draw(self, num_ahead: int = 0) -> Draw:
        """Return how to draw the token that comes `num_ahead` positions after the next one."""
        return self.sampling, self.num_drawn + num_ahead, self.seen

    def append(self, tokens: list[int]) -> None:
        """Add the tokens that a step has drawn to the answer."""
        self.drawn = tokens
        self.known.extend(tokens)
        self.num_drawn += len(tokens)
        self.num_left -= len(tokens)
        if self.sampling.repetition_penalty != 1.0:
            self.seen.update(tokens)


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Consecutive tokens of a prompt, to be run into a session's caches, which already hold `start` tokens.

    If `row` is set, the piece ends the prompt, and the logits of its last token draw the row's first token.
    """

    caches: list[Any]
    start: int
    tokens: list[int]
    row: Row | None = None

    @property
    def states(self) -> list[Any]:
        """The arrays of the caches, to be evaluated together with the drawn tokens."""
        return [cache.state for cache in self.caches]


class Batch(ABC):
    """The running answers. Runs one step after another for them and for pieces of prompts."""

    #: Whether rows may have rings in the place of plain caches, and whether a model's own windows are rings.
    has_rings = windows_are_rings = False
    #: The layers whose keys a paged session keeps in sketches.
    sketched: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._rows: list[Row] = []
        #: Draft tokens since the start, and those of them that were accepted.
        self.num_drafted = self.num_accepted = 0

    @property
    def rows(self) -> tuple[Row, ...]:
        """The running answers, in the order of their first tokens."""
        return tuple(self._rows)

    @property
    def num_cached(self) -> int:
        """Number of tokens with KV, over all rows."""
        return sum(min(row.num_cached, row.most_held) for row in self._rows)

    @property
    def growing(self) -> list[int]:
        """The lengths in tokens of all rows with full caches, for which the next step allocates memory."""
        # One step may be in flight and another be launched before the next check: room for two tokens.
        full = (row for row in self._rows if row.caches and layers.grows(row.caches, 2))
        return [min(row.num_cached, row.most_held) for row in full]

    @property
    def removal_bytes(self) -> int:
        """The most bytes that removing one row allocates meanwhile."""
        return 0

    @property
    def is_ahead(self) -> bool:
        """Whether the next step has been launched already, so that it can take no pieces of prompts."""
        return False

    def caches(self, row: Row) -> list[Any]:
        """Return a row's KV as caches. They are valid until the next step and must not be written to."""
        return row.caches or []

    @abstractmethod
    def step(self, pieces: Sequence[PrefillPiece], *, run_ahead: bool = False) -> None:
        """Run every row and piece, and draw each row's next token; a piece's row joins with its first token.

        A row gets one token, or more if its draft is accepted: see `Row.drawn`. Afterwards all tokens
        that were run have KV. With `run_ahead` a batch may launch the next step before the caller has read
        this step's tokens: see `is_ahead`.
        """

    def remove(self, row: Row) -> list[Any]:
        """Remove a row, and return its KV as separate caches."""
        self._rows.remove(row)
        return row.caches or []

    def roll_back(self) -> bool:
        """Undo a failed step for every row; False if that is not possible."""
        return not self._rows

    def clear(self) -> None:
        """Drop every row and its KV, after a failed step left the caches in an unknown state."""
        self._rows = []

    def _draw(self, rows: Sequence[Row], pieces: Sequence[PrefillPiece], logits: mx.array) -> None:
        """Draw the step's tokens. `logits` are for `rows`, then for the prompts that end in this step."""
        beginning = [piece.row for piece in pieces if piece.row is not None]
        every = [*rows, *beginning]
        choice = draw_all(logits, [row.draw() for row in every]) if every else None
        mx.eval(choice, [piece.states for piece in pieces])
        drawn: Any = [] if choice is None else choice.tolist()
        for row, token in zip(every, drawn, strict=True):
            row.append([token])
        for row in rows:
            row.num_cached += 1
        self._rows += beginning
