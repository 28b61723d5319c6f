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
    """The tokens `[start, end)` of one image: from its first to its last row of input embeddings."""

    start: int
    end: int
    #: A digest of all that the rows depend on, besides the model.
    fingerprint: bytes
    #: The SHA-256 of the image's file.
    digest: bytes = b""
    #: The tokens in each line, if the tokens have positions in a plane; otherwise 0.
    columns: int = 0

    def moved(self, by: int) -> Self:
        """Return the same image `by` tokens later."""
        return self._replace(start=self.start + by, end=self.end + by)

    def cut(self, end: int) -> Self:
        """Return the image without its tokens from position `end` on."""
        return self._replace(end=min(self.end, end))


def whole_end(spans: Iterable[ImageSpan], start: int, end: int) -> int:
    """Return `end`; if it is inside an image, the image's start, or its end if `start` is not before it.

    So a piece of a prompt that begins at `start` ends at a whole image.
    """
    for span in spans:
        if span.start < end < span.end:
            return span.start if span.start > start else span.end
    return end


def name_images(packed: bytes, start: int, spans: Sequence[ImageSpan]) -> bytes:
    """Return packed tokens in which the tokens of images have ids drawn from the images' fingerprints.

    `start` is the position of the first token in the session, `spans` are the session's images.
    """
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
