"""How many tool calls an answer may have under each `tool_choice`, and how answers with invalid calls end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_tools import CALL, CLOCK, WEATHER, WITH_TOOLS, ask, generated, user, world_of

from turnkeep_client.messages import NamedTool
from turnkeep_client.requests import _ChosenFunction
from worker.models.tokenizer import Tokenizer

OTHER = CALL.replace("Rome", "Oslo")
UNKNOWN = CALL.replace("weather", "whether")


@pytest.fixture(scope="module")
def with_tools(model_with_template: Callable[[str, str], Path]) -> Tokenizer:
    return Tokenizer.from_folder(model_with_template("with-tools", WITH_TOOLS))


async def test_a_tool_named_in_tool_choice_is_called_once(with_tools: Tokenizer) -> None:
    world = world_of(with_tools, CALL + OTHER + OTHER)
    named = NamedTool(function=_ChosenFunction(name="weather"))
    one = await generated(world, ask(1, user("a"), tools=(WEATHER, CLOCK), tool_choice=named))
    assert [call.function.arguments for call in one.tool_calls] == ['{"city": "Rome"}']
    assert (one.text, one.finish_reason) == ("", "tool_calls")


async def test_a_call_of_a_tool_that_tool_choice_does_not_name_stays_text_and_counts_as_malformed(
    with_tools: Tokenizer,
) -> None:
    named = NamedTool(function=_ChosenFunction(name="clock"))
    world = world_of(with_tools, CALL)
    one = await generated(world, ask(1, user("a"), tools=(WEATHER, CLOCK), tool_choice=named))
    assert (one.text, one.tool_calls, one.finish_reason) == (CALL, (), "tool_calls_malformed")


async def test_an_answer_under_tool_choice_required_ends_when_it_repeats_a_call(
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


async def test_an_answer_with_a_valid_call_beside_an_invalid_one_is_not_malformed(
    with_tools: Tokenizer,
) -> None:
    world = world_of(with_tools, f"{CALL}\n{UNKNOWN}\n{OTHER}", UNKNOWN)
    first = await generated(world, ask(1, user("a"), tools=(WEATHER,)))
    assert [call.function.name for call in first.tool_calls] == ["weather", "weather"]
    assert (first.text, first.finish_reason) == (UNKNOWN, "tool_calls")
    second = await generated(world, ask(2, user("b")))
    assert (second.text, second.tool_calls) == (UNKNOWN, ())
    assert second.finish_reason == "tool_calls_malformed"


async def test_an_answer_that_is_a_tool_call_in_json_without_markers_counts_as_a_tool_call(
    with_tools: Tokenizer,
) -> None:
    bare = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
    world = world_of(with_tools, f"```json{bare}```", '{"name": "Ada", "age": 36}')
    first = await generated(world, ask(1, user("a"), tools=(WEATHER,)))
    assert (first.text, len(first.tool_calls), first.finish_reason) == ("", 1, "tool_calls")
    second = await generated(world, ask(2, user("b")))
    assert (second.text, second.finish_reason) == ('{"name": "Ada", "age": 36}', "stop")
