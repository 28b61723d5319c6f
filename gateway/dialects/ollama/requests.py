"""Parses Ollama's requests to `/api/chat` and `/api/generate` into `ClientTurn`s. Pure."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec
from msgspec import Struct

from gateway.dialects.openai import common as openai
from gateway.form import ModelLoad
from gateway.images import joined
from gateway.turn import (
    ClientTurn,
    Fault,
    WholeNumber,
    as_whole,
    check,
    decoded,
    parts_checked,
    prefilled,
    refused,
    renamed,
)
from turnkeep_client.content_blocks import ContentWarning
from turnkeep_client.explain import field_of
from turnkeep_client.messages import OPTIONS, Function, Message, ToolCall, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gateway.images import Reading

#: The options that have an effect, with the protocol's names for them.
_OPTIONS: Final = {one.name_in("ollama"): name for name, one in OPTIONS.items()}
#: Ollama's names of fields, by the protocol's names.
NAMES: Final = {name: f"options.{theirs}" for theirs, name in _OPTIONS.items()} | {
    "response_format": "format"
}
#: Fields that never affect an answer: how long a model stays loaded is the worker's setting.
_HARMLESS: Final = {"keep_alive"}
_ROLES: Final = ("system", "user", "assistant", "tool")


class _Function(Struct, frozen=True):
    name: str
    arguments: dict[str, Any] | str = {}


class _Call(Struct, frozen=True):
    function: _Function
    id: str | None = None


class _Said(Struct, frozen=True):
    role: str
    content: str | None = ""
    images: list[str] | None = None
    tool_calls: list[_Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    thinking: str | None = None


class _Request(openai.SamplingFields, frozen=True, kw_only=True):
    """The fields of both requests. Some clients send options beside `options`, in OpenAI's names."""

    stream: bool | None = True
    think: bool | str | None = None
    format: dict[str, Any] | str | None = None
    options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: WholeNumber | None = None
    max_output_tokens: WholeNumber | None = None


class ChatBody(_Request, frozen=True, kw_only=True):
    """A request to `/api/chat`."""

    messages: list[_Said] | None = None
    tools: list[dict[str, Any]] | None = None


class GenerateBody(_Request, frozen=True, kw_only=True):
    """A request to `/api/generate`."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[Any] | None = None
    images: list[str] | None = None


class _Empty(Struct, frozen=True):
    """A request that may have no prompt: then Ollama's client only wants to load or unload a model."""

    model: str = ""
    prompt: str | None = None
    messages: list[Any] | None = None
    keep_alive: float | str | None = None


_EMPTY: Final = msgspec.json.Decoder(_Empty)
_CHAT: Final = msgspec.json.Decoder(ChatBody, dec_hook=as_whole)
_GENERATE: Final = msgspec.json.Decoder(GenerateBody, dec_hook=as_whole)


@parts_checked()
def chat(body: bytes) -> ClientTurn:
    """Parse a request to `/api/chat` into a `ClientTurn`. Raises `Fault`."""
    asked, reading = openai.request(_CHAT, body, ("n",))
    reading.warnings = [one for one in reading.warnings if one.where not in _HARMLESS]
    if not asked.messages:
        raise refused("messages is empty", "messages")
    options = _options(asked, reading.warnings)
    if asked.tools:
        options["tools"] = asked.tools
    messages, options = prefilled(_messages(asked.messages, reading), options)
    return _turn(asked, options, reading, messages=messages)


@parts_checked()
def generate(body: bytes) -> ClientTurn:
    """Parse a request to `/api/generate`: one message, or with `raw` a rendered prompt. Raises `Fault`."""
    asked, reading = openai.request(_GENERATE, body, ("n",))
    reading.warnings = [one for one in reading.warnings if one.where not in _HARMLESS]
    openai.refuse(asked, ("suffix", "template"))
    if asked.context:
        raise refused("context is not supported: send the conversation to /api/chat", "context")
    if not asked.prompt:
        raise refused("prompt is empty", "prompt")
    options = _options(asked, reading.warnings)
    if asked.raw:
        return _turn(asked, options, reading, text=asked.prompt)
    first = [_Said("system", asked.system)] if asked.system else []
    said = [*first, _Said("user", asked.prompt, asked.images)]
    return _turn(asked, options, reading, messages=tuple(_messages(said, reading)))


def _turn(asked: _Request, options: Mapping[str, Any], reading: Reading, **prompt: Any) -> ClientTurn:
    is_stream = asked.stream is not False
    turn = ClientTurn(
        options=options,
        model=asked.model,
        stream=is_stream,
        warnings=tuple(reading.warnings),
        images=reading.images,
        **prompt,
    )
    return check(turn, NAMES)


