"""Formats a session's conversation as a file: Markdown to read, or JSON in OpenAI's format. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from turnkeep_client.images import as_text

if TYPE_CHECKING:
    from turnkeep_client.history import History

_WHO: Final = {"user": "You", "assistant": "Model", "system": "System", "tool": "Result of a tool"}


def as_json(history: History) -> bytes:
    """Return a conversation's messages as JSON, in the format of OpenAI's requests."""
    return msgspec.json.format(msgspec.json.encode(history.messages)) + b"\n"


def as_markdown(name: str, history: History) -> str:
    """Return a conversation as Markdown, with a heading for each message, and tool calls as JSON."""
    parts = [f"# {name}\n"]
    if not history.is_whole:
        parts.append("(The beginning is no longer in the log.)\n")
    for message in history.messages:
        parts.append(f"## {_WHO.get(message.role, message.role)}\n")
        parts += [f"{as_text(message.content)}\n"] if message.content else []
        calls = [msgspec.json.encode(call.function).decode() for call in message.tool_calls or ()]
        parts += [f"```json\n{call}\n```\n" for call in calls]
    return "\n".join(parts)
