"""Reads the contents of messages in all dialects: each image becomes a part with its file's digest. Pure."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from turnkeep_client.content_blocks import ContentError, Warned, block_text, printed
from turnkeep_client.images import decoded_image, divided, image_digest, joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from turnkeep_client.images import Content
    from turnkeep_client.messages import Message

#: The types of image blocks in all dialects.
_KINDS: Final = ("image", "image_url", "input_image")
_LINKS: Final = ("http://", "https://")


class Link(NamedTuple):
    """An image that a request names by its URL; `where` is its path in the request."""

    url: str
    where: str


class Unseen(Warned):
    """The warning of an image, which is told only if the model cannot see."""


def told(warnings: Sequence[Warned], *, sees: bool) -> tuple[Warned, ...]:
    """Return the warnings of a request to a model that sees images, or does not."""
    return tuple(one for one in warnings if not (sees and isinstance(one, Unseen)))


def digests(messages: Iterable[Message]) -> list[str]:
    """Return the digests of all images in messages, each once, in order."""
    return [*dict.fromkeys(digest for one in messages for digest in divided(one.content or "")[1])]


class Reading:
    """What one request has beside its messages: warnings, and images by their digests.

    An image that must be fetched is a `Link`, by the digest of its URL.
    """

    def __init__(self, warnings: Iterable[Warned]) -> None:
        self.warnings = [*warnings]
        self.images: dict[str, bytes | Link] = {}

    def content(self, given: Any, where: str) -> Content:
        """Return a message's content. Raises `ContentError`."""
        if isinstance(given, str):
            return given
        if not isinstance(given, list):
            raise ContentError("the content is neither a string nor a list of parts", where)
        return joined(self.block(one, f"{where}[{at}]") for at, one in enumerate(given))

    def block(self, given: Any, where: str) -> Content:
        """Return a content block as text or, for an image, as one part. Raises `ContentError`."""
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in _KINDS:
            return block_text(given, where, self.warnings)
        if (source := _source(given)) is None:
            why = "an image must have its file as base64 or as a data: URL; files by their ids are not kept"
            raise ContentError(why, where)
        return self.image(source, where, kind)

    def image(self, source: str, where: str, kind: str = "image") -> Content:
        """Return an image as one part; `source` is base64 or a URL. Raises `ContentError`."""
        self.warnings.append(Unseen(where, f"{printed(kind)} replaced by a placeholder"))
        if source.startswith(_LINKS):
            digest = sha256(source.encode()).hexdigest()
            self.images[digest] = Link(source, where)
        else:
            data = decoded_image(source, where)
            digest = image_digest(data, where)
            self.images[digest] = data
        return ({"type": "image", "digest": digest},)


def _source(block: dict[str, Any]) -> str | None:
    """Return the base64 or the URL in an image block of any dialect."""
    match block:
        case {"image_url": {"url": str(url)}} | {"image_url": str(url)}:
            return url
        case {"source": {"data": str(found)} | {"url": str(found)}} | {"data": str(found)}:
            return found
    return None
