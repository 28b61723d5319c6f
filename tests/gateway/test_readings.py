"""Requests of each API are read as `readings.txt` says.

Below a heading, which says what the gateway does, are requests: the API and the fields in which it differs
from the API's plain request, and after `|` each of its messages: a role and a content, or all of it. What is
read follows, indented: messages, options, warnings or a refusal, and of what a plain request has only what
differs. `TURNKEEP_TEST_RECORD=1 pytest tests/gateway/test_readings.py` writes all that is indented anew: read
what has changed.
"""

import json
import os
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from crafted import user

from gateway.dialects.anthropic import messages
from gateway.dialects.ollama import requests as ollama
from gateway.dialects.openai import chat, completions
from gateway.dialects.responses import requests as responses
from gateway.turn import ClientTurn, Fault

FILE = Path(__file__).with_name("readings.txt")
#: How each API reads a request, and the fields of its plain request.
APIS: dict[str, tuple[Callable[[bytes], ClientTurn], dict[str, Any]]] = {
    "chat": (chat.read, {"messages": [user("Plain.")]}),
    "completion": (completions.read, {"prompt": "Plain."}),
    "message": (messages.read, {"messages": [user("Plain.")], "max_tokens": 5}),
    "response": (responses.read, {"input": "Plain."}),
    "ollama": (ollama.chat, {"model": "m", "messages": [user("Plain.")]}),
    "generate": (ollama.generate, {"model": "m", "prompt": "Plain."}),
}
#: The fields of a turn whose parts have lines of their own.
APART = ("messages", "options", "asked", "images", "warnings")


def written(value: Any) -> str:
    return json.dumps(msgspec.to_builtins(value), ensure_ascii=False)


def lines(turn: ClientTurn) -> Iterator[str]:
    """Yield what was read, in lines of a name and a value; fields that have their defaults have no line."""
    for message in turn.messages or ():
        role, content, *more = ({"role": "", "content": None} | msgspec.to_builtins(message)).items()
        yield f"{role[1]}: {written(content[1])}{f' {written(dict(more))}' if more else ''}"
    for place in ("options", "asked"):
        for name, value in getattr(turn, place).items():
            parts = value if name == "tools" else [value]
            yield from (f"{place}.{name}: {written(one)}" for one in parts)
    bare = ClientTurn(options={})
    for name in turn.__struct_fields__:
        if name not in APART and (value := getattr(turn, name)) != getattr(bare, name):
            yield f"{name}: {written(value)}"
    for name, file in turn.images.items():
        yield f"image {name}: {'its file' if name == sha256(cast(bytes, file)).hexdigest() else file!r}"
    yield from (f"warns of {one.where}: {one.what}" for one in turn.warnings)


def read(api: str, **fields: Any) -> ClientTurn:
    reader, plain = APIS[api]
    return reader(json.dumps(plain | fields).encode())


def reading(request: list[str]) -> list[str]:
    """Return what is read of a request, which is written as in the file."""
    (api, _, told), *said = (line.removeprefix("| ").partition(" ") for line in request)
    fields: dict[str, Any] = json.loads(told)
    if said:
        whole = [
            {"role": role, "content": json.loads(rest)} if role.isalpha() else json.loads(f"{role} {rest}")
            for role, _, rest in said
        ]
        fields["input" if api == "response" else "messages"] = whole
    try:
        found, plain = [*lines(read(api, **fields))], [*lines(read(api))] if fields else []
    except Fault as fault:
        return [f"refused: {fault.status} {fault.param}: {fault.message}"]
    names = {line.partition(":")[0] for line in found}
    gone = [name for line in plain if (name := line.partition(":")[0]) not in names]
    return [line for line in found if line not in plain] + [f"without {name}" for name in gone]


def cases() -> dict[str, list[tuple[list[str], list[str]]]]:
    """Return the requests below each heading, and what is read of each, in lines."""
    found: dict[str, list[tuple[list[str], list[str]]]] = {}
    for line in FILE.read_text().splitlines():
        if line.startswith("### "):
            below = found[line.removeprefix("### ")] = []
        elif line.startswith("  "):
            below[-1][1].append(line.removeprefix("  "))
        elif line.startswith("| "):
            below[-1][0].append(line)
        else:
            below.append(([line], []))
    return found


@pytest.mark.parametrize("name", cases())
def test_the_gateway_translates_each_example_request_of_an_api_into_the_recorded_worker_request(
    name: str,
) -> None:
    if "TURNKEEP_TEST_RECORD" in os.environ:
        parts = []
        for heading, below in cases().items():
            parts.append(f"### {heading}")
            for request, _ in below:
                parts += [*request, *(f"  {line}" for line in reading(request))]
        FILE.write_text("\n".join(parts) + "\n")
    for request, told in cases()[name]:
        assert reading(request) == told, request


def test_the_schema_of_the_memory_tool_has_the_commands_and_arguments_of_the_anthropic_library() -> None:
    from anthropic.types import beta

    kinds = ("View", "Create", "StrReplace", "Insert", "Delete", "Rename")
    commands = [getattr(beta, f"BetaMemoryTool20250818{kind}Command") for kind in kinds]
    (tool,) = read("message", tools=[{"type": "memory_20250818", "name": "memory"}]).options["tools"]
    given = tool["function"]["parameters"]["properties"]
    names = {one.model_fields["command"].annotation.__args__[0] for one in commands}
    assert {*given["command"]["enum"]} == names
    assert given.keys() == {name for one in commands for name in one.model_fields}
