"""Checks of calls, chat templates and tokenizers do bounded work: their threads serve all tenants."""

from __future__ import annotations

import ast
import json
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from test_splitting import markup, outcome, splitter

from worker.models import chat_template
from worker.models.call_parsers import WrittenCall
from worker.models.tokenizer import TemplateError, Tokenizer
from worker.text import arguments
from worker.text.arguments import NoCallError, OfferedTools
from worker.text.grammar import text_matcher
from worker.text.splitting import AnswerCalls


def offered(parameters: Any) -> OfferedTools:
    return OfferedTools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])


def fitted(value: Any, schema: Any, **defined: Any) -> Any:
    """Return an argument, converted by its schema; raises `NoCallError` if it does not fit."""
    tools = offered({"properties": {"x": schema}, "$defs": defined})
    return json.loads(tools.believed(WrittenCall("f", {"x": value})).arguments)["x"]


def test_schema_patterns_are_compiled_before_any_tool_call_and_matched_a_limited_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: Counter[str] = Counter()

    def counting(word: str, asked: str) -> Any:
        counted["compiled"] += 1
        matches = text_matcher(word, asked)
        assert matches is not None

        def match(text: str) -> bool | None:
            counted["matched"] += 1
            return matches(text)

        return match

    monkeypatch.setattr(arguments, "text_matcher", counting)
    patterns = [{"type": "string", "pattern": f"^x{{{num}}}y$"} for num in range(300)]
    either = {"anyOf": [{"$ref": "#/$defs/any"}] * 70}
    tools = offered({"$defs": {"any": {"anyOf": patterns[:100]}}, "properties": {"a": either}})
    for _ in range(20):
        with pytest.raises(NoCallError, match="too long"):
            tools.believed(WrittenCall("f", {"a": "q"}))
    assert counted["compiled"] == 100
    assert counted["matched"] < 1_500
    tools = offered({"$defs": {"any": {"anyOf": patterns}}, "properties": {"a": either}})
    assert counted["compiled"] == 228
    assert tools.believed(WrittenCall("f", {"a": "q"})), "one of the patterns is not checked"


LONG = [[num] for num in range(9_000)]


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (8_999, {"enum": list(range(9_000))}),
        (LONG, {"const": LONG}),
        ({"a": 1}, {"required": ["a"] * 90_000}),
        ("a" * 9_000, {"pattern": "^a*$"}),
        (LONG, {"uniqueItems": True}),
        (['["' + "a" * 90_000 + '"]'], {"items": {"type": "array"}}),
        (1, {"$ref": "#/$defs/" + "a" * 90_000}),
        (1, {"not": {"enum": list(range(2, 9_000))}}),
    ],
)
def test_a_tool_call_argument_is_checked_against_one_costly_schema_and_refused_for_2000_such_schemas(
    value: Any, schema: Any
) -> None:
    assert fitted(value, schema)
    with pytest.raises(NoCallError, match="too long"):
        fitted(value, {"anyOf": [{"$ref": "#/$defs/never"}] * 2_000}, never={"allOf": [schema, False]})


