"""Names the tokens of images by their content. Pure.

In a session's token ids, all tokens of all images are the same few ids: the image itself reaches the model as
rows of input embeddings. So where tokens are compared or named, these ids are replaced by ids that are drawn
from the image's fingerprint and the token's offset in the image, 31 bits for each token. No vocabulary has
such ids. Blocks without images keep their names.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

_ID_BYTES: Final = 4
#: Set in the drawn ids, and in no id of a vocabulary.
_DRAWN: Final = np.uint32(1 << 31)
_PERSON: Final = b"turnkeep.image"


class ImageSpan(NamedTuple):
    """The tokens `[start, end)` of one image: from its first to its last row of input embeddings.

    The fingerprint is a digest of all that the rows depend on, besides the model. `digest` is the SHA-256 of
    the file, for readers of the file alone. If the tokens have positions in a plane, each line has `columns`
    tokens; otherwise that is 0.
    """

    start: int
    end: int
    fingerprint: bytes
    digest: bytes = b""
    columns: int = 0

    def moved(self, by: int) -> Self:
        """Return the same image `by` tokens later."""
        return self._replace(start=self.start + by, end=self.end + by)

    def cut(self, end: int) -> Self:
        """Return the image without its tokens from position `end` on."""
        return self._replace(end=min(self.end, end))


def whole_end(spans: Iterable[ImageSpan], start: int, end: int) -> int:
    """Return the end of a piece `[start, end)` that ends inside no image: before it, else behind it."""
    for span in spans:
        if span.start < end < span.end:
            return span.start if span.start > start else span.end
    return end


def overlaid(packed: bytes, start: int, spans: Sequence[ImageSpan]) -> bytes:
    """Return packed tokens with images' ids drawn from their fingerprints; the first is number `start`."""
    end = start + len(packed) // _ID_BYTES
    inside = [span for span in spans if span.start < end and span.end > start]
    if not inside:
        return packed
    ids = np.frombuffer(packed, "<u4").copy()
    for span in inside:
        first, last = max(span.start, start), min(span.end, end)
        drawn = hashlib.shake_128(_PERSON + span.fingerprint).digest((last - span.start) * _ID_BYTES)
        ids[first - start : last - start] = np.frombuffer(drawn, "<u4")[first - span.start :] | _DRAWN
    return ids.tobytes()


def has_image(packed: bytes) -> bool:
    """Whether any of these packed tokens is an image's."""
    return bool((np.frombuffer(packed, "<u4") >= _DRAWN).any())
