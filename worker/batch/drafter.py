"""Defines the port to drafters, which predict answers' next tokens: `lookup` and `draft_model`.

`speculation` calls them. A draft may be wrong: the batch runs it after a row's last token, draws a token at
each position as it does without a draft, and accepts the draft's tokens up to the first one that differs
(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, for draws that depend
only on the seed). So a drafter changes only how many tokens a step yields, never which tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from .rows import Row


class Drafter:
    """Drafts tokens for the rows of a batch. This base class never drafts. Device thread only.

    `pass_share` is the time to draft one token for each row, as a share of a step without drafts; `hope` is
    the share of draft tokens that are right. Both are estimates, used until measurements replace them.
    """

    pass_share: float = 0.0
    hope: float = 0.5

    def num_missing(self, row: Row) -> int | None:  # noqa: ARG002
        """Return how many tokens `prepare` has to run before `propose` may be called for a row.

        None if the drafter cannot draft for the row now.
        """
        return None

    def prepare(self, row: Row, num_tokens: int) -> None:
        """Run at most `num_tokens` of the tokens that `num_missing` counts for a row."""

    def propose(self, wanted: Mapping[Row, int]) -> dict[Row, list[int]]:  # noqa: ARG002
        """Return drafts of up to `wanted[row]` tokens after each row's last token; some may be absent."""
        return {}

    def leave(self, row: Row) -> None:
        """End drafting for a row whose answer has ended; a later row may continue its session."""

    def forget(self, session: Hashable) -> None:
        """Drop the drafter's state of a session that has no row."""

    def clear(self) -> None:
        """Drop the drafter's state of all sessions."""
