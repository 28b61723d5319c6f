"""Positions of images' tokens in a plane, for models with multimodal rotary positions (M-RoPE). Pure.

A token has a position for time, one for height and one for width. In a text the three are equal, and go on by
one for each token. The tokens of an image that begins at position p have p, p + line and p + column. The text
behind it goes on after the largest of them, so its tokens' positions are lower than their numbers in the
session, by a shift that stays the same up to the next image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TypeAlias

    from cache.names.images import ImageSpan

    #: A token's rotary position; of a token of an image in a plane: for time, height and width.
    Position: TypeAlias = int | tuple[int, int, int]


def positions(spans: Sequence[ImageSpan], start: int, end: int) -> Sequence[Position]:
    """Return the rotary positions of the tokens `[start, end)` of a session with the images `spans`.

    A token of an image in a plane has three numbers (time, height, width), any other token one.
    """
    if not any(span.columns for span in spans):
        return range(start, end)
    found: list[Position] = []
    at = shift = 0
    for span in spans:
        if span.columns:
            found += _between(at, span.start, shift, start, end)
            for i in range(max(start, span.start), min(end, span.end)):
                line, column = divmod(i - span.start, span.columns)
                first = span.start + shift
                found.append((first, first + line, first + column))
            at, shift = span.end, shift + _shift(span)
    return [*found, *_between(at, end, shift, start, end)]


def shift_after(spans: Iterable[ImageSpan]) -> int:
    """Return how much the positions of text behind all `spans` differ from the tokens' numbers."""
    return sum(_shift(span) for span in spans if span.columns)


def _between(first: int, last: int, shift: int, start: int, end: int) -> Iterator[int]:
    return (i + shift for i in range(max(first, start), min(last, end)))


def _shift(span: ImageSpan) -> int:
    num = span.end - span.start
    return max(-(-num // span.columns), min(num, span.columns)) - num
