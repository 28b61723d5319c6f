"""Translates OpenAI's `/v1/chat/completions`: requests into `ClientTurn`s, results into answers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from gateway.images import joined
from gateway.turn import (
    ClientTurn,
    WholeNumber,
    as_tool,
    as_whole,
    check,
    decoded,
    parts_checked,
    prefilled,
    refused,
)
from turnkeep_client.content_blocks import other_text
from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import Function, Message, ToolCall, encode

from . import common as openai

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.images import Content, Reading
    from turnkeep_client.messages import CallPart, Chunk, Generated, TokenLogprob


_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
#: The id for calls and results in the old form, `function_call`, which has none.
_OLD_ID: Final = "call_0"
#: Types of calls that stay calls; those of other types become text.
_CALLS: Final = ("function", "custom")
#: Fields that would change the answer, but that no worker supports.
_REFUSED: Final = ("audio", "functions", "function_call", "web_search_options")


class _Function(Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = ""


class _Custom(Struct, frozen=True):
    name: str
    input: str = ""


class _Call(Struct, frozen=True):
    function: _Function | None = None
    custom: _Custom | None = None
    id: str | None = None
    type: str = "function"


class _Message(Struct, frozen=True):
    role: str
    content: str | list[Any] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    function_call: _Function | None = None


class _ToolFunction(Struct, frozen=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(Struct, frozen=True):
    type: str = "function"
    function: _ToolFunction | None = None


class _Allowed(Struct, frozen=True):
    mode: str
    tools: list[_Tool]


class _Chosen(Struct, frozen=True):
    type: str = "function"
    function: _ToolFunction | None = None
    allowed_tools: _Allowed | None = None


class ChatBody(openai.SamplingFields, frozen=True, kw_only=True):
    """A request's body."""

    messages: list[_Message]
    max_completion_tokens: WholeNumber | None = None
    logprobs: bool | None = None
    top_logprobs: WholeNumber | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | _Chosen | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None


class _Sent(Struct, frozen=True):
    """The messages and tools of a request, with their JSON keys in the order in which they were sent."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


_DECODER: Final = msgspec.json.Decoder(ChatBody, dec_hook=as_whole)
_SENT: Final = msgspec.json.Decoder(_Sent)


@parts_checked()
def read(body: bytes) -> ClientTurn:
    """Parse a request's body into a `ClientTurn`. Raises `Fault`."""
    asked, reading = openai.request(_DECODER, body)
    openai.refuse(asked, _REFUSED)
    if asked.modalities not in (None, [], ["text"]):
        raise refused("only the modality text is supported", "modalities")
    if not asked.messages:
        raise refused("messages is empty", "messages")
    sent = decoded(_SENT, body)
    most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    field = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    options = openai.with_tokens(openai.sampling(asked, most), field) | _tools(asked, sent)
    if asked.logprobs:
        options |= {"logprobs": True, "top_logprobs": int(asked.top_logprobs or 0)}
    elif asked.top_logprobs:
        raise refused("top_logprobs needs logprobs: true", "top_logprobs")
    options |= openai.reasoning(asked.reasoning_effort, "reasoning_effort", reading.warnings)
    streamed = asked.stream_options
    said = [
        _message(one, f"messages[{number}]", reading).of_keys(sent.messages[number])
        for number, one in enumerate(asked.messages)
    ]
    messages, options = prefilled(said, options)
    turn = ClientTurn(
        messages=messages,
        options=options,
        n=1 if asked.n is None else int(asked.n),
        model=asked.model,
        stream=bool(asked.stream),
        include_usage=bool(streamed and streamed.include_usage),
        warnings=tuple(reading.warnings),
        images=reading.images,
    )
    return check(turn, {})


def _tools(asked: ChatBody, sent: _Sent) -> dict[str, Any]:
    """Return the generate options for tools, each tool with its keys in the order sent. Raises `Fault`."""
    if not asked.tools:
        if asked.tool_choice in (None, "auto", "none"):
            return {}
        raise refused("tool_choice needs tools", "tool_choice")
    for number, tool in enumerate(asked.tools):
        if tool.type != "function":
            raise refused(f"tools of the type {tool.type} are not supported", f"tools[{number}]")
        if tool.function is None:
            raise refused("a tool needs the field function, with its name", f"tools[{number}]")
    tools = [_as_sent(tool, f"tools[{number}]") for number, tool in enumerate(sent.tools or ())]
    choice = asked.tool_choice
    if isinstance(choice, _Chosen) and (allowed := choice.allowed_tools) is not None:
        names = {one.function.name for one in allowed.tools if one.function is not None}
        tools, choice = [tool for tool in tools if tool["function"]["name"] in names], allowed.mode
        if not tools:
            raise refused("none of the allowed tools is among the tools", "tool_choice")
    options: dict[str, Any] = {"tools": tools}
    if isinstance(choice, _Chosen):
        if choice.type != "function":
            raise refused(f"a tool_choice of the type {choice.type} is not supported", "tool_choice")
        if choice.function is None:
            raise refused("a tool_choice needs the field function, with its name", "tool_choice")
        options["tool_choice"] = {"type": "function", "function": {"name": choice.function.name}}
    elif choice is not None:
        options["tool_choice"] = choice
    if asked.parallel_tool_calls is not None:
        options["parallel_tool_calls"] = asked.parallel_tool_calls
    return options


