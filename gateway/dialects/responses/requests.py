"""Parses requests to `/v1/responses` into `ClientTurn`s. Pure.

`items` converts the conversation in a request, `answers` writes the answer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from gateway.dialects.openai import common as openai
from gateway.logged_answers import RESPONSES
from gateway.turn import ClientTurn, WholeNumber, as_tool, as_whole, check, parts_checked, refused
from turnkeep_client.content_blocks import ContentWarning
from turnkeep_client.messages import OPTIONS, Message

from .items import Item, called_name, messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: What the log calls this API.
NAME: Final = RESPONSES
#: This API's names of fields, by the protocol's names.
NAMES: Final = {
    **{name: one.name_in("responses") for name, one in OPTIONS.items()},
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
#: Fields that would change the answer, but that are not supported.
_REFUSED: Final = ("conversation", "prompt")
_REFERRED: Final = re.compile(rb'"(?:msg|rs|fc|ctc)_([0-9a-f]{48})')
_MOST_REFERRED: Final = 2_000
_NONE: Final[Mapping[str, dict[str, Any]]] = {}
_ENCRYPTED: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"
#: OpenAI's limits of a response's metadata: pairs, characters of a key, characters of a value.
_MOST_PAIRS, _MOST_KEY, _MOST_VALUE = 16, 64, 512


class _Tool(Struct, frozen=True):
    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = None
    tools: list[_Tool] | None = None


class _Choice(Struct, frozen=True):
    type: str
    name: str = ""
    namespace: str | None = None
    mode: str = "auto"
    tools: list[_Choice] | None = None


class _Format(Struct, frozen=True):
    type: str
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: bool | None = None


class _Text(Struct, frozen=True):
    format: _Format | None = None


class _Reasoning(Struct, frozen=True):
    effort: str | None = None


class ResponsesBody(openai.SamplingFields, frozen=True, kw_only=True):
    """A request's body."""

    input: str | list[Item] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: WholeNumber | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _Choice | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: WholeNumber | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


_DECODER: Final = msgspec.json.Decoder(ResponsesBody, dec_hook=as_whole)


def answer_ids_in(body: bytes) -> set[str]:
    """Return the ids of all answers to whose items a request could refer. Raises `Fault` if too many."""
    if b'"item_reference"' not in body:
        return set()
    found = {one.decode() for one in _REFERRED.findall(body)}
    if len(found) > _MOST_REFERRED:
        raise refused(f"more than {_MOST_REFERRED} answers are referred to", "input")
    return found


@parts_checked()
def read(body: bytes, known: Mapping[str, dict[str, Any]] = _NONE) -> ClientTurn:
    """Parse a request; `known` maps ids to the items that the request names. Raises `Fault`."""
    asked, reading = openai.request(_DECODER, body, ("max_tokens", "n"))
    openai.refuse(asked, _REFUSED)
    given = asked.input
    said = messages(given, known, reading) if isinstance(given, list) else [Message("user", given)]
    if not given or not said:
        raise refused("input is empty", "input")
    effort, included = asked.reasoning.effort if asked.reasoning else None, asked.include or ()
    tools, kinds = _tools(asked, reading.warnings)
    options = openai.with_tokens(openai.sampling(asked, asked.max_output_tokens), "max_output_tokens")
    options |= openai.reasoning(effort, "reasoning.effort", reading.warnings) | tools
    if _LOGPROBS in included:
        options |= {"logprobs": True, "top_logprobs": int(asked.top_logprobs or 0)}
    if asked.text and asked.text.format and asked.text.format.type != "text":
        options["response_format"] = _response_format(asked.text.format)
    first = [Message("system", asked.instructions)] if asked.instructions else []
    repeated = {
        "instructions": bool(first),
        "metadata": _metadata(asked.metadata or {}),
        "previous_response_id": asked.previous_response_id,
        "effort": effort,
        "encrypted": _ENCRYPTED in included,
        "kinds": kinds,
        "background": bool(asked.background),
    }
    if asked.background and asked.store is False:
        raise refused("an answer in the background needs store: true", "background")
    turn = ClientTurn(
        messages=(*first, *said),
        options=options,
        model=asked.model,
        stream=bool(asked.stream),
        asked={name: value for name, value in repeated.items() if value},
        is_kept=asked.store is not False,
        previous=asked.previous_response_id or "",
        warnings=tuple(reading.warnings),
        images=reading.images,
    )
    return check(turn, NAMES)


