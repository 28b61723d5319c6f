"""Excessive tools are refused, or named in a warning, while another answer goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_wire import LONG, Start, Wire, generate

from tests.parts import CHAT_TEMPLATE
from worker.text import arguments, grammar
from worker.text.grammar import text_matcher

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
        "a tool_choice of g, which is none of its tools",
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


async def test_excessive_tools_or_stop_strings_are_refused_while_another_answer_goes_on(served: Wire) -> None:
    expected = await served.send("alone", generate("l", **LONG))
    running = await served.publish("r", generate("l", **LONG))
    for number, (more, says) in enumerate(REFUSED):
        told = await served.send(f"s{number}", asked("a", **more))
        assert (told["type"], told["code"]) == ("failed", "invalid_request"), says
        assert says in told["message"]
        assert (await served.send(f"s{number}", asked("b")))["type"] == "generated"
    assert (await served.result(running))["tokens"] == expected["tokens"]


async def test_a_tool_with_an_unenforceable_schema_leaves_the_other_tools_held_to_theirs(
    served: Wire,
) -> None:
    tools = [tool("deep", deep(300)), tool("pick", {"enum": [1, 2]})]
    more = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0}
    picked: list[dict[str, Any]] = []
    for seed in range(30):
        told = await served.send(f"s{seed}", asked("a", seed=seed, max_tokens=200, **more))
        (warning,) = told["warnings"]
        assert warning.startswith("arguments are not held to the schemas of deep: ")
        calls = [call["function"] for call in told.get("tool_calls", [])]
        picked += [json.loads(call["arguments"]) for call in calls if call["name"] == "pick"]
        if len(picked) == 3:
            break
    assert len(picked) == 3
    assert {one["x"] for one in picked} <= {1, 2}


async def test_a_tools_patterns_are_compiled_on_neither_the_event_loops_nor_the_devices_thread(
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


async def test_an_answer_ends_with_the_reason_length_before_its_calls_are_larger_than_a_message(
    wire: Start, model_with_template: Callable[[str, str], Path]
) -> None:
    served = await wire(
        model=str(model_with_template("names-of-tools", NAMES + CHAT_TEMPLATE)), max_message_bytes=12 * 1024
    )
    choice = {"type": "choice", "choices": ["\n "]}
    space = await served.send("q", generate("a", text="x", response_format=choice))
    calls = "<tool_call>" + '{"name":"f"}' * 120 + "</tool_call>"
    told = await served.send(
        "s",
        asked(
            "a",
            tools=[{"type": "function", "function": {"name": "f"}}],
            response_format={"type": "choice", "choices": [calls]},
            logit_bias=dict.fromkeys(space["tokens"][:2], -100),
            max_tokens=1_800,
        ),
    )
    assert (told["type"], told.get("finish_reason")) == ("generated", "length")
    assert 20 < len(told["tool_calls"]) < 120


async def test_a_tool_call_left_incomplete_at_max_tokens_stays_in_the_text_of_the_answer(
    served: Wire,
) -> None:
    quote = await served.send(
        "q", generate("a", text="x", response_format={"type": "choice", "choices": ['"']})
    )
    told = await served.send(
        "s",
        asked(
            "a",
            tools=[tool("f", {"type": "string"})],
            tool_choice="required",
            logit_bias={quote["tokens"][0]: -100},
            max_tokens=300,
        ),
    )
    assert (told["finish_reason"], told.get("tool_calls", [])) == ("length", [])
    assert told["text"].lstrip().startswith('<tool_call>\n{"name": "f", "arguments": {"x":')
    assert (await served.send("s", asked("b", tool_choice="none")))["type"] == "generated"
