"""Text is a tool call only if the tool was offered, the whole block parses and the arguments fit the schema.

A client would execute a wrong call, so a doubtful call stays text.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jsonschema
import pytest
from hypothesis import given
from test_splitting import FAMILIES, markup, outcome, splitter, wide, written

from worker.models.answer_markup import markup_of
from worker.models.call_parsers import WrittenCall, parse_calls
from worker.models.catalog import named, template_support
from worker.models.model_files import ModelError
from worker.models.tokenizer import Tokenizer
from worker.text.arguments import NoCallError, OfferedTools
from worker.text.splitting import call_id


def tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXT = {"type": "string"}
TOOLS = [
    tool("bash", ("command",), command=TEXT, timeout={"type": "integer"}),
    tool("write", ("path", "content"), path=TEXT, content=TEXT),
    tool("clock"),
]


def read(family: str, text: str, **more: Any) -> tuple[Any, ...]:
    """Return an answer's outcome, and check that streaming by characters gives the same."""
    found = outcome(splitter(family, **more), [text])
    assert outcome(splitter(family, **more), text) == found
    return found


def calls_in(family: str, text: str, tools: Any = TOOLS, **more: Any) -> list[tuple[str, Any]]:
    """Return an answer's calls, and check that it loses no text."""
    text = wide(text)
    found = read(family, text, tools=tools, **more)
    if not found[2] and not more and family != "harmony":
        assert found[0] == text, "what is no call is text, as it was written"
    return [(name, json.loads(arguments)) for _, name, arguments in found[2]]


LS = ("<function=bash>", "<parameter=command>", "ls", "</parameter>")


def coder(*lines: str) -> str:
    return "\n".join(("<tool_call>", *lines, "</tool_call>"))


# Qwen's coders


@pytest.mark.parametrize("mark", ["</parameter>", "</tool_call>", "</function>", "<tool_call>"])
def test_a_qwen3_coder_call_whose_argument_contains_the_markers_of_the_format_is_parsed(mark: str) -> None:
    command = f"echo '{mark}' > a\nls"
    lines = ("<function=bash>", "<parameter=command>", command, "</parameter>", "</function>")
    assert calls_in("qwen3_coder", coder(*lines)) == [("bash", {"command": command})]


@pytest.mark.parametrize(
    "lines",
    [
        ("<function=bash>", "I list.", "<parameter=command>", "ls", "</parameter>", "</function>"),
        ("<function=bash>", "</function>"),
        ("<function=zsh>", "<parameter=command>", "ls", "</parameter>", "</function>"),
        (*LS, "<parameter=command>", "rm", "</parameter>", "</function>"),
        (*LS, "<parameter=timeout>", "soon", "</parameter>", "</function>"),
    ],
    ids=["words", "missing", "unknown", "twice", "no-number"],
)
def test_a_qwen3_coder_call_with_missing_or_repeated_arguments_is_not_parsed(lines: tuple[str, ...]) -> None:
    assert calls_in("qwen3_coder", coder(*lines)) == []


# GLM and MiniMax


@pytest.mark.parametrize(
    "block",
    [
        "bash is what I call now\n<arg_key>command</arg_key><arg_value>ls</arg_value>",
        "I would list the files",
        "clock is what I would call",
        "bash\n<arg_key>command</arg_key>ls",
        "bash\n<arg_key>command</arg_key>",
        "bash\n<arg_key>command</arg_key><arg_value>ls",
        "bash\n<arg_key>command</arg_key><arg_value>ls</arg_value>, and then",
        "bash\n<arg_key>command</arg_key><arg_value>a<arg_key>nosuch</arg_key><arg_value>1</arg_value>",
    ],
)
def test_a_glm_call_with_prose_or_incomplete_arguments_between_its_markers_is_not_parsed(block: str) -> None:
    assert calls_in("glm47", f"<tool_call>{block}</tool_call>") == []


