"""Answers in each family's format split into the same parts however they are streamed; no text is lost."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from worker.models.answer_markup import AnswerMarkup, markup_of
from worker.models.call_parsers import ParsedCall
from worker.text.arguments import OfferedTools
from worker.text.harmony import HarmonySplitter
from worker.text.splitting import AnswerCalls, MarkedSplitter, Piece, Splitter, call_id

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "code": {"type": ["string", "object"]},
                },
            },
        },
    }
    for name in ("weather", "run")
]
#: For each family: the template text and the vocabulary that identify it, and its format of a call.
FAMILIES: dict[str, tuple[str, set[str], str]] = {
    "generic": ("", set(), '<tool_call>\n{{"name": "{name}", "arguments": {json}}}\n</tool_call>'),
    "json_tools": (
        "tools <tool_call> tool_call.name",
        {"<think>", "</think>"},
        '<tool_call>\n{{"name": "{name}", "arguments": {json}}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "tools <tool_call>\n<function=",
        set(),
        "<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>",
    ),
    "glm47": ("tools <arg_key>", set(), "<tool_call>{name}\n{pairs}</tool_call>"),
    "mistral": ("tools [TOOL_CALLS]", set(), '[TOOL_CALLS][{{"name": "{name}", "arguments": {json}}}]'),
    "mistral_args": ("tools [TOOL_CALLS]", {"[THINK]", "[/THINK]"}, "[TOOL_CALLS]{name}[ARGS]{json}"),
    "pythonic": (
        "tools <|tool_call_start|>",
        set(),
        "<|tool_call_start|>[{name}({python})]<|tool_call_end|>",
    ),
    "kimi_k2": (
        "tools <|tool_calls_section_begin|>",
        set(),
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json}"
            "<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
    "llama": ("tools", {"<|python_tag|>"}, '<|python_tag|>{{"name": "{name}", "parameters": {json}}}'),
    "llama_bare": ("tools", {"<|python_tag|>"}, '{{"name": "{name}", "parameters": {json}}}'),
    "deepseek_v3": (
        "tools <~tool▁calls▁begin~>",
        {"<think>", "</think>"},
        (
            "<~tool▁calls▁begin~><~tool▁call▁begin~>function<~tool▁sep~>{name}\n```json\n{json}\n```"
            "<~tool▁call▁end~><~tool▁calls▁end~>"
        ),
    ),
    "deepseek_v31": (
        "tools <~tool▁calls▁begin~>",
        {"<think>", "</think>"},
        (
            "<~tool▁calls▁begin~><~tool▁call▁begin~>{name}<~tool▁sep~>{json}<~tool▁call▁end~>"
            "<~tool▁calls▁end~>"
        ),
    ),
    "deepseek_v32": (
        "tools ~DSML~",
        {"<think>", "</think>"},
        (
            '<~DSML~function_calls>\n<~DSML~invoke name="{name}">\n{dsml}</~DSML~invoke>\n'
            "</~DSML~function_calls>"
        ),
    ),
    "minimax_m2": (
        "tools <minimax:tool_call>",
        {"<think>", "</think>"},
        '<minimax:tool_call>\n<invoke name="{name}">\n{invoke}</invoke>\n</minimax:tool_call>',
    ),
    "gemma4": (
        "tools <|tool_call>",
        {"<|channel>", "<channel|>"},
        "<|tool_call>call:{name}{{{gemma}}}<tool_call|>",
    ),
    "function_gemma": (
        "tools <start_function_call>",
        set(),
        "<start_function_call>call:{name}{{{function_gemma}}}<end_function_call>",
    ),
    "longcat": ("tools <longcat_tool_call>", set(), "<longcat_tool_call>{name}\n{long}</longcat_tool_call>"),
    "kimi_singular": (
        "tools <|tool_calls_section_begin|>",
        set(),
        (
            "<|tool_call_section_begin|><|tool_call_begin|>functions.{name}<|tool_call_argument_begin|>{json}"
            "<|tool_call_end|><|tool_call_section_end|>"
        ),
    ),
    "kimi_k3": (
        "tools",
        {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"},
        (
            '<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>{xtml}<|close|>call<|sep|>'
            "<|close|>tools<|sep|>"
        ),
    ),
    "seed_oss": (
        "tools <seed:tool_call> <function=",
        {"<seed:think>", "</seed:think>"},
        "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
    ),
    "minicpm5": (
        'tools <function name="',
        set(),
        '<function name="{name}">{param}</function>',
    ),
    "muse_spark": (
        "tools <atem:function_calls>",
        set(),
        '<atem:function_calls>\n<atem:invoke name="{name}">\n{atem}</atem:invoke>\n</atem:function_calls>',
    ),
    "olmo3": ("tools <function_calls>", set(), "<function_calls>\n{name}({python})\n</function_calls>"),
    "nemotron": (
        "tools <TOOLCALL>",
        {"<think>", "</think>"},
        '<TOOLCALL>[{{"name": "{name}", "arguments": {json}}}]</TOOLCALL>',
    ),
    "phi4": (
        "tools <|/tool|>",
        set(),
        '<|tool_call|>[{{"name": "{name}", "arguments": {json}}}]<|/tool_call|>',
    ),
    "granite": (
        "tools <|tool_call|>",
        set(),
        '<|tool_call|>[{{"name": "{name}", "arguments": {json}}}]',
    ),
    "hunyuan": (
        "tools <tool_calls>",
        {"<think>", "</think>"},
        '<tool_calls>[{{"name": "{name}", "arguments": {json}}}]</tool_calls>',
    ),
    "lfm2": (
        "tools",
        {"<|tool_call_start|>", "<|tool_call_end|>"},
        "<|tool_call_start|>[{name}({python})]<|tool_call_end|>",
    ),
    "llama4_bare": ("tools", {"<|python_start|>"}, "[{name}({python})]"),
    "harmony": (
        "tools",
        {"<|channel|>", "<|message|>"},
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json}<|call|>",
    ),
}
#: Families whose calls end only with the answer.
UNENDED = ("mistral", "mistral_args", "llama", "llama_bare", "granite", "llama4_bare", "harmony")
#: Families whose calls can end before the answer does, so that text or another call may follow.
ENDED = [name for name in FAMILIES if name not in UNENDED]
ARGUMENTS: dict[str, Any] = {"city": "Zürich 😀", "days": 3}
#: Beginnings of calls, and texts whose repetitions a regular expression may divide in many ways.
BEGUN = ("", "f", "f<arg_key>", "f<longcat_arg_key>", "```python\n", "f[CALL_ID]", '{"name": "')
BEGUN += ('<atem:invoke name="f"><atem:parameter name="',)
REPEATED = (" ", "\t\n", '\\"', "\n```", 'name="', 'name="a" ', "<arg_key>")


def markup(family: str) -> AnswerMarkup:
    template, vocabulary, _ = FAMILIES[family]
    return markup_of(wide(template), vocabulary)


def wide(text: str) -> str:
    """Replace `~` with the full-width bars of DeepSeek's special tokens."""
    text = text.replace("~DSML~", "\uff5cDSML\uff5c")
    return text.replace("<~", "<\uff5c").replace("~>", "\uff5c>")