def _options(asked: _Request, warnings: list[ContentWarning]) -> dict[str, Any]:
    given = {name: value for name, value in (asked.options or {}).items() if value is not None}
    beside = {name: getattr(asked, name) for name in openai.SamplingFields.__struct_fields__}
    if asked.max_tokens is None:
        beside["max_tokens"] = asked.max_output_tokens
    known = beside | {_OPTIONS[name]: value for name, value in given.items() if name in _OPTIONS}
    warnings += [ContentWarning(f"options.{name}", "has no effect") for name in given if name not in _OPTIONS]
    if isinstance(asked.format, str) and asked.format not in {"", "json"}:
        raise refused("format must be json or a JSON schema", "format")
    if asked.format:
        known["response_format"] = (
            {"type": "json_object"}
            if asked.format == "json"
            else {"type": "json_schema", "json_schema": {"schema": asked.format}}
        )
    try:
        sampled = msgspec.convert(known, openai.SamplingFields, dec_hook=as_whole)
    except msgspec.ValidationError as error:
        raise renamed(refused(str(error), field_of(error)), NAMES) from None
    most = sampled.max_tokens
    if most is not None and most < 0:  # -1 is no limit, -2 what fits in the context
        most = None
    options = openai.sampling(sampled, most)
    if asked.logprobs:
        options |= {"logprobs": True, "top_logprobs": int(asked.top_logprobs or 0)}
    if asked.think is False:
        options["reasoning"] = {"budget": 0}
    elif isinstance(asked.think, str):
        options |= openai.reasoning(asked.think, "think", warnings)
    return options


def _messages(given: Sequence[_Said], reading: Reading) -> list[Message]:
    """Convert messages. A result without an id gets the id of a call without a result."""
    found: list[Message] = []
    queues, waiting = _queues(()), set[str]()
    for number, one in enumerate(given):
        where = f"messages[{number}]"
        if one.role not in _ROLES:
            raise refused(f"the role {one.role!r} is not one of {', '.join(_ROLES)}", f"{where}.role")
        images = [
            reading.block({"type": "image", "data": file}, f"{where}.images[{at}]")
            for at, file in enumerate(one.images or ())
        ]
        told = joined([one.content or "", *images])
        call_id = _taken(one, queues, waiting) if one.role == "tool" else None
        calls = tuple(_call(call, f"call_{number}_{at}") for at, call in enumerate(one.tool_calls or ()))
        if calls:
            queues, waiting = _queues(calls), {call.id for call in calls}
        try:
            found.append(Message(one.role, told, None, calls, call_id))  # type: ignore[arg-type]
        except ValueError as error:
            raise refused(str(error), where) from None
    return found


def _queues(calls: Sequence[ToolCall]) -> dict[str | None, deque[str]]:
    """Return the calls' ids in order, by the function's name; under None, all of them."""
    found: dict[str | None, deque[str]] = {None: deque(call.id for call in calls)}
    for call in calls:
        found.setdefault(call.function.name, deque()).append(call.id)
    return found


def _taken(result: _Said, queues: Mapping[str | None, deque[str]], waiting: set[str]) -> str | None:
    """Take the waiting call that a result names, else the first of its tool or of all; return its id."""
    named = deque([result.tool_call_id] if result.tool_call_id else ())
    for queue in (named, queues.get(result.tool_name), queues[None]):
        while queue:
            if (call_id := queue.popleft()) in waiting:
                waiting.remove(call_id)
                return call_id
    return None


def _call(given: _Call, call_id: str) -> ToolCall:
    arguments = given.function.arguments
    written = arguments if isinstance(arguments, str) else encode(arguments).decode()
    return ToolCall(id=given.id or call_id, function=Function(given.function.name, written))


def loading(body: bytes) -> ModelLoad | None:
    """Return the response to a request without a prompt, which loads or unloads a model; None for others."""
    asked = decoded(_EMPTY, body)
    if asked.prompt or asked.messages:
        return None
    said = {"response": ""} if asked.messages is None else {"message": {"role": "assistant", "content": ""}}
    unloads = asked.keep_alive in (0, "0", "0s")
    ended = {"done": True, "done_reason": "unload" if unloads else "load"}
    created_at = datetime.now(UTC).isoformat()
    return ModelLoad({"model": asked.model, "created_at": created_at, **said, **ended}, unloads)


def refuse(path: Mapping[str, str]) -> NoReturn:
    """Raise a `Fault` for a path of Ollama's API, `/api/{name}`, that the gateway does not serve."""
    name = path["name"]
    why = f"/api/{name} is not served here: `turnkeep model` pulls, shows and removes models"
    if name == "embeddings":
        why = "/api/embeddings is not served: ask /api/embed"
    raise Fault(501, why)