def _response_format(form: _Format) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema is None:
        raise refused("the format has no schema", "text.format.schema")
    named = {} if form.name is None else {"name": form.name}
    return {"type": form.type, form.type: {"schema": form.schema, "strict": bool(form.strict), **named}}


def _metadata(given: dict[str, str]) -> dict[str, str]:
    if len(given) > _MOST_PAIRS or any(
        len(key) > _MOST_KEY or len(value) > _MOST_VALUE for key, value in given.items()
    ):
        most = f"{_MOST_PAIRS} pairs of at most {_MOST_KEY} and {_MOST_VALUE} characters"
        raise refused(f"metadata may have {most}", "metadata")
    return given


def _tools(
    asked: ResponsesBody, warnings: list[ContentWarning]
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Return the generate options for tools, and by name the fields in which a tool's calls are special.

    These are `type`, `name` and `namespace` of custom tools and of tools in namespaces.

    Tools that OpenAI's own servers would run are left out, with a warning.
    """
    tools, kinds, choice = [], {}, asked.tool_choice
    allowed = _allowed(choice)
    for namespace, tool, where in _offered(asked.tools or (), warnings):
        if not tool.name:
            why = f"a {tool.type} has no name: it is beside type, not within function"
            raise refused(why, f"{where}.name")
        name = called_name(namespace, tool.name)
        if allowed is not None and name not in allowed:
            continue
        tools.append(as_tool(_function(name, tool), where))
        if namespace is not None or tool.type == "custom":
            kind = {"type": tool.type, "name": tool.name, "namespace": namespace}
            kinds[name] = {field: value for field, value in kind.items() if value is not None}
    if isinstance(choice, _Choice):
        if choice.type in {"function", "custom"}:
            if not choice.name:
                why = f"a tool_choice of the type {choice.type} has no name: it is beside type"
                raise refused(why, "tool_choice")
            name = called_name(choice.namespace, choice.name)
            choice = {"type": "function", "function": {"name": name}}  # type: ignore[assignment]
        elif allowed is not None:
            choice = choice.mode
        else:
            raise refused(f"a tool_choice of the type {choice.type} is not supported", "tool_choice")
    if not tools:
        if choice in (None, "auto", "none"):
            return {}, {}
        raise refused("tool_choice needs tools", "tool_choice")
    chosen = {"tool_choice": choice, "parallel_tool_calls": asked.parallel_tool_calls}
    options = {"tools": tools} | {field: value for field, value in chosen.items() if value is not None}
    return options, kinds


def _allowed(choice: str | _Choice | None) -> set[str] | None:
    if not isinstance(choice, _Choice) or choice.type != "allowed_tools":
        return None
    return {called_name(one.namespace, one.name) for one in choice.tools or ()}


def _offered(
    tools: Iterable[_Tool], warnings: list[ContentWarning], namespace: str | None = None, within: str = ""
) -> Iterator[tuple[str | None, _Tool, str]]:
    """Yield the functions and custom tools, each with its namespace and its path in the request."""
    for number, tool in enumerate(tools):
        where = f"{within}tools[{number}]"
        if tool.type == "namespace":
            yield from _offered(tool.tools or (), warnings, tool.name, f"{where}.")
        elif tool.type in {"function", "custom"}:
            yield namespace, tool, where
        else:
            warnings.append(ContentWarning(where, f"{tool.type} is left out: nobody would run it"))


def _function(name: str, tool: _Tool) -> dict[str, Any]:
    fields = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    if tool.type == "custom":
        text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        grammar = tool.format.get("definition") if isinstance(tool.format, dict) else None
        described = "\n\n".join(part for part in (tool.description, grammar) if part)
        fields = {"description": described or None, "parameters": text | {"additionalProperties": False}}
    return {"name": name, **{field: value for field, value in fields.items() if value is not None}}
