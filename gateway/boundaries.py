"""Names the boundaries of a conversation: a chain of digests, one after each message.

Pure. Two conversations have the same digest up to a message if, and only if, the model would be told the
same up to there. What clients change as they send a conversation again is left out: how a content is divided
into parts, the spacing and order of a call's arguments, ids of calls, and all reasoning.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from turnkeep_client.messages import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from turnkeep_client.messages import Called, Generated, Message, ToolCall

#: Options of a generate that belong to the prompt.
_RENDERED: Final = ("tools", "chat_template_kwargs", "special_tokens")

_ENCODER: Final = msgspec.json.Encoder(order="deterministic")


def chain(messages: Sequence[Message], options: Mapping[str, Any]) -> list[bytes]:
    """Return the digest of the conversation's beginning, then one after each message."""
    found, calls = [_digest(b"chat", _rendered(options))], list[str]()
    for message in messages:
        text, given = message.content or "", message.tool_calls or ()
        role = "system" if message.role == "developer" else message.role  # two names, one meaning
        item: list[Any] = [role, text, message.name, _calls(given)]
        if message.role == "tool":
            item.append(_place(message.tool_call_id, calls))
        elif given:
            calls = [call.id for call in given]
        found.append(_digest(found[-1], item))
    return found


def prompt_of(prompt: str | Sequence[int], options: Mapping[str, Any]) -> bytes:
    """Return the digest of a prompt that is no conversation: of a text, or of tokens."""
    return _digest(b"text", [prompt, _rendered(options)])


def answered(prompt: bytes, result: Generated, prefix: str = "") -> set[bytes]:
    """Return the digests that the conversation may have after an answer to `prompt` that began with `prefix`.

    Two, if the text begins or ends with white space: many clients remove it.
    """
    calls, said = _calls(result.tool_calls), prefix + result.text
    return {_digest(prompt, ["assistant", text, None, calls]) for text in (said, said.strip())}


def options_digest(options: Mapping[str, Any], number: int) -> bytes:
    """Name what decides on an answer beside its prompt; `number` is that of the answer among several."""
    biases = sorted(options.get("logit_bias", {}).items())
    return _digest(b"options", [{**options, "logit_bias": biases}, number])[:8]


def _rendered(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _RENDERED if options.get(name)}


def _calls(calls: Iterable[ToolCall | Called]) -> list[Any]:
    return [[call.function.name, _arguments(call.function.arguments)] for call in calls]


def _arguments(text: str) -> list[Any]:
    try:
        return ["json", msgspec.json.decode(text)]
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ["text", text]


def _place(call_id: str | None, calls: Sequence[str]) -> int | str | None:
    """Return which of the last calls is answered: ids may differ, but not what they refer to."""
    return calls.index(call_id) if call_id in calls else call_id


def _digest(before: bytes, item: Any) -> bytes:
    try:
        body = _ENCODER.encode(item)
    except (ValueError, RecursionError):
        body = encode(item)  # raises an error with a sentence
    return blake2b(before + body, digest_size=16).digest()
