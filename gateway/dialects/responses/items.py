"""Converts the items of `/v1/responses` to messages, and messages to items. Pure."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from gateway.images import joined
from gateway.turn import Fault, number_in, refused
from turnkeep_client.content_blocks import other_text
from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.images import data_url
from turnkeep_client.messages import Function, Message, ToolCall, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.images import Reading
    from gateway.logged_answers import LoggedAnswer

_ROLES: Final = ("system", "developer", "user", "assistant")
_NUM_ITEMS, _MOST_ITEMS = 20, 100
_SEAL: Final = "turnkeep1:"
_SUMMARY: Final = "Your own summary of our conversation before my next message:\n\n"
_LOST: Final = "[image: the summary has no copy of it]"
#: Items that are left out: reasoning of models, searches without their results, and lists of tools.
_SILENT: Final = ("reasoning", "web_search_call", "file_search_call", "mcp_list_tools")


class Item(Struct, frozen=True):
    """One item of any type; each type uses some of the fields."""

    type: str | None = "message"
    role: str = ""
    content: Any = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    action: Any = None
    output: Any = None
    encrypted_content: Any = None


def messages(items: Sequence[Item], known: Mapping[str, dict[str, Any]], reading: Reading) -> list[Message]:
    """Convert items to messages; `known` has, by id, the items that an `item_reference` may name.

    Text and calls of the assistant that follow each other become one message. Each content that is not text
    adds a warning to `reading`. Raises `Fault`.
    """
    found: list[list[Message]] = []  # the messages of each turn
    for number, given in enumerate(items):
        where, item = f"input[{number}]", given
        if item.type == "item_reference" and (named := known.get(item.id or "")):
            item = msgspec.convert(named, Item)
        if item.type in _SILENT:
            continue
        try:
            one = _message(item, where, reading)
        except (ValueError, InvalidMessageError) as error:
            raise refused(str(error), where) from None
        last = found[-1] if found and one.role == found[-1][0].role == "assistant" else []
        if len(last) > 1 or (last and (one.tool_calls or last[0].tool_calls)):
            last.append(one)
        else:
            found.append([one])
    return [_joined(said) for said in found]


def called_name(namespace: str | None, name: str) -> str:
    """Return a function's name for the model: `namespace__name`, or `name` if it has no namespace."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _joined(said: Sequence[Message]) -> Message:
    if len(said) == 1:
        return said[0]
    told = joined(one.content or "" for one in said)
    calls = tuple(call for one in said for call in one.tool_calls or ())
    return Message("assistant", told or None, None, calls)


def _message(item: Item, where: str, reading: Reading) -> Message:
    match item.type:
        case "message" | None:
            if item.role not in _ROLES:
                raise refused(f"the role {item.role!r} is not one of {', '.join(_ROLES)}", f"{where}.role")
            told = reading.content(item.content, f"{where}.content")
            return Message(item.role, told)  # type: ignore[arg-type]
        case "function_call":
            return _call(item, item.name or "", item.arguments or "{}")
        case "custom_tool_call":
            return _call(item, item.name or "", {"input": item.input})
        case "local_shell_call":
            return _call(item, "local_shell", item.action)
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            told = reading.content(item.output or "", f"{where}.output")
            return Message("tool", told, None, (), item.call_id or item.id)
        case "item_reference":
            raise Fault(404, f"Item with id '{item.id}' not found.", param=f"{where}.id")
        case "compaction" if (summary := _opened(item.encrypted_content)) is not None:
            return Message("user", f"{_SUMMARY}{summary}")
    given = {"content": item.content, "output": item.output}
    text = other_text(given, item.type, where, reading.warnings)
    return Message("assistant" if item.type.endswith("_call") else "user", text)


def _call(item: Item, name: str, arguments: Any) -> Message:
    text = arguments if isinstance(arguments, str) else encode(arguments).decode()
    call = ToolCall(
        id=item.call_id or item.id or "call", function=Function(called_name(item.namespace, name), text)
    )
    return Message("assistant", None, None, (call,))


def sealed(summary: str) -> str:
    """Encode a conversation's summary as the opaque `encrypted_content` that clients send back."""
    return f"{_SEAL}{b64encode(summary.encode()).decode()}"


def _opened(given: Any) -> str | None:
    """Decode a summary that `sealed` encoded; None if another server wrote it."""
    if not isinstance(given, str) or not given.startswith(_SEAL):
        return None
    try:
        return b64decode(given.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        return None


def page(answer: LoggedAnswer, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the conversation's items before an answer, the latest first.

    `query` can have `order` (`asc`: the earliest first), `limit` (20), and `after`, the id of the item before
    the page. Raises `Fault` for an invalid limit.
    """
    begun = int(bool(answer.turn.asked.get("instructions")))
    said = (answer.turn.messages or ())[begun:]
    found = [item for number, one in enumerate(said) for item in items_of(one, f"{answer.id}_{number}")]
    if query.get("order", "desc") != "asc":
        found.reverse()
    limit = number_in(query, "limit")
    limit = _NUM_ITEMS if limit is None else limit
    if not 1 <= limit <= _MOST_ITEMS:
        raise refused(f"limit must be 1 to {_MOST_ITEMS}", "limit")
    ids = [item["id"] for item in found]
    first = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
    shown = found[first : first + limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    return {"object": "list", "data": shown, "has_more": first + len(shown) < len(found), **ends}


def items_of(said: Message, key: str, images: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Convert a message to items, with ids made from `key`.

    `images` has files by their digests; a text replaces images that it lacks. Without `images`, an image has
    its digest as `file_id`.
    """
    if said.role == "tool":
        told = said.content or ""
        output: dict[str, Any] = {
            "call_id": said.tool_call_id or "",
            "output": told if isinstance(told, str) else [_part(one, "input_text", images) for one in told],
        }
        return [{"id": f"fco_{key}", "type": "function_call_output", **output, "status": "completed"}]
    kind = "output_text" if said.role == "assistant" else "input_text"
    parts = [{"type": "text", "text": said.content}] if isinstance(said.content, str) else said.content or ()
    content = [_part(one, kind, images) for one in parts]
    message = {"id": f"in_{key}", "type": "message", "role": said.role, "status": "completed"}
    calls = [
        {
            "id": f"in_{key}_{number}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.function.name,
            "arguments": call.function.arguments,
            "status": "completed",
        }
        for number, call in enumerate(said.tool_calls or ())
    ]
    return [*([{**message, "content": content}] if said.content else []), *calls]


def _part(part: Mapping[str, Any], kind: str, images: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert a part of a content; an image that `images` lacks becomes a text."""
    image: dict[str, Any] = {"type": "input_image", "detail": "auto"}
    if part["type"] == "image" and images is None:
        return {**image, "file_id": part["digest"]}
    if part["type"] == "image" and isinstance(file := (images or {}).get(part["digest"]), bytes):
        return {**image, "image_url": data_url(file)}
    text = {"type": kind, "text": part.get("text", _LOST)}
    return {**text, "annotations": []} if kind == "output_text" else text
