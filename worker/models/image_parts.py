"""Images in the contents of messages, in two forms: as parts, and as marks in text. Pure.

Parts are what a session keeps: `{"type": "image", "digest": ..., "grid": [...]}`. The grid is the model
family's layout of the image, such as its rows and columns of views (`vision.families`); it is missing if the
model does not see the image. While messages are adapted to a chat template and joined, their contents are
text, and a mark stands for each image: a text between two lone surrogates, which no message can contain.
The tokens that a model gets for an image come from `vision.image_processor`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from turnkeep_client.content_blocks import block_text

if TYPE_CHECKING:
    from collections.abc import Mapping

_MARK: Final = re.compile("\udc00([0-9a-f]{64})(?::([0-9,]*))?\udc01")


def with_marks(message: Mapping[str, Any], grids: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a message whose content is text, with a mark for each image; text content stays as it is.

    With `grids`, grids by digest, a mark has the grid from there, or none; otherwise the part's own grid.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return {**message}
    return {**message, "content": "".join(_text(part, grids) for part in content)}


def _text(part: Mapping[str, Any], grids: Mapping[str, Any] | None) -> str:
    if part["type"] != "image":
        return str(part["text"])
    digest = part["digest"]
    grid = part.get("grid") if grids is None else grids.get(digest)
    return f"\udc00{digest}\udc01" if grid is None else f"\udc00{digest}:{','.join(map(str, grid))}\udc01"


def with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in which a text with marks is replaced by parts; any other content stays."""
    content = message.get("content")
    if not isinstance(content, str) or "\udc00" not in content:
        return {**message}
    images = images_in(content)
    texts = _MARK.sub("\udc01", content).split("\udc01")
    parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}] if texts[0] else []
    for (digest, grid), text in zip(images, texts[1:], strict=True):
        parts.append({"type": "image", "digest": digest, **({} if grid is None else {"grid": grid})})
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def images_in(content: Any) -> list[tuple[str, list[int] | None]]:
    """Return (digest, grid) for each image in a message's content, in order: parts, or text with marks.

    `digest` is the SHA-256 of the image's file as hex. `grid` has the numbers from which `Family.text` makes
    the image's tokens, for most families its rows and columns of views or of tokens; some families need none,
    so it may be empty. It is None if the model does not see the image.
    """
    if isinstance(content, str):
        found = [one.groups() for one in _MARK.finditer(content)]
        return [(digest, grid if grid is None else _numbers(grid)) for digest, grid in found]
    parts = content or ()
    return [(part["digest"], part.get("grid")) for part in parts if part["type"] == "image"]


def without_unseen(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with a placeholder text for each mark without a grid: the model sees no such image."""
    content = message.get("content")
    if not isinstance(content, str) or "\udc00" not in content:
        return {**message}
    placeholder = block_text({"type": "image"}, "", [])
    text = _MARK.sub(lambda found: placeholder if found[2] is None else found[0], content)
    return {**message, "content": text}


def _numbers(grid: str) -> list[int]:
    return [int(number) for number in grid.split(",")] if grid else []
