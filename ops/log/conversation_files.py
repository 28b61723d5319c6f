"""Formats a session's conversation as a file: Markdown to read, or JSON in OpenAI's format. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from turnkeep_client.images import data_url, images_in, media_type, text_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from turnkeep_client.history import History

_WHO: Final = {"user": "You", "assistant": "Model", "system": "System", "tool": "Result of a tool"}


def as_json(history: History, images: Mapping[str, bytes]) -> bytes:
    """Return a conversation's messages as JSON, in the format of OpenAI's requests.

    `images` has the files of all its images by their digests.
    """
    said = msgspec.to_builtins(history.messages)
    for message in said:
        if isinstance(message.get("content"), list | tuple):
            message["content"] = [_in_openais_form(part, images) for part in message["content"]]
    return msgspec.json.format(msgspec.json.encode(said)) + b"\n"


def _in_openais_form(part: dict[str, Any], images: Mapping[str, bytes]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    return {"type": "image_url", "image_url": {"url": data_url(images[part["digest"]])}}


def image_files(folder: str, images: Mapping[str, bytes]) -> dict[str, str]:
    """Return a path in `folder` for each image, by its digest."""
    return {
        digest: f"{folder}/{digest[:16]}.{media_type(data).rpartition('/')[2]}"
        for digest, data in images.items()
    }


def as_markdown(name: str, history: History, files: Mapping[str, str]) -> str:
    """Return a conversation as Markdown, with a heading for each message, and tool calls as JSON.

    `files` has the paths of its images by their digests.
    """
    parts = [f"# {name}\n"]
    if not history.is_whole:
        parts.append("(The beginning is no longer in the log.)\n")
    for message in history.messages:
        parts.append(f"## {_WHO.get(message.role, message.role)}\n")
        parts += [f"![]({files[digest]})\n" for digest in images_in(message.content)]
        parts += [f"{text}\n"] if (text := text_in(message.content)) else []
        calls = [msgspec.json.encode(call.function).decode() for call in message.tool_calls or ()]
        parts += [f"```json\n{call}\n```\n" for call in calls]
    return "\n".join(parts)