def test_white_space_in_the_arguments_of_a_tool_call_is_kept() -> None:
    content = "    indented:\n\tand more\n\n"
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
        for key, value in (("path", " a"), ("content", content))
    )
    wanted = [("write", {"path": " a", "content": content})]
    assert calls_in("glm47", f"<tool_call>write\n{pairs}</tool_call>") == wanted
    parameters = f'<parameter name="path"> a</parameter>\n<parameter name="content">{content}</parameter>'
    text = f'<minimax:tool_call>\n<invoke name="write">\n{parameters}\n</invoke>\n</minimax:tool_call>'
    assert calls_in("minimax_m2", text) == wanted
    lines = ("<function=write>", "<parameter=path>", " a", "</parameter>")
    lines += ("<parameter=content>", content, "</parameter>", "</function>")
    assert calls_in("qwen3_coder", coder(*lines)) == wanted


# Mistral


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('[TOOL_CALLS]bash[ARGS]{"command": "ls"}', [("bash", {"command": "ls"})]),
        ('[TOOL_CALLS]bash[CALL_ID]a1b2c3d4e[ARGS]{"command": "ls"}', [("bash", {"command": "ls"})]),
        ('[TOOL_CALLS]fs.bash[ARGS]{"command": "ls"}', []),
        ('[TOOL_CALLS]a1[CALL_ID]bash[ARGS]{"command": "ls"}', []),
        ('[TOOL_CALLS]my bash[ARGS]{"command": "ls"}', []),
        ('[TOOL_CALLS]bash[ARGS]["ls"]', []),
        ('[TOOL_CALLS]bash{"command": "ls"}', [("bash", {"command": "ls"})]),
    ],
)
def test_a_mistral_tool_call_is_parsed_only_if_it_names_an_offered_tool_and_has_object_arguments(
    text: str, wanted: Any
) -> None:
    assert calls_in("mistral_args", text) == wanted
    assert calls_in("mistral", text) == wanted
    if wanted:
        assert calls_in("mistral_args", text + text.replace("ls", "pwd")) == [
            *wanted,
            ("bash", {"command": "pwd"}),
        ]


def test_a_mistral_tool_call_keeps_its_id_unless_an_earlier_call_has_the_same_id() -> None:
    text = "[TOOL_CALLS]clock[CALL_ID]a1b2c3d4e[ARGS]{}"
    ((own, _, _), (other, _, _)) = outcome(splitter("mistral_args", tools=TOOLS), [text + text])[2]
    assert own == "a1b2c3d4e"
    assert other != own, "two calls never have one id"


# Python's syntax


@pytest.mark.parametrize(
    "text",
    [
        'bash("ls")',
        "bash(command='ls', **more)",
        "bash('ls', timeout=1)",
        "bash(command='ls', command='rm -r /')",
        "[]",
        "bash",
    ],
)
def test_python_syntax_other_than_calls_with_keyword_arguments_is_not_parsed_as_a_tool_call(
    text: str,
) -> None:
    assert calls_in("pythonic", f"<|tool_call_start|>[{text}]<|tool_call_end|>") == []


@pytest.mark.parametrize(
    "argument",
    [r"'\U00110000', timeout=1", r"'\UFFFFFFFF', timeout=1", pytest.param("[" * 5000, id="nested")],
)
def test_a_pythonic_call_is_parsed_although_the_argument_of_the_next_call_cannot_be_evaluated(
    argument: str,
) -> None:
    text = f"<|tool_call_start|>[clock(), bash(command={argument})]<|tool_call_end|>"
    assert calls_in("pythonic", text) == [("clock", {})]


# JSON


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "bash", "arguments": {"command": "ls"}, "reason": "why not"}',
        '{"name": "bash", "name": "write", "arguments": {"command": "ls"}}',
        '{"name": "bash", "arguments": {"command": "ls", "command": "rm -r /"}}',
        '{"name": "bash", "arguments": {"command": "ls"}, "parameters": {"command": "rm"}}',
        '{"name": "bash", "arguments": ["ls"]}',
        '{"name": "bash", "arguments": {}}',
        '{"name": "bash", "arguments": {"command": 3}}',
        '{"name": "bash", "arguments": {"command": "ls", "timeout": 1.5}}',
        '{"name": "bash", "arguments": {"command": "ls", "timeout": NaN}}',
        '{"name": "zsh", "arguments": {"command": "ls"}}',
        '{"name": "Bash", "arguments": {"command": "ls"}}',
        "[]",
    ],
)
def test_a_json_tool_call_with_unknown_repeated_or_mistyped_fields_is_reported_malformed(body: str) -> None:
    text = f"<tool_call>\n{body}\n</tool_call>"
    assert calls_in("generic", text) == []
    assert outcome(splitter("generic", tools=TOOLS), text)[3], "which is a malformed call"


