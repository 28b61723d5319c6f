"""The cache policy of a session: of which tokens KV is kept, and whether on the device or on SSD. Pure.

A policy is chosen when a session is opened, and is part of every snapshot's identity, because KV depends on
the tokens that were visible when it was computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Tokens held beyond a window: up to this many are written before the first of them attends to the window,
#: and a session can be rewound by as many without prefilling again.
SLACK: Final = 256
#: Tokens per chunk, which is recalled as a whole; a chunk begins at a multiple of this number.
CHUNK: Final = 64
#: Tokens on SSD that a prompt attends to at a time.
PART: Final = 1024
#: The most tokens that are recalled at a time.
RECALLED: Final = 512


@dataclass(frozen=True, slots=True)
class Policy:
    """A cache policy: each token sees all tokens up to itself, or, with a `window`, a part of them.

    The visible part is the first `sink` and the last `window` tokens, including the token itself, as in
    "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453). With `recall`, rotary
    positions equal session positions, and up to `recall` other tokens are visible too, in whole chunks: the
    chunks that contain pinned tokens, and the chunks with the highest scores. KV of all tokens is on SSD,
    that of the visible ones also on the device. With `recall` only the tokens of answers are limited to this
    part: a prompt's tokens see all earlier tokens, whose KV is read from SSD layer by layer.
    """

    sink: int = 0
    window: int | None = None
    recall: int = 0
    #: Spans of pinned tokens, (start, end), in order.
    pins: tuple[tuple[int, int], ...] = ()
    #: Whether the session's KV may be written to disk. That does not change the KV, so policies that differ
    #: in this only are equal, and have the same names.
    has_snapshots: bool = field(default=True, compare=False)

    @classmethod
    def paged(cls, resident: int, pins: Iterable[tuple[int, int]] = (), *, sink: int) -> Policy:
        """Return the policy of a paged session with `resident` tokens on the device, and pinned spans `pins`.

        Sinks and pinned chunks come first; other chunks and the window share the remaining tokens equally.

        Raises `ValueError` for pins that overlap, or that leave less than four chunks.
        """
        spans = tuple(sorted(pins))
        if any(end > start for (_, end), (start, _) in pairwise(spans)):
            raise ValueError("pins overlap; make one of those that do")
        num_pinned = len(cls(pins=spans).pinned) * CHUNK
        left = resident - sink - num_pinned
        if left < 4 * CHUNK:
            raise ValueError(
                f"{num_pinned} pinned tokens (whole chunks of {CHUNK}) and {sink} sinks leave"
                f" {max(left, 0)} of {resident} resident tokens; {4 * CHUNK} or more must be left"
            )
        chosen = left // 2 // CHUNK * CHUNK
        return cls(sink, left - chosen, num_pinned + chosen, spans)

    @property
    def pinned(self) -> list[int]:
        """The numbers of the chunks that contain pinned tokens and so stay on the device, in order."""
        chunks = (range(start // CHUNK, -(-end // CHUNK)) for start, end in self.pins)
        return sorted(set(chain.from_iterable(chunks)))

    @property
    def name(self) -> str:
        """The policy's name in requests and results: full, paged or sink_window."""
        return "full" if self.window is None else "paged" if self.recall else "sink_window"

    @property
    def is_endless(self) -> bool:
        """Whether a session may exceed the model's context length, since no token sees that many tokens."""
        return self.window is not None and not self.recall

    @property
    def scale(self) -> int:
        """How many times longer a prompt's pieces may be than under `FULL`: 8 if each reads KV from SSD."""
        return 8 if self.recall else 1

    @property
    def spare(self) -> int:
        """The most tokens that the device holds in addition to the visible ones."""
        return SLACK + (RECALLED if self.recall else 0)

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that are visible; None if there is no limit."""
        return None if self.window is None else self.sink + self.recall + self.window

    def __str__(self) -> str:
        """Return the policy as a text that is part of an identity.

        For paged sessions it contains `exact`: their prompts see all tokens, also those with KV on SSD only.
        """
        if self.window is None:
            return "full"
        if not self.recall:
            return f"{self.name}({self.sink},{self.window})"
        pins = [f"{start}-{end}" for start, end in self.pins]
        numbers = map(str, (self.sink, self.window, self.recall))
        return f"{self.name}({','.join([*numbers, *pins, 'exact'])})"

    def num_visible(self, position: int) -> int:
        """Return the most tokens that are visible in a session of `position` tokens."""
        return position if self.most_tokens is None else min(position, self.most_tokens)

    def num_held(self, position: int) -> int:
        """Return the most tokens whose KV the device holds for a session of `position` tokens."""
        return position if self.most_tokens is None else min(position, self.most_tokens + self.spare)

    def visible_from(self, position: int) -> int:
        """Return the position from which on every token is visible, in a session of `position` tokens."""
        if self.window is None or position <= self.sink + self.window:
            return 0
        num_before, pinned = -(-(position - self.window) // CHUNK), self.pinned
        num_chosen = num_before - sum(chunk < num_before for chunk in pinned)
        if num_chosen <= self.recall // CHUNK - len(pinned):
            return 0
        return position - self.window

    def seen(self, position: int) -> tuple[tuple[int, int], ...]:
        """List the spans that are always visible in a session of `position` tokens: sinks, pins, window."""
        first = self.visible_from(position)
        if not first:
            return ((0, position),) if position else ()
        spans = [(0, self.sink)]
        for chunk in self.pinned:
            start, end = chunk * CHUNK, min((chunk + 1) * CHUNK, first)
            if start <= spans[-1][1]:
                start = spans.pop()[0]
            spans.append((start, end))
        return (*((start, end) for start, end in spans if start < end), (first, position))


#: Every token keeps its KV.
FULL = Policy()
