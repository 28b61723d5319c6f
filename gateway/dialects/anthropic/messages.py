"""Translates Anthropic's `/v1/messages`: requests into `ClientTurn`s, results into answers. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import Struct

from gateway import form
from gateway.dialects.openai import common as openai
from gateway.images import joined
from gateway.turn import (
    ClientTurn,
    Fault,
    WholeNumber,
    as_tool,
    as_whole,
    check,
    parts_checked,
    prefilled,
    refused,
)
from turnkeep_client.content_blocks import ContentWarning, block_text
from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import OPTIONS, Function, Message, ToolCall, encode

from . import client_tools
from . import common as anthropic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.images import Reading
    from turnkeep_client.messages import CallPart, Chunk, Generated

#: A line in some clients' system prompts that differs in each request and means nothing to the model.
_BILLING: Final = re.compile(r"x-anthropic-billing-header[^\n]*\n*")
#: This API's names of fields, by the protocol's names.
NAMES: Final = {
    **{name: one.name_in("anthropic") for name, one in OPTIONS.items()},
    "messages": "messages",
    "reasoning.budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
}
#: Fields that would change the answer, but that no worker supports.
_REFUSED: Final = ("mcp_servers", "container")
_T = TypeVar("_T")

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class _Used(Struct, frozen=True):
    name: str
    id: str = ""
    input: Any = None


class _Result(Struct, frozen=True):
    tool_use_id: str = ""
    content: str | list[Any] | None = None
    is_error: bool | None = None


class _Message(Struct, frozen=True):
    role: str
    content: str | list[Any]


class _Tool(Struct, frozen=True):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class _Choice(Struct, frozen=True):
    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _Thinking(Struct, frozen=True):
    type: str
    budget_tokens: WholeNumber | None = None


class _Format(Struct, frozen=True):
    type: str
    schema: dict[str, Any] | None = None


class _OutputConfig(Struct, frozen=True):
    format: _Format | None = None
    effort: str | None = None


class _Thread(Struct, frozen=True):
    type: str


class MessagesBody(openai.SamplingFields, frozen=True, kw_only=True):
    """A request: Anthropic's fields, and OpenAI's fields for sampling."""

    messages: list[_Message]
    system: str | list[Any] | None = None
    stop_sequences: list[str] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    mcp_servers: Any = None
    container: Any = None
    thread: _Thread | None = None


_DECODER: Final = msgspec.json.Decoder(MessagesBody, dec_hook=as_whole)


@parts_checked()
def read(body: bytes, *, is_counted: bool = False) -> ClientTurn:
    """Parse a request's body into a `ClientTurn`; if only its tokens are counted, it needs no `max_tokens`.

    Raises `Fault`.
    """
    asked, reading = openai.request(_DECODER, body, ("n",))
    openai.refuse(asked, _REFUSED)
    if asked.thread is not None and asked.thread.type == "continue":
        # Anthropic's libraries then send the whole conversation, which continues its session.
        raise Fault(404, "threads are not kept: send the whole conversation", code=anthropic.NO_THREAD)
    if not asked.messages:
        raise refused("messages is empty", "messages")
    if asked.max_tokens is None and not is_counted:
        raise refused("max_tokens: Field required", "max_tokens")
    messages = _system(asked.system, reading.warnings)
    for number, given in enumerate(asked.messages):
        where = f"messages[{number}]"
        try:
            messages += _messages(given, where, reading)
        except (ValueError, InvalidMessageError) as error:
            raise refused(str(error), where) from None
    told, options = prefilled(messages, _options(asked, reading.warnings))
    prefix = options.get("prefix", "")
    if prefix != prefix.rstrip():
        raise refused("final assistant content cannot end with trailing whitespace", "messages")
    turn = ClientTurn(
        messages=told,
        options=options,
        model=asked.model,
        stream=bool(asked.stream),
        warnings=tuple(reading.warnings),
        images=reading.images,
    )
    return check(turn, NAMES)


def _options(asked: MessagesBody, warnings: list[ContentWarning]) -> dict[str, Any]:
    options = openai.sampling(asked, asked.max_tokens) | _tools(asked, warnings)
    if asked.stop_sequences:
        options["stop"] = asked.stop_sequences
    if asked.output_config:
        options |= openai.reasoning(asked.output_config.effort, "output_config.effort", warnings)
    if (budget := _budget(asked.thinking)) is not None:
        options["reasoning"] = {"budget": budget}
    if asked.output_config and (form := asked.output_config.format):
        described = {"schema": form.schema, "strict": False}
        options["response_format"] = {"type": form.type, form.type: described}
    return options


def _budget(thinking: _Thinking | None) -> int | None:
    if thinking is None or thinking.type not in {"disabled", "enabled"}:
        return None  # no limit
    if thinking.type == "enabled" and thinking.budget_tokens is None:
        raise refused("enabled thinking needs budget_tokens", "thinking.budget_tokens")
    budget = 0 if thinking.type == "disabled" else int(thinking.budget_tokens or 0)
    return None if budget == openai.ANY else budget


def _system(given: str | list[Any] | None, warnings: list[ContentWarning]) -> list[Message]:
    parts = [given] if isinstance(given, str) else given or []
    texts = [block_text(part, f"system[{at}]", warnings) for at, part in enumerate(parts)]
    if texts and _BILLING.match(texts[0]):
        texts[0] = _BILLING.sub("", texts[0], count=1)
    text = "".join(texts)
    return [Message("system", text)] if text else []


def _messages(given: _Message, where: str, reading: Reading) -> list[Message]:
    """Convert a message to the protocol's messages: each tool result becomes a message of its own."""
    blocks = [given.content] if isinstance(given.content, str) else given.content
    match given.role:
        case "assistant":
            return [_said(blocks, f"{where}.content", reading)]
        case "user":
            return _asked(blocks, f"{where}.content", reading)
        case "system":
            return [Message("system", reading.content(given.content, f"{where}.content"))]
    raise refused(f"the role {given.role!r} is not one of user, assistant, system", f"{where}.role")