def test_json_tool_calls_with_raw_line_breaks_in_strings_or_arguments_as_a_json_string_are_parsed() -> None:
    wanted = [("bash", {"command": "ls\npwd"})]
    assert (
        calls_in("generic", '<tool_call>{"name": "bash", "arguments": {"command": "ls\npwd"}}</tool_call>')
        == wanted
    )
    text = json.dumps({"name": "bash", "arguments": json.dumps({"command": "ls\npwd"})})
    assert calls_in("generic", f"<tool_call>{text}</tool_call>") == wanted


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"Ada","age":36}',
        '{"name": "clock", "age": 36}',
        '{"name": "clock"}',
        '{"name": "bash", "parameters": 3}',
    ],
)
@pytest.mark.parametrize("family", ["llama_bare", "generic", "json_tools"])
def test_a_json_object_without_an_offered_tool_name_or_arguments_object_is_shown_as_text(
    family: str, text: str
) -> None:
    assert calls_in(family, text) == []
    assert not outcome(splitter(family, tools=TOOLS), text)[3], "nor a malformed one"


@pytest.mark.parametrize("family", ["llama_bare", "generic", "json_tools"])
@pytest.mark.parametrize("around", ["{}", "```json\n{}\n```", "```\n{}\n```\n", "\n {} \n", "```json\n{}"])
def test_a_json_object_without_call_markers_is_a_tool_call_only_if_it_is_the_whole_answer(
    family: str, around: str
) -> None:
    body = json.dumps({"name": "bash", "arguments": {"command": "echo '```' \n"}}, indent=2)
    text = around.replace("{}", body)
    assert calls_in(family, text) == [("bash", {"command": "echo '```' \n"})]
    assert calls_in(family, f"Like this:\n{text}") == []
    assert calls_in(family, f"{text}\nThat is it.") == []


def test_json_and_code_are_streamed_as_soon_as_they_cannot_be_the_beginning_of_a_tool_call() -> None:
    one = splitter("generic", tools=TOOLS)
    assert one.push('{"name": "Ada", "age"').text
    assert splitter("generic", tools=TOOLS).push('```python\nprint("x")').text
    assert splitter("generic", tools=TOOLS).push("[1, 2").text


# Other families

NESTED = [tool("fs.set", key=TEXT, of={"type": "object"}, all={"type": "array"})]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "gemma4",
            '<|tool_call>call:fs.set{key:<|"|>a}, b:{<|"|>,of:{x:{y:1}},all:[true,<|"|>"<|"|>]}<tool_call|>',
        ),
        (
            "function_gemma",
            (
                "<start_function_call>call:fs.set{key:<escape>a}, b:{<escape>,of:{x:{y:1}},"
                'all:[true,<escape>"<escape>]}<end_function_call>'
            ),
        ),
    ],
)
def test_a_gemma_tool_call_with_nested_values_or_a_dotted_name_is_parsed(family: str, text: str) -> None:
    wanted = {"key": "a}, b:{", "of": {"x": {"y": 1}}, "all": [True, '"']}
    assert calls_in(family, text, NESTED) == [("fs.set", wanted)]
    for old, new in (("y:1}", "y:1"), (":1", ":one"), (",all", " all"), ("call:", "call "), ("all:", "key:")):
        assert calls_in(family, text.replace(old, new), NESTED) == []


def test_a_kimi_tool_call_keeps_its_id_if_the_id_ends_with_a_counter_and_else_gets_a_new_id() -> None:
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>{}", "<|tool_call_end|>"
    body = "".join(
        f"{begin}{name}{middle}{end}" for name in ("functions.clock:0", "functions.clock", "clock:2")
    )
    text = f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"
    calls = outcome(splitter("kimi_k2", tools=TOOLS), [text])[2]
    assert [name for _, name, _ in calls] == ["clock"] * 3
    assert (calls[0][0], calls[1][0] == call_id("r", 1), calls[2][0]) == (
        "functions.clock:0",
        True,
        "clock:2",
    )


