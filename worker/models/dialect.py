"""Finds out how a model writes reasoning and tool calls into its answers: markers, and a parser for calls.

The parsers are mlx-lm's where it has one for the model's family; those of Llama's and DeepSeek's calls are
here. All of them take whole calls; `worker.text.splitting` finds the calls while an answer grows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence
    from typing import TypeAlias

    #: Parses the text between the markers, given the request's tools; raises any error.
    Parser: TypeAlias = "Callable[[str, Sequence[Mapping[str, Any]]], list[ParsedCall]]"


class ParsedCall(NamedTuple):
    """One tool call of an answer. `arguments` is JSON as text; `id` is the model's own, mostly None."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model marks its reasoning and its tool calls.

    `reasoning` and `calls` are pairs of markers, the end of `calls` is empty if calls go on to the answer's
    end. With `is_json`, each call is one JSON object with `name` first, so that its arguments are known while
    they are written. With `is_bare`, an answer that begins like a JSON object is a call without a marker.
    With `is_harmony`, the text consists of messages with channels (OpenAI's harmony format).
    """

    reasoning: tuple[str, str] | None = None
    calls: tuple[str, str] | None = None
    parse: Parser | None = None
    is_json: bool = False
    is_bare: bool = False
    is_harmony: bool = False
    renders_tools: bool = False
    #: How a call is written between its markers, for grammars: with NAME before the arguments, then what
    #: follows them; None there if the arguments are not JSON.
    form: tuple[str, str | None] = ('\n{"name": "NAME", "arguments": ', "}\n")


#: Pairs of markers of reasoning, by what the vocabulary has.
_REASONING: Final = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
)
#: What in a chat template tells mlx-lm's parsers apart, the first that is there, and the call's form.
_PARSERS: Final[tuple[tuple[str, str, tuple[str, str | None]], ...]] = (
    ("<minimax:tool_call>", "minimax_m2", ('\n<invoke name="NAME">\n', None)),
    ("<|tool_call>", "gemma4", ("call:NAME{", None)),
    ("<start_function_call>", "function_gemma", ("call:NAME{", None)),
    ("<longcat_tool_call>", "longcat", ("NAME\n", None)),
    ("<arg_key>", "glm47", ("NAME\n", None)),
    ("<|tool_call_start|>", "pythonic", ("[NAME(", None)),
    ("<|tool_list_start|>", "pythonic", ("[NAME(", None)),
    ("<function=", "qwen3_coder", ("\n<function=NAME>\n", None)),
    (
        "<|tool_calls_section_begin|>",
        "kimi_k2",
        (
            "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    ('<function name="', "minicpm5", ("", None)),
    ("[ARGS]", "mistral", ("NAME[ARGS]", "")),
    ("[TOOL_CALLS]", "mistral", ('[{"name": "NAME", "arguments": ', "}]")),
    ("<atem:function_calls>", "muse_spark", ("", None)),
)


def _deepseek(name: str) -> str:
    """Return the special token of this name, with DeepSeek's wide bars and low lines."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


_DEEPSEEK: Final = (_deepseek("tool calls begin"), _deepseek("tool calls end"))
_DEEPSEEK_CALL: Final = re.compile(
    f"{_deepseek('tool call begin')}(.*?){_deepseek('tool sep')}(.*?){_deepseek('tool call end')}", re.DOTALL
)
_FENCED: Final = re.compile(r"\s*([^\n]+)\n```json\n(.*?)\n```\s*", re.DOTALL)
#: How models are asked to call whose template knows no tools: the format of Hermes and Qwen.
GENERIC: Final = ("<tool_call>", "</tool_call>")


def renders_tools(template: str) -> bool:
    """Say whether a chat template describes tools to the model."""
    return re.search(r"\btools\b", template) is not None


def reasons(vocabulary: Container[str]) -> bool:
    """Say whether a model has words to mark reasoning."""
    return _is_harmony(vocabulary) or _reasoning(vocabulary) is not None


def _is_harmony(vocabulary: Container[str]) -> bool:
    return "<|channel|>" in vocabulary and "<|message|>" in vocabulary


def _reasoning(vocabulary: Container[str]) -> tuple[str, str] | None:
    if "<|channel>" in vocabulary and "<channel|>" in vocabulary:
        return "<|channel>thought", "<channel|>"
    return next(
        ((begin, end) for begin, end in _REASONING if begin in vocabulary and end in vocabulary), None
    )


def dialect_of(template: str, vocabulary: Container[str]) -> Dialect:
    """Return the dialect of a model, by its chat template's source and its vocabulary."""
    if _is_harmony(vocabulary):
        return Dialect(
            calls=("<|channel|>commentary ", ""),
            is_harmony=True,
            renders_tools=renders_tools(template),
            form=("to=functions.NAME <|constrain|>json<|message|>", ""),
        )
    reasoning = _reasoning(vocabulary)
    if not renders_tools(template):
        return Dialect(reasoning, GENERIC, _parse_json, is_json=True)
    if _DEEPSEEK[0] in template:
        begin, sep, end = map(_deepseek, ("tool call begin", "tool sep", "tool call end"))
        fenced = (f"{begin}function{sep}NAME\n```json\n", f"\n```{end}")
        plain = (f"{begin}NAME{sep}", end)
        form = fenced if "```json" in template else plain
        return Dialect(reasoning, _DEEPSEEK, _parse_deepseek, renders_tools=True, form=form)
    for mark, name, of_family in _PARSERS:
        if mark in template:
            module = import_module(f"mlx_lm.tool_parsers.{name}")
            pair = (module.tool_call_start, module.tool_call_end)
            return Dialect(
                reasoning, pair, _Foreign(module.parse_tool_call), renders_tools=True, form=of_family
            )
    if "<|python_tag|>" in vocabulary:
        return Dialect(
            reasoning,
            ("<|python_tag|>", ""),
            _parse_llama,
            is_bare=True,
            renders_tools=True,
            form=('{"name": "NAME", "parameters": ', "}"),
        )
    return Dialect(reasoning, GENERIC, _parse_json, is_json=True, renders_tools=True)


class _Foreign:
    """A parser of mlx-lm, whose calls have their arguments as objects."""

    def __init__(self, parse: Callable[..., Any]) -> None:
        self._parse = parse

    def __call__(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[ParsedCall]:
        found = self._parse(text, list(tools))
        return [_checked(call) for call in (found if isinstance(found, list) else [found])]


def _parse_json(text: str, _tools: Sequence[Mapping[str, Any]] = ()) -> list[ParsedCall]:
    """Parse one JSON object with `name` and `arguments`. Raises `ValueError`."""
    return [_checked(json.loads(text))]


def _parse_llama(text: str, _tools: Sequence[Mapping[str, Any]]) -> list[ParsedCall]:
    """Parse JSON objects, which may be separated by semicolons."""
    decoder, calls, at = json.JSONDecoder(), list[ParsedCall](), 0
    text = text.strip()
    while at < len(text) or not calls:
        call, at = decoder.raw_decode(text, at)
        calls.append(_checked(call))
        while at < len(text) and text[at] in "; \n":
            at += 1
    return calls


def _parse_deepseek(text: str, _tools: Sequence[Mapping[str, Any]]) -> list[ParsedCall]:
    """Parse the calls of DeepSeek V3.1, or those of V3 and R1, whose arguments are in a fence."""
    calls = []
    for head, body in _DEEPSEEK_CALL.findall(text):
        fenced = _FENCED.fullmatch(body)
        name, arguments = (fenced[1], fenced[2]) if fenced else (head, body)
        calls.append(_checked({"name": name.strip(), "arguments": json.loads(arguments)}))
    if not calls:
        raise ValueError("no call between the markers")
    return calls


def _checked(call: Any) -> ParsedCall:
    """Check a parsed call; raises `ValueError`."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError("a call needs a name")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call must be an object")  # noqa: TRY004
    own = call.get("id")
    return ParsedCall(call["name"], _as_json(arguments), own if isinstance(own, str) and own else None)


def _as_json(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON. Raises `ValueError` for numbers that JSON does not have."""
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)


#: Characters of an id of a call, where the template wants so many.
_SHORT: Final = 9
_ASKED: Final = """You may call functions to answer the user's request. Their signatures:
<tools>
{tools}
</tools>
For each call, return a JSON object with the function's name and arguments within <tool_call> tags:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>"""


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], role: str = "system"
) -> list[Mapping[str, Any]]:
    """Return a conversation with its tools described in a first message, for templates without tools."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    asked = _ASKED.format(tools=listed)
    if role == "system" and messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{asked}"}
        return [first, *messages[1:]]
    return [{"role": role, "content": asked}, *messages]


def with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with its tool calls in the content, for templates without them."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = [str(message.get("content") or "")] if message.get("content") else []
    said += [
        f'{GENERIC[0]}\n{{"name": {json.dumps(call["name"], ensure_ascii=False)},'
        f' "arguments": {call["arguments"] or "{}"}}}\n{GENERIC[1]}'
        for call in calls
    ]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(said)}


def with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with ids of calls as some templates want them: nine letters and digits."""
    found = dict(message)
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [{**call, "id": _short(call["id"])} for call in calls]
    if message["role"] == "tool":
        found["tool_call_id"] = _short(message.get("tool_call_id") or "")
    return found


def _short(call_id: str) -> str:
    if len(call_id) == _SHORT and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode(), digest_size=_SHORT).hexdigest()[:_SHORT]


def with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose tool calls have their arguments as objects, as most templates want them."""
    return {**message, "tool_calls": [_with_object(call) for call in message.get("tool_calls") or ()]}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError):
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**call["function"], "arguments": arguments}}
