"""Searches the texts of all sessions of a tenant, by reading the log once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from turnkeep_client.session_log import entries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnkeep_client.client import Client

#: Characters to show before and after a match.
_BEFORE: Final = 20
_BEHIND: Final = 50


class _Part(Struct):
    text: str = ""


class _Said(Struct):
    content: str | list[_Part] | None = None


class _Entry(Struct):
    """The text fields of a request or a result."""

    text: str | None = None
    messages: list[_Said] | None = None


_ENTRY: Final = msgspec.json.Decoder(_Entry)


async def said(client: Client, words: str, patience_s: float) -> tuple[dict[str, str], bool]:
    """Find the sessions whose texts contain `words`, in any case of letters.

    Returns an excerpt around the last match by session, and whether the log was read to its end within
    `patience_s`. Raises `TurnkeepError`.
    """
    found: dict[str, str] = {}
    wanted = words.casefold()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            async for one in entries(client.stored, client.tenant):
                for text in _texts(one.body):
                    folded = text.casefold()
                    if (at := folded.find(wanted)) >= 0:
                        # `ß` becomes two characters: the place is then one in the folded text.
                        shown = text if len(folded) == len(text) else folded
                        found[one.key.session] = _around(shown, at, len(wanted))
            return found, True
    return found, False


def _texts(body: bytes) -> Iterator[str]:
    try:
        entry = _ENTRY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # workers refuse or ignore it
        return
    if entry.text:
        yield entry.text
    for message in entry.messages or ():
        match message.content:
            case str(text):
                yield text
            case [*parts]:
                yield from (part.text for part in parts)


def _around(text: str, at: int, length: int) -> str:
    begin, end = max(0, at - _BEFORE), at + length + _BEHIND
    cut = " ".join(text[begin:end].split())
    return f"{'...' if begin else ''}{cut}{'...' if end < len(text) else ''}"