def test_llama_4_tool_calls_are_parsed_in_python_syntax_and_in_json() -> None:
    for text in (
        "[clock()]",
        '{"name": "clock", "parameters": {}}',
        "<|python_start|>[clock()]<|python_end|>",
    ):
        assert calls_in("llama4_bare", text) == [("clock", {})]
    assert calls_in("llama4_bare", "[clock()] is how I would call") == []


def test_a_minicpm_tool_call_with_argument_values_wrapped_in_cdata_is_parsed() -> None:
    params = '<param name="path">a</param><param name="content"><![CDATA[<b></param>\n]]></param>'
    text = f'<function name="write">{params}</function>'
    assert calls_in("minicpm5", text) == [("write", {"path": "a", "content": "<b></param>\n"})]


def test_every_tool_parser_of_mlx_lm_has_a_turnkeep_call_format_with_the_same_markers() -> None:
    folder = Path(find_spec("mlx_lm.tool_parsers").submodule_search_locations[0])  # type: ignore[union-attr,index]
    for name in sorted(one.stem for one in folder.glob("*.py") if one.stem != "__init__"):
        module = import_module(f"mlx_lm.tool_parsers.{name}")
        assert markup_of("tools", set(), name).calls == (module.tool_call_start, module.tool_call_end), name


def test_the_tool_parser_named_in_a_model_folder_selects_the_call_format(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "named"
    shutil.copytree(tiny_model, folder)
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    for file in folder.glob("chat_template*"):
        file.write_text(template)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    for more, opens in (({}, "<tool_call>"), ({"tool_parser_type": "gemma4"}, "<|tool_call>")):
        (folder / "tokenizer_config.json").write_text(json.dumps(config | more))
        assert Tokenizer.from_folder(folder).markup.calls[0] == opens


def test_the_chat_template_type_of_a_model_selects_a_template_of_mlx_lm_or_is_refused_if_unknown(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "as-code"
    shutil.copytree(tiny_model, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"chat_template_type": "deepseek_v32"}))
    tokenizer = Tokenizer.from_folder(folder)
    call = {
        "id": "a",
        "type": "function",
        "function": {"name": "bash", "arguments": '{"command": "ls", "n": 1}'},
    }
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is there?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "made.txt", "tool_call_id": "a"},
    ]
    expected = import_module("mlx_lm.chat_templates.deepseek_v32").apply_chat_template
    day = datetime(2026, 1, 1, tzinfo=UTC)
    for variables in ({}, {"enable_thinking": False}):
        found = tokenizer.render(
            tokenizer.adapted(said, None, Counter()),
            add_generation_prompt=True,
            started=day,
            tools=TOOLS,
            variables=variables,
        )
        assert found == expected(said, add_generation_prompt=True, tools=TOOLS, **variables)
    alone = tokenizer.render(said[1:2], add_generation_prompt=True, started=day, tools=TOOLS)
    assert "$FUNCTION_NAME" in alone, "the tools are there without a system message, too"
    assert tokenizer.markup.calls == (wide("<~DSML~function_calls>"), wide("</~DSML~function_calls>"))
    entry = named(str(folder), tmp_path / "data")
    assert (entry.tools, template_support(entry)) == (True, tokenizer.support)
    (tmp_path / "elsewhere.py").write_text("")
    elsewhere = os.path.relpath(
        tmp_path / "elsewhere", Path(find_spec("mlx_lm").origin).parent / "chat_templates"
    )
    for unknown in ("of_a_later_day", elsewhere):
        path.write_text(json.dumps(config | {"chat_template_type": unknown}))
        with pytest.raises(ModelError, match=f"chat_template_type {unknown}, which mlx-lm does not know"):
            Tokenizer.from_folder(folder)


# Harmony


