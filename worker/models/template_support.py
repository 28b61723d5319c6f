"""Finds out which kinds of messages a chat template renders, by rendering short conversations. Pure.

Many templates silently drop messages of roles that they do not know, or refuse them. `Tokenizer` tests its
template once, and then passes only messages that the template renders.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .answer_markup import with_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    #: Renders messages (first) and tools (second); raises any error.
    Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]


class TemplateError(Exception):
    """The chat template refuses these messages; the error's text contains the template's own error."""


@dataclass(frozen=True, slots=True)
class TemplateSupport:
    """Whether a chat template renders each kind of messages: without an error, and with all of their text.

    For what `Tokenizer` does with messages of the other kinds see `INSTEAD`.
    """

    #: Contents that are text; if False, contents must be lists of parts.
    plain: bool = True
    #: A system message before the user's first message.
    system: bool = True
    #: A system message and no other message.
    system_alone: bool = True
    #: A system message and no other message, in a conversation with tools.
    tools_alone: bool = True
    #: A system message after other messages.
    late_system: bool = True
    #: Messages of the role developer; False also if the template's source does not name the role.
    developer: bool = True
    #: Calls whose arguments are objects.
    objects: bool = True
    #: Calls whose arguments are text, JSON or not.
    texts: bool = True
    #: Messages with more than one call.
    several_calls: bool = True
    #: Messages with both text and calls.
    text_with_calls: bool = True
    #: Any call ids, and results of tools without an id.
    any_ids: bool = True
    #: Results of tools, as messages of the role tool.
    results: bool = True
    #: Results of tools after an answer whose call is only in its text.
    results_alone: bool = True
    #: An answer as the first message, whether or not a user's message follows.
    answer_first: bool = True
    #: Messages without text.
    empty: bool = True
    #: Pairs of roles whose messages are not rendered in a row; `Tokenizer` joins the texts of such messages.
    joined: frozenset[tuple[str, str]] = frozenset()

    @property
    def calls(self) -> bool:
        """Whether the template renders tool calls, with arguments in at least one of the two forms."""
        return self.objects or self.texts

    def in_words(self) -> list[str]:
        """List, as phrases, how `Tokenizer` changes messages of kinds that the template does not render."""
        said = [words for field, words in INSTEAD.items() if not getattr(self, field)]
        if self.texts and not self.objects:
            said.append("arguments of calls as text")
        return said + [joined_in_words(*pair) for pair in sorted(self.joined)]


def joined_in_words(before: str, after: str) -> str:
    """Return the phrase for two joined messages, given their roles."""
    return f"{before} and {after} in a row joined"


#: The change, as a phrase, to a kind of message that a template does not render.
INSTEAD: Final = {
    "plain": "contents as lists of parts",
    "system": "system at the head of the first user message",
    "system_alone": "an empty user message after a system message alone",
    "tools_alone": "an empty user message after a system message alone, if there are tools",
    "late_system": "late system within user messages",
    "developer": "developer as system",
    "calls": "calls as text",
    "several_calls": "several calls of a message as text",
    "text_with_calls": "calls beside text as text",
    "any_ids": "ids of calls of nine characters",
    "results": "tool results as user messages",
    "results_alone": "tool results as user messages, unless they follow calls that it renders",
    "answer_first": "an empty user message before a first answer",
    "empty": "empty messages refused",
}


def support_of(render: Render, source: str, *, renders_tools: bool) -> TemplateSupport:
    """Test a template with the text `source`, by `render(messages, tools)`, which may raise anything.

    If it renders no plain conversation, return `TemplateSupport()`: all kinds of messages pass unchanged.
    """
    shows = partial(_shows, render)
    if shows(_ASKED):
        if not shows(_ASKED, _ANSWERED, _said("user", "3")):
            return TemplateSupport()
    elif not shows(*in_parts([_ASKED, _ANSWERED])):
        return TemplateSupport()
    else:
        found = support_of(
            lambda told, tools: render(in_parts(told), tools), source, renders_tools=renders_tools
        )
        return replace(found, plain=False)
    system, developer = _said("system", "4"), _said("developer", "5")
    calls = _calls_of(shows, renders_tools=renders_tools)
    called, result, says = calls.called, _said("tool", "8", calls.both[0]["id"]), _said("assistant", "9")
    # Some templates require reasoning in the last answer only: also try one that is not the last.
    results = any(shows(_ASKED, called, result, *rest) for rest in ([says], [says, _ASKS]))
    several_calls = shows(_ASKED, calls.several)
    return TemplateSupport(
        system=shows(system, _ASKED),
        system_alone=shows(system) or not shows(system, _ASKED),
        tools_alone=not renders_tools or not shows(system) or shows(system, tools=[_TOOL]),
        late_system=shows(_ASKED, _ANSWERED, system, _said("user", "5")),
        developer=re.search(r"\bdeveloper\b", source) is not None
        and shows(developer, _ASKED)
        and shows(_ASKED, _ANSWERED, developer, _said("user", "6")),
        objects=calls.objects,
        texts=calls.texts,
        several_calls=several_calls,
        text_with_calls=not calls.known or shows(_ASKED, {**called, **_said("assistant", "5")}),
        any_ids=not (calls.known and results) or _takes_any_ids(shows, calls),
        results=results,
        results_alone=not results or shows(_ASKED, _ANSWERED, result, says),
        answer_first=shows(_ANSWERED) and shows(_ANSWERED, _said("user", "3")),
        empty=shows(_said("user", None)) and shows(_ASKED, _said("assistant", None), _said("user", "3")),
        joined=_joined(shows, calls, results=results, several_calls=several_calls),
    )


def _shows(render: Render, *messages: dict[str, Any], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
    """Return whether a template renders messages with all of their texts, in order."""
    try:
        said = render(deepcopy(messages), tools)  # a template may change them
    except Exception:  # noqa: BLE001  # a template is foreign code that can raise anything
        return False
    at = 0
    for text in (text for message in messages for text in _texts(message)):
        at = said.find(text, at) + 1
        if not at:
            return False
    return "'key'" not in said  # a Python repr instead of JSON


class _Calls(NamedTuple):
    """Whether a template renders arguments as `objects`, and as `texts`; `both` are two calls for tests."""

    objects: bool
    texts: bool
    both: tuple[dict[str, Any], dict[str, Any]]

    @property
    def known(self) -> bool:
        return self.objects or self.texts

    @property
    def called(self) -> dict[str, Any]:
        return self._message(self.both[0])

    @property
    def several(self) -> dict[str, Any]:
        return self._message(*self.both)

    def _message(self, *calls: dict[str, Any]) -> dict[str, Any]:
        return _calling(*calls) if self.known else with_calls(_calling(*calls))


def _calls_of(shows: Callable[..., bool], *, renders_tools: bool) -> _Calls:
    one, other = _call("abcdefgh1", {"key": "probe-6"}), _call("abcdefgh2", {"key": "probe-7"})
    written = _call("abcdefgh1", '{"key": "probe-6"}'), _call("abcdefgh2", '{"key": "probe-7"}')
    objects = renders_tools and shows(_ASKED, _calling(one))
    texts = renders_tools and shows(_ASKED, _calling(_call("abcdefgh1", "probe-6 (")))
    return _Calls(objects, texts, (one, other) if objects else written)


def _takes_any_ids(shows: Callable[..., bool], calls: _Calls) -> bool:
    arguments = calls.both[0]["function"]["arguments"]
    free = [_call(name, arguments) for name in ("a", "call_0123456789abcdef")]
    return shows(_ASKED, calls.called, _said("tool", "8")) and all(
        shows(_ASKED, _calling(call), _said("tool", "8", call["id"])) for call in free
    )


def _joined(
    shows: Callable[..., bool], calls: _Calls, *, results: bool, several_calls: bool
) -> frozenset[tuple[str, str]]:
    result, second = (_said("tool", number, one["id"]) for number, one in zip("89", calls.both, strict=True))
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {
        ("user", "user"): [_ASKED, _ASKS],
        ("assistant", "assistant"): [_ASKED, _ANSWERED, _said("assistant", "3"), _ASKS],
        ("tool", "tool"): [_ASKED, calls.several if several_calls else calls.called, result, second],
        ("user", "tool"): [_ASKED, result],
        ("tool", "user"): [_ASKED, calls.called, result, _ASKS],
    }
    return frozenset(
        pair for pair, row in rows.items() if ("tool" not in pair or results) and not shows(*row)
    )


def in_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts instead of text."""
    return [
        {**one, "content": [{"type": "text", "text": one["content"]}]}
        if isinstance(one.get("content"), str)
        else {**one}
        for one in messages
    ]


_PARAMETERS: Final = {
    "type": "object",
    "properties": {"key": {"type": "string", "description": "a key"}},
    "required": ["key"],
}
_TOOL: Final = {
    "type": "function",
    "function": {"name": "probe", "description": "probes", "parameters": _PARAMETERS},
}


def _said(role: str, number: str | None, call_id: str | None = None) -> dict[str, Any]:
    of_call = {"tool_call_id": call_id} if call_id else {}
    return {"role": role, "content": "" if number is None else f"probe-{number}", **of_call}


_ASKED: Final = _said("user", "1")
_ANSWERED: Final = _said("assistant", "2")
_ASKS: Final = _said("user", "9")


def _call(call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": arguments}}


def _calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def _texts(message: dict[str, Any]) -> list[str]:
    """List the texts that the rendering of a message must contain."""
    content = message["content"]
    found = [part["text"] for part in content] if isinstance(content, list) else [content] if content else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        given = function["arguments"]
        found += [function["name"], *(given.values() if isinstance(given, dict) else [])]
        found += re.findall(r"probe-\d", given) if isinstance(given, str) else []
    return found