def _said(blocks: list[Any], where: str, reading: Reading) -> Message:
    calls, parts = [], []
    for at, block in enumerate(blocks):
        if not _is(block, "tool_use"):
            parts.append(reading.block(block, f"{where}[{at}]"))
            continue
        used = _converted(block, _Used, f"{where}[{at}]")
        calls.append(ToolCall(id=used.id, function=Function(used.name, encode(used.input or {}).decode())))
    return Message("assistant", joined(parts), None, tuple(calls))


def _asked(blocks: list[Any], where: str, reading: Reading) -> list[Message]:
    found, parts = [], []
    for at, block in enumerate(blocks):
        if not _is(block, "tool_result"):
            parts.append(reading.block(block, f"{where}[{at}]"))
            continue
        if parts:
            found.append(Message("user", joined(parts)))
            parts = []
        result = _converted(block, _Result, f"{where}[{at}]")
        told = reading.content(result.content or "", f"{where}[{at}].content")
        told = joined(["Error: ", told]) if result.is_error else told
        found.append(Message("tool", told, None, (), result.tool_use_id or None))
    if parts or not found:
        found.append(Message("user", joined(parts)))
    return found


def _is(block: Any, kind: str) -> bool:
    return isinstance(block, dict) and block.get("type") == kind


def _converted(block: dict[str, Any], kind: type[_T], where: str) -> _T:
    try:
        return msgspec.convert(block, kind)
    except msgspec.ValidationError as error:
        raise refused(str(error), where) from None


def _tools(asked: MessagesBody, warnings: list[ContentWarning]) -> dict[str, Any]:
    """Return the generate options for tools, without those that Anthropic's servers would run, which warn."""
    tools = []
    for number, tool in enumerate(asked.tools or ()):
        if tool.type == "function":
            raise refused("a tool has name, description and input_schema, no function", f"tools[{number}]")
        if tool.type in (None, "custom"):
            more = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
            given = {name: value for name, value in more.items() if value is not None}
        elif (known := client_tools.description(tool.type)) is not None:
            given = known
        else:
            warnings.append(
                ContentWarning(f"tools[{number}]", f"{tool.type} is left out: nobody would run it")
            )
            continue
        tools.append(as_tool({"name": tool.name, **given}, f"tools[{number}]"))
    choice = asked.tool_choice or _Choice("auto")
    if not tools:
        if choice.type in {"auto", "none"}:
            return {}
        raise refused("tool_choice needs tools", "tool_choice")
    options: dict[str, Any] = {"tools": tools}
    if choice.type == "tool":
        if not choice.name:
            raise refused("a tool_choice of the type tool has no name", "tool_choice.name")
        options["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.type in _CHOICES:
        options["tool_choice"] = _CHOICES[choice.type]
    else:
        raise refused(f"a tool_choice of the type {choice.type} is not supported", "tool_choice")
    if choice.disable_parallel_tool_use:
        options["parallel_tool_calls"] = False
    return options


def whole(turn: ClientTurn, answer_id: str, created: int, results: Sequence[Generated]) -> dict[str, Any]:  # noqa: ARG001  # the same parameters in all dialects
    """Return the JSON body of the response to a request without `stream`."""
    (result,) = results
    content: list[dict[str, Any]] = []
    if result.reasoning:
        signature = anthropic.signature([result.reasoning])
        content.append({"type": "thinking", "thinking": result.reasoning, "signature": signature})
    if result.text.strip():
        content.append({"type": "text", "text": result.text})
    for call in result.tool_calls:
        arguments = _object(call.function.arguments)
        content.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments})
    return {**_head(turn, answer_id, content), **anthropic.end(result), "usage": anthropic.usage(result)}


