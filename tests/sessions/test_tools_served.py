"""Tools and reasoning with a real worker: forced calls, budgets, excessive tools, a restart in an answer."""

import json
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from raw_wire import LONG, Start, Wire, generate, user
from test_tools import WITH_TOOLS

from tests.parts import CHAT_TEMPLATE, make_tiny_model
from turnkeep_client import run_tools
from turnkeep_client.client import Client
from turnkeep_client.errors import InvalidMessageError, RequestFailedError
from turnkeep_client.messages import Chunk, Generated
from turnkeep_client.session import Session
from worker.text import arguments, grammar
from worker.text.grammar import text_matcher

CITY = {"type": "string", "maxLength": 12}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": CITY, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
#: The tokens `<think>` and `</think>` of `thinking_model`.
MARKS = (259, 260)
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
HARMONY = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


async def heard(session: Session, **asked: Any) -> tuple[list[Chunk], Generated]:
    generation = session.generate(**asked)
    return [chunk async for chunk in generation], generation.result


def joined(chunks: list[Chunk]) -> list[tuple[str | None, str | None, str]]:
    calls: list[tuple[str | None, str | None, str]] = []
    for part in (part for chunk in chunks for part in chunk.tool_calls):
        if part.index == len(calls):
            calls.append((part.id, part.name, part.arguments))
        else:
            own, name, arguments = calls[part.index]
            calls[part.index] = own, name, arguments + part.arguments
    return calls


@pytest.fixture
async def random(
    local_worker: Callable[..., Awaitable[Any]], model_with_template: Callable[[str, str], Path]
) -> Client:
    """A client of a random model whose template knows tools."""
    client: Client = (await local_worker(model=str(model_with_template("with-tools", WITH_TOOLS)))).client
    return client


async def test_a_tool_schema_that_cannot_be_enforced_gives_a_warning_or_if_strict_an_error(
    random: Client,
) -> None:
    odd: dict[str, Any] = json.loads(json.dumps(WEATHER))
    odd["function"]["parameters"]["propertyNames"] = {"pattern": "^[a-z]+$"}
    asked: dict[str, Any] = {"messages": user("Weather?"), "tool_choice": "required", "max_tokens": 200}
    asked["parallel_tool_calls"] = False
    result = await random.session("s").generate(tools=[odd], **asked)
    assert "propertyNames" in " ".join(result.warnings)
    assert len(result.tool_calls) == 1
    odd["function"]["strict"] = True
    with pytest.raises(
        RequestFailedError, match=r"the schema of get_weather: Unimplemented.*propertyNames"
    ) as no:
        await random.session("t").generate(tools=[odd], **asked)
    assert "%json" not in str(no.value)


async def test_a_strict_tool_gives_a_warning_if_the_models_calls_are_not_json(
    local_worker: Callable[..., Awaitable[Any]], model_with_template: Callable[[str, str], Path]
) -> None:
    coder = str(model_with_template("tagged-calls", f"{WITH_TOOLS}{{# <function= #}}"))
    client = (await local_worker(model=coder)).client
    for strict, warned in ((True, True), (False, False)):
        tools = [{**WEATHER, "function": {**WEATHER["function"], "strict": strict}}]
        asked = client.session("s").generate(messages=user("Weather?"), tools=tools, max_tokens=1)
        assert ("strict tools are not enforced" in " ".join((await asked).warnings)) == warned


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose template begins answers with `<think>`, and whose vocabulary has the markers."""
    begun = CHAT_TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    return model_with_tokens(tmp_path_factory.mktemp("models") / "thinking", begun, "<think>", "</think>")


@pytest.fixture(scope="module")
def harmony_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose vocabulary has the special tokens of the harmony format."""
    names = "start", "end", "message", "channel", "constrain", "call", "return"
    marks = [f"<|{name}|>" for name in names]
    return model_with_tokens(tmp_path_factory.mktemp("models") / "harmony", HARMONY, *marks, special=True)


def model_with_tokens(folder: Path, template: str, *tokens: str, special: bool = False) -> Path:
    from transformers import AutoTokenizer

    make_tiny_model(folder, vocab_size=259 + len(tokens))
    fast = AutoTokenizer.from_pretrained(folder)
    fast.add_tokens(list(tokens), special_tokens=special)
    fast.chat_template = template
    saved = folder.with_name("saved")
    fast.save_pretrained(saved)
    for file in saved.iterdir():
        shutil.copy(file, folder / file.name)
    return folder


