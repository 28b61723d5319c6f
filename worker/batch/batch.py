"""The running answers, and steps over them: what `SharedPass`, `MergedRows` and `OneByOne` have in common.

The runner sees `Batch` alone; which of the three a model gets, `choosing` finds out. Device thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from cache.kv import layers

from .sampling import draw_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.names.blocks import Tokens

    from .lookup import Lookup
    from .sampling import Draw, Sampling
    from .slots import Pool


@dataclass(slots=True, eq=False)
class Row:
    """One running answer.

    `known` are all tokens of its session; the first `num_cached` have KV, the last one has none yet. The KV
    is in `caches`, or, where that is None, in a pool's slot or merged. `drawn` are the tokens of the last
    step, `num_drawn` counts the answer's, and `num_left` how many more it may have. A repetition penalty
    applies to those that are in `seen`.
    """

    caches: list[Any] | None
    known: Tokens
    sampling: Sampling
    num_drawn: int
    num_cached: int
    num_left: int
    seen: set[int] = field(default_factory=set)
    drawn: list[int] = field(default_factory=list)
    # `SharedPass` alone sets these:
    lookup: Lookup | None = None
    pool: Pool | None = None
    slot: int = 0

    def draw(self, num_ahead: int = 0) -> Draw:
        """Say how the next token is drawn, or the one that is `num_ahead` tokens behind it."""
        return self.sampling, self.num_drawn + num_ahead, self.seen

    def append(self, tokens: list[int]) -> None:
        """Add what a step has drawn to the answer."""
        self.drawn = tokens
        self.known.extend(tokens)
        self.num_drawn += len(tokens)
        self.num_left -= len(tokens)
        if self.sampling.repetition_penalty != 1.0:
            self.seen.update(tokens)


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Tokens of a prompt, to be added to a session's caches, which hold `start` tokens before it.

    With `row` set they end the prompt, and the row's first token is drawn from the logits of the last one.
    """

    caches: list[Any]
    start: int
    tokens: list[int]
    row: Row | None = None

    @property
    def states(self) -> list[Any]:
        """What its caches hold, to be evaluated beside the tokens, which do not depend on it."""
        return [cache.state for cache in self.caches]


class Batch(ABC):
    """The running answers, and one step after another for them and for prompts."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        #: Tokens that were speculated, and those of them that would have been drawn.
        self.num_drafted = self.num_accepted = 0

    @property
    def rows(self) -> tuple[Row, ...]:
        """The running answers, in the order in which they began."""
        return tuple(self._rows)

    @property
    def num_cached(self) -> int:
        """Tokens that the rows hold, all together."""
        return sum(row.num_cached for row in self._rows)

    @property
    def growing(self) -> list[int]:
        """Lengths of the rows for which the next step allocates, since their caches are full."""
        # A step may be in flight and another one begin before anybody asks again: room for two tokens.
        return [row.num_cached for row in self._rows if row.caches and layers.grows(row.caches[0], 2)]

    @property
    def removal_bytes(self) -> int:
        """The most that is allocated when a row is removed."""
        return 0

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is in flight already, so that it can take no pieces."""
        return False

    def caches(self, row: Row) -> list[Any]:
        """Show a row's KV, to be read before the next step."""
        return row.caches or []

    @abstractmethod
    def step(self, pieces: Sequence[PrefillPiece], *, run_ahead: bool = False) -> None:
        """Draw the next tokens of every row, and the first of the rows that begin here; they run from now on.

        A row gets one token, or more where it speculated: see `Row.drawn`. The KV of every row and piece has
        what was run. `run_ahead` lets a batch that can launch the step after this one while the caller
        reads what this one drew: see `is_ahead`.
        """

    def remove(self, row: Row) -> list[Any]:
        """Take a row out, and return its KV as caches of its own."""
        self._rows.remove(row)
        return row.caches or []

    def roll_back(self) -> bool:
        """Bring every row back to before a step that failed; False where that is not possible."""
        return not self._rows

    def clear(self) -> None:
        """Forget every row and its KV, after a failed step left the caches in an unknown state."""
        self._rows = []

    def _draw(self, rows: Sequence[Row], pieces: Sequence[PrefillPiece], logits: mx.array) -> None:
        """Sample the step's tokens: `logits` are those of `rows`, then of prompts that a piece completes."""
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
