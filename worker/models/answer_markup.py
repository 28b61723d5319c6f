"""Detects how a model marks reasoning and tool calls in its answers: the markers, and a parser for calls.

`call_parsers` parses complete calls; `worker.text.splitting` finds calls in an answer that still grows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

from .call_parsers import (
    CLOSED_CODE,
    CallSyntax,
    either,
    parse_bare,
    parse_bare_python,
    parse_calls,
    tagged,
    trimmed,
    without_cdata,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from .call_parsers import Parser


@dataclass(frozen=True, slots=True)
class AnswerMarkup:
    """How a model, or a family of models, marks reasoning and tool calls."""

    #: The syntaxes of calls that are parsed, the usual one first.
    forms: tuple[CallSyntax, ...] = ()
    #: For grammars: the text of a call before its arguments, with NAME for the tool's name, and the text
    #: after them; None instead of the latter if the arguments are not JSON.
    form: tuple[str, str | None] = ('\n{"name": "NAME", "arguments": ', "}\n")
    #: Parses an answer that consists of calls without markers; None if the model writes none.
    bare: Parser | None = None
    #: Markers that models write by mistake; they are removed from the text.
    strays: tuple[str, ...] = ()
    #: The markers before and after reasoning; None if the model marks none.
    reasoning: tuple[str, str] | None = None
    #: Whether answers consist of messages with channels (OpenAI's harmony format).
    is_harmony: bool = False
    #: Whether the chat template describes tools to the model.
    renders_tools: bool = False

    @property
    def has_reasoning(self) -> bool:
        """Whether the model marks reasoning."""
        return self.is_harmony or self.reasoning is not None

    @property
    def calls(self) -> tuple[str, str]:
        """The begin and end markers of calls in the first of `forms`; an empty text for a missing marker."""
        if self.is_harmony:
            return "<|channel|>commentary ", ""
        return (self.forms[0].opens, self.forms[0].closes or "") if self.forms else ("", "")


#: Words of a vocabulary, all of which show that a model writes one of these formats.
_HARMONY: Final = ("<|channel|>", "<|message|>")
_XTML: Final = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
#: Pairs of reasoning markers, each after the words that show it; a model uses the first pair that is shown.
_REASONING: Final = (
    (("<|channel>", "<channel|>"), ("<|channel>thought", "<channel|>")),
    (_XTML, ("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
    (("<think>", "</think>"), ("<think>", "</think>")),
    (("<seed:think>", "</seed:think>"), ("<seed:think>", "</seed:think>")),
    (("<longcat_think>", "</longcat_think>"), ("<longcat_think>", "</longcat_think>")),
    (("<|think:start|>", "<|think:end|>"), ("<|think:start|>", "<|think:end|>")),
    (("[THINK]", "[/THINK]"), ("[THINK]", "[/THINK]")),
)


def _deepseek(name: str) -> str:
    """Return DeepSeek's special token `name` as text: between fullwidth bars, with `▁` for each space."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


_BEGIN, _SEP, _END = map(_deepseek, ("tool call begin", "tool sep", "tool call end"))
_DSML: Final = _deepseek("DSML")[1:-1]
_JSON_LIST: Final = ('[{"name": "NAME", "arguments": ', "}]")


def _form(opens: str, closes: str | None, **more: Any) -> CallSyntax:
    return CallSyntax(opens, closes, parse_calls, **more)


def _tag_forms(
    opens: str, closes: str, call: str, key: str, names: str, plain: Callable[[str], str] = str
) -> tuple[CallSyntax, ...]:
    """Return the syntax of calls between tags named `call`, with values between tags named `key`.

    The second form is the same without the markers around all calls. `names` stands between a tag's name and
    the name of a tool.
    """
    name = rf'(?:<{call}(?:=|\b(?>[^<>]*?\bname=)))?"?(?P<name>[^"<>\s{{}}\[\]]++)"?[^<>]*+>\s*'
    value = (
        rf'<{key}(?:=|\b(?>[^<>]*?\bname=))"?(?P<key>[^"<>\n]++)"?(?: string="(?P<type>true|false)")?[^<>]*+>'
    )
    parse = either(tagged(rf"\s*{name}", value, f"</{key}>", f"</{call}>", plain), parse_calls)
    quotes = (f"<{key}", f"</{key}>")
    return CallSyntax(opens, closes, parse, quotes), CallSyntax(
        f"<{call}{names}", f"</{call}>", parse, quotes
    )


