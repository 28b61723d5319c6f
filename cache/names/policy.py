"""Which tokens of a session keep their KV: all, or the first few and the last ones. Pure.

A policy is chosen when a session is opened, and is part of every snapshot's identity: KV that was computed
with fewer tokens in sight is other KV.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """What the token at position t sees: all tokens up to itself, or, with a `window`, a part of them.

    That part is the first `sink` and the last `window`, itself included: as in "Efficient Streaming Language
    Models with Attention Sinks" (arXiv 2309.17453).
    """

    sink: int = 0
    window: int | None = None

    @property
    def name(self) -> str:
        """The policy as the protocol calls it."""
        return "full" if self.window is None else "sink_window"

    @property
    def most_tokens(self) -> int | None:
        """The tokens that are seen at the most; None without a bound."""
        return None if self.window is None else self.sink + self.window

    def __str__(self) -> str:
        """Write it for an identity."""
        return "full" if self.window is None else f"sink_window({self.sink},{self.window})"

    def num_visible(self, position: int) -> int:
        """Count the tokens whose KV a session of `position` tokens keeps."""
        return position if self.most_tokens is None else min(position, self.most_tokens)

    def visible_from(self, position: int) -> int:
        """Say from which position on a session of `position` tokens sees all; before it, its sinks alone."""
        return 0 if self.num_visible(position) == position else position - (self.window or 0)


#: Every token keeps its KV.
FULL = Policy()
