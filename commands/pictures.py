"""Images on the command line: files that options or lines of a terminal name, as parts of a message."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from turnkeep_client.content_blocks import ContentError, image_in
from turnkeep_client.images import image

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ENDINGS: Final = (".png", ".jpg", ".jpeg", ".webp", ".gif")


def parts_of(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Read image files as parts of a message. Raises `UsageError` for a file that is no image."""
    found = []
    for file in files:
        try:
            found.append(image(file))
            image_in(found[-1], str(file))
        except OSError as error:
            raise click.UsageError(f"{file} cannot be read: {error.strerror}") from None
        except ContentError as error:
            raise click.UsageError(f"{file}: {error}") from None
    return found


def content_of(text: str, parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message: a text or, if there are image parts, these and then the text."""
    return [*parts, *([{"type": "text", "text": text}] if text else [])] if parts else text


def dragged(line: str) -> list[Path]:
    """Return the image files that a line consists of; empty if it has anything else.

    A terminal writes the paths of files that are dragged into it, in quotes or with escaped characters.
    """
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote
        words = []
    for files in ([Path(line.strip())], [Path(word) for word in words]):
        if files and all(map(_is_image, files)):
            return files
    return []


def _is_image(file: Path) -> bool:
    try:
        return file.suffix.lower() in _ENDINGS and file.is_file()
    except OSError:  # a name that is too long
        return False
