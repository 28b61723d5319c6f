"""Describes, as functions, the tools of Anthropic's API that clients run themselves. Pure.

A request names such a tool by its type alone, since Anthropic's models know the parameters; other models must
be told them. The parameters are those of the pages on the bash, text editor and memory tools in Anthropic's
documentation, and of the classes `BetaMemoryTool20250818Command` in its Python library.
"""

from __future__ import annotations

from typing import Any, Final

_TEXT: Final = {"type": "string"}
_LINE: Final = {"type": "integer"}
_EDITS: Final = {
    "path": _TEXT,
    "file_text": {"type": "string", "description": "The new file's text, for create."},
    "old_str": {"type": "string", "description": "The text to replace, for str_replace; it occurs once."},
    "new_str": {"type": "string", "description": "The text in its place."},
    "insert_line": {"type": "integer", "description": "The line behind which to insert; 0 is the beginning."},
    "insert_text": {"type": "string", "description": "The text to insert."},
    "view_range": {
        "type": "array",
        "items": _LINE,
        "minItems": 2,
        "maxItems": 2,
        "description": "The first and last line to view; -1 is the last one.",
    },
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


_EDIT: Final = ("view", "create", "str_replace", "insert")
#: By the beginning of a tool's type, up to its date: the description and the parameters.
_KNOWN: Final = {
    "bash": (
        "Run a command in a bash session that stays open; restart: true begins a new session.",
        _object([], command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor": (
        "View, create and edit files.",
        _object(["command", "path"], command=_commands(*_EDIT), **_EDITS),
    ),
    "memory": (
        "View, create, edit, delete and rename files in /memories, which outlive the conversation.",
        _object(
            ["command"],
            command=_commands(*_EDIT, "delete", "rename"),
            **_EDITS,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}


def description(kind: str) -> dict[str, Any] | None:
    """Return the description and parameters for a tool's type; None if clients do not run such tools."""
    name, _, date = kind.rpartition("_")
    if not date.isdecimal() or name not in _KNOWN:
        return None
    text, parameters = _KNOWN[name]
    return {"description": text, "parameters": parameters}
