"""Writes grammars that make an answer call a tool, or let it call tools only in a valid form. Pure.

The grammars are in llguidance's variant of Lark. Arguments in JSON follow the tool's schema; in other formats
the grammar constrains only the beginning of a call, not its arguments.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from .grammar import guided
from .harmony import FINAL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from worker.models.answer_markup import AnswerMarkup

#: Text in angle or square brackets, which may be a control token within a call.
_MARKER: Final = re.compile(r"(<[^<>]*>|\[[^\[\]]*\])")


def calls_grammar(
    markup: AnswerMarkup,
    tools: Sequence[Mapping[str, Any]],
    token_of: Callable[[str], int | None],
    *,
    answer: str | None,
    several: bool,
) -> str:
    """Return a grammar for answers that call `tools`.

    `token_of` returns a marker's id if it is a control token, which grammars match by id only; else None.
    `answer` is the grammar rule of an answer without calls, or the word `text`, which allows any text around
    calls; with None the answer must call a tool. With `several`, an answer may have more than one call.
    """
    opens, closes = markup.calls
    before, after = markup.form
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
    if markup.is_harmony:
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
    """Write a JSON schema as a grammar rule; `is_lenient` ignores keywords that cannot be enforced."""
    return f"%json {json.dumps(guided(schema, lenient=is_lenient), ensure_ascii=False)}"


def _text(text: str, token_of: Callable[[str], int | None]) -> str:
    """Write a text, perhaps empty, as a grammar rule: control tokens by their ids, the rest as strings."""
    parts = []
    for part in filter(None, _MARKER.split(text)):
        token = token_of(part)
        parts.append(json.dumps(part) if token is None else f"<[{token}]>")
    return " ".join(parts)


def _messages(opens: str, answer: str | None, token_of: Callable[[str], int | None]) -> list[str]:
    """Write the rules of a harmony answer after its reasoning: either one call, or text."""
    start = f"start: ({_text('<|start|>assistant', token_of)})? ({_text(opens, token_of)} call"
    if answer is None:
        return [f"{start})"]
    said = "/(?s:.*)/" if answer == "text" else answer
    return [f"{start} | {_text(FINAL, token_of)} answer)", f"answer: {said}"]


def _within_text(opens: str, token_of: Callable[[str], int | None]) -> list[str]:
    """Write two rules: `next` is text up to and including a call's marker, `TEXT` is text without it."""
    if token_of(opens) is not None:
        return ["TEXT: /(?s:.)+/", f"next: TEXT? {_text(opens, token_of)}"]
    # One lexeme includes the marker: a separate lexeme for the text would consume the marker's beginning.
    escaped = "".join(f"\\{char}" if char in "\\/.^$|?*+()[]{}" else char for char in opens)
    text = f"TEXT: /(?s:.)+/ & ~/(?s:.*){escaped}(?s:.*)/"
    return [text, f"next[suffix={json.dumps(opens)}]: /(?s:.*)/"]
