"""Computes a conversation's boundaries: after each message, a digest of the conversation up to there.

Two conversations share a boundary if, and only if, the model would see the same prompt up to that message,
and results of parallel calls came in the same order. The digests leave out what clients change when they send
a conversation again: the division of content into parts, spacing, order and whole numbers in a call's
arguments, ids of calls, and all reasoning. Recent boundaries are remembered, to find where a new one differs.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

from turnkeep_client.messages import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from turnkeep_client.messages import Called, Generated, Message, ToolCall

log = logging.getLogger(__name__)

#: Options of a generate request that change its rendered prompt; and whether the session has no KV on disk,
#: since a session that does cannot continue one that does not.
_RENDERED: Final = ("tools", "chat_template_kwargs", "special_tokens", "snapshots")

_ENCODER: Final = msgspec.json.Encoder(order="deterministic")


def _number(written: str) -> float:
    """Return 2 for 2.0, as JavaScript writes it. Raises `OverflowError` for infinity."""
    number = float(written)
    whole = int(number)
    return whole if whole == number else number


_ARGUMENTS: Final = msgspec.json.Decoder(float_hook=_number)


def chain(messages: Sequence[Message], options: Mapping[str, Any]) -> list[bytes]:
    """Return a digest of the options that change the prompt, then one chained digest for each message."""
    found, calls = [_digest(b"chat", _rendered(options))], dict[str | None, int]()
    for message in messages:
        said, given = message.content or "", message.tool_calls or ()
        role = "system" if message.role == "developer" else message.role  # two names, one meaning
        item: list[Any] = [role, said, message.name, _calls(given)]
        if message.role == "tool":
            # Which call the result answers: clients may change its id, but not its place.
            item.append(calls.get(message.tool_call_id, message.tool_call_id))
        elif given:
            calls = {given[at].id: at for at in reversed(range(len(given)))}
        found.append(_digest(found[-1], item))
    return found


def prompt_of(prompt: str | Sequence[int], options: Mapping[str, Any]) -> bytes:
    """Return the digest of a prompt that is a text or token ids, not a conversation."""
    return _digest(b"text", [prompt, _rendered(options)])


def after_answer(prompt: bytes, result: Generated, prefix: str = "") -> set[bytes]:
    """Return the possible digests of a conversation after an answer; `prompt` is the digest before it.

    `prefix` is the beginning that the client gave, which `result` lacks. An answer with white space at its
    ends has two digests, since many clients strip the white space.
    """
    calls, said = _calls(result.tool_calls), prefix + result.text
    return {_digest(prompt, ["assistant", text, None, calls]) for text in (said, said.strip())}


def options_digest(options: Mapping[str, Any], number: int) -> bytes:
    """Return a digest of the options and of the answer's `number` among several, but not of the prompt."""
    biases = sorted(options.get("logit_bias", {}).items())
    return _digest(b"options", [{**options, "logit_bias": biases}, number])[:8]


def _rendered(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _RENDERED if options.get(name)}


def _calls(calls: Iterable[ToolCall | Called]) -> list[Any]:
    return [[call.function.name, _arguments(call.function.arguments)] for call in calls]


def _arguments(text: str) -> list[Any]:
    try:
        return ["json", _ARGUMENTS.decode(text)]
    except (msgspec.DecodeError, UnicodeError, RecursionError, OverflowError):
        return ["text", text]


def _digest(before: bytes, item: Any) -> bytes:
    try:
        body = _ENCODER.encode(item)
    except (ValueError, RecursionError):
        body = encode(item)  # raises an error that says what is wrong
    return blake2b(before + body, digest_size=16).digest()


#: Boundaries of one generation, some 90 bytes each; two generations are kept.
_MOST: Final = 10_000


class RecentBoundaries:
    """The boundaries of recent conversations: digests of a conversation up to each of its messages.

    They are kept in two generations; the older one is dropped as a whole.
    """

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def difference(self, told: Sequence[Message], known: Sequence[bytes], num_known: int) -> str | None:
        """Remember the boundaries `known` of a conversation `told`; a session has `num_known` messages of it.

        If its last answer is not among these, log that, and return the first part that differs from all
        remembered conversations: `tools`, or a message. Return None if no part does.
        """
        differs = None
        num_seen = self._add(known) - 1
        num_old = max((at for at, one in enumerate(told, 1) if one.role == "assistant"), default=0)
        if num_known >= num_old:
            return None
        if num_seen < 0:
            differs = "tools"
        elif num_seen < num_old:
            first, content = told[num_seen], told[num_seen].content or ""
            unit = "characters" if isinstance(content, str) else "parts"
            differs = f"messages[{num_seen}] ({first.role}, {len(content)} {unit})"
        why = f"{differs} differs from all known" if differs else "no session has the others"
        log.info("%d of a conversation's %d messages were found: %s", num_known, len(told), why)
        return differs

    def _add(self, known: Sequence[bytes]) -> int:
        """Add a conversation's boundaries; return how many of them, from the first on, were known before."""
        num = len(known)
        while num and known[num - 1] not in self._young and known[num - 1] not in self._old:
            num -= 1
        self._young.update(known[max(0, num - 1) :])
        if len(self._young) > _MOST:
            self._young, self._old = set(), self._young
        return num
