"""Defines what a step consists of: rows, pieces of prompts, and the ports for passes and for rows' KV.

`batch` runs the steps. Device thread only.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from .parts import OwnPart

if TYPE_CHECKING:
    from array import array
    from collections.abc import Hashable, Mapping, Sequence

    import mlx.core as mx

    from .image_rows import ImageRows
    from .parts import Part
    from .plane import Position
    from .row_sampler import DrawnToken, RowSampler
    from .slots import Form


class UnsoundError(Exception):
    """The model's logits are NaN or infinite."""

    def __init__(self) -> None:
        super().__init__("the model's logits are no finite numbers: its weights are broken or overflow")


@dataclass(slots=True, eq=False)
class Row:
    """One running answer."""

    #: The KV of the session's first `num_cached` tokens; None while the batch's `CommonKv` has it.
    caches: list[Any] | None
    #: The session's last tokens, from which drafts are made. The last one has no KV yet.
    known: array[int]
    sampler: RowSampler
    num_cached: int
    #: How many more tokens the answer can get.
    num_left: int
    #: The most tokens whose KV is stored at a time, if the session has a window.
    most_held: int = sys.maxsize
    #: The tokens of the last step; valid only if the logits were finite (`is_sound`).
    drawn: list[DrawnToken] = field(default_factory=list)
    is_sound: bool = True
    #: What to add to a token's number in the session for its rotary position.
    shift: int = 0
    #: Later rows of the same session can reuse a drafter's state of this row; None: no row can.
    session: Hashable = None
    #: Decides which pools can hold the row; None if unknown or if none can.
    form: Form | None = None

    def append(self, drawn: list[DrawnToken], *, is_sound: bool = True) -> None:
        """Add the tokens that a step has drawn for the row to its answer."""
        tokens = [one.token for one in drawn]
        self.drawn, self.is_sound = drawn, is_sound
        self.known.extend(tokens)
        self.num_left -= len(tokens)
        self.sampler.push(tokens)


@dataclass(slots=True)
class Embedding:
    """The vector of a prompt: its last token's hidden state after the final norm, normalised to length 1."""

    #: With tokens, the vector has instead the logits of these tokens after the prompt.
    tokens: tuple[int, ...] = ()
    #: 32-bit floats, little-endian; empty until the prompt has run.
    vector: bytes = b""
    #: Whether the vector's numbers are finite; otherwise it is not valid.
    is_sound: bool = True


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Consecutive tokens of a prompt, to be prefilled into caches that already hold `start` tokens."""

    caches: list[Any]
    start: int
    tokens: list[int]
    #: Set if the piece ends the prompt: the row's first token is drawn from the logits of the last token.
    row: Row | None = None
    #: Receives the vector of the piece's last token.
    embedding: Embedding | None = None
    #: The input embeddings of tokens that belong to images.
    images: ImageRows | None = None
    #: Rotary positions, by default the tokens' numbers in the session.
    positions: Sequence[Position] | None = None

    @property
    def has_output(self) -> bool:
        """Whether a pass returns logits, or hidden states, of the piece's last token."""
        return self.row is not None or self.embedding is not None

    def part(self) -> OwnPart:
        """Return the part of a pass over the piece's tokens."""
        return OwnPart(self.caches, self.start, len(self.tokens), self.positions, self.images)

    @property
    def states(self) -> list[Any]:
        """The arrays of the caches, to be evaluated together with the drawn tokens."""
        return [cache.state for cache in self.caches]


class Pass(Protocol):
    """Runs a forward pass of a model over tokens of many sessions."""

    def __call__(
        self,
        parts: Sequence[Part],
        tokens: Sequence[int] | mx.array,
        pieces: Sequence[PrefillPiece] = (),
        *,
        hidden: bool = False,
    ) -> mx.array:
        """Build a pass over `tokens`, which are the tokens of `parts` in order, and over pieces of prompts.

        Returns logits, (rows, vocabulary), not evaluated: for all `tokens`, then for the last token of each
        piece that `has_output`. With `hidden`, returns the hidden states before the output head instead. The
        caches are updated.
        """


class CommonKv:
    """Keeps KV of several rows in common arrays, instead of the rows' own caches. This base class keeps none.

    A row is called kept while this object has its KV.
    """

    #: For each kept row whose memory the next step enlarges: the number of tokens to allocate for.
    growing: Sequence[int] = ()
    #: The most bytes that `leave` allocates.
    removal_bytes = 0
    #: Whether a step in flight has already changed kept rows' KV.
    includes_ahead = False

    def place(self, rows: Sequence[Row]) -> None:
        """Move rows' KV in and out before a step. A row's `caches` is None exactly while the row is kept."""

    def fitted(self, drafts: Mapping[Row, list[int]]) -> dict[Row, list[int]]:
        """Return the drafts, padded or shortened so that one pass can run all kept rows; may add drafts."""
        return dict(drafts)

    def can_draft(self, row: Row) -> bool:  # noqa: ARG002
        """Say whether a kept row can have a draft."""
        return False

    def parts(
        self,
        rows: Sequence[Row],  # noqa: ARG002
        num_ahead: int,  # noqa: ARG002
        drafts: Mapping[Row, list[int]],  # noqa: ARG002
    ) -> list[tuple[Part, list[Row]]] | None:
        """Make the parts of a pass over the kept `rows`; return each part with its rows in order.

        `num_ahead` tokens of each row are not known yet. `drafts` come from `fitted`. Returns None if a pass
        over exactly these rows is not possible.
        """
        return []

    def caches(self, row: Row) -> list[Any]:
        """Return a kept row's KV as caches, which may share its memory and are valid until the next step."""
        raise AssertionError(f"no row is kept here: {row}")

    def leave(self, row: Row) -> None:
        """Copy a kept row's KV to new caches of the row, and drop it here."""

    def may_run_ahead(self, row: Row) -> bool:  # noqa: ARG002
        """Say whether a kept row has room for the step after the one in flight."""
        return True

    def commit(self) -> None:
        """Make the last step final: it can no longer be undone."""

    def roll_back(self) -> bool:
        """Undo the last step for the kept rows, unless it is final; return False if their KV is lost."""
        return True

    def clear(self) -> None:
        """Drop all kept rows and their KV."""