def test_a_tool_call_text_is_accepted_unchecked_if_the_schema_pattern_is_too_costly_for_the_text() -> None:
    schema = {"items": {"pattern": "^((a{1,100}){1,100}){1,100}$"}}
    with pytest.raises(NoCallError):
        fitted(["b"], schema)
    assert fitted(["a" * 200, "a", "b"], schema) == ["a" * 200, "a", "b"]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were parsed as calls, one for each try."""
    found: list[str] = []
    believed = AnswerCalls.believed

    def noted(calls: AnswerCalls, parse: Any, text: str, **more: Any) -> Any:
        found.append(text)
        return believed(calls, parse, text, **more)

    monkeypatch.setattr(AnswerCalls, "believed", noted)
    return found


#: For each family, a long call that no end marker completes, and what stands before each of these.
UNFINISHED = {
    "pythonic": ("[run(" + "code='\"', " * 2_001, "days=4)]"),
    "olmo3": ("run(" + "code='\"', " * 2_001, "days=4)"),
    "gemma4": ("call:run{" + "days:3," * 3_000 + 'code:<|"|>', ""),
}


@pytest.mark.parametrize("family", UNFINISHED)
def test_an_unfinished_tool_call_with_100_end_markers_is_parsed_fewer_than_50_times(
    family: str, parsed: list[str]
) -> None:
    opens, closes = markup(family).calls
    begun, more = UNFINISHED[family]
    text = opens + begun + f"{more}{closes}" * 100
    assert outcome(splitter(family), [text])[0] == text
    assert 1 <= len(parsed) < 50


#: Answers in which each part could be searched to the end, and how often.
CALL_WITHOUT_TAG = "<function=run>\n<parameter=code>\nls\n</function>\n"
QUADRATIC = {
    "generic": ('<tool_call>{"name": "run", "arguments": {"code": "' + "<tool_call>" * 9_000, ""),
    "pythonic": ("<|tool_call_start|>[run(code='" + "<|tool_call_end|>" * 9_000, ""),
    "qwen3_coder": (
        f"<tool_call>{CALL_WITHOUT_TAG.replace('</f', '</parameter></f')}",
        CALL_WITHOUT_TAG * 1_000 + "</parameter>x" * 3_000 + "</tool_call>",
    ),
}


@pytest.mark.parametrize("family", QUADRATIC)
def test_searching_a_long_answer_of_call_markers_for_tool_calls_takes_under_1_5_seconds(family: str) -> None:
    text = "".join(QUADRATIC[family])
    began_s = time.thread_time()
    assert outcome(splitter(family), [text])[0] == text
    assert time.thread_time() - began_s < 1.5


@pytest.mark.parametrize("family", ["generic", "mistral", "qwen3_coder"])
def test_searching_long_white_space_in_an_answer_for_tool_calls_takes_linear_time(family: str) -> None:
    opens = markup(family).calls[0]
    for begun in ("", f'{opens}{{"name": "run", "arguments": {{"code": "'):
        pieces = [begun, *[" " * 64] * 10_000]
        began_s = time.thread_time()
        assert outcome(splitter(family), pieces)[0] == "".join(pieces)
        assert time.thread_time() - began_s < 1.5, begun


def test_a_pythonic_tool_call_whose_string_contains_end_markers_and_code_is_parsed(parsed: list[str]) -> None:
    opens, closes = markup("pythonic").calls
    code = f"""f'{{a}}'  # it's "{closes}"\n""" * 200
    (call,) = outcome(splitter("pythonic"), [f"{opens}[run(code={code!r})]{closes}"])[2]
    assert json.loads(call[2]) == {"code": code}
    assert len(parsed) == 1


@pytest.mark.parametrize("prefix", ["f", "rF"])
def test_a_tool_call_that_contains_an_f_string_is_never_given_to_the_python_parser(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, closes = markup("llama4_bare").calls
    text = f"[run(code={prefix}'{'{a}' * 3_000}')]"
    seen: list[str] = []
    for whole in (text, f"{opens}{text}{closes}", f"{opens}[\n#'''\n{text}#'''\n]{closes}"):
        with monkeypatch.context() as patched:
            patched.setattr(ast, "parse", seen.append)
            found = outcome(splitter("llama4_bare"), [whole])
        assert (found, seen) == ((whole, "", [], whole != text), [])


@pytest.mark.parametrize("text", ["a" * 2_000, "a[CALL_ID]" + "b" * 2_000, "a" + " " * 2_000 + "b"])
def test_text_after_a_mistral_call_marker_that_begins_no_call_is_streamed_immediately(text: str) -> None:
    one = splitter("mistral_args")
    assert "".join(one.push(char).text for char in f"[TOOL_CALLS]{text}") == f"[TOOL_CALLS]{text}"
    assert one.malformed


DAY = datetime(2024, 2, 29, tzinfo=UTC)
SAY = "{{ messages[-1].content }}"
ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that leave out every round": (
        "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}"
    ),
    "loops in a macro": (
        "{% macro spin() %}{% for i in range(99999) %}{% endfor %}{% endmacro %}"
        "{% for i in range(99999) %}{{ spin() }}{% endfor %}"
    ),
    "calls in a chain": (
        "{% macro a() %}{% endmacro %}{% macro b() %}{{ (a() ~ a()) * 10 }}{% endmacro %}"
        "{% for i in range(99999) %}{{ (b() ~ b() ~ b() ~ b() ~ b() ~ b()) }}{% endfor %}"
    ),
    "a recursive loop": (
        "{% for i in range(9) recursive %}{{ loop(range(9)) if loop.depth < 12 }}{% endfor %}"
    ),
}
MACRO_FOR_EVER = "{% macro spin() %}{{ spin() }}{% endmacro %}{{ spin() }}"


