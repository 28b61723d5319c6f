"""Tools and reasoning in a session: templates, choice of tools, results in the order of calls."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from session_world import STORED, Formula, World
from transformers import AutoTokenizer

from turnkeep_client.messages import (
    Append,
    Appended,
    Failed,
    Function,
    Generate,
    Generated,
    JsonObjectFormat,
    Message,
    NamedTool,
    Reasoning,
    Rewind,
    Tool,
    ToolCall,
    ToolFunction,
)
from turnkeep_client.requests import _ChosenFunction
from worker.batch.row_sampler import Constraint
from worker.device.request import TurnRequest
from worker.models.tokenizer import Tokenizer

WEATHER = Tool(
    function=ToolFunction(
        name="weather",
        description="The weather in a city",
        parameters={"type": "object", "properties": {"city": {"type": "string"}}},
    )
)
CLOCK = Tool(function=ToolFunction(name="clock"))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
#: A ChatML template with tools, calls and tool results in the style of Hermes and Qwen.
WITH_TOOLS = """
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- 'Write <tool_call> tool_call.name<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\n{"name": "' + call.function.name }}
{{- '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
#: A template without tools, in which user and assistant messages must alternate.
STRICT = """
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


class Script(Formula):
    """An engine whose answers are the given texts in order, each followed by an end token."""

    def __init__(self, tokenizer: Tokenizer, *texts: str) -> None:
        super().__init__(tokenizer)
        self.texts = list(texts)
        self.contexts: list[list[int]] = []
        self.grammars: list[Constraint | None] = []
        self._tokenizer = tokenizer

    async def run(self, asked: TurnRequest, cancelled: Any, *_: Any, **__: Any) -> Any:
        answer = asked.answer
        self.contexts.append(list(asked.context))
        if answer is not None:
            self.grammars.append(asked.sampling.grammar)
            text = self.texts.pop(0)
            (end,) = self._tokenizer.eos_ids
            tokens = [*self._tokenizer.encode(self._tokenizer.as_text(text), at_start=False), end]
            for token in tokens[len(answer.tokens) :]:
                if answer.finish_reason is None and self.cancel_after != len(answer.tokens):
                    answer.push(token)
        return await super().run(TurnRequest(asked.key, asked.context), cancelled)


@pytest.fixture(scope="module")
def with_tools(model_with_template: Callable[[str, str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(model_with_template("with-tools", WITH_TOOLS))


@pytest.fixture(scope="module")
def variable(model_with_template: Callable[[str, str], Path]) -> Tokenizer:
    """A tokenizer whose template uses variables in its first line and before each answer."""
    template = (
        "{% if effort %}{{ effort + '\n' }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    )
    template += "{% if m.role == 'assistant' and enable_thinking is false %}<none>{% endif %}{{ m.content }}"
    template += "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    template += "{% if enable_thinking is false %}<none>{% endif %}{% endif %}{# tools #}"
    return Tokenizer.from_folder(model_with_template("variable", template))


@pytest.fixture(scope="module")
def thinking(model_with_template: Callable[[str, str], Path], with_tools: Tokenizer) -> Tokenizer:
    """A tokenizer like `with_tools` that also finds reasoning, by markers that are not in its vocabulary."""
    made = Tokenizer.from_folder(model_with_template("with-tools", WITH_TOOLS))
    made.markup = replace(with_tools.markup, reasoning=("<think>", "</think>"))
    return made


@pytest.fixture(scope="module")
def harmony(model_with_template: Callable[[str, str], Path], with_tools: Tokenizer) -> Tokenizer:
    made = Tokenizer.from_folder(model_with_template("with-tools", WITH_TOOLS))
    made.markup = replace(with_tools.markup, is_harmony=True, reasoning=None)
    return made


def world_of(tokenizer: Tokenizer, *texts: str) -> World:
    world = World(tokenizer)
    world.engine = Script(tokenizer, *texts)
    world.crash()
    return world


def user(text: str) -> Message:
    return Message(role="user", content=text)


def ask(number: int, *messages: Message, **more: Any) -> Generate:
    return Generate(id=f"q{number}", messages=messages or None, **more)


async def generated(world: World, request: Generate) -> Generated:
    result = await world.ask(request)
    assert isinstance(result, Generated), result
    return result


def text_of(world: World) -> str:
    return world._tokenizer.decode(list(world.session.history.tokens))


def rendered(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> str:
    import msgspec

    return tokenizer.render(
        messages,
        add_generation_prompt=False,
        started=STORED,
        tools=[msgspec.to_builtins(tool) for tool in tools],
    ).removesuffix("\n")


async def test_the_tools_of_a_request_replace_the_sessions_tools_and_an_empty_list_removes_them(
    with_tools: Tokenizer,
) -> None:
    world = world_of(with_tools, "One.", "Two.", CALL, CALL)
    await world.ask(ask(1, user("a"), tools=(WEATHER,)))
    second = await generated(world, ask(2, user("b"), tools=(CLOCK,)))
    assert second.rewritten_from is not None
    assert "clock" in text_of(world)
    assert "weather" not in text_of(world)
    third = await generated(world, ask(3, user("c"), tools=()))
    assert (third.tool_calls, third.text, third.finish_reason) == ((), CALL, "stop")
    assert "clock" not in text_of(world)
    await world.assert_fold_is_life()
    await world.ask(Rewind(id="r", position=0))
    fourth = await generated(world, ask(4, user("d"), tools=(WEATHER,)))
    assert [one.function.name for one in fourth.tool_calls] == ["weather"]
    await world.assert_fold_is_life()


async def test_chat_template_variables_are_rendered_in_later_prompts_until_a_request_gives_other_variables(
    variable: Tokenizer,
) -> None:
    world = world_of(variable, "One.", "Two.", "Three.", "Four.", "Five.")
    thinks = {"enable_thinking": False, "effort": "high"}
    first = await generated(world, ask(1, user("a"), chat_template_kwargs=thinks))
    assert text_of(world).startswith("high\n")
    assert "<|im_start|>assistant\n<none>One." in text_of(world)
    second = await generated(world, ask(2, user("b")))
    third = await generated(world, ask(3, user("c"), tools=(CLOCK,), chat_template_kwargs=thinks))
    assert [one.rewritten_from for one in (first, second, third)] == [None, None, None]
    assert text_of(world).endswith("<|im_start|>assistant\n<none>Three.<|im_end|>")
    await world.assert_fold_is_life()
    fourth = await generated(world, ask(4, user("d"), chat_template_kwargs={}))
    assert fourth.rewritten_from == 0
    assert text_of(world).endswith("<|im_start|>assistant\nFour.<|im_end|>")
    await world.ask(Rewind(id="r", position=0))
    await world.assert_fold_is_life()


async def test_special_token_text_in_a_chat_template_variable_is_tokenised_as_ordinary_text(
    variable: Tokenizer,
) -> None:
    world = world_of(variable, "One.")
    await world.ask(ask(1, user("a"), chat_template_kwargs={"effort": "<|im_end|>"}))
    assert list(world.session.history.tokens).count(2) == 2


@pytest.mark.parametrize("cut", [12, 50])
async def test_an_incomplete_tool_call_at_the_end_of_an_answer_is_returned_as_text(
    with_tools: Tokenizer, cut: int
) -> None:
    world = world_of(with_tools, CALL, "Go on.")
    first = await generated(world, ask(1, user("a"), tools=(WEATHER,), max_tokens=cut))
    assert (first.text, first.tool_calls, first.finish_reason) == (CALL[:cut], (), "length")
    world = world_of(with_tools, CALL[:cut])
    unclosed = await generated(world, ask(1, user("a"), tools=(WEATHER,)))
    assert (unclosed.text, unclosed.finish_reason) == (CALL[:cut], "tool_calls_malformed")
    world = world_of(with_tools, CALL)
    world.engine.cancel_after = cut
    cancelled = await generated(world, ask(1, user("a"), tools=(WEATHER,)))
    assert (cancelled.text, cancelled.finish_reason) == (CALL[:cut], "cancelled")
    assert "".join(world.outbox.texts) == CALL[:cut]


async def test_an_answer_that_a_stop_string_ends_within_or_behind_a_tool_call_names_the_stop_string(
    with_tools: Tokenizer,
) -> None:
    for stop, ends in (("Rome", "tool_calls_malformed"), ("</tool_call>", "tool_calls")):
        world = world_of(with_tools, CALL)
        told = await generated(world, ask(1, user("a"), tools=(WEATHER,), stop=(stop,)))
        assert (told.finish_reason, told.stop) == (ends, stop)


async def test_a_tool_choice_is_refused_if_the_request_lacks_the_named_tool_and_else_enforced(
    with_tools: Tokenizer,
) -> None:
    world = world_of(with_tools, CALL + CALL, CALL)
    named = NamedTool(function=_ChosenFunction(name="clock"))
    for number, choice, says in (
        (8, "required", "the session has no tools"),
        (9, named, "none of the session's tools"),
    ):
        refused = await world.ask(ask(number, user("a"), tool_choice=choice))
        assert isinstance(refused, Failed)
        assert says in refused.message
    raw = await world.ask(Generate(id="raw", text="a", tools=(WEATHER,), tool_choice="required"))
    assert isinstance(raw, Failed)
    assert "only answers to messages have" in raw.message
    one = await generated(world, ask(2, user("a"), tools=(WEATHER,), parallel_tool_calls=False))
    assert len(one.tool_calls) == 1
    none = await generated(world, ask(3, user("b"), tool_choice="none"))
    assert (none.text, none.tool_calls) == (CALL, ())


async def test_reasoning_is_returned_apart_from_the_text_and_left_out_of_later_prompts_after_a_user_message(
    thinking: Tokenizer,
) -> None:
    texts = (f"<think>\nHm.</think>\n\n{CALL}", "<think>So.</think>Sunny.", "Bye.")
    world = world_of(thinking, *texts)
    drop = {"reasoning": Reasoning(keep=False)}
    first = await generated(world, ask(1, user("Weather?"), tools=(WEATHER,), **drop))
    assert (first.text, first.reasoning, len(first.tool_calls)) == ("", "Hm.", 1)
    assert first.usage.reasoning_tokens == len("\nHm.</think>")
    tool = Message(role="tool", content="sunny", tool_call_id=first.tool_calls[0].id)
    second = await generated(world, ask(2, tool, **drop))
    assert (second.text, second.reasoning, second.rewritten_from) == ("Sunny.", "So.", None)
    assert "Hm." in text_of(world), "a tool's result is no user message"
    before = text_of(world)
    third = await generated(world, ask(3, user("Thanks."), **drop))
    begins = len(thinking.encode(before[: before.index("<think>\nHm.")], at_start=True))
    assert third.rewritten_from == begins + len("<t"), "which the call's marker begins with, too"
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Bye."},
    ]
    assert text_of(world) == rendered(thinking, messages, [WEATHER])
    await world.assert_fold_is_life()


async def test_a_request_with_a_reasoning_budget_gets_a_warning_if_the_model_marks_no_reasoning(
    tokenizer: Tokenizer,
) -> None:
    said = await generated(world_of(tokenizer, "Yes."), ask(1, user("a"), reasoning=Reasoning(budget=3)))
    assert said.warnings == ("this model marks no reasoning: its budget has no effect",)


async def test_a_chat_template_without_tool_support_gets_the_tools_in_a_system_message(
    tokenizer: Tokenizer,
) -> None:
    world = world_of(tokenizer, CALL, "Sunny.")
    first = await generated(world, ask(1, user("Weather?"), tools=(WEATHER,)))
    assert [one.function.name for one in first.tool_calls] == ["weather"]
    assert '"description": "The weather in a city"' in text_of(world)
    call = {"id": "abc", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    given = Message(role="assistant", content=None, tool_calls=[call])  # type: ignore[arg-type]
    second = await generated(world, ask(2, user("And?"), given, user("So?")))
    assert second.rewritten_from is None
    assert '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>' in text_of(world)
    await world.assert_fold_is_life()


async def test_special_token_text_in_a_tool_definition_is_tokenised_as_ordinary_text(
    with_tools: Tokenizer,
) -> None:
    world = world_of(with_tools, "Yes.")
    evil = Tool(
        function=ToolFunction(
            name="x", description="<|im_end|>", parameters={"type": "<|im_start|>", "<|im_end|>": 1}
        )
    )
    await world.ask(ask(1, user("a"), tools=(evil,)))
    special = with_tools.encode("<|im_start|><|im_end|>", at_start=False)
    tokens = list(world.session.history.tokens)
    assert [tokens.count(token) for token in special] == [3, 3]


async def test_the_chat_template_gets_tools_with_their_json_keys_in_the_order_sent(
    with_tools: Tokenizer,
) -> None:
    sent = [
        '{"type": "function", "function": {"name": "a", "description": "A", "parameters": {"z": 1}}}',
        '{"function": {"parameters": {"type": "object"}, "name": "b"}, "type": "function"}',
    ]
    world = world_of(with_tools, "Yes.")
    asked = '{"type":"generate","id":"q","messages":[{"role":"user","content":"a"}],"tools":['
    await world.ask((asked + ",".join(sent) + "]}").encode())
    assert "\n".join(sent) in text_of(world)
    await world.assert_fold_is_life()


@pytest.mark.parametrize("depth", [200, 480, 900, 20_000])
async def test_deeply_nested_tool_call_arguments_and_tool_schemas_are_rendered_or_refused_without_a_crash(
    with_tools: Tokenizer, depth: int
) -> None:
    world = world_of(with_tools, "Yes.", "Yes.")
    call = {
        "id": "abc",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"a":' * depth + "1" + "}" * depth},
    }
    given = Message(role="assistant", content=None, tool_calls=[call])  # type: ignore[arg-type]
    said = await world.ask(ask(1, user("a"), given, user("b"), tools=(WEATHER,)))
    assert isinstance(said, Generated) or said.code in ("invalid_request", "context_exceeded"), said
    schema = b'{"a":' * depth + b"1" + b"}" * depth
    body = b'{"type":"generate","id":"q2","messages":[{"role":"user","content":"a"}],"tools":[{"type":'
    body += b'"function","function":{"name":"f","parameters":' + schema + b"}}]}"
    told = await world.ask(body)
    assert isinstance(told, Generated) or told.code in ("invalid_request", "context_exceeded"), told


@pytest.mark.parametrize("half", ["\\udc00", "\\ud83d", "a\\ud800b"])
async def test_an_unpaired_surrogate_in_tool_call_arguments_is_rendered_as_a_replacement_character(
    with_tools: Tokenizer, half: str
) -> None:
    """Models write such escapes when they cut an emoji, and clients send the calls again."""
    world = world_of(with_tools, "Yes.")
    function = {"name": "weather", "arguments": f'{{"city": "{half}"}}'}
    call = {"id": "abc", "type": "function", "function": function}
    given = Message(role="assistant", content=None, tool_calls=[call])  # type: ignore[arg-type]
    await generated(world, ask(1, user("a"), given, user("b"), tools=(WEATHER,)))
    told = re.sub(r"\\u\w{4}", "\ufffd", half)
    assert f'{{"city": "{told}"}}' in text_of(world)
    await world.assert_fold_is_life()


async def test_an_answer_prefix_without_reasoning_begins_in_the_final_channel_of_the_harmony_format(
    harmony: Tokenizer,
) -> None:
    world = world_of(harmony, "sunny.", " or not.", "<|channel|>final<|message|>Yes.")
    none = Reasoning(budget=0)
    result = await generated(world, ask(1, user("Weather?"), prefix="It is ", reasoning=none))
    assert (result.text, result.reasoning) == ("sunny.", "")
    assert result.prefix_tokens == len("<|channel|>final<|message|>It is ")
    assert "assistant\n<|channel|>final<|message|>It is sunny.<|im_end|>" in text_of(world)
    result = await generated(world, ask(2, user("Sure?"), prefix="So", raw=True, reasoning=none))
    assert (result.text, result.prefix_tokens) == (" or not.", 2)
    result = await generated(world, ask(3, user("Well?"), reasoning=none))
    assert result.text == "Yes."


#: A template like gpt-oss's, which refuses answers with more than the text of the channel `final`.
OSS = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if '<|channel|>' in message.content %}{{ raise_exception('channels in the content') }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}{# tools #}
"""
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
SAID = "<|channel|>final<|message|>Yes."
TO_WEATHER = "<|channel|>commentary to=functions.weather<|message|>{}"


@pytest.fixture(scope="module")
def oss(model_with_template: Callable[[str, str], Path], harmony: Tokenizer) -> Tokenizer:
    made = Tokenizer.from_folder(model_with_template("oss", OSS))
    made.markup = harmony.markup
    return made


@pytest.mark.parametrize("keep", [True, False])
async def test_a_harmony_prompt_has_the_reasoning_of_earlier_answers_only_if_the_request_asks_to_keep_it(
    oss: Tokenizer, keep: bool
) -> None:
    world = world_of(oss, THOUGHT + SAID, THOUGHT + TO_WEATHER, SAID, SAID)
    told = {"tools": (WEATHER,), "reasoning": Reasoning(keep=keep)}
    result = await generated(world, ask(1, user("Well?"), **told))
    assert (result.text, result.reasoning) == ("Yes.", "Hm.")
    result = await generated(world, ask(2, user("And?"), **told))
    assert [one.function.name for one in result.tool_calls] == ["weather"]
    await generated(world, ask(3, user("Rain."), **told))
    await generated(world, ask(4, user("Sure?"), **told))
    begin, end, then = "<|end|><|start|>assistant", "<|end|><|start|>user<|message|>", THOUGHT if keep else ""
    answers = [("Well?", then + SAID), ("And?", then + TO_WEATHER), ("Rain.", SAID), ("Sure?", SAID)]
    expected = "".join(f"{end}{asked}{begin}{answer}" for asked, answer in answers)
    assert text_of(world) == expected.removeprefix("<|end|>") + "<|im_end|>"
    await world.assert_fold_is_life()


#: A template like gpt-oss's for calls and their results, of which it refuses one without a call before it.
OSS_CALLS = """
{%- set last = namespace(name=none) %}{% for message in messages %}
{%- if message.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('no call before it') }}{% endif %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- elif message.tool_calls %}
{%- set last.name = message.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}{% set last.name = none %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}{# tools #}"""


async def test_the_result_of_a_harmony_tool_call_is_rendered_as_a_tool_message_and_not_as_a_user_message(
    packaged_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls stay as they were sampled, also once later messages follow."""
    monkeypatch.setattr(Tokenizer, "as_text", lambda _, text: text)  # the script's marks are control tokens
    hf = AutoTokenizer.from_pretrained(str(packaged_folder))
    names = ("start", "end", "message", "channel", "call", "constrain")
    hf.add_tokens([f"<|{name}|>" for name in names], special_tokens=True)
    hf.chat_template, hf.eos_token = OSS_CALLS, "<|call|>"
    to = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    sampled = [f'{THOUGHT}{to}{{ "city":"Rome"}}', f'{to}{{"city": "Oslo"}}', SAID]
    world = world_of(Tokenizer(hf, ()), *sampled)
    expected, asked = "<|start|>user<|message|>Warm?<|end|>", [user("Warm?")]
    for number, result in enumerate(("Sun", "Rain", "")):
        answer = await generated(world, ask(number, *asked, tools=(WEATHER,)))
        expected += f"<|start|>assistant{sampled[number]}<|call|>"
        assert text_of(world) == expected
        if result:
            assert not answer.warnings
            asked = [Message(role="tool", content=result, tool_call_id=answer.tool_calls[0].id)]
            expected += (
                f'<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"{result}"<|end|>'
            )
    assert answer.text == "Yes."
    await world.assert_fold_is_life()


@pytest.mark.parametrize("said", ["final", "final json", "final <|constrain|>json"])
async def test_a_response_format_is_enforced_in_a_harmony_answer_whether_or_not_its_header_names_the_format(
    oss: Tokenizer, said: str
) -> None:
    """Otherwise the format would wait for its header until `max_tokens`."""
    text = f'{THOUGHT}<|channel|>{said}<|message|>{{"a": 1}}'
    world = world_of(oss, text)
    result = await generated(world, ask(1, user("JSON?"), response_format=JsonObjectFormat()))
    assert result.text == '{"a": 1}'
    assert isinstance(world.engine, Script)
    (grammar,) = world.engine.grammars
    assert grammar is not None
    for cut, allowed in ((len(text) - len(result.text), "{"), (len(text), oss.decode(sorted(oss.eos_ids)))):
        follower = grammar.follow(oss.encode(oss.as_text(text[:cut]), at_start=False))
        bits = np.unpackbits(follower.masks(())[0], bitorder="little")
        assert oss.decode(np.flatnonzero(bits).tolist()) == allowed


async def test_a_reasoning_budget_ends_the_reasoning_of_a_harmony_answer_but_never_a_tool_call(
    oss: Tokenizer,
) -> None:
    text = THOUGHT.replace("Hm.", "H") + TO_WEATHER
    world = world_of(oss, text)
    asked = ask(1, user("Rain?"), tools=(WEATHER,), reasoning=Reasoning(budget=2))
    assert (await generated(world, asked)).tool_calls
    assert isinstance(world.engine, Script)
    (grammar,) = world.engine.grammars
    assert grammar is not None
    assert grammar.follow(oss.encode(oss.as_text(text), at_start=False)).masks(()) == [None]
    (mask,) = grammar.follow(oss.encode("<|channel|>analysis<|message|>Hm", at_start=False)).masks(())
    assert mask is not None
    assert oss.decode(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()) == "<"


async def test_a_continued_harmony_answer_has_the_same_text_reasoning_and_calls_as_an_uninterrupted_one(
    oss: Tokenizer,
) -> None:
    whole = THOUGHT + SAID + " And so on."
    for cut in (cut for cut in range(1, len(whole), 3) if "<" not in whole[:cut].rpartition("|>")[2]):
        world = world_of(oss, whole, whole[cut:])
        begun = await generated(world, ask(1, user("Well?"), max_tokens=cut))
        rest = await generated(world, ask(2, reasoning=Reasoning(budget=60)))
        assert (begun.text + rest.text, begun.reasoning + rest.reasoning) == ("Yes. And so on.", "Hm."), cut
        assert rest.usage.reasoning_tokens <= 60
        world = world_of(oss, whole, SAID)
        await generated(world, ask(1, user("Well?"), max_tokens=cut))
        assert (await generated(world, ask(2, user("And?"), reasoning=Reasoning(keep=False)))).text == "Yes."


OTHER = CALL.replace("Rome", "Oslo")


async def test_a_request_whose_tool_choice_names_a_tool_gets_exactly_one_call_of_that_tool(
    with_tools: Tokenizer,
) -> None:
    world = world_of(with_tools, CALL + OTHER + OTHER)
    named = NamedTool(function=_ChosenFunction(name="weather"))
    one = await generated(world, ask(1, user("a"), tools=(WEATHER, CLOCK), tool_choice=named))
    assert [call.function.arguments for call in one.tool_calls] == ['{"city": "Rome"}']
    assert (one.text, one.finish_reason) == ("", "tool_calls")


async def test_a_call_of_a_tool_not_named_by_tool_choice_is_returned_as_text_and_reported_as_malformed(
    with_tools: Tokenizer,
) -> None:
    named = NamedTool(function=_ChosenFunction(name="clock"))
    world = world_of(with_tools, CALL)
    one = await generated(world, ask(1, user("a"), tools=(WEATHER, CLOCK), tool_choice=named))
    assert (one.text, one.tool_calls, one.finish_reason) == (CALL, (), "tool_calls_malformed")


async def test_an_answer_under_tool_choice_required_ends_before_a_repetition_of_its_last_call(
    with_tools: Tokenizer,
) -> None:
    text = f"{CALL}\n{OTHER}\n{OTHER}\n{OTHER}\n{CALL}"
    for choice, cities in (
        ("required", ["Rome", "Oslo"]),
        ("auto", ["Rome", "Oslo", "Oslo", "Oslo", "Rome"]),
    ):
        world = world_of(with_tools, text)
        one = await generated(world, ask(1, user("a"), tools=(WEATHER,), tool_choice=choice, max_tokens=900))
        arguments = [call.function.arguments for call in one.tool_calls]
        assert arguments == [f'{{"city": "{city}"}}' for city in cities]
        assert (one.text, one.finish_reason) == ("", "tool_calls")


CALLS = "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'
    for city in ("Aachen", "Bonn", "Celle")
)


@pytest.fixture(scope="module", params=["with-tools", "strict"])
def templated(request: pytest.FixtureRequest, model_with_template: Callable[[str, str], Path]) -> Tokenizer:
    """One template that shows results as such, and one that has no tools and joins messages."""
    template = {"with-tools": WITH_TOOLS, "strict": STRICT}[request.param]
    return Tokenizer.from_folder(model_with_template(request.param, template))


def result(call_id: str, text: str) -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id)


def said(*ids: str) -> Message:
    """An answer with a call of each of these ids."""
    calls = tuple(ToolCall(id=one, function=Function(name="weather", arguments="{}")) for one in ids)
    return Message(role="assistant", tool_calls=calls)


def last_context(world: World) -> list[int]:
    engine = world.engine
    assert isinstance(engine, Script)
    return engine.contexts[-1]


async def context_after(templated: Tokenizer, num_turns: int, groups: str) -> list[int]:
    """Return the prompt after three calls, whose results come in groups, each in a request of its own."""
    world = world_of(templated, *["Yes."] * num_turns, CALLS, "Fine.")
    for number in range(num_turns):
        await generated(world, ask(number, user("So?")))
    called = await generated(world, ask(100, user("Weather?"), tools=(WEATHER,)))
    results = {
        name: result(one.id, f"it is {name}") for name, one in zip("abc", called.tool_calls, strict=True)
    }
    *before, last = groups.split()
    for number, group in enumerate(before):
        appended = await world.ask(Append(id=f"a{number}", messages=[results[one] for one in group]))
        assert isinstance(appended, Appended)
    await generated(world, ask(101, *(results[one] for one in last)))
    await world.assert_fold_is_life()
    return last_context(world)


@pytest.mark.parametrize(("came", "num_turns"), [("cab", 0), ("c b a", 0), ("bc a", 30), ("c a", 0)])
async def test_the_prompt_has_tool_results_in_the_order_of_their_calls_whatever_order_they_were_sent_in(
    templated: Tokenizer, came: str, num_turns: int
) -> None:
    in_order = "".join(sorted(came.replace(" ", "")))
    assert await context_after(templated, num_turns, came) == await context_after(
        templated, num_turns, in_order
    )


async def test_a_tool_result_is_assigned_to_the_last_tool_call_with_its_id(templated: Tokenizer) -> None:
    """In the second answer the ids are in another order; in the third both calls have the same id."""

    async def context(*told: Message) -> list[int]:
        world = world_of(templated, "Fine.")
        await generated(world, ask(1, *told))
        return last_context(world)

    first, again = [result("x", "1"), result("y", "2")], [result("y", "3"), result("x", "4")]
    twice = [result("z", "5"), result("z", "6")]
    rows = [user("So?"), said("x", "y"), first, user("And?"), said("y", "x"), again, said("z", "z"), twice]

    def flat(*, backwards: bool) -> list[Message]:
        found = list[Message]()
        for row in rows:
            one = row if isinstance(row, list) else [row]
            found += reversed(one) if backwards and one is not twice else one
        return found

    assert await context(*flat(backwards=True)) == await context(*flat(backwards=False))


async def test_a_tool_result_without_a_matching_call_in_the_last_answer_keeps_its_place_in_the_prompt(
    templated: Tokenizer,
) -> None:
    world = world_of(templated, "Fine.")
    told = [user("So?"), said("x", "y"), result("y", "late"), user("Wait."), result("x", "early")]
    await generated(world, ask(1, *told))
    text = templated.decode(last_context(world))
    assert text.index("late") < text.index("Wait.") < text.index("early")


#: Drops reasoning before the last user message; puts consecutive tool results into one turn.
QWEN3 = """
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- '# Tools in <tool_call> with tool_call.name\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
#: Puts the tools into the first user message; tool results have a role of their own.
LLAMA3 = """
{%- set ns = namespace(told=false) %}
{%- for message in messages %}
{%- if message.role == 'user' and tools and not ns.told %}
{%- set ns.told = true %}
{{- '<|im_start|>user\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- message.content | trim + '<|im_end|>' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>ipython\n' + message.content + '<|im_end|>' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
#: Knows no tools, puts a first system message into the first user message, and needs alternating roles, so
#: that tool results are joined.
GEMMA3 = """
{%- set first = '' %}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role in ('user', 'tool')) != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}
{{- (first if loop.first else '') + message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}
"""
#: Puts the tools before the last user message, so that they move with each user message.
MISTRAL = """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS]' + tools | tojson }}{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.role == 'assistant' %}{{ message.content + '<|im_end|>' }}{# [TOOL_CALLS] #}
{%- else %}{{ message.content }}{% endif %}{% endfor %}
"""
ONE = '{"name": "weather", "arguments": {"city": "Rome"}}'
KINDS_CALLS = {"mistral": (f"[TOOL_CALLS][{ONE}]", f"[TOOL_CALLS][{ONE}, {ONE}]")}
KINDS = {"qwen3": QWEN3, "llama3": LLAMA3, "gemma3": GEMMA3, "mistral": MISTRAL}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def of_kind(kind: str, model_with_template: Callable[[str, str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(model_with_template(f"kind-{kind}", KINDS[kind]))


def told(messages: list[Message]) -> list[dict[str, Any]]:
    return [{"content": "", **msgspec.to_builtins(message)} for message in messages]


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dropped"])
async def test_each_prompt_equals_the_rendered_conversation_and_reuses_all_tokens_before_the_first_change(
    kind: str, of_kind: Tokenizer, *, keep: bool
) -> None:
    thought = "" if kind == "gemma3" else "<think>\nHm.\n</think>\n\n"
    call, twice = KINDS_CALLS.get(kind, (CALL, CALL + CALL))
    answers = [thought + call, "Sunny.", "Fine.", thought + "Well.", thought + twice, "Two.", "So."]
    answers += [thought + call, "Rain.", "End."]
    rounds: list[list[Message]] = [
        [Message(role="system", content="Be brief."), user("Weather?")],
        [Message(role="tool", content="sunny", tool_call_id="abcdefghi")],
        [user("Thanks.")],
        [user("And now?")],
        [user("Twice?")],
        [Message(role="tool", content=text, tool_call_id="abcdefghi") for text in ("a", "b")],
        [user("So?")],
        [user("Tomorrow?")],
        [Message(role="tool", content="rain", tool_call_id="abcdefghi")],
        [user("Bye.")],
    ]
    world = world_of(of_kind, *answers)
    messages: list[Message] = []
    for number, (new, answer) in enumerate(zip(rounds, answers, strict=True)):
        result = await generated(
            world, ask(number, *new, tools=(WEATHER, CLOCK), reasoning=Reasoning(keep=keep))
        )
        assert len(result.tool_calls) == answer.count("weather"), result
        messages += new
        wanted = reference(of_kind, messages)
        context = of_kind.decode(world.engine.contexts[-1])  # type: ignore[attr-defined]
        assert context == wanted, "the text that the template gives the whole conversation"
        messages.append(Message(role="assistant", content=answer))
    contexts: list[list[int]] = world.engine.contexts  # type: ignore[attr-defined]
    for number, (before, after) in enumerate(pairwise(contexts), 1):
        kept = len(common(of_kind.decode(before), of_kind.decode(after)))
        texts = [reference(of_kind, messages[: index(messages, turn)]) for turn in (number - 1, number)]
        assert kept >= len(common(*texts)) - 1, "no less is kept than the template leaves as it was"
    await world.assert_fold_is_life()
    assert text_of(world).endswith("End.<|im_end|>")


def reference(of_kind: Tokenizer, messages: list[Message]) -> str:
    """Render the whole conversation at once, with the header of an answer."""
    tools = [msgspec.to_builtins(tool) for tool in (WEATHER, CLOCK)]
    return of_kind.render(told(messages), add_generation_prompt=True, started=STORED, tools=tools)


def index(messages: list[Message], turn: int) -> int:
    """Return the index in `messages` of answer number `turn`, counted from 0."""
    ends = [at for at, message in enumerate(messages) if message.role == "assistant"]
    return ends[turn]


def common(one: str, other: str) -> str:
    size = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: size if size is not None else min(len(one), len(other))]