async def test_reasoning_ends_at_its_token_budget_and_the_response_format_applies_to_the_text_after_it(
    local_worker: Callable[..., Awaitable[Any]], thinking_model: Path
) -> None:
    client = (await local_worker(model=str(thinking_model))).client
    for budget in (0, 5):
        chunks, result = await heard(
            client.session(f"s{budget}"),
            messages=user("Hi"),
            reasoning={"budget": budget},
            response_format={"type": "choice", "choices": ["yes", "no"]},
            max_tokens=40,
            logit_bias={2: -100},
        )
        assert result.usage.reasoning_tokens == budget + 1, "with the token that closes it"
        assert result.text in ("yes", "no")
        assert "".join(chunk.reasoning for chunk in chunks) == result.reasoning
        assert "".join(chunk.text for chunk in chunks) == result.text


async def test_an_answer_prefix_continues_reasoning_that_the_template_began_unless_the_budget_is_0(
    local_worker: Callable[..., Awaitable[Any]], thinking_model: Path
) -> None:
    client = (await local_worker(model=str(thinking_model))).client
    asked: dict[str, Any] = {
        "messages": user("Hi"),
        "max_tokens": 5,
        "prefix": "So",
        "logit_bias": dict.fromkeys((2, *MARKS), -100),
    }
    behind = await client.session("behind").generate(**asked, reasoning={"budget": 0})
    assert (behind.reasoning, behind.usage.reasoning_tokens) == ("", 0)
    assert behind.text
    assert behind.prefix_tokens == len("</think>\n\nSo".replace("</think>", "."))
    inside = await client.session("inside").generate(**asked)
    assert (inside.text, inside.prefix_tokens) == ("", len("So"))


async def test_an_answer_with_a_response_format_does_not_end_inside_its_reasoning(
    local_worker: Callable[..., Awaitable[Any]], thinking_model: Path
) -> None:
    session = (await local_worker(model=str(thinking_model))).client.session("s")
    asked: dict[str, Any] = {"messages": user("Hi"), "max_tokens": 60, "logit_bias": {2: 100, MARKS[1]: 90}}
    assert len((await session.generate(**asked)).tokens) == 1
    one = await session.generate(**asked, response_format={"type": "choice", "choices": ["yes", "no"]})
    assert one.finish_reason == "stop"
    assert one.text in ("yes", "no")


async def test_a_forced_harmony_tool_call_follows_the_reasoning_even_if_the_worker_restarts_in_between(
    local_worker: Callable[..., Awaitable[Any]], harmony_model: Path
) -> None:
    asked: dict[str, Any] = {
        "messages": user("Hi"),
        "tools": [WEATHER, CLOCK],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "reasoning": {"budget": 300},
        "max_tokens": 700,
        "temperature": 0.8,
        "seed": 6,
        "logit_bias": dict.fromkeys([2, *range(259, 266)], -100) | {262: -50},  # its reasoning lasts
    }
    worker = await local_worker(model=str(harmony_model))
    expected = await worker.client.session("alone").generate(**asked)
    generation, chunks = worker.client.session("s").generate(**asked), list[Chunk]()
    async for chunk in generation:
        chunks.append(chunk)
        if sum(len(one.tokens) for one in chunks) > 180 and not worker.task.done():
            worker.app.stop()
            await worker.task
            await local_worker(model=str(harmony_model))
    result = generation.result
    assert result.resumed_tokens > 180
    assert (result.tokens, result.finish_reason) == (expected.tokens, "tool_calls")
    assert result.usage.reasoning_tokens == 301
    (call,) = result.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() == {"city", "days"}
    assert joined(chunks) == [(call.id, call.function.name, call.function.arguments)]


async def test_the_client_method_run_tools_calls_the_functions_and_sends_their_results_and_errors(
    random: Client,
) -> None:
    asked: list[Any] = []

    async def get_weather(city: str, days: int) -> dict[str, Any]:
        asked.append((city, days))
        if len(asked) == 1:
            raise LookupError(city)
        return {"sky": "blue"}

    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
    for _ in range(2):  # the second time from the record
        answer = await run_tools(
            random.session("s"),
            {"get_weather": get_weather},
            messages=user("Weather in Rome?"),
            request_id="step",
            parallel_tool_calls=False,
            most=3,
            **options,
        )
    assert asked
    assert answer.id.startswith("step-")
    shown = [entry.body for entry in await random.log("s") if entry.kind == "in"]
    assert b"LookupError" in shown[1], "sent before the answer was asked for"
    steps = [one for one in shown if b"generate" in one]
    assert len(steps) == 2 * len(set(steps)), "each twice, and answered once"
    with pytest.raises(InvalidMessageError, match="there is no function for clock"):
        await run_tools(random.session("s"), {}, messages=user("x"), tools=[CLOCK])


async def test_the_client_method_run_tools_refuses_a_request_id_too_long_for_its_suffixes_and_sends_nothing(
    random: Client,
) -> None:
    functions: dict[str, Any] = {"clock": lambda: pytest.fail("its effect could not be undone")}
    with pytest.raises(InvalidMessageError, match="x-7-results' is not valid: it must be 1 to 64"):
        await run_tools(
            random.session("s"), functions, messages=user("x"), tools=[CLOCK], request_id="x" * 55
        )
    assert await random.log("s") == []


