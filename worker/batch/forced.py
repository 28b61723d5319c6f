"""Drafts text that a row's grammar fully determines: JSON keys and punctuation, the end of reasoning. Pure.

The text is certain, but its tokens are not: the tokenizer may split it otherwise than the model does, and the
model may draw a longer token that begins with the draft's last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .drafter import Drafter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .rows import Row


class Forced(Drafter):
    """Drafts text that rows' grammars determine; see `drafter.Drafter`.

    A step with such rows is never launched before the previous tokens are read.
    """

    hope = 0.9

    def num_missing(self, row: Row) -> int | None:
        """Return 0, since nothing has to run before a draft; None for a row without a grammar."""
        return 0 if row.sampler.sampling.grammar is not None else None

    def propose(self, wanted: Mapping[Row, int]) -> dict[Row, list[int]]:
        """Return, for each row with a determined text, up to `wanted[row]` tokens of that text."""
        return {row: draft for row, most in wanted.items() if (draft := [*row.sampler.forced()[:most]])}
