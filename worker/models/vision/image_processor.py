"""Reads images for one model: what stands for an image in a prompt, its fingerprint, and its views.

Any thread may call it; it knows no MLX. `tower` computes the rows of input embeddings from the views.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from array import array
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cache.names.images import ImageSpan
from cache.names.tokens import Tokens, as_tokens
from worker.models.template_support import TemplateError

from .image_file import ImageError, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .families import Family, Grid, View

#: The packages by which an image's rows may differ.
_PACKAGES: Final = ("mlx-vlm", "pillow", "transformers")


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """What stands for an image in a prompt. All fields follow from the digest, the grid and the model."""

    #: The SHA-256 of the image's file.
    digest: bytes
    #: See `Family.views`.
    grid: Grid
    #: The tokens in place of the one that the chat template writes.
    tokens: array[int]
    #: The tokens `[start, end)` among them are the image's span (see `cache.names.images`).
    start: int
    end: int
    #: Names the span.
    fingerprint: bytes


class ImageProcessor:
    """A model's image processor."""

    def __init__(self, family: Family, encode: Callable[..., list[int]]) -> None:
        """Take the tokenizer's `encode`. Raises `ValueError` unless it makes one token of `family.image`."""
        #: What the chat template writes for an image, and the token that stands for each row.
        self.image = family.placeholder or family.image
        (self.image_token,) = encode(family.image, at_start=False)
        #: The texts that stand for an image only where the worker writes them.
        self.marks = (self.image, family.image)
        #: Whether the tokens of an image attend to each other in both directions.
        self.is_joint = bool(family.most_joint)
        self._family = family
        self._encode = encode
        settings = json.dumps(family.processor.__dict__, sort_keys=True, default=str)
        versions = [importlib.metadata.version(name) for name in _PACKAGES]
        said = repr((type(family.processor).__name__, settings, versions))
        #: A digest of how files become views.
        self.processor = hashlib.blake2b(said.encode(), digest_size=32, person=b"turnkeep.images").digest()

    def read(self, data: bytes) -> ImageTokens:
        """Decode and process an image file; return what stands for it in a prompt. Raises `ImageError`.

        Takes a second for a large image: not for the event loop.
        """
        grid, _ = self._processed(data)
        return self.tokens(hashlib.sha256(data).digest(), grid)

    def tokens(self, digest: bytes, grid: Sequence[int]) -> ImageTokens:
        """Return what stands for an image that `read` has read, without the image file."""
        ids = array("I", self._encode(self._family.text(grid), at_start=False))
        start, last = ids.index(self.image_token), len(ids) - 1
        while ids[last] != self.image_token:
            last -= 1
        said = digest + self.processor + repr(tuple(grid)).encode()
        name = hashlib.blake2b(said, digest_size=32, person=b"turnkeep.image").digest()
        return ImageTokens(digest, tuple(grid), ids, start, last + 1, name)

    def views(self, data: bytes) -> list[View]:
        """Return the views of an image file, from which the tower computes its rows. Raises `ImageError`."""
        return self._processed(data)[1]

    def written(self, text: str, grids: Sequence[Grid]) -> str:
        """Return a rendered prompt with the text of all tokens of each image, instead of one placeholder.

        `grids` are those of the images, in order. Raises `TemplateError` if the chat template has written
        another number of placeholders: some templates drop earlier images.
        """
        first, *rest = text.split(self.image)
        if len(rest) != len(grids):
            raise TemplateError(
                f"the chat template writes {len(rest)} of {len(grids)} images; send images in the user's"
                " messages"
            )
        around = self._family.around
        texts = (f"{around}{self._family.text(grid)}{around}" for grid in grids)
        return first + "".join(text + part for text, part in zip(texts, rest, strict=True))

    def found(self, ids: Iterable[int], images: Iterable[tuple[str, Sequence[int]]]) -> Tokens:
        """Return a prompt's tokens with the spans of its images, given each image's (digest, grid), in order.

        Raises `TemplateError` if the tokens of one are not there.
        """
        tokens, spans, at = array("I", ids), list[ImageSpan](), 0
        for digest, grid in images:
            one = self.tokens(bytes.fromhex(digest), grid)
            with suppress(ValueError):
                at = tokens.index(self.image_token, at) - one.start
            if tokens[max(at, 0) : at + len(one.tokens)] != one.tokens:
                raise TemplateError("the tokenizer writes an image in another way; get the whole model again")
            columns = one.grid[-1] if self._family.is_plane else 0
            spans.append(ImageSpan(at + one.start, at + one.end, one.fingerprint, one.digest, columns))
            at += len(one.tokens)
        return as_tokens(tokens, spans)

    def _processed(self, data: bytes) -> tuple[Grid, list[View]]:
        image = decode(data)
        try:
            grid, views = self._family.views(image)
        except Exception:  # noqa: BLE001  # foreign code, which raises anything for an extreme shape
            views = []
        if not views or not all(view.num_rows for view in views):
            size = f"{image.width} x {image.height}"
            raise ImageError(f"the model's processor refuses an image of {size} pixels; crop it")
        return grid, views


def settings_of(folder: Any) -> dict[str, Any]:
    """Return the settings of a folder's image processor. Raises `OSError`, `ValueError`."""
    files = ("processor_config.json", "preprocessor_config.json")
    found = [json.loads((folder / name).read_text("utf-8")) for name in files if (folder / name).exists()]
    nested: list[dict[str, Any]] = [one["image_processor"] for one in found if "image_processor" in one]
    if not nested and not (folder / files[1]).exists():
        raise ValueError("it has no preprocessor_config.json")
    said: dict[str, Any] = nested[0] if nested else found[-1]
    return {key: value for key, value in said.items() if key not in _NO_SETTINGS}


#: What says which classes read the settings, and which form their results have.
_NO_SETTINGS: Final = frozenset(
    (
        *("image_processor_type", "processor_class", "feature_extractor_type", "return_tensors", "device"),
        *("disable_grouping", "input_data_format", "data_format"),
    )
)