def splitter(family: str, *, in_reasoning: bool = False, tools: Any = TOOLS, **more: Any) -> Splitter:
    found = markup(family)
    calls = AnswerCalls(OfferedTools(tools), lambda index: call_id("r", index), **more)
    if found.is_harmony:
        return HarmonySplitter(calls)
    return MarkedSplitter(found, calls, in_reasoning=in_reasoning)


def written(family: str, name: str = "weather", arguments: dict[str, Any] = ARGUMENTS) -> str:
    as_json = json.dumps(arguments, ensure_ascii=False)
    return wide(FAMILIES[family][2]).format(
        name=name,
        json=as_json,
        python=", ".join(f"{key}={value!r}" for key, value in arguments.items()),
        parameters="".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()),
        gemma=gemma(arguments, '<|"|>'),
        function_gemma=gemma(arguments, "<escape>"),
        invoke=tags('<parameter name="{}">{}</parameter>\n', arguments),
        dsml="".join(
            wide(f'<~DSML~parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{value}')
            + wide("</~DSML~parameter>\n")
            for key, value in arguments.items()
        ),
        param=tags('<param name="{}">{}</param>', arguments),
        atem=tags('<atem:parameter name="{}">{}</atem:parameter>\n', arguments),
        long=tags(
            "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>{}</longcat_arg_value>\n", arguments
        ),
        xtml="".join(
            f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "number"}"<|sep|>'
            f"{value}<|close|>argument<|sep|>"
            for key, value in arguments.items()
        ),
        pairs="".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()
        ),
    )


def gemma(value: Any, quote: str) -> str:
    if isinstance(value, dict):
        pairs = ",".join(f"{key}:{gemma(one, quote)}" for key, one in value.items())
        return pairs if value is ARGUMENTS or "code" in value or "city" in value else f"{{{pairs}}}"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def tags(form: str, arguments: dict[str, Any]) -> str:
    return "".join(form.format(key, value) for key, value in arguments.items())


