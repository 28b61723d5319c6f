"""Defines the port to drafters, which predict answers' next tokens, and the drafter by prompt lookup. Pure.

`speculation` calls them; `draft_model` has another one. A draft may be wrong: the batch runs it after a row's
last token, draws a token at each position as it does without a draft, and accepts the draft's tokens up to
the first one that differs (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
2023, for draws that depend only on the seed). So a drafter changes only how many tokens a step yields, never
which tokens.

Prompt lookup copies the tokens that followed an earlier occurrence of the last few tokens (Saxena, "Prompt
Lookup Decoding", 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from array import array
    from collections.abc import Hashable, Mapping

    from .rows import Row


class Drafter:
    """Drafts tokens for the rows of a batch. This base class never drafts. Device thread only."""

    #: The time to draft one token for each row, as a share of a step without drafts. Like `hope` an estimate,
    #: used until measurements replace it.
    pass_share: float = 0.0
    #: The share of draft tokens that are right.
    hope: float = 0.5

    def num_missing(self, row: Row) -> int | None:  # noqa: ARG002
        """Return how many tokens `prepare` has to run before `propose` may be called for a row.

        None if the drafter cannot draft for the row now.
        """
        return None

    def prepare(self, row: Row, num_tokens: int) -> None:
        """Run at most `num_tokens` of the tokens that `num_missing` counts for a row."""

    def propose(self, wanted: Mapping[Row, int]) -> dict[Row, list[int]]:  # noqa: ARG002
        """Return drafts of up to `wanted[row]` tokens after each row's last token.

        A row for which there is no draft is left out.
        """
        return {}

    def leave(self, row: Row) -> None:
        """End drafting for a row whose answer has ended; a later row may continue its session."""

    def forget(self, session: Hashable) -> None:
        """Drop the drafter's state of a session that has no row."""

    def clear(self) -> None:
        """Drop the drafter's state of all sessions."""


#: Number of last tokens that must have occurred before.
NGRAM: Final = 3
#: Drafts come from this many last tokens of a session. Searching them takes 20 us per token of an answer. An
#: index would be faster, but would have to be built when the answer begins.
MOST_SEEN: Final = 65_536


class Lookup(Drafter):
    """Drafts the tokens that followed an earlier occurrence of a row's last tokens; see `drafter.Drafter`.

    The latest such occurrence counts.
    """

    def propose(self, wanted: Mapping[Row, int]) -> dict[Row, list[int]]:
        """Copy the tokens that followed the latest earlier occurrence of each row's last tokens."""
        return {row: draft for row, most in wanted.items() if (draft := lookup_draft(row.known, most))}

    def num_missing(self, row: Row) -> int | None:
        """Return 0 if the row's last two tokens occurred before, as the next one may complete a match.

        Otherwise None.
        """
        return 0 if _place(row.known, NGRAM - 1) is not None else None


def lookup_draft(tokens: array[int], most: int) -> list[int]:
    """Return the `most` tokens that followed the latest earlier occurrence of the last `NGRAM` tokens.

    The list is empty if there is no earlier occurrence.
    """
    place = _place(tokens, NGRAM)
    if place is None:
        return []
    found = [*tokens[place : place + most]]
    while len(found) < most:  # the copy reached the last token: continue the repetition
        found.append(found[place - len(tokens)])
    return found


def _place(known: array[int], num: int) -> int | None:
    """Return the position after the latest earlier occurrence of the last `num` tokens; None if none."""
    last = known[-num:]
    if len(last) < num:
        return None
    tokens = np.asarray(known, np.uint32)[-MOST_SEEN:]
    places = np.flatnonzero(tokens[num - 1 : -1] == last[-1]) + num
    for back in range(2, num + 1):
        places = places[tokens[places - back] == last[-back]]
    return int(places[-1]) + len(known) - len(tokens) if len(places) else None
