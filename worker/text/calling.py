"""Writes grammars of tool calls: what an answer may be that must call, or may call only as tools allow. Pure.

The grammars are in llguidance's variant of Lark. Arguments that a model writes as JSON follow the tool's
schema; those of other formats are free, but the call's beginning is not.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from .grammar import guided
from .harmony import FINAL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from worker.models.dialect import Dialect

#: What may be a control token within the text of a call.
_MARKER: Final = re.compile(r"(<[^<>]*>|\[[^\[\]]*\])")


def calls_grammar(
    dialect: Dialect,
    tools: Sequence[Mapping[str, Any]],
    token_of: Callable[[str], int | None],
    *,
    answer: str | None,
    several: bool,
) -> str:
    """Return a grammar whose answers are calls of `tools`.

    `token_of` returns the id of a marker that is a control token, which the text of an answer cannot spell.
    `answer` is the rule of an answer that calls nothing, or of the text around calls (`text`); None if the
    answer must call. With `several`, there may be more calls than one.
    """
    opens, closes = dialect.calls
    before, after = dialect.form
    lines = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        begin = before.replace("NAME", function["name"])
        rest = f"args_{number} {_text(after + closes, token_of)}" if after is not None else "/(?s:.*)/"
        lines.append(f"call_{number}: {_text(begin, token_of)} {rest}")
        if after is not None:
            schema = {"type": "object", **(function.get("parameters") or {})}
            lines.append(f"args_{number}: {json_rule(schema, is_lenient=not function.get('strict'))}")
    lines.append(f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}")
    if dialect.is_harmony:
        return "\n".join([*_messages(opens, answer, token_of), *lines])
    more = several and after is not None
    if answer == "text":
        lines += _within_text(opens, token_of)
        return "\n".join([f"start: (next call){'*' if more else '?'} TEXT?", *lines])
    opened = f"{_text(opens, token_of)} call"
    calls = f"/[ \\n]{{0,4}}/ {opened}" + (f' ("\\n"? {opened})*' if more else "")
    if answer is not None:
        lines.append(f"answer: {answer}")
        calls += " | answer"
    return "\n".join([f"start: {calls}", *lines])


def json_rule(schema: Mapping[str, Any], *, is_lenient: bool) -> str:
    """Write a JSON schema as a rule; `is_lenient` leaves out keywords that cannot be enforced."""
    return f"%json {json.dumps(guided(schema, lenient=is_lenient), ensure_ascii=False)}"


def _text(text: str, token_of: Callable[[str], int | None]) -> str:
    """Write text as a rule, perhaps empty: control tokens within it by their ids, the rest as strings."""
    parts = []
    for part in filter(None, _MARKER.split(text)):
        token = token_of(part)
        parts.append(json.dumps(part) if token is None else f"<[{token}]>")
    return " ".join(parts)


def _messages(opens: str, answer: str | None, token_of: Callable[[str], int | None]) -> list[str]:
    """Write the rules of an answer in harmony behind its reasoning: one call, which ends it, or its text."""
    start = f"start: ({_text('<|start|>assistant', token_of)})? ({_text(opens, token_of)} call"
    if answer is None:
        return [f"{start})"]
    said = "/(?s:.*)/" if answer == "text" else answer
    return [f"{start} | {_text(FINAL, token_of)} answer)", f"answer: {said}"]


def _within_text(opens: str, token_of: Callable[[str], int | None]) -> list[str]:
    """Write the rules of text before a call's marker with the marker (`next`), and of text without one."""
    if token_of(opens) is not None:
        return ["TEXT: /(?s:.)+/", f"next: TEXT? {_text(opens, token_of)}"]
    # A lexeme that ends with the marker: a longer one would have to give back what begins the marker.
    escaped = "".join(f"\\{char}" if char in "\\/.^$|?*+()[]{}" else char for char in opens)
    text = f"TEXT: /(?s:.)+/ & ~/(?s:.*){escaped}(?s:.*)/"
    return [text, f"next[suffix={json.dumps(opens)}]: /(?s:.*)/"]