NAMES = (
    "{% for tool in tools or [] %}{{ tool.function.name }}"
    "{% if tool.function.name == 'odd' %}{{ raise_exception('no odd tools') }}{% endif %}{% endfor %}"
)


def tool(name: str, value: Any = None, **more: Any) -> dict[str, Any]:
    """Make a tool with one argument `x`, whose JSON schema is `value`."""
    parameters = {"type": "object", "properties": {"x": value or {}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BRANCHES = [{"anyOf": [{"type": "string", "pattern": f"a{i}{j}"} for i in range(8)]} for j in range(6)]
#: Schemas that cannot become a grammar, each with a part of the reason.
BOMBS: dict[str, list[Any]] = {
    "multipleOf: all in a schema": [{"multipleOf": 60_000}, {"multipleOf": 60_001}],
    "recursion limit": [deep(300)],
    "schema too large": [{"allOf": BRANCHES}],
    "bytes, the limit is": [{"enum": list(range(30_000))}],
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(513)]},
        "a list of at most 512 items",
    ),
    ({"stop": [f"stop{n}" for n in range(1_000)]}, "a list of at most 16 items"),
    ({"tools": [tool("odd")]}, "no odd tools"),
    (
        {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice names g, which is none of the tools",
    ),
    *(
        ({"tools": [tool(f"f{n}", one, strict=True) for n, one in enumerate(bomb)]}, says)
        for says, bomb in BOMBS.items()
    ),
]


@pytest.fixture
async def served(wire: Start, model_with_template: Callable[[str, str], Path]) -> Wire:
    return await wire(model=str(model_with_template("names-of-tools", NAMES + CHAT_TEMPLATE)))


def asked(request_id: str, **more: Any) -> dict[str, Any]:
    return generate(request_id, messages=[{"role": "user", "content": "x"}], **more)


async def test_too_many_tools_or_stop_strings_are_refused_and_change_no_token_of_a_running_answer(
    served: Wire,
) -> None:
    expected = await served.send("alone", generate("l", **LONG))
    running = await served.publish("r", generate("l", **LONG))
    for number, (more, says) in enumerate(REFUSED):
        told = await served.send(f"s{number}", asked("a", **more))
        assert (told["type"], told["code"]) == ("failed", "invalid_request"), says
        assert says in told["message"]
        assert (await served.send(f"s{number}", asked("b")))["type"] == "generated"
    assert (await served.result(running))["tokens"] == expected["tokens"]


@pytest.mark.parametrize("schema", [deep(300), {"type": "wrong"}], ids=["deep", "wrong"])
async def test_the_arguments_of_other_tools_are_enforced_even_if_one_tool_schema_cannot_be_enforced(
    served: Wire, schema: dict[str, Any]
) -> None:
    tools = [tool("bent", schema), tool("pick", {"enum": [1, 2]})]
    more = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0}
    picked: list[dict[str, Any]] = []
    for seed in range(30):
        told = await served.send(f"s{seed}", asked("a", seed=seed, max_tokens=100, **more))
        (warning,) = told["warnings"]
        assert warning.startswith("arguments are not held to the schemas of bent: ")
        assert "\n" not in warning, "it has lines of the grammar"
        calls = [call["function"] for call in told.get("tool_calls", [])]
        picked += [json.loads(call["arguments"]) for call in calls if call["name"] == "pick"]
        if picked:
            break
    assert {one["x"] for one in picked} in ({1}, {2})


async def test_regex_patterns_of_tool_schemas_are_compiled_outside_the_event_loop_and_device_threads(
    served: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, int] = {"loop": threading.get_ident()}

    def noted(word: str, asked: str) -> Any:
        threads[asked], matches = threading.get_ident(), text_matcher(word, asked)

        def match(text: str) -> bool | None:
            threads["device"] = threading.get_ident()
            return matches(text) if matches else None

        return match

    def noted_regular(_: str) -> bool:
        threads["grammar"] = threading.get_ident()
        return True

    monkeypatch.setattr(arguments, "text_matcher", noted)
    monkeypatch.setattr(grammar, "_is_regular", noted_regular)
    made = tool("f", {"type": "string", "pattern": "^ab$"})
    made["function"]["parameters"]["additionalProperties"] = False
    more = {"tools": [made], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    told = await served.send("s", asked("a", **more))
    assert [json.loads(call["function"]["arguments"]) for call in told["tool_calls"]] == [{"x": "ab"}]
    assert threads.keys() == {"loop", "^ab$", "device", "grammar"}
    assert list(threads.values()).count(threads["loop"]) == 1
    assert list(threads.values()).count(threads["device"]) == 1
