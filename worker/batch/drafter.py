"""The port of what drafts answers' next tokens: `forced`, `lookup` and `draft_model`; `speculation` asks.

A draft may be wrong: the batch runs it behind a row's last token, draws a token at each place as it does
without a draft, and accepts the draft's tokens up to the first one that differs (Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", 2023, for samples that are a function of the seed). So
a drafter changes only the number of tokens a step, never the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from .rows import Row


class Drafter:
    """Drafts for all rows of a batch; this one never does, and keeps nothing. Device thread only.

    `pass_share` is what one more token of all drafts takes, as a share of a plain step, until it is measured;
    `hope` the share of a draft's tokens that are right, until that is.
    """

    pass_share: float = 0.0
    hope: float = 0.5

    def may_propose(self, row: Row) -> bool:  # noqa: ARG002
        """Whether `propose` may draft for a row once it has one more token, which is not known yet."""
        return False

    def num_missing(self, row: Row) -> int | None:  # noqa: ARG002
        """Return how many tokens `prepare` has to run before `propose` may be called for a row.

        None if it cannot draft for the row now.
        """
        return None

    def prepare(self, row: Row, num_tokens: int) -> None:
        """Run at most `num_tokens` of a row's missing tokens."""

    def propose(self, wanted: Mapping[Row, int]) -> dict[Row, list[int]]:  # noqa: ARG002
        """Draft up to so many tokens behind each row's last one; rows without a draft may be left out."""
        return {}

    def leave(self, row: Row) -> None:
        """End drafting for a row that is over; its session may come again."""

    def forget(self, session: Hashable) -> None:
        """Drop what is kept of a session without a row."""

    def clear(self) -> None:
        """Drop what is kept of all sessions."""