@pytest.mark.parametrize(
    ("to", "wanted"),
    [
        ("functions.bash", [("bash", {"command": "ls"})]),
        ("assistant", []),
        ("python", []),
        ("functions.zsh", []),
        ("browser.search", []),
    ],
)
def test_in_the_harmony_format_only_calls_of_offered_functions_are_parsed_as_tool_calls(
    to: str, wanted: Any
) -> None:
    text = f'<|channel|>commentary to={to} <|constrain|>json<|message|>{{"command": "ls"}}<|call|>'
    assert calls_in("harmony", text) == wanted
    if not wanted:
        assert '{"command": "ls"}' in outcome(splitter("harmony", tools=TOOLS), text)[0]


# Markers that are only mentioned, and invalid calls


def good(family: str, command: str) -> str:
    return written(family, "run", {"code": command})


MARKED = [name for name in FAMILIES if name not in ("llama_bare", "llama4_bare", "llama", "harmony")]


@pytest.mark.parametrize("family", MARKED)
def test_two_tool_calls_are_parsed_despite_an_unknown_tool_or_a_bare_marker_between_them(family: str) -> None:
    found = markup(family)
    opens, closes = found.calls
    bad = written(family, "unknown", {"code": "x"})
    for between in (bad, f"{opens}{closes}", f"`{opens}` is the marker", f"I write {opens} first"):
        text = f"{good(family, 'a')}\n{between}\n{good(family, 'b')}"
        said, _, calls, _ = read(family, text)
        assert [json.loads(one[2])["code"] for one in calls] == ["a", "b"], between
        assert between in said


#: Families that do not quote arguments, so that an argument may contain all end markers of a call.
TAGGED = [name for name in MARKED if markup(name).forms[0].is_tagged]


@pytest.mark.parametrize("family", TAGGED)
def test_tool_call_syntax_inside_the_argument_of_another_call_is_not_parsed_as_a_call(family: str) -> None:
    inner, closes = good(family, "rm"), markup(family).calls[1]
    page = f"For example:\n{inner}\nor\n{inner}\nremoves all."
    whole = good(family, page)
    for text in (whole, f"{whole}\n{good(family, 'b')}"):
        said, _, calls, _ = read(family, text)
        assert (said, json.loads(calls[0][2])["code"]) == ("", page)
    unknown = written(family, "unknown", {"code": page})
    for text in (whole[: whole.rindex("all.")], whole.removesuffix(closes)[:-12], unknown):
        assert read(family, text) == (text, "", [], True)


@pytest.mark.parametrize("family", ["generic", "hunyuan", "nemotron", "phi4", "pythonic", "olmo3"])
def test_a_tool_call_whose_string_argument_contains_an_unescaped_call_is_shown_as_text(family: str) -> None:
    inner = good(family, "rm")
    text = (
        good(family, "^").replace("^", f"For example:\n{inner}\nor\n{inner}\nremoves all.").replace("'", '"')
    )
    for one in (text, text[: text.rindex("all")]):
        said, _, calls, _ = read(family, one)
        assert (said, calls) == (one, [])


@pytest.mark.parametrize("family", TAGGED)
def test_a_tool_call_whose_argument_has_every_end_marker_is_text_and_reported_malformed(family: str) -> None:
    ends = good(family, "^").partition("^")[2]
    text = good(family, f"A call ends with {ends}\nand the rest")
    assert read(family, text) == (text, "", [], True)


def test_two_harmony_tool_calls_are_parsed_although_a_call_of_an_unknown_tool_is_between_them() -> None:
    again = "<|start|>assistant"
    bad = written("harmony", "unknown").removesuffix("<|call|>") + "<|end|>"
    text = again.join([good("harmony", "a"), bad, good("harmony", "b")])
    assert [call[0] for call in calls_in("harmony", text, [tool("run", code=TEXT)])] == ["run", "run"]


def test_a_valid_tool_call_after_a_call_with_an_unclosed_string_is_parsed() -> None:
    bad = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls}}\n</tool_call>\n'
    text = bad + '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert calls_in("generic", text) == [("clock", {})]


# The end of an answer


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "harmony"])
def test_a_complete_tool_call_at_the_end_of_an_answer_is_parsed_without_its_end_marker(family: str) -> None:
    closes = markup(family).calls[1]
    text = written(family).removesuffix(closes)
    for cut in (text, text + ("" if family.endswith("_bare") else closes[:3]), text + "\n"):
        assert len(outcome(splitter(family), [cut])[2]) == 1, cut