def _as_sent(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool with its keys in the order sent, without fields that are null or that no worker knows."""
    known = _ToolFunction.__struct_fields__
    function = {
        name: value for name, value in tool["function"].items() if name in known and value is not None
    }
    fields = as_tool(function, f"{where}.function")
    return {name: fields[name] for name in (*tool, *fields) if name in fields}


def _message(given: _Message, where: str, reading: Reading) -> Message:
    if given.role == "function":
        result = _Message("tool", given.content or "", tool_call_id=_OLD_ID)
        return _message(result, where, reading)
    if given.role not in _ROLES:
        raise refused(f"the role {given.role!r} is not one of {', '.join(_ROLES)}", f"{where}.role")
    content: Content | None = given.refusal
    if given.content is not None:
        content = reading.content(given.content, f"{where}.content")
    calls = []
    old = [_Call(given.function_call, id=_OLD_ID)] if given.function_call else []
    for index, one in enumerate(given.tool_calls or old):
        at = f"{where}.tool_calls[{index}]"
        if one.type in _CALLS:
            calls.append(_call(one, index, at))
        else:
            content = joined([content or "", other_text({}, one.type, at, reading.warnings)])
    if content is None and not calls:
        if given.role not in ("assistant", "tool"):
            raise refused("the message has no content", f"{where}.content")
        content = ""  # some clients keep answers without text, and results of tools that returned nothing
    try:
        return Message(given.role, content, given.name, tuple(calls), given.tool_call_id)  # type: ignore[arg-type]
    except ValueError as error:
        raise refused(str(error), where) from None


def _call(given: _Call, index: int, where: str) -> ToolCall:
    called = given.function
    if given.type == "custom" and given.custom is not None:
        called = _Function(given.custom.name, {"input": given.custom.input})
    if called is None:
        raise refused(f"a call of the type {given.type} must have the field {given.type}", where)
    arguments = called.arguments
    if isinstance(arguments, dict):  # OpenAI's are JSON text, but some clients send an object
        try:
            arguments = encode(arguments).decode()
        except InvalidMessageError as error:
            raise refused(str(error), where) from None
    call_id = given.id or f"call_{index}"
    return ToolCall(id=call_id, function=Function(called.name, arguments or "{}"))


def whole(turn: ClientTurn, answer_id: str, created: int, results: Sequence[Generated]) -> dict[str, Any]:
    """Return the JSON body of the response to a request without `stream`."""
    choices = []
    for index, result in enumerate(results):
        message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
        if result.reasoning:
            message["reasoning_content"] = result.reasoning
        if result.tool_calls:
            message["content"] = result.text or None
            message["tool_calls"] = [msgspec.to_builtins(call) for call in result.tool_calls]
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": _logprobs(result.logprobs) if turn.options.get("logprobs") else None,
                "finish_reason": openai.finish_reason(result),
            }
        )
    return _head("chat.completion", turn, answer_id, created) | {
        "choices": choices,
        "usage": openai.usage(results),
    }


class ChatEvents(openai.CompletionStream):
    """Encodes the events of one streamed response."""

    def __init__(self, turn: ClientTurn, answer_id: str, created: int) -> None:
        head = _head("chat.completion.chunk", turn, answer_id, created)
        super().__init__(head, include_usage=turn.include_usage)

    def start(self, index: int) -> bytes:
        """Encode the event that opens answer number `index`."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self.choice(index, {"delta": delta}, None, None)

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Encode the event for a chunk of an answer; return empty bytes if the chunk adds nothing."""
        delta: dict[str, Any] = {}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.text:
            delta["content"] = chunk.text
        if chunk.tool_calls:
            delta["tool_calls"] = [_call_part(part) for part in chunk.tool_calls]
        if not delta and not chunk.logprobs:
            return b""
        return self.choice(
            index, {"delta": delta}, _logprobs(chunk.logprobs) if chunk.logprobs else None, None
        )

    def finish(self, index: int, result: Generated) -> bytes:
        """Encode the event with an answer's `finish_reason`."""
        return self.choice(index, {"delta": {}}, None, openai.finish_reason(result))


def _head(kind: str, turn: ClientTurn, answer_id: str, created: int) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": created, "model": turn.model}


def _call_part(part: CallPart) -> dict[str, Any]:
    function: dict[str, Any] = {"arguments": part.arguments}
    if part.name is None:
        return {"index": part.index, "function": function}
    function = {"name": part.name, **function}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": openai.likelihoods(tokens), "refusal": None}
