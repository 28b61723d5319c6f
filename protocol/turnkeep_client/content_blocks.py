"""Reduces a message's content to text; placeholders replace blocks that models cannot read. Pure.

Clients resend the conversation with each request, so refusing one block would end the conversation for good.
The placeholder of a block never changes: the digests of the gateway's conversations depend on it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .errors import TurnkeepError

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
_MOST_PRINTED: Final = 64
_MOST_TOLD: Final = 20


class ContentWarning(NamedTuple):
    """A warning: the part of a request at the path `where` was ignored or converted, as `what` says."""

    where: str
    what: str


class ContentError(TurnkeepError):
    """A part of a message's content is invalid; `where` is its path."""

    def __init__(self, message: str, where: str) -> None:
        super().__init__(message)
        self.where = where


def sentences(warnings: Sequence[ContentWarning]) -> list[str]:
    """Write the first warnings as sentences; a last sentence counts the others."""
    shown = [f"{one.where}: {one.what}" for one in warnings[:_MOST_TOLD]]
    more = len(warnings) - len(shown)
    return [*shown, f"and {more} more"] if more else shown


def printed(name: str) -> str:
    """Shorten a name that a client sent and replace characters that a header or sentence cannot hold."""
    return _UNPRINTED.sub("_", name)[:_MOST_PRINTED]


def text_of(content: Any, where: str, warnings: list[ContentWarning]) -> str:
    """Return a message's content as text. Raises `ContentError`.

    Appends to `warnings` one for each block that is not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ContentError("the content is neither a string nor a list of parts", where)
    return "".join(block_text(block, f"{where}[{at}]", warnings) for at, block in enumerate(content))


def block_text(block: Any, where: str, warnings: list[ContentWarning]) -> str:
    """Return the text of a content block, "" for a reasoning block, else a placeholder.

    Raises `ContentError`.
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
    """Return the text inside a block that is not text itself, or a placeholder; append a warning."""
    text = _own_text(block)
    how = "replaced by a placeholder" if text is None else "read as text"
    warnings.append(ContentWarning(where, f"{printed(kind)} {how}"))
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
        return f"[tool_reference: {printed(name)}]"
    found = _KIND.fullmatch(kind)
    if found and (sense := _SENSES.get(found[1])):
        return f"[{found[1]}: this model cannot {sense}]"
    return f"[{printed(kind)}: this model cannot read it]"
