"""Reads the contents of messages in all dialects: each image becomes a part with its file's digest. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec.structs import force_setattr

from turnkeep_client.content_blocks import (
    IMAGES,
    ContentError,
    ContentWarning,
    block_text,
    content_of,
    image_in,
    printable,
)
from turnkeep_client.images import digest_of, images_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from turnkeep_client.messages import Message

    #: A message's content: a text, or parts of which at least one is an image.
    Content = str | tuple[dict[str, Any], ...]

#: The end of a worker's warning about an image.
_PLACED: Final = ": image replaced by a placeholder"
_LINKS: Final = ("http://", "https://")


class Link(NamedTuple):
    """An image that a request names by its URL; `where` is its path in the request."""

    url: str
    where: str


class ImageWarning(ContentWarning):
    """The warning that an image is replaced, which is true only if the model does not see images."""


def true_warnings(warnings: Sequence[ContentWarning], *, sees: bool) -> tuple[ContentWarning, ...]:
    """Return a request's warnings, without those about images if its model `sees` images."""
    return tuple(one for one in warnings if not (sees and isinstance(one, ImageWarning)))


def other_warnings(given: Iterable[str], own: Sequence[ContentWarning]) -> list[str]:
    """Return a worker's warnings, without those about images if the gateway's `own` have them already."""
    names_images = any(isinstance(one, ImageWarning) for one in own)
    return [one for one in given if not (names_images and one.endswith(_PLACED))]


def joined(contents: Iterable[Content]) -> Content:
    """Join contents to one: neighbouring texts become one text, and a content without images a string."""
    parts = [part for one in contents for part in ([one] if isinstance(one, str) else one)]
    return content_of(parts, "", [])


def attach(messages: Iterable[Message], images: Mapping[str, Any]) -> None:
    """Set the messages' field `files` to the files of their images, which are then sent with them.

    `images` has files by digest; other values are left out.
    """
    for message in messages:
        named = images_in(message.content)
        if files := {one: images[one] for one in named if isinstance(images.get(one), bytes)}:
            force_setattr(message, "files", {**message.files, **files})


class Reading:
    """Reads the contents of one request's messages; collects its warnings and its images."""

    def __init__(self, warnings: Iterable[ContentWarning]) -> None:
        self.warnings = [*warnings]
        #: Files by their digests, and links to images by the digests of their URLs.
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
        if isinstance(given, dict):
            file = _link(given, where) or image_in(given, where)
            if file is not None:
                return self._named(file, where, given["type"])
        return block_text(given, where, self.warnings)

    def _named(self, file: bytes | Link, where: str, kind: str) -> Content:
        self.warnings.append(ImageWarning(where, f"{printable(kind)} replaced by a placeholder"))
        digest = digest_of(file.url.encode() if isinstance(file, Link) else file)
        self.images[digest] = file
        return ({"type": "image", "digest": digest},)


def _link(block: dict[str, Any], where: str) -> Link | None:
    """Return an image block's URL, in the form of any dialect; None for other blocks, and without a URL."""
    match block:
        case {"image_url": {"url": str(url)} | str(url)} | {"source": {"url": str(url)}}:
            return Link(url, where) if block.get("type") in IMAGES and url.startswith(_LINKS) else None
    return None
