"""Drafts an answer's next tokens from the session's earlier tokens: prompt lookup. Pure.

If the last few tokens occurred before, the tokens that followed them are the draft (Saxena, "Prompt Lookup
Decoding", 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .drafter import Drafter

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping

    from .rows import Row

#: Number of last tokens that have to match an earlier run of tokens.
NGRAM: Final = 3
#: A session's last tokens, in which drafts are looked for. They are compared for each token of an answer, in
#: 20 us: a table of them would have to be made when the answer begins.
MOST_SEEN: Final = 65_536


class Lookup(Drafter):
    """Looks for the latest earlier copy of a row's last tokens; see `drafter.Drafter`."""

    def may_propose(self, row: Row) -> bool:
        """Whether an earlier copy of the last tokens but one is there."""
        return _place(row.known, NGRAM - 1) is not None

    def propose(self, wanted: Mapping[Row, int]) -> dict[Row, list[int]]:
        """Copy what followed the latest earlier run of the last tokens."""
        return {row: draft for row, most in wanted.items() if (draft := looked_up(row.known, most))}

    def num_missing(self, row: Row) -> int:  # noqa: ARG002
        """Return 0: nothing has to be run."""
        return 0


def looked_up(tokens: array[int], most: int) -> list[int]:
    """Return up to `most` tokens that followed the latest earlier run of the last tokens, if there is one."""
    place = _place(tokens, NGRAM)
    if place is None:
        return []
    found = [*tokens[place : place + most]]
    while len(found) < most:  # a repetition continues
        found.append(found[place - len(tokens)])
    return found


def _place(known: array[int], num: int) -> int | None:
    """Return the position after the latest earlier run of tokens that equals the last `num` tokens."""
    last = known[-num:]
    if len(last) < num:
        return None
    tokens = np.asarray(known, np.uint32)[-MOST_SEEN:]
    places = np.flatnonzero(tokens[num - 1 : -1] == last[-1]) + num
    for back in range(2, num + 1):
        places = places[tokens[places - back] == last[-back]]
    return int(places[-1]) + len(known) - len(tokens) if len(places) else None