def test_a_tool_call_truncated_before_its_end_marker_is_parsed_in_json_but_not_in_the_glm_format() -> None:
    one = splitter("glm47")
    one.push(written("glm47").removesuffix("</tool_call>"))
    one.finish(is_cut=True)
    assert one.calls == []
    whole = splitter("generic")
    whole.push(written("generic").removesuffix("</tool_call>"))
    whole.finish(is_cut=True)
    assert len(whole.calls) == 1, "an object shows that it is complete"


# How many calls


def in_a_row(family: str, codes: str, between: str) -> str:
    if family == "harmony":
        between = "<|start|>assistant"
    elif family.startswith("llama"):
        between = ";"
    text = between.join(good(family, code).replace("<|python_tag|>", "") for code in codes)
    return f"<|python_tag|>{text}" if family == "llama" else text


@pytest.mark.parametrize("family", FAMILIES)
def test_tool_calls_beyond_the_allowed_number_are_dropped_from_an_answer(family: str) -> None:
    text = in_a_row(family, "abc", "")
    said, _, calls, _ = read(family, text, max_calls=1)
    assert ([json.loads(call[2])["code"] for call in calls], said) == (["a"], "")


@pytest.mark.parametrize("family", FAMILIES)
def test_if_tool_calls_are_required_a_call_equal_to_the_previous_one_ends_the_answer(family: str) -> None:
    text = in_a_row(family, "abbbba", "\n")
    one = splitter(family, ends_at_repeat=True)
    said, _, calls, _ = outcome(one, text)
    assert ([json.loads(call[2])["code"] for call in calls], said) == (["a", "b"], "")
    assert one.is_full


# Arguments and schemas


