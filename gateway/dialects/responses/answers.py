"""Writes the answers of `/v1/responses`: items (reasoning, a message, calls), whole or as events. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway import form
from gateway.dialects.anthropic.common import event, signature
from gateway.dialects.openai import common as openai
from gateway.turn import ALL_THAT_FITS, NO_WORKER, fault_of, renamed
from turnkeep_client.messages import Generated

from .requests import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gateway.turn import ClientTurn, Fault
    from turnkeep_client.messages import Called, Chunk, Failed, TokenLogprob

#: The status of an answer by its `finish_reason`; otherwise it is `completed`.
_STATUSES: Final = {
    "length": "incomplete",
    "expired": "incomplete",
    "model_changed": "incomplete",
    "given_up": "incomplete",
    "cancelled": "cancelled",
}
#: The content that an item streams: the name of its events, and the field with the whole content.
_REASONING: Final = ("reasoning_text", "text")
_TEXT: Final = ("output_text", "text")
_ARGUMENTS: Final = ("function_call_arguments", "arguments")
_INPUT: Final = ("custom_tool_call_input", "input")
#: The text of one event: four characters below U+0800, or up to three and then one above (such as CJK).
_PIECE: Final = re.compile(r"[\0-\u07ff]{4}|[\0-\u07ff]{0,3}[\u0800-\U0010ffff]")
#: The first piece is short, so that a client sees the first token when it comes.
_FIRST: Final = re.compile(r".", re.DOTALL)


def whole(turn: ClientTurn, answer_id: str, created: int, results: Sequence[Generated]) -> dict[str, Any]:
    """Return the JSON body of the response to a request without `stream`."""
    (result,) = results
    output = []
    if result.reasoning:
        output.append(_reasoning(turn, f"rs_{answer_id}", result.reasoning))
    if result.text.strip() or not result.tool_calls:
        tokens = result.logprobs if turn.options.get("logprobs") else ()
        output.append(_message(f"msg_{answer_id}", result.text, tokens, _item_status(result)))
    for index, call in enumerate(result.tool_calls):
        name, arguments = call.function.name, call.function.arguments
        output.append(_call(turn, f"{answer_id}_{index}", call.id, name, arguments))
    return _response(turn, answer_id, created, output, result)


def described(
    turn: ClientTurn, answer_id: str, created: int, result: Generated | Failed | None
) -> dict[str, Any]:
    """Return the JSON body of an answer: with its result, with its failure, or (None) as one that runs."""
    if isinstance(result, Generated):
        return whole(turn, answer_id, created, [result])
    fault = None if result is None else renamed(fault_of(result.as_error()), NAMES)
    return _response(turn, answer_id, created, [], fault=fault)


@dataclass(slots=True)
class _Begun:
    """An output item that is being streamed; `write` builds its JSON from text and status.

    The client has the first `num_told` characters of its text.
    """

    id: str
    index: int
    kind: tuple[str, str]
    write: Callable[[str, str], dict[str, Any]]
    text: str = ""
    num_told: int = 0


class ResponseEvents(form.Events):
    """Encodes the events of one streamed response.

    The events and their numbers depend only on the answer, not on its division into chunks: reasoning and
    text are always split at the same characters (`_PIECE`), and calls come last.
    """

    def __init__(self, turn: ClientTurn, answer_id: str, created: int) -> None:
        self._turn = turn
        self._id = answer_id
        self._created = created
        #: The `sequence_number` of the next event.
        self.num_events = 0
        self._num_items = 0
        self._reasoning: _Begun | None = None
        self._message: _Begun | None = None
        self._tokens: list[TokenLogprob] = []
        #: How many log probabilities were sent, and the characters of their tokens, with those of reasoning.
        self._num_told = self._told_length = 0
        #: Leading white space, not sent until text follows.
        self._space = ""

    @property
    def heartbeat(self) -> bytes:
        """An `in_progress` event with the last event's number: comments do not keep some clients waiting."""
        self.num_events -= 1
        return self._life("in_progress")

    def start(self, index: int) -> bytes:  # noqa: ARG002  # there is one answer
        """Encode the events `response.created` and `response.in_progress`."""
        return self._life("created") + self._life("in_progress")

    def chunk(self, index: int, chunk: Chunk) -> bytes:  # noqa: ARG002  # there is one answer
        """Encode the events for a chunk of the answer; return empty bytes if the chunk adds nothing."""
        self._tokens += chunk.logprobs
        written = b""
        if chunk.reasoning and self._message is None:
            if self._reasoning is None:
                item_id = f"rs_{self._id}"
                self._reasoning, written = self._begin(
                    item_id, _REASONING, lambda said, _: _reasoning(self._turn, item_id, said)
                )
            self._reasoning.text += chunk.reasoning
            written += self._grow(self._reasoning)
        if self._message is not None:
            self._message.text += chunk.text
        else:
            self._space += chunk.text
            if self._space.strip():
                written += self._speak()
        return written + (self._grow(self._message) if self._message else b"")

    def finish(self, index: int, result: Generated) -> bytes:  # noqa: ARG002  # there is one answer
        """Encode the end of the open items, the events of all calls, and the event with the response."""
        body = whole(self._turn, self._id, self._created, [result])
        written = b""
        if self._message is None and any(item["type"] == "message" for item in body["output"]):
            written = self._speak()
        if self._message is None:
            written += self._end(self._reasoning)
        written += self._end(self._message, _item_status(result))
        for number, call in enumerate(result.tool_calls):
            written += self._call(number, call)
        kind = "completed" if body["status"] == "completed" else "incomplete"
        return written + self._event(f"response.{kind}", response=body)

    def error(self, fault: Fault) -> bytes:
        """Encode the error that ends the stream, as two events: each client understands only one of them.

        Before the stream's first event, encode only `error`, which does not have the answer's id. The same
        if no worker can be reached: a request in the log has not failed, and is answered later. Such an error
        has the last event's number, behind which clients can resume.
        """
        written = b""
        if fault.code == NO_WORKER:
            self.num_events = max(0, self.num_events - 1)
        elif self.num_events:
            failed = _response(self._turn, self._id, self._created, [], fault=fault)
            written = self._event("response.failed", response=failed)
        told = {"code": fault.code, "message": fault.message, "param": fault.param, **openai.error(fault)}
        return written + self._event("error", **told)

    def _speak(self) -> bytes:
        """Encode the events that end the reasoning item and begin the message item."""
        written, item_id = self._end(self._reasoning), f"msg_{self._id}"
        self._message, begun = self._begin(
            item_id,
            _TEXT,
            lambda said, status: _message(
                item_id, said, () if status == "in_progress" else self._tokens, status
            ),
        )
        self._message.text = self._space
        return written + begun

    def _call(self, number: int, call: Called) -> bytes:
        """Encode all events of one tool call."""
        name, key = call.function.name, f"{self._id}_{number}"
        is_custom = _kind(self._turn, name).get("type") == "custom"
        begun, written = self._begin(
            f"{'ctc' if is_custom else 'fc'}_{key}",
            _INPUT if is_custom else _ARGUMENTS,
            lambda said, status: _call(self._turn, key, call.id, name, said, status),
        )
        begun.text = call.function.arguments
        return written + self._end(begun)

    def _begin(
        self, item_id: str, kind: tuple[str, str], write: Callable[[str, str], dict[str, Any]]
    ) -> tuple[_Begun, bytes]:
        begun = _Begun(item_id, self._num_items, kind, write)
        self._num_items += 1
        item = write("", "in_progress")
        parts = item.get("content", ())
        shown = item | {"content": []} if parts else item
        written = self._event("response.output_item.added", output_index=begun.index, item=shown)
        for part in parts:
            written += self._of(begun, "content_part.added", content_index=0, part=part)
        return begun, written

    def _grow(self, begun: _Begun, *, is_over: bool = False) -> bytes:
        """Encode an event for each complete piece of an item's text; if the text `is_over`, for all of it.

        Then the last event of a message has all log probabilities that were not sent before.
        """
        written, text = b"", begun.text
        # Tokens of parts of a character, reasoning and calls have no text: behind it come those not yet sent.
        rest = self._tokens if is_over and begun is self._message else []
        while begun.num_told < len(text) or self._num_told < len(rest):
            found = _PIECE.match(text, begun.num_told) if begun.num_told else _FIRST.match(text)
            if found is None and not is_over:
                break
            end = found.end() if found else len(text)
            more = {"content_index": 0, "delta": text[begun.num_told : end]}
            if begun is self._message:
                more["logprobs"] = openai.likelihoods(self._likely(end, is_over=found is None))
            begun.num_told = end
            written += self._of(begun, f"{begun.kind[0]}.delta", **more)
        return written

    def _likely(self, end: int, *, is_over: bool) -> list[TokenLogprob]:
        """Return unsent log probabilities, up to the character `end` or, if the text `is_over`, all."""
        first, thought = self._num_told, len(self._reasoning.text) if self._reasoning else 0
        while self._num_told < len(self._tokens):
            length = self._told_length + len(self._tokens[self._num_told].token)
            if length > thought + end and not is_over:
                break
            self._told_length = length
            self._num_told += 1
        return self._tokens[first : self._num_told]

    def _end(self, begun: _Begun | None, status: str = "completed") -> bytes:
        """Encode the events that end an item; return empty bytes for None."""
        if begun is None:
            return b""
        item = begun.write(begun.text, status)
        event, name = begun.kind
        parts = item.get("content", ())
        if parts:
            written = self._grow(begun, is_over=True)
            more = {"content_index": 0, **{k: v for k, v in parts[0].items() if k != "type"}}
        else:
            written = self._of(begun, f"{event}.delta", delta=item[name]) if item[name] else b""
            more = {name: item[name], "name": item["name"]}
        written += self._of(begun, f"{event}.done", **more)
        for part in parts:
            written += self._of(begun, "content_part.done", content_index=0, part=part)
        return written + self._event("response.output_item.done", output_index=begun.index, item=item)

    def _life(self, kind: str) -> bytes:
        return self._event(f"response.{kind}", response=_response(self._turn, self._id, self._created, []))

    def _of(self, begun: _Begun, event: str, **fields: Any) -> bytes:
        return self._event(f"response.{event}", item_id=begun.id, output_index=begun.index, **fields)

    def _event(self, type: str, **fields: Any) -> bytes:  # noqa: A002  # the field's name in an event
        self.num_events += 1
        return event(type, sequence_number=self.num_events - 1, **fields)


