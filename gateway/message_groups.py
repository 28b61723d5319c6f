"""Divides new messages among several requests, if they do not fit in one. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from turnkeep_client.errors import MessageTooLargeError
from turnkeep_client.messages import encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from turnkeep_client.messages import Message

#: Room for a request's other fields beside messages and options: type, id and position.
_HEAD_BYTES: Final = 512


def groups_ahead(
    messages: Sequence[Message], options: Mapping[str, Any], max_bytes: int, header_bytes: int = 0
) -> list[Sequence[Message]]:
    """Return groups of messages, each to be sent in an append before the generate; empty if none is needed.

    A request has at most `max_bytes`, and the generate needs `header_bytes` of that for its header. The first
    append has the tools too. Raises `MessageTooLargeError` if a single message is too large.
    """
    sizes = [len(encode(message)) + 1 for message in messages]
    num_rest = _HEAD_BYTES + header_bytes + len(encode(dict(options)))
    if sum(sizes) + num_rest <= max_bytes:
        return []
    num_tools = _HEAD_BYTES + len(encode({"tools": options.get("tools")}))
    for number, (message, size) in enumerate(zip(messages, sizes, strict=True)):
        beside = num_rest if number == len(messages) - 1 else num_tools
        if size + beside > max_bytes:
            raise MessageTooLargeError(
                f"a message ({message.role}) has {size} bytes, {size + beside} with the options; the worker"
                f" takes at most {max_bytes} (max_message_bytes)"
            )
    return [messages[start:end] for start, end in _groups(sizes[:-1], max_bytes - num_tools)]


def _groups(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of consecutive groups whose total is at most `most`; a larger item is one group."""
    start = total = 0
    for at, size in enumerate(sizes):
        if at > start and total + size > most:
            yield start, at
            start, total = at, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)