def fitted(value: Any, schema: Any, *, is_text: bool = False) -> Any:
    """Return an argument, converted by its schema; raises `NoCallError` if it does not fit."""
    offered = OfferedTools([{"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}])
    return json.loads(offered.believed(WrittenCall("f", {"x": value}, is_text=is_text)).arguments)["x"]


WHOLE, NULL = {"type": "integer"}, {"type": "null"}


@pytest.mark.parametrize(
    ("value", "schema", "wanted"),
    [
        ("3", WHOLE, 3),
        (3.0, WHOLE, 3),
        ("1e308", WHOLE, 1e308),
        ("3", {"anyOf": [WHOLE, NULL]}, 3),
        ("null", {"anyOf": [WHOLE, NULL]}, None),
        ("3", {"anyOf": [WHOLE, TEXT]}, "3"),
        ("3", {"type": ["integer", "string"]}, "3"),
        ("3", {"anyOf": [False, {"allOf": [WHOLE]}, {"enum": [4]}]}, 3),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("[1]", {"type": "array", "items": WHOLE}, [1]),
        (["1"], {"type": "array", "items": WHOLE}, [1]),
        ('{"a": "1"}', {"type": "object", "properties": {"a": WHOLE}}, {"a": 1}),
        ("null", TEXT, "null"),
        ("3", {}, "3"),
        (None, {"type": "string", "nullable": True}, None),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"type": "int"}, 2),
        ("2", {"type": "any"}, "2"),
        ("3", {"$ref": "#/$defs/none"}, "3"),
    ],
    ids=repr,
)
def test_a_tool_call_argument_is_converted_to_the_type_of_its_schema_only_if_the_type_is_unambiguous(
    value: Any, schema: Any, wanted: Any
) -> None:
    found = fitted(value, schema)
    assert (found, type(found)) == (wanted, type(wanted))


@pytest.mark.parametrize(
    ("text", "schema", "wanted"),
    [
        ("3", WHOLE, 3),
        (" 3\n", WHOLE, 3),
        ("3", TEXT, "3"),
        ("3", {"anyOf": [WHOLE, TEXT]}, "3"),
        ("3", {"anyOf": [WHOLE, NULL]}, 3),
        ("null", {"anyOf": [TEXT, NULL]}, None),
        ("null", {"oneOf": [TEXT, NULL]}, None),
        ("null", TEXT, "null"),
        ("true", TEXT, "true"),
        ('{"a": 1}', TEXT, '{"a": 1}'),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ('{"a": 1}', {}, {"a": 1}),
        ("3", {}, "3"),
        ("  x\n", TEXT, "  x\n"),
        ("False", {"type": "boolean"}, False),
        ("2", {"enum": [1, 2, "a"]}, 2),
    ],
    ids=repr,
)
def test_a_tool_call_argument_written_as_plain_text_is_parsed_as_the_type_of_its_schema(
    text: str, schema: Any, wanted: Any
) -> None:
    found = fitted(text, schema, is_text=True)
    assert (found, type(found)) == (wanted, type(wanted))


PATH_OF_FILES = {
    "type": "object",
    "if": {"properties": {"mode": {"const": "file"}}, "required": ["mode"]},
    "then": {"required": ["path"]},
    "else": {"properties": {"path": False}},
}


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("a", {"pattern": "a"}),
        ("2026-11-26", {"format": "date"}),
        ("x", {"format": "of-our-own"}),
        ("ab", {"pattern": "^(?=a)"}),
        ("ab", {"not": {"pattern": "^(?=b)"}}),
        ([1], {"not": {"contains": {"type": "string"}}}),
        ([1], {"not": {"not": {"contains": {"type": "string"}}}}),
        (1, {"not": {"$ref": "other.json"}}),
        (1, {"not": {"$ref": "#an-anchor"}}),
        (5_000_000.01, {"multipleOf": 0.01}),
        (-0.3, {"multipleOf": 0.1}),
        ("a", {"if": {"format": "of-our-own"}, "then": False, "else": False}),
        ({"mode": "file", "path": "a"}, PATH_OF_FILES),
        ({"mode": "all"}, PATH_OF_FILES),
        ("\ud800", {"pattern": "."}),
        ({"n": 3}, {"if": {"required": ["n"]}, "then": {"properties": {"n": WHOLE}}}),
    ],
    ids=repr,
)
def test_a_tool_call_argument_that_fits_its_schema_or_cannot_be_checked_is_accepted_unchanged(
    value: Any, schema: Any
) -> None:
    assert fitted(value, schema) == value


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("three", WHOLE),
        (3, TEXT),
        (True, WHOLE),
        (1, {"enum": [True]}),
        (3.5, WHOLE),
        ("c", {"enum": ["a", "b"]}),
        ([1, "x"], {"type": "array", "items": WHOLE}),
        ({"b": 1}, {"type": "object", "additionalProperties": False, "properties": {"a": {}}}),
        ({}, {"type": "object", "required": ["a"]}),
        (11, {"type": "integer", "maximum": 10}),
        (2**53 + 1, {"multipleOf": 2}),
        (0.35, {"multipleOf": 0.1}),
        ("", {"type": "string", "minLength": 1}),
        ([], {"type": "array", "minItems": 1}),
        (None, TEXT),
        ("x", {"anyOf": [WHOLE, NULL]}),
        ("3", {"anyOf": [WHOLE, {"type": "string", "pattern": "^a"}]}),
        ("3", {"anyOf": [WHOLE, {"enum": ["a"]}]}),
        ("3", {"anyOf": [{"enum": ["a"]}, WHOLE]}),
        ([1, 2], {"items": [WHOLE], "additionalItems": False}),
        (1, False),
        ("a-1", {"type": "string", "pattern": "^[a-z]+$"}),
        ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab!", {"pattern": "^(a+)+$"}),
        ("soon", {"type": "string", "format": "date"}),
        ("rm", {"not": {"enum": ["rm"]}}),
        ({"mode": "file"}, PATH_OF_FILES),
        ({"A": 1}, {"propertyNames": {"pattern": "^[a-z]$"}}),
        ([1, {"a": 1, "b": 2}, {"b": 2, "a": 1}], {"uniqueItems": True}),
    ],
    ids=repr,
)
def test_a_tool_call_argument_that_cannot_be_converted_to_fit_its_schema_raises_an_error(
    value: Any, schema: Any
) -> None:
    with pytest.raises(NoCallError):
        fitted(value, schema)


