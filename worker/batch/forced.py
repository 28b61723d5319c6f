"""Drafts where a row's grammar leaves no choice: keys and marks of JSON, the end of a reasoning. Pure.

The text is certain, its tokens are not: they are those that the tokenizer makes of it, and the last one may
also be the beginning of a longer one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .drafter import Drafter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .rows import Row


class Forced(Drafter):
    """Asks the rows' grammars; see `drafter.Drafter`. No step of such rows is ever launched ahead."""

    hope = 0.9

    def num_missing(self, row: Row) -> int | None:
        """Return 0, or None for a row without a grammar."""
        return 0 if row.sampler.sampling.grammar is not None else None

    def propose(self, wanted: Mapping[Row, int]) -> dict[Row, list[int]]:
        """Return the tokens of the text that must come next."""
        return {row: draft for row, most in wanted.items() if (draft := [*row.sampler.forced()[:most]])}
