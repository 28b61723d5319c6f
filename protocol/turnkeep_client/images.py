"""Images in a session's log: each file is stored once, on a subject that its SHA-256 names.

A long file is stored in pieces, each on the subject of the piece's own SHA-256; the file's own entry then has
the SHA-256 of its pieces, 32 bytes each. So each entry proves itself, and may be stored again at any time.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

#: The largest file.
MOST_BYTES: Final = 20_000_000
#: The largest piece of a file, and the smallest: a message is at least twice as large.
PIECE_BYTES: Final = 2**17
_LEAST_BYTES: Final = 2**12
_DIGEST_BYTES: Final = 32


def image(source: str | Path | bytes) -> dict[str, Any]:
    """Return an image, given as a path or as the bytes of its file, as a part of a message's `content`.

    PNG, JPEG, WebP, and GIF, whose first frame the model sees. Raises `OSError`.
    """
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    return {"type": "image", "data": base64.b64encode(data).decode()}


def media_type(data: bytes) -> str:
    """Return the media type of an image file by its first bytes; `image/png` if they are not known."""
    begins = {b"\xff\xd8": "image/jpeg", b"GIF8": "image/gif"}
    kind = next((kind for begin, kind in begins.items() if data.startswith(begin)), "image/png")
    return "image/webp" if data[8:12] == b"WEBP" else kind


def data_url(data: bytes) -> str:
    """Return an image file as a `data:` URL."""
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


def digest_of(data: bytes) -> str:
    """Return the SHA-256 that names a file or a piece of it, as hex."""
    return hashlib.sha256(data).hexdigest()


def entries(data: bytes, most_bytes: int = PIECE_BYTES) -> Iterator[tuple[str, bytes]]:
    """Yield the digest and body of each log entry that stores a file: its pieces, then the file's own entry.

    No body of a piece has more than `most_bytes`, or 4,096 if that is less.
    """
    size = max(min(most_bytes, PIECE_BYTES), _LEAST_BYTES)
    if len(data) <= size:
        yield digest_of(data), data
        return
    digests = b""
    for start in range(0, len(data), size):
        piece = data[start : start + size]
        yield digest_of(piece), piece
        digests += hashlib.sha256(piece).digest()
    yield digest_of(data), digests


async def assemble(digest: str, read: Callable[[str], Awaitable[bytes | None]]) -> bytes | None:
    """Return the file with this digest from its entries; None if one is missing, or the digest is wrong.

    `read` returns the body of the entry with a digest, None if there is none.
    """
    body = await read(digest)
    if body is None or digest_of(body) == digest:
        return body
    if len(body) > _DIGEST_BYTES * (MOST_BYTES // _LEAST_BYTES + 1):
        return None
    names = [body[at : at + _DIGEST_BYTES].hex() for at in range(0, len(body), _DIGEST_BYTES)]
    data = b""
    for name in names:
        piece = await read(name)
        if piece is None or len(data) > MOST_BYTES:
            return None
        data += piece
    return data if digest_of(data) == digest else None


def files_of(request: object) -> dict[str, bytes]:
    """Return the image files that a request's messages contain, by digest; not those that they only name."""
    messages: Any = getattr(request, "messages", None) or ()
    return {digest: data for message in messages for digest, data in message.files.items()}


def images_of(request: object) -> list[str]:
    """Return the digests of the images in a request's messages, in order."""
    messages: Any = getattr(request, "messages", None) or ()
    return [digest for message in messages for digest in images_in(message.content)]


def images_in(content: Any) -> list[str]:
    """Return the digests of the images in a message's content, in order."""
    return [part["digest"] for part in content if part["type"] == "image"] if _has_parts(content) else []


def text_in(content: Any) -> str:
    """Return the text of a message's content, without its images."""
    if not _has_parts(content):
        return content or ""
    return "".join(part["text"] for part in content if part["type"] == "text")


def as_text(content: Any) -> str:
    """Return a message's content as text to show: an image is named by the start of its digest."""
    if not _has_parts(content):
        return content or ""
    return "".join(
        f"[image {part['digest'][:12]}]" if part["type"] == "image" else part["text"] for part in content
    )


def _has_parts(content: Any) -> bool:
    return isinstance(content, list | tuple)