def test_a_recursive_argument_schema_is_checked_at_every_depth_and_an_endless_schema_fits_no_call() -> None:
    tree = {"type": "object", "properties": {"of": {"$ref": "#/$defs/tree"}, "n": WHOLE}}
    parameters = {"properties": {"x": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}
    offered = OfferedTools([{"function": {"name": "f", "parameters": parameters}}])
    found = offered.believed(WrittenCall("f", {"x": {"of": {"n": "3"}}}))
    assert json.loads(found.arguments) == {"x": {"of": {"n": 3}}}
    both = {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}], "type": "object"}
    endless = OfferedTools(
        [{"function": {"name": "f", "parameters": {"$ref": "#/$defs/x", "$defs": {"x": both}}}}]
    )
    with pytest.raises(NoCallError):
        endless.believed(WrittenCall("f", {}))


def test_a_tool_call_whose_id_has_an_unpaired_surrogate_gets_a_new_valid_id() -> None:
    call = r'{"name": "clock", "arguments": {}, "id": "a\ud800"}'
    (found,) = outcome(splitter("generic", tools=TOOLS), [f"<tool_call>{call}</tool_call>"])[2]
    assert found == (call_id("r", 0), "clock", "{}")


#: Parts of calls in all formats, and of values that cannot be.
PARTS = [
    *("{", "}", "[", "]", "(", ")", ":", ",", "=", "\n", "\\", "'", '"', "#", "```", "call:", "functions."),
    *(r"\UFFFFFFFF", r"\ud800", r"\777", "1e999", "NaN", "0x1f", "1" * 5000, "[" * 1500, '{"a":' * 1500, "1"),
    *('{"name": "clock"', ', "arguments": ', "clock", "command", "<escape>", '<|"|>', "<![CDATA[", "]]>"),
]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_every_tool_call_parser_raises_nothing_but_value_errors_for_random_model_output(
    family: str, data: Any
) -> None:
    """Otherwise the calls before are lost, or another format is not tried."""
    tags = re.findall(r"<[^<>]*>|\[[A-Z_]*\]", written(family, "clock"))
    text = "".join(data.draw(st.lists(st.sampled_from([*PARTS, *tags]), max_size=12)))
    found = markup(family)
    parsers = [parse_calls, *(form.parse for form in found.forms), *filter(None, [found.bare])]
    for parse in parsers:
        with suppress(ValueError):
            parse(
                data.draw(st.sampled_from(["clock(", "clock{", "clock", ""])) + text, data.draw(st.booleans())
            )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "b", "2", "true"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
KINDS = st.sampled_from(["string", "integer", "number", "boolean", "null", "array", "object"])
SCHEMAS = st.recursive(
    st.fixed_dictionaries({}, optional={"type": KINDS | st.lists(KINDS, min_size=1, max_size=2)})
    | st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=2)})
    | st.fixed_dictionaries({"minimum": st.integers(-1, 1)})
    | st.fixed_dictionaries({"maxLength": st.integers(0, 1)})
    | st.fixed_dictionaries({"pattern": st.sampled_from(["a", "^a?$", "^(?=a)"])})
    | st.fixed_dictionaries({"uniqueItems": st.booleans()})
    | st.booleans(),
    lambda inner: (
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"items": inner})
        | st.fixed_dictionaries({"not": inner})
        | st.fixed_dictionaries({"if": inner, "then": inner, "else": inner})
        | st.fixed_dictionaries({"propertyNames": inner})
        | st.fixed_dictionaries(
            {"properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2)},
            optional={"required": st.just(["a"]), "additionalProperties": inner},
        )
    ),
    max_leaves=4,
)


@given(value=VALUES, schema=SCHEMAS)
def test_random_tool_call_arguments_are_accepted_exactly_if_their_schema_allows_their_converted_value(
    value: Any, schema: Any
) -> None:
    checker = jsonschema.Draft202012Validator(schema)
    try:
        found = fitted(value, schema)
    except NoCallError:
        assert not checker.is_valid(value)
    else:
        assert checker.is_valid(found) or "(?=" in str(schema)  # which is not checked
        if checker.is_valid(value):
            assert found == value
