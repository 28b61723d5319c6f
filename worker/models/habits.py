"""Finds out what a chat template does with each kind of message, by rendering short conversations. Pure.

Many templates leave out messages of a role that they do not know, without a word, or refuse them. `Tokenizer`
asks once, and gives the template only what it renders.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from .dialect import with_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    #: Renders messages, with tools; raises any error.
    Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str]


@dataclass(frozen=True, slots=True)
class Habits:
    """Which kinds of message a template renders: without refusing them, and with all of their text.

    Contents are `plain` text, else lists of parts. `tools_alone` says that tools may stand beside a system
    message alone. `developer` needs a template that names this role, as models know no other. Calls may have
    their arguments as `objects`, or as any `texts`. A message may have `several_calls`, or `text_with_calls`.
    With `any_ids` calls may have these, and results none. `results` of tools are `results_alone` behind an
    answer whose call is only in its text. `joined` has pairs of roles that may not follow each other: their
    texts are joined.
    """

    plain: bool = True
    system: bool = True
    system_alone: bool = True
    tools_alone: bool = True
    late_system: bool = True
    developer: bool = True
    objects: bool = True
    texts: bool = True
    several_calls: bool = True
    text_with_calls: bool = True
    any_ids: bool = True
    results: bool = True
    results_alone: bool = True
    answer_first: bool = True
    empty: bool = True
    joined: frozenset[tuple[str, str]] = frozenset()

    @property
    def calls(self) -> bool:
        """Whether the template renders tool calls."""
        return self.objects or self.texts

    def in_words(self) -> list[str]:
        """Say what is done for a template that does not render each kind of message as it is."""
        said = [words for field, words in INSTEAD.items() if not getattr(self, field)]
        if self.texts and not self.objects:
            said.append("arguments of calls as text")
        return said + [joined_in_words(*pair) for pair in sorted(self.joined)]


def joined_in_words(before: str, after: str) -> str:
    """Say that messages of these roles are joined."""
    return f"{before} and {after} in a row joined"


#: What is done instead of what a template does not render.
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
    "results_alone": "tool results as user messages, unless they follow calls of the same request",
    "answer_first": "an empty user message before a first answer",
    "empty": "empty messages refused",
}


def habits_of(render: Render, source: str, *, renders_tools: bool) -> Habits:
    """Ask a template, whose text is `source`; what renders no plain conversation at all is not asked."""

    def shows(*messages: dict[str, Any], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        try:
            said = render(messages, tools)
        except Exception:  # noqa: BLE001  # a template is foreign code that can raise anything
            return False
        at = 0
        for text in (text for message in messages for text in _texts(message)):
            at = said.find(text, at) + 1
            if not at:
                return False
        return "'key'" not in said  # what Python writes, in place of JSON

    asked, answered = _said("user", "1"), _said("assistant", "2")
    if shows(asked):
        if not shows(asked, answered, _said("user", "3")):
            return Habits()
    elif not shows(*in_parts([asked, answered])):
        return Habits()
    else:
        found = habits_of(
            lambda told, tools: render(in_parts(told), tools), source, renders_tools=renders_tools
        )
        return replace(found, plain=False)

    def takes(call: dict[str, Any]) -> bool:
        return shows(asked, _calling(call), _said("tool", "8", call["id"]))

    system, developer = _said("system", "4"), _said("developer", "5")
    one, other = _call("abcdefgh1", {"key": "probe-6"}), _call("abcdefgh2", {"key": "probe-7"})
    called = _calling(one)
    objects = renders_tools and shows(asked, called)
    texts = renders_tools and shows(asked, _calling(_call("abcdefgh1", "probe-6 (")))
    written = _call("abcdefgh1", '{"key": "probe-6"}'), _call("abcdefgh2", '{"key": "probe-7"}')
    calls = (one, other) if objects else written
    if not (knows := objects or texts):
        called, several = with_calls(_calling(written[0])), with_calls(_calling(*written))
    else:
        called, several = _calling(calls[0]), _calling(*calls)
    several_calls = shows(asked, several)
    free = [_call(name, calls[0]["function"]["arguments"]) for name in ("a", "call_0123456789abcdef")]
    result, second = _said("tool", "8", one["id"]), _said("tool", "9", other["id"])
    says, asks = _said("assistant", "9"), _said("user", "9")
    # Some templates want the reasoning of a last answer, and of no earlier one.
    results = any(shows(asked, called, result, *rest) for rest in ([says], [says, asks]))
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {
        ("user", "user"): [asked, asks],
        ("assistant", "assistant"): [asked, answered, _said("assistant", "3"), asks],
        ("tool", "tool"): [asked, several if several_calls else called, result, second],
        ("user", "tool"): [asked, result],
        ("tool", "user"): [asked, called, result, asks],
    }
    return Habits(
        system=shows(system, asked),
        system_alone=shows(system) or not shows(system, asked),
        tools_alone=not renders_tools or not shows(system) or shows(system, tools=[_TOOL]),
        late_system=shows(asked, answered, system, _said("user", "5")),
        developer=re.search(r"\bdeveloper\b", source) is not None
        and shows(developer, asked)
        and shows(asked, answered, developer, _said("user", "6")),
        objects=objects,
        texts=texts,
        several_calls=several_calls,
        text_with_calls=not knows or shows(asked, {**called, **_said("assistant", "5")}),
        any_ids=not (knows and results)
        or (shows(asked, called, _said("tool", "8")) and all(map(takes, free))),
        results=results,
        results_alone=not results or shows(asked, answered, result, says),
        answer_first=shows(answered, _said("user", "3")),
        empty=shows(_said("user", None)) and shows(asked, _said("assistant", None), _said("user", "3")),
        joined=frozenset(
            pair for pair, row in rows.items() if ("tool" not in pair or results) and not shows(*row)
        ),
    )


def in_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with lists of parts as contents."""
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


def _call(call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": arguments}}


def _calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def _texts(message: dict[str, Any]) -> list[str]:
    """List what a render of a message must have."""
    content = message["content"]
    found = [part["text"] for part in content] if isinstance(content, list) else [content] if content else []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        given = function["arguments"]
        found += [function["name"], *(given.values() if isinstance(given, dict) else [])]
        found += re.findall(r"probe-\d", given) if isinstance(given, str) else []
    return found
