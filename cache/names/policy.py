"""Which tokens of a session keep their KV: all, or the first few and the last ones. Pure.

A policy is chosen when a session is opened, and is part of every snapshot's identity: KV depends on the
tokens that were visible when it was computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Tokens held beyond a window: up to this many are written before the first of them attends to the window,
#: and a session can be rewound by as many without prefilling again.
SLACK: Final = 256


@dataclass(frozen=True, slots=True)
class Policy:
    """Which tokens a token sees: all tokens up to itself, or, with a `window`, a part of them.

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
        """The most tokens that are visible; None without a bound."""
        return None if self.window is None else self.sink + self.window

    def __str__(self) -> str:
        """Return the policy as a part of an identity."""
        return "full" if self.window is None else f"sink_window({self.sink},{self.window})"

    def num_visible(self, position: int) -> int:
        """Return how many tokens' KV a session of `position` tokens keeps."""
        return position if self.most_tokens is None else min(position, self.most_tokens)

    def num_held(self, position: int) -> int:
        """Count the tokens whose KV the device holds for a session of `position` tokens, at the most."""
        return position if self.most_tokens is None else min(position, self.most_tokens + SLACK)

    def visible_from(self, position: int) -> int:
        """Return the position from which all of `position` tokens are visible; before it, only the sinks."""
        return 0 if self.num_visible(position) == position else position - (self.window or 0)


#: Every token keeps its KV.
FULL = Policy()