def _item_status(result: Generated) -> str:
    return "incomplete" if result.finish_reason in _STATUSES else "completed"


def _reasoning(turn: ClientTurn, item_id: str, text: str) -> dict[str, Any]:
    item = {"id": item_id, "type": "reasoning", "summary": []}
    parts = [{"type": "reasoning_text", "text": text}]
    sealed = {"encrypted_content": signature([text])} if turn.asked.get("encrypted") else {}
    return {**item, "content": parts, **sealed}


def _message(item_id: str, text: str, tokens: Sequence[TokenLogprob], status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": openai.likelihoods(tokens)}
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}


def _kind(turn: ClientTurn, name: str) -> dict[str, str]:
    """Return the fields in which a call of this tool differs from a function call; empty if in none."""
    found: dict[str, str] = turn.asked.get("kinds", {}).get(name, {})
    return found


def _call(  # each is a field of the item
    turn: ClientTurn, key: str, call_id: str, name: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    kind = dict(_kind(turn, name))
    called = {"call_id": call_id, "name": name, "status": status}
    if kind.pop("type", "function") == "custom":
        return {"id": f"ctc_{key}", "type": "custom_tool_call", "input": _input(arguments), **called, **kind}
    return {"id": f"fc_{key}", "type": "function_call", "arguments": arguments, **called, **kind}


def _input(arguments: str) -> str:
    try:
        return str(msgspec.json.decode(arguments, type=dict[str, Any])["input"])
    except (msgspec.MsgspecError, RecursionError, KeyError):
        return arguments


def _response(
    turn: ClientTurn,
    answer_id: str,
    created: int,
    output: Sequence[dict[str, Any]],
    result: Generated | None = None,
    *,
    fault: Fault | None = None,
) -> dict[str, Any]:
    """Return the response object of an answer: with a result, with a `fault`, or without both as running."""
    options, asked = turn.options, turn.asked
    status = "in_progress" if fault is None else "failed"
    if result is not None:
        status = _STATUSES.get(result.finish_reason, "completed")
    begun = (turn.messages or ())[:1] if asked.get("instructions") else ()
    most = options.get("max_tokens", ALL_THAT_FITS)
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "background": asked.get("background", False),
        "error": fault and {"code": fault.code or fault.kind, "message": fault.message},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": begun[0].content if begun else None,
        "max_output_tokens": None if most == ALL_THAT_FITS else most,
        "metadata": asked.get("metadata", {}),
        "model": turn.model,
        "output": output,
        "parallel_tool_calls": options.get("parallel_tool_calls", True),
        "previous_response_id": asked.get("previous_response_id"),
        "reasoning": {"effort": asked.get("effort"), "summary": None},
        "store": turn.is_kept,
        **_told(options),
        "truncation": "disabled",
        "usage": result and usage_of(result),
    }


def _told(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a response that repeat generate options."""
    return {
        "temperature": options.get("temperature"),
        "text": {"format": _format(options.get("response_format", {"type": "text"}))},
        "tool_choice": _flat(options.get("tool_choice", "auto")),
        "tools": [{"strict": False, "parameters": None, **_flat(tool)} for tool in options.get("tools", ())],
        "top_logprobs": options.get("top_logprobs", 0),
        "top_p": options.get("top_p"),
    }


def _flat(nested: Any) -> Any:
    """Flatten a tool, or a choice of a tool: move the fields of `function` up, next to `type`."""
    return nested if isinstance(nested, str) else {"type": nested["type"], **nested["function"]}


def _format(nested: dict[str, Any]) -> dict[str, Any]:
    return {"type": nested["type"], **nested.get("json_schema", {})}


def usage_of(result: Generated) -> dict[str, Any]:
    """Return a result's token counts as the field `usage`."""
    used = result.usage
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }
