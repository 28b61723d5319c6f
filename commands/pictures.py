"""Images on the command line: files that options or lines of a terminal name, as parts of a message."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turnkeep_client.content_blocks import ContentError, image_in
from turnkeep_client.images import image

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif")


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
    """Return the content of a message with these images before its text."""
    return [*parts, *([{"type": "text", "text": text}] if text else [])] if parts else text


def dragged(line: str) -> list[Path]:
    """Return the image files that a line consists of; empty if it has anything else.

    A terminal writes the paths of files that are dragged into it, in quotes or with escaped characters.
    """
    if not line.rstrip("'\" ").lower().endswith(_ENDINGS):
        return []
    try:
        files = [Path(word) for word in shlex.split(line)]
        if not all(file.is_file() for file in files):
            files = [Path(line)]  # spaces that are not escaped
        return files if all(file.is_file() and file.suffix.lower() in _ENDINGS for file in files) else []
    except (OSError, ValueError):  # an open quote, or a name that is too long
        return []