def split(one: Splitter, pieces: Iterable[str]) -> Piece:
    whole = Piece()
    for piece in pieces:
        whole += one.push(piece)
    return whole + one.finish()


def joined_calls(piece: Piece) -> list[tuple[str | None, str | None, str]]:
    """Join the parts of each call by the call's index, as a client does."""
    calls: list[tuple[str | None, str | None, str]] = []
    for part in piece.calls:
        if part.index == len(calls):
            calls.append((part.id, part.name, part.arguments))
        else:
            own, name, arguments = calls[part.index]
            calls[part.index] = (own, name, arguments + part.arguments)
    return calls


def outcome(one: Splitter, pieces: Iterable[str]) -> tuple[Any, ...]:
    piece = split(one, pieces)
    told = [(call.id, call.function.name, call.function.arguments) for call in one.calls]
    assert joined_calls(piece) == told, "the parts make the calls"
    return piece.text, piece.reasoning, told, one.malformed


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    places = st.lists(st.integers(0, len(text)), max_size=12).map(
        lambda found: sorted({0, *found, len(text)})
    )
    return places.map(lambda found: [text[start:end] for start, end in pairwise(found)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_call_is_parsed_however_its_text_is_divided_into_streamed_pieces(family: str) -> None:
    text = written(family)
    whole = outcome(splitter(family), [text])
    said, _, calls, malformed = whole
    assert (said, malformed) == ("", False)
    ((_, name, arguments),) = calls
    assert (name, json.loads(arguments)) == ("weather", ARGUMENTS)
    for at in range(len(text) + 1):
        assert outcome(splitter(family), [text[:at], text[at:]]) == whole
    assert outcome(splitter(family), text) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_are_parsed_as_markers_inside_a_tool_call_and_left_out_before_a_tool_call(
    family: str,
) -> None:
    """Each tag is taken for a special token, and left out if it is no marker where it stands."""

    def markers(one: Splitter, text: str) -> Iterator[str]:
        for part in re.split(r"(</?[^<>\s]+>|\[/?[A-Z_]+\])", text):
            is_token = re.fullmatch(r"<.+>|\[/?[A-Z_]+\]", part) is not None
            if not is_token or one.is_marker(part):
                yield part

    one, text = splitter(family), written(family)
    text += text if family in ENDED else ""
    assert outcome(one, markers(one, text)) == outcome(splitter(family), [text])
    one = splitter(family)
    if not markup(family).is_harmony:
        assert [*markers(one, "<|im_start|>a")] == ["", "a"]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=settings().max_examples // 3)  # of each of thirty families, which share the code
@given(data=st.data())
def test_an_answer_gives_the_same_text_reasoning_and_tool_calls_however_it_is_divided_into_pieces(
    family: str, data: st.DataObject
) -> None:
    found = markup(family)
    words = st.text('ab <>|/[]{}"\n', max_size=12)
    if found.is_harmony:
        plain = words.map(lambda text: f"<|channel|>final<|message|>{text}<|end|><|start|>assistant")
        thought = words.map(lambda text: f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant")
    else:
        plain = words
        opens, closes = found.reasoning or ("", "")
        thought = words.map(lambda text: opens + text + closes)
    call = st.sampled_from(
        [
            written(family),
            written(family, "run", {"code": found.calls[1] + '"'}),
            written(family)[:-9],
            written(family)[:12],
            written(family)[-12:],
            written(family, "unknown"),
            written(family).replace("3", "true"),
            *filter(None, (*found.calls, f"`{found.calls[0]}`")),
        ]
    )
    text = "".join(data.draw(st.lists(st.one_of(plain, thought, call), max_size=5)))
    whole = outcome(splitter(family), [text])
    assert outcome(splitter(family), data.draw(cuts(text))) == whole
    assert outcome(splitter(family), text) == whole
    for word in text.split():
        if word.isalpha():
            assert word in f"{whole[0]} {whole[1]} {whole[2]}", "nothing vanishes"


@pytest.mark.parametrize("family", ENDED)
def test_text_before_and_after_several_tool_calls_is_kept_and_each_call_has_its_own_id(family: str) -> None:
    text = f"I look.\n{written(family)}\n{written(family, 'run', {'code': 'x'})}\nDone."
    said, _, calls, malformed = outcome(splitter(family), text)
    assert [name for _, name, _ in calls] == ["weather", "run"]
    assert len({own for own, _, _ in calls}) == 2
    assert (said, malformed) == ("I look.\nDone.", False)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_offered_tools_an_answer_in_tool_call_syntax_is_shown_as_text(family: str) -> None:
    text = written(family)
    said, _, calls, malformed = outcome(splitter(family, tools=()), text)
    assert calls == []
    assert not malformed
    assert said or markup(family).is_harmony


@pytest.mark.parametrize("family", ["generic", "llama", "mistral_args", "harmony", "deepseek_v31", "kimi_k2"])
def test_tool_call_arguments_that_are_empty_nested_or_contain_markers_in_strings_are_parsed(
    family: str,
) -> None:
    for code in ('print("</tool_call><tool_call>")\n{"a": [1, "}"]}', {"deep": [{"x": '\\"'}]}, None):
        arguments = {"code": code} if code else {}
        _, _, ((_, _, found),), malformed = outcome(splitter(family), written(family, "run", arguments))
        assert (json.loads(found), malformed) == (arguments, False)


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.endswith("_bare")])
@pytest.mark.parametrize("cut", [0.4, 0.7])
def test_a_tool_call_cut_off_in_its_arguments_is_shown_as_text_and_reported_as_malformed(
    family: str, cut: float
) -> None:
    text = written(family)
    begin, end = text.index("weather"), text.index("days") + len("days")
    text = text[: begin + int(cut * (end - begin))]
    said, _, calls, malformed = outcome(splitter(family), "First. " + text if family in ENDED else text)
    assert calls == []
    assert malformed
    assert "weather" in said


@pytest.mark.parametrize("family", ["json_tools", "mistral_args", "deepseek_v31"])
def test_reasoning_is_separated_from_text_whether_the_prompt_or_the_answer_has_the_opening_marker(
    family: str,
) -> None:
    found = markup(family).reasoning
    assert found
    for opens, in_reasoning in ((found[0], False), ("", True)):
        text = f"{opens}\nFirst, hm.{found[1]}\n\nHello."
        said, thought, _, _ = outcome(splitter(family, in_reasoning=in_reasoning), text)
        assert (said, thought) == ("Hello.", "First, hm.")
    said, thought, _, _ = outcome(splitter(family, in_reasoning=True), "No end")
    assert (said, thought) == ("", "No end")


def test_text_that_continues_a_harmony_answer_is_streamed_without_waiting_for_a_header() -> None:
    for begun in (
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
        "b",
    ):
        assert HarmonySplitter(AnswerCalls(OfferedTools(()), str), begun).push("c") == Piece("c")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_part_of_a_tool_call_is_streamed_before_the_call_is_complete(family: str) -> None:
    one, text = splitter(family), written(family)
    for char in text:
        piece = one.push(char)
        assert not piece.text
        assert len(piece.calls) == len(one.calls)
        assert all(part.name == "weather" and json.loads(part.arguments) for part in piece.calls)


def test_a_generated_tool_call_id_has_nine_characters_derived_from_request_id_and_call_index() -> None:
    assert call_id("a:1", 0) == call_id("a:1", 0) != call_id("a:1", 1)
    assert call_id("a:1", 0).isalnum()
    assert len(call_id("a:1", 0)) == 9


@pytest.mark.parametrize("family", FAMILIES)
def test_parsing_an_unfinished_tool_call_of_10000_repeated_pieces_takes_less_than_0_5_s(family: str) -> None:
    """The thread that splits answers holds the interpreter meanwhile, and other sessions wait."""
    opens, closes = markup(family).calls
    for num, begun, repeated in product((400, 10_000), BEGUN, REPEATED):
        began_s = time.thread_time()
        split(splitter(family), [f"{opens}{begun}{repeated * num}!{closes}"])
        assert time.thread_time() - began_s < 0.5, (num, begun, repeated)


def test_each_tool_call_of_an_answer_has_a_different_id() -> None:
    calls = AnswerCalls(OfferedTools(TOOLS), lambda index: f"new{index}")
    for name, own in zip("abcde", ["x", "x", None, "new2", "y"], strict=True):
        calls.add([ParsedCall(name, "{}", own)])
    assert [call.id for call in calls.made] == ["x", "new1", "new2", "new3", "y"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<think>\n\n</think>\n\nHi", "Hi"),
        ("<think>a</think> <think> </think>\nHi", "Hi"),
        ("So: {call}</tool_call>", "So:"),
        ("So: {call} and</tool_call>", "So: and</tool_call>"),
    ],
)
def test_white_space_after_empty_reasoning_and_a_second_end_marker_after_a_tool_call_are_left_out(
    text: str, shown: str
) -> None:
    found = splitter("json_tools")
    piece = found.push(text.replace("{call}", written("json_tools"))) + found.finish()
    assert piece.text == shown
