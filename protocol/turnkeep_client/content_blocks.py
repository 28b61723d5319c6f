"""Reduces a message's content to text and images; placeholders replace blocks that no model can read. Pure.

Clients resend the conversation with each request, so refusing one block would end the conversation for good.
The placeholder of a block never changes: the digests of the gateway's conversations depend on it.
"""

from __future__ import annotations

import base64
import binascii
import re
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .errors import TurnkeepError
from .images import MOST_BYTES, digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_TEXTS: Final = ("text", "input_text", "output_text", "refusal")
#: Reasoning blocks that clients send back; they add no text.
_SILENT: Final = ("thinking", "redacted_thinking", "reasoning")
#: The name of a block in its placeholder, and what the model cannot do with it.
_SENSES: Final = {
    "image": "see images",
    "audio": "hear audio",
    "video": "watch videos",
    "document": "read documents",
    "file": "read files",
}
_KIND: Final = re.compile(r"(?:input_)?([a-z]+?)(?:_url)?")
_UNPRINTED: Final = re.compile(r"[^\w.:/-]+", re.ASCII)
#: The types of image blocks.
IMAGES: Final = ("image", "input_image", "image_url")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_DATA_URL: Final = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_MOST_PRINTED: Final = 64
_MOST_TOLD: Final = 20


class ContentWarning(NamedTuple):
    """Says that the part of a request at the path `where` was ignored or converted; `what` says how."""

    where: str
    what: str


class ContentError(TurnkeepError):
    """A part of a message's content is invalid; `where` is the path of this part in the request."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


def sentences(warnings: Sequence[ContentWarning]) -> list[str]:
    """Return the first 20 warnings as sentences; a last item counts the others."""
    shown = [f"{one.where}: {one.what}" for one in warnings[:_MOST_TOLD]]
    more = len(warnings) - len(shown)
    return [*shown, f"and {more} more"] if more else shown


def printable(name: str) -> str:
    """Return the first 64 characters of a client's name, with `_` for those unfit for a header."""
    return _UNPRINTED.sub("_", name)[:_MOST_PRINTED]


def text_of(content: Any, where: str, warnings: list[ContentWarning]) -> str:
    """Return a message's content as text, its blocks as `block_text`. Raises `ContentError`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ContentError("the content is neither a string nor a list of parts", where)
    return "".join(block_text(block, f"{where}[{at}]", warnings) for at, block in enumerate(content))


def content_of(
    blocks: Sequence[Any], where: str, warnings: list[ContentWarning]
) -> str | tuple[dict[str, str], ...]:
    """Return a content, given as blocks from `with_digests`: as text, or with images as a tuple of parts.

    A part has the type `image` and a `digest`, or the type `text` and the joined text of the other blocks
    between two images. Raises and appends to `warnings` as `block_text`.
    """
    parts = list[dict[str, str]]()
    for at, block in enumerate(blocks):
        if isinstance(block, dict) and "digest" in block and block.get("type") == "image":
            parts.append({"type": "image", "digest": block["digest"]})
        else:
            parts.append({"type": "text", "text": block_text(block, f"{where}[{at}]", warnings)})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    found = list[dict[str, str]]()
    for kind, run in groupby(parts, lambda part: part["type"]):
        some = [*run]
        text = "".join(part.get("text", "") for part in some)
        found += some if kind == "image" else [{"type": "text", "text": text}] if text else []
    return tuple(found)


def with_digests(blocks: Sequence[Any], where: str, files: dict[str, bytes]) -> list[Any]:
    """Return a content's blocks with digests in place of image files; add the files to `files`, by digest.

    An image whose file is elsewhere, such as in a vendor's store, stays as it is. Raises `ContentError`.
    """
    found = []
    for at, block in enumerate(blocks):
        data = image_in(block, f"{where}[{at}]") if isinstance(block, dict) else None
        if data is not None:
            digest = digest_of(data)
            files[digest] = data
            found.append({"type": "image", "digest": digest})
        else:
            found.append(block)
    return found


def image_in(block: dict[str, Any], where: str) -> bytes | None:
    """Return the file of an image block; None for other blocks, and for images without their file.

    Raises `ContentError` for an image by URL, and if the digest, the base64 or the file is not valid.
    """
    if block.get("type") not in IMAGES:
        return None
    if (digest := block.get("digest")) is not None:
        if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
            raise ContentError("an image's digest must be the SHA-256 of its file, as 64 hex digits", where)
        return None
    source, url = block.get("source"), block.get("image_url")
    given = source if isinstance(source, dict) else url if isinstance(url, dict) else {"url": url}
    data = block.get("data", given.get("data"))
    if data is None and isinstance(url := given.get("url"), str):
        if not (begin := _DATA_URL.match(url)):
            why = "images are not fetched; send the file itself, as a data: URL with base64"
            raise ContentError(why, where)
        data = url[begin.end() :]
    if data is None:
        return None
    try:
        file = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise ContentError("an image's data must be base64", where) from None
    return check_image(file, where)


def check_image(file: bytes, where: str) -> bytes:
    """Return `file`; raise `ContentError` if it is too large or does not begin like a supported image."""
    if len(file) > MOST_BYTES:
        raise ContentError(f"the image has {len(file)} bytes; the most are {MOST_BYTES}", where)
    if not (file.startswith((b"\x89PNG", b"\xff\xd8", b"GIF8")) or file[8:12] == b"WEBP"):
        raise ContentError("the image is of no known format; send a PNG, JPEG, WebP or GIF", where)
    return file


def block_text(block: Any, where: str, warnings: list[ContentWarning]) -> str:
    """Return a content block as text: "" for a reasoning block, else the block's text or a placeholder.

    Appends a warning for a block that is neither text nor reasoning. Raises `ContentError`.
    """
    if isinstance(block, str):
        return block
    kind = block.get("type", "text") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise ContentError("a part of a content must be an object with a type", where)
    if kind in _SILENT:
        return ""
    if kind in _TEXTS:
        text = block.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ContentError(f"a part of the type {kind} must have a text", where)
        return text
    return other_text(block, kind, where, warnings)


def other_text(block: dict[str, Any], kind: str, where: str, warnings: list[ContentWarning]) -> str:
    """Return the text inside a block of another `kind` than text, or a placeholder; append a warning."""
    text = _own_text(block)
    how = "replaced by a placeholder" if text is None else "read as text"
    warnings.append(ContentWarning(where, f"{printable(kind)} {how}"))
    return _placeholder(block, kind) if text is None else text


def _own_text(block: dict[str, Any]) -> str | None:
    """Return the plain text inside a document, search result, summary or similar block; None without text."""
    source = block.get("source")
    inner: dict[str, Any] = source if isinstance(source, dict) else {}
    plain = inner.get("data") if inner.get("type") == "text" else None
    for given in (*map(block.get, ("text", "content", "output")), inner.get("content"), plain):
        if isinstance(given, str) and given:
            return given
        if isinstance(given, list) and any(_is_text(part) for part in given):
            return "".join(part["text"] if _is_text(part) else _placeholder_of(part) for part in given)
    return None


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text"), str)


def _placeholder_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return _placeholder(part, kind) if isinstance(kind, str) else ""


def _placeholder(block: dict[str, Any], kind: str) -> str:
    if kind == "tool_reference" and isinstance(name := block.get("tool_name"), str):
        return f"[tool_reference: {printable(name)}]"
    found = _KIND.fullmatch(kind)
    if found and (sense := _SENSES.get(found[1])):
        return f"[{found[1]}: this model cannot {sense}]"
    return f"[{printable(kind)}: this model cannot read it]"
