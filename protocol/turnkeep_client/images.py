"""Images in messages' contents: checks files, names them by their digests, and joins parts. Pure."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from .content_blocks import ContentError

if TYPE_CHECKING:
    from collections.abc import Iterable

#: A message's content: a text, or parts of which at least one is an image.
Content: TypeAlias = "str | tuple[dict[str, Any], ...]"
MOST_IMAGE_BYTES: Final = 20_000_000
#: How a file of each media type begins.
_BEGINNINGS: Final = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "image/gif": re.compile(rb"GIF8[79]a"),
}


def media_type(data: bytes) -> str | None:
    """Return the media type of an image file by its first bytes; None for a file of another type."""
    return next((kind for kind, begins in _BEGINNINGS.items() if begins.match(data)), None)


def image_digest(data: bytes, where: str) -> str:
    """Return the name of an image file: its SHA-256. Raises `ContentError` about the path `where`."""
    if not data:
        raise ContentError("the image is empty", where)
    if len(data) > MOST_IMAGE_BYTES:
        raise ContentError(f"the image has {len(data)} bytes; at most {MOST_IMAGE_BYTES} are taken", where)
    if media_type(data) is None:
        raise ContentError("the image is no PNG, JPEG, WebP or GIF file", where)
    return sha256(data).hexdigest()


def decoded_image(source: str, where: str) -> bytes:
    """Return the file that base64 or a `data:` URL has. Raises `ContentError` about the path `where`."""
    if source.startswith("data:"):
        head, comma, source = source.partition(",")
        if not comma or not head.endswith(";base64"):
            why = "a data: URL of an image must have its file as base64: data:image/png;base64,..."
            raise ContentError(why, where)
    if len(source) > MOST_IMAGE_BYTES * 4 // 3 + 4096:
        raise ContentError(f"the image is larger than {MOST_IMAGE_BYTES} bytes", where)
    try:
        return b64decode("".join(source.split()), validate=True)
    except (binascii.Error, ValueError):
        raise ContentError("the image is no base64, or was cut short", where) from None


def data_url(data: bytes) -> str:
    """Return an image file as a `data:` URL."""
    return f"data:{media_type(data)};base64,{b64encode(data).decode()}"


def joined(contents: Iterable[Content]) -> Content:
    """Join contents: neighbouring texts become one, and texts alone a string."""
    parts: list[dict[str, Any]] = []
    for content in contents:
        for part in ({"type": "text", "text": content},) if isinstance(content, str) else content:
            if part["type"] == "text" and parts and parts[-1]["type"] == "text":
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
            elif part != {"type": "text", "text": ""}:
                parts.append(part)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return tuple(parts)


def divided(content: Content) -> tuple[str, tuple[str, ...]]:
    """Return a content's text and the digests of its images."""
    parts = ({"type": "text", "text": content},) if isinstance(content, str) else content
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    return text, tuple(part["digest"] for part in parts if part["type"] == "image")