def _keys_form(prefix: str) -> CallSyntax:
    """Return the syntax of GLM's calls; for LongCat's, each tag's name begins with `prefix`."""
    parse = tagged(
        r"(?P<name>[^<>{}]++)(?=<|\Z)",
        rf"<{prefix}arg_key>(?P<key>[^<>]+)</{prefix}arg_key>\s*<{prefix}arg_value>",
        f"</{prefix}arg_value>",
    )
    quotes = (f"<{prefix}arg_value>", f"</{prefix}arg_value>")
    opens, closes = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    return CallSyntax(opens, closes, either(parse, parse_calls), quotes, is_framed=False)


#: The markers of calls for models whose template knows no tools: the format of Hermes and Qwen.
GENERIC: Final = ("<tool_call>", "</tool_call>")
_GENERIC: Final = AnswerMarkup((_form(*GENERIC),), bare=parse_bare)
_DEEPSEEK: Final = (_form(_deepseek("tool calls begin"), _deepseek("tool calls end")), _form(_BEGIN, _END))
_MISTRAL: Final = _form(
    "[TOOL_CALLS]",
    "",
    value=re.compile(
        r"\s*(?:(?=[\[{])|[^\s\[\]{}]+\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\]\s*(?=[\[{])|(?=\{)))"
    ),
)
_LLAMA: Final = AnswerMarkup(
    (_form("<|python_tag|>", None),), ('{"name": "NAME", "parameters": ', "}"), parse_bare
)
_MINICPM: Final = tagged(
    r'\s*"(?P<name>[^"<>]+)"\s*>\s*',
    r'<param\s+name\s*=\s*"(?P<key>[^"<>]+)"\s*>',
    "</param>",
    plain=without_cdata,
)
_XTML_JSON: Final = r"(?:<\|open\|>json[^<>]*<\|sep\|>\s*)?"
_XTML_FORM: Final = either(
    tagged(
        rf'\s*(?:<\|open\|>call tool=)?"(?P<name>[^"<>]+)"[^<>]*<\|sep\|>\s*{_XTML_JSON}',
        r'<\|open\|>argument key="(?P<key>[^"]+)"(?: type="(?P<type>[^"]*)")?[^<>]*<\|sep\|>',
        "<|close|>argument<|sep|>",
        r"(?:<\|close\|>json<\|sep\|>\s*)?<\|close\|>call<\|sep\|>",
    ),
    parse_calls,
)
_XTML_QUOTES: Final = ("<|open|>argument ", "<|close|>argument")
#: The markup of each family of models; families have mlx-lm's names where mlx-lm has a parser for them.
FAMILIES: Final[dict[str, AnswerMarkup]] = {
    "minimax_m2": AnswerMarkup(
        _tag_forms("<minimax:tool_call>", "</minimax:tool_call>", "invoke", "parameter", " name="),
        ('\n<invoke name="NAME">\n', None),
    ),
    "gemma4": AnswerMarkup(
        (_form("<|tool_call>", "<tool_call|>", quotes=('<|"|>', '<|"|>'), cost=5),),
        ("call:NAME{", None),
        None,
        ("<channel|>",),
    ),
    "function_gemma": AnswerMarkup(
        (_form("<start_function_call>", "<end_function_call>", quotes=("<escape>", "<escape>"), cost=5),),
        ("call:NAME{", None),
    ),
    "longcat": AnswerMarkup((_keys_form("longcat_"),), ("NAME\n", None)),
    "glm47": AnswerMarkup((_keys_form(""),), ("NAME\n", None)),
    "laguna": AnswerMarkup((_keys_form(""),), ("NAME\n", None)),
    "pythonic": AnswerMarkup(
        (_form("<|tool_call_start|>", "<|tool_call_end|>", closed=CLOSED_CODE, cost=5),), ("[NAME(", None)
    ),
    "olmo3": AnswerMarkup(
        (_form("<function_calls>", "</function_calls>", closed=CLOSED_CODE, cost=5),), ("\nNAME(", None)
    ),
    "llama4": AnswerMarkup(
        (_form("<|python_start|>", "<|python_end|>", closed=CLOSED_CODE, cost=5),),
        ("[NAME(", None),
        either(parse_bare, parse_bare_python),
    ),
    "seed_oss": AnswerMarkup(
        _tag_forms("<seed:tool_call>", "</seed:tool_call>", "function", "parameter", "=", trimmed),
        ("\n<function=NAME>\n", None),
    ),
    "qwen3_coder": AnswerMarkup(
        _tag_forms(*GENERIC, "function", "parameter", "=", trimmed), ("\n<function=NAME>\n", None)
    ),
    "kimi_k2": AnswerMarkup(
        (
            _form("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            _form("<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
            _form("<|tool_call_begin|>", "<|tool_call_end|>"),
        ),
        ("<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "kimi_k3": AnswerMarkup(
        (
            CallSyntax("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", _XTML_FORM, _XTML_QUOTES),
            CallSyntax("<|open|>call tool=", "<|close|>call<|sep|>", _XTML_FORM, _XTML_QUOTES),
        ),
        ('<|open|>call tool="NAME"', None),
        None,
        ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    "minicpm5": AnswerMarkup(
        (CallSyntax("<function name=", "</function>", _MINICPM, ("<param ", "</param>")),), ("", None)
    ),
    "muse_spark": AnswerMarkup(
        _tag_forms(
            "<atem:function_calls>", "</atem:function_calls>", "atem:invoke", "atem:parameter", " name="
        ),
        ("", None),
    ),
    "deepseek_v32": AnswerMarkup(
        _tag_forms(
            f"<{_DSML}function_calls>",
            f"</{_DSML}function_calls>",
            f"{_DSML}invoke",
            f"{_DSML}parameter",
            " name=",
        ),
        (f'\n<{_DSML}invoke name="NAME">\n', None),
    ),
    "mistral": AnswerMarkup((_MISTRAL,), _JSON_LIST),
    "mistral_args": AnswerMarkup((_MISTRAL,), ("NAME[ARGS]", "")),
    "deepseek_v3": AnswerMarkup(_DEEPSEEK, (f"{_BEGIN}function{_SEP}NAME\n```json\n", f"\n```{_END}")),
    "deepseek_v31": AnswerMarkup(_DEEPSEEK, (f"{_BEGIN}NAME{_SEP}", _END)),
    "nemotron": AnswerMarkup((_form("<TOOLCALL>", "</TOOLCALL>"),), _JSON_LIST),
    "phi4": AnswerMarkup((_form("<|tool_call|>", "<|/tool_call|>"),), _JSON_LIST),
    "granite": AnswerMarkup(
        (_form("<|tool_call|>", "", value=re.compile(r"\s*(?=[\[{])")), _form(*GENERIC)), _JSON_LIST
    ),
    "hunyuan": AnswerMarkup((_form("<tool_calls>", "</tool_calls>"),), _JSON_LIST),
    "llama": _LLAMA,
    "json_tools": _GENERIC,
}
#: Texts in a chat template that identify a family; the first that occurs decides. Then the call markers of
#: the families in `_BY_MARKER` count.
_MARKS: Final = (
    (_DSML, "deepseek_v32"),
    (_deepseek("tool calls begin"), "deepseek_v31"),
    ("<arg_key>", "glm47"),
    ("<|tool_list_start|>", "pythonic"),
    ("<seed:tool_call>", "seed_oss"),
    ("<function=", "qwen3_coder"),
    ('<function name="', "minicpm5"),
    ("[ARGS]", "mistral_args"),
    ("<|/tool_call|>", "phi4"),
    ("<|/tool|>", "phi4"),
)
_BY_MARKER: Final = (
    *("minimax_m2", "gemma4", "function_gemma", "longcat", "pythonic", "kimi_k2", "mistral", "muse_spark"),
    *("olmo3", "nemotron", "granite", "hunyuan", "llama4"),
)
#: Words of a vocabulary that identify a family whose template has none of these texts.
_BY_VOCABULARY: Final = (
    (_XTML, "kimi_k3"),
    (("<|tool_call_start|>", "<|tool_call_end|>"), "pythonic"),
    (("<|python_start|>",), "llama4"),
    (("<|python_tag|>",), "llama"),
    ((), "json_tools"),
)


def renders_tools(template: str) -> bool:
    """Return whether a chat template describes tools to the model."""
    return re.search(r"\btools\b", template) is not None


def reasons(vocabulary: str) -> bool:
    """Return whether a model's vocabulary, a text of JSON, has markers of reasoning."""
    known = (_HARMONY, *(words for words, _ in _REASONING))
    return any(all(f'"{word}"' in vocabulary for word in words) for words in known)


def _has_all(vocabulary: Container[str], words: Sequence[str]) -> bool:
    return all(word in vocabulary for word in words)


def _reasoning(vocabulary: Container[str]) -> tuple[str, str] | None:
    return next((pair for words, pair in _REASONING if _has_all(vocabulary, words)), None)


def markup_of(template: str, vocabulary: Container[str], parser: str | None = None) -> AnswerMarkup:
    """Find a model's markup from its chat template's source and its vocabulary.

    `parser` is `tool_parser_type` in tokenizer_config.json, the name of one of mlx-lm's parsers.
    """
    if _has_all(vocabulary, _HARMONY):
        return AnswerMarkup(
            is_harmony=True,
            renders_tools=renders_tools(template),
            form=("to=functions.NAME <|constrain|>json<|message|>", ""),
        )
    reasoning = _reasoning(vocabulary)
    if not renders_tools(template):
        return replace(_GENERIC, reasoning=reasoning)
    family = FAMILIES[_family(template, vocabulary, parser)]
    strays = family.strays if reasoning else ()
    return replace(family, reasoning=reasoning, renders_tools=True, strays=strays)


def _family(template: str, vocabulary: Container[str], parser: str | None) -> str:
    marks = (*_MARKS, *((FAMILIES[family].calls[0], family) for family in _BY_MARKER))
    found = next((family for mark, family in marks if mark in template), None)
    if found == "deepseek_v31" and "```json" in template:
        return "deepseek_v3"
    if isinstance(parser, str) and parser in FAMILIES and found != "mistral_args":
        return parser
    return found or next(family for words, family in _BY_VOCABULARY if _has_all(vocabulary, words))


#: The length of a call's id for templates that want short ids.
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
    """Return the messages with a text that describes the tools, for templates without tools.

    The text is added to a system message at the beginning; if there is none, or `role` is not system, it is a
    new first message of this role.
    """
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    asked = _ASKED.format(tools=listed)
    if role == "system" and messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0].get('content') or ''}\n\n{asked}"}
        return [first, *messages[1:]]
    return [{"role": role, "content": asked}, *messages]


def with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with its calls as text in the content, for templates without calls.

    The calls' ids stay, as `call_ids`; the results of the tools that follow are put in their order.
    """
    calls = [call["function"] for call in message["tool_calls"]]
    said = [str(message.get("content") or "")] if message.get("content") else []
    said += [
        f'{GENERIC[0]}\n{{"name": {json.dumps(call["name"], ensure_ascii=False)},'
        f' "arguments": {call["arguments"] or "{}"}}}\n{GENERIC[1]}'
        for call in calls
    ]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(said), "call_ids": [one["id"] for one in message["tool_calls"]]}


def with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose call ids are replaced by nine letters and digits, as some templates require."""
    found = dict(message)
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in calls]
    if message["role"] == "tool":
        found["tool_call_id"] = short_id(message.get("tool_call_id") or "")
    return found


def short_id(call_id: str) -> str:
    """Return `call_id` if it consists of nine letters and digits, else a digest of it that does."""
    if len(call_id) == _SHORT and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode(), digest_size=_SHORT).hexdigest()[:_SHORT]


def with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have their arguments as objects, not JSON text, as most templates want.

    Arguments that are not the text of a JSON object stay text.
    """
    return {**message, "tool_calls": [_with_object(call) for call in message.get("tool_calls") or ()]}


#: Half of a surrogate pair, which JSON may escape alone, as models do that cut an emoji; it is no text.
_HALF: Final = re.compile("[\ud800-\udfff]")


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    text = call["function"]["arguments"] or "{}"
    try:
        arguments = json.loads(text)
        if "\\u" in text:
            arguments = json.loads(_HALF.sub("\ufffd", json.dumps(arguments, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**call["function"], "arguments": arguments}}