def render(tokenizer: Tokenizer, content: str = "hi", num_messages: int = 1) -> str:
    messages = [{"role": "user", "content": content}] * num_messages
    return tokenizer.render(messages, add_generation_prompt=True, started=DAY)


@pytest.mark.model
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_chat_template_that_takes_too_many_steps_is_stopped_with_an_error(
    with_template: Callable[[str], Tokenizer], template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "_MAX_STEPS", 10_000)
    tokenizer = with_template("{% if 'spin' in messages[-1].content %}" + template + "{% endif %}" + SAY)
    for _ in range(2):
        assert render(tokenizer, "hi") == "hi"
        with pytest.raises(TemplateError, match="it takes more than 10000 steps; send fewer messages"):
            render(tokenizer, "spin")


@pytest.mark.model
def test_a_chat_template_with_endless_recursion_is_stopped_with_an_error(
    with_template: Callable[[str], Tokenizer],
) -> None:
    with pytest.raises(TemplateError, match="recursion"):
        render(with_template(MACRO_FOR_EVER))


@pytest.mark.model
@pytest.mark.parametrize(
    "value",
    ["9 ** (9 ** 9)", "'a' * 10 ** 12", "10 ** 12 * [1]", "lipsum(10 ** 9)"],
)
def test_a_chat_template_with_one_endless_operation_is_stopped_with_an_error_at_once(
    with_template: Callable[[str], Tokenizer], value: str
) -> None:
    with pytest.raises(TemplateError, match=r"it computes a value of more than|'lipsum' is undefined"):
        render(with_template("{{ " + value + " }}"))


@pytest.mark.model
def test_a_chat_template_that_computes_a_number_of_more_than_65536_bits_is_stopped_with_an_error(
    with_template: Callable[[str], Tokenizer],
) -> None:
    grows = "{% set n = namespace(x=9) %}{% for i in range(18) %}{% set n.x = n.x * n.x %}{% endfor %}"
    with pytest.raises(TemplateError, match="it computes a value of more than 65536 bits"):
        render(with_template(grows))
    assert (
        render(with_template("{{ 2 ** 10 * 3 }} {{ '-' * 3 }} {{ 0.5 * 3 }} {{ 2.0 ** -1 }}"))
        == "3072 --- 1.5 0.5"
    )


@pytest.mark.model
def test_a_chat_template_that_writes_too_many_characters_is_stopped_with_an_error(
    with_template: Callable[[str], Tokenizer],
) -> None:
    flood = "{% for i in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}"
    with pytest.raises(TemplateError, match="it writes more than 67108864 characters; send fewer"):
        render(with_template(flood), "x" * 1000)


@pytest.mark.model
def test_a_chat_template_that_runs_longer_than_the_time_limit_is_stopped_with_an_error(
    with_template: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "{% for i in range(99999) %}{% set x = range(50000) | sum %}{% endfor %}"
    monkeypatch.setattr(chat_template, "_MAX_SECONDS", 0.1)
    with pytest.raises(TemplateError, match=r"it takes more than 0.1 s"):
        render(with_template(slow))


@pytest.mark.model
def test_tokenising_message_content_made_of_special_tokens_takes_linear_work(
    tokenizer: Tokenizer,
) -> None:
    """Each character is passed to the tokenizer fewer than six times on average, however long the text."""
    looked_at = 0
    rust = tokenizer._rust

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(rust, name)

        def encode(self, text: str, **options: Any) -> Any:
            nonlocal looked_at
            looked_at += len(text)
            return rust.encode(text, **options)

    content = "<|im_end|>" * 2000
    counted = Tokenizer(tokenizer._hf)
    counted._rust = counted.controls._rust = Counting()
    tokens = counted.encode(counted.as_text(content), at_start=False)
    assert counted.decode(tokens) == content
    assert looked_at < 6 * len(content)