class MessageEvents(form.Events):
    """Encodes the events of one streamed response: content blocks, each with a start and a stop event."""

    heartbeat: Final = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, turn: ClientTurn, answer_id: str, created: int) -> None:  # noqa: ARG002  # the same parameters in all dialects
        self._head = _head(turn, answer_id, [])
        #: The last block's number, and the open block's kind: "thinking", "text", or a tool call's index.
        self._number = -1
        self._open: str | int | None = None
        self._reasoning: list[str] = []
        #: Leading white space, not sent until text follows: clients refuse a block of white space alone.
        self._space = ""

    def start(self, index: int) -> bytes:  # noqa: ARG002  # there is one answer
        """Encode the `message_start` event."""
        usage = {**anthropic.CACHE_USAGE, "input_tokens": 0, "output_tokens": 0}
        head = {**self._head, "stop_reason": None, "stop_sequence": None, "usage": usage}
        return anthropic.event("message_start", message=head)

    def chunk(self, index: int, chunk: Chunk) -> bytes:  # noqa: ARG002  # there is one answer
        """Encode the events for a chunk of the answer; return empty bytes if the chunk adds nothing."""
        written = b""
        if chunk.reasoning:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            written += self._block("thinking", empty) + self._delta("thinking", chunk.reasoning)
            self._reasoning.append(chunk.reasoning)
        if text := self._shown(chunk.text):
            written += self._block("text", {"type": "text", "text": ""}) + self._delta("text", text)
        return written + b"".join(self._call(part) for part in chunk.tool_calls)

    def finish(self, index: int, result: Generated) -> bytes:  # noqa: ARG002  # there is one answer
        """Encode the end of the open block, and the event with the stop reason and the token counts."""
        return self._stop() + anthropic.event(
            "message_delta", delta=anthropic.end(result), usage=anthropic.usage(result)
        )

    def end(self, results: Sequence[Generated]) -> bytes:  # noqa: ARG002  # each result is written already
        """Encode the `message_stop` event, the last of the stream."""
        return anthropic.event("message_stop")

    def error(self, fault: Fault) -> bytes:
        """Encode the error event that ends the stream."""
        return anthropic.event(**anthropic.error(fault))

    def _shown(self, text: str) -> str:
        if self._open == "text":
            return text
        text = self._space + text
        self._space = "" if text.strip() else text
        return "" if self._space else text

    def _call(self, part: CallPart) -> bytes:
        written = b""
        if part.name is not None:
            call = {"type": "tool_use", "id": part.id, "name": part.name}
            written = self._block(part.index, {**call, "input": {}})
        return written + (
            self._delta("input_json", part.arguments, "partial_json") if part.arguments else b""
        )

    def _block(self, kind: str | int, empty: dict[str, Any]) -> bytes:
        """Encode the end of the open block and the start of a block of `kind`, unless that one is open."""
        if kind == self._open:
            return b""
        before = self._stop()
        self._open = kind
        self._number += 1
        return before + anthropic.event("content_block_start", index=self._number, content_block=empty)

    def _delta(self, kind: str, text: str, field: str | None = None) -> bytes:
        delta = {"type": f"{kind}_delta", field or kind: text}
        return anthropic.event("content_block_delta", index=self._number, delta=delta)

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta("signature", anthropic.signature(self._reasoning))
            self._reasoning = []
        self._open = None
        return signed + anthropic.event("content_block_stop", index=self._number)


def _head(turn: ClientTurn, answer_id: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    answer = {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "model": turn.model}
    return {**answer, "content": content}


def _object(arguments: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {"arguments": found}
