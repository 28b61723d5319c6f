"""The answers of `/v1/responses`: items (reasoning, a message, calls), whole or as events. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import Generated

from . import openai
from .anthropic import event, signature
from .turn import ALL_THAT_FITS, fault_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from turnkeep_client.messages import CallPart, Chunk, TokenLogprob

    from .recorded import Recorded
    from .turn import Fault, Turn

#: Statuses other than `completed`.
_STATUSES: Final = {
    "length": "incomplete",
    "expired": "incomplete",
    "model_changed": "incomplete",
    "cancelled": "cancelled",
}
#: What grows in an item: the name of its events, and of the field with all of it.
_REASONING: Final = ("reasoning_text", "text")
_TEXT: Final = ("output_text", "text")
_ARGUMENTS: Final = ("function_call_arguments", "arguments")
_INPUT: Final = ("custom_tool_call_input", "input")


def whole(turn: Turn, answer_id: str, created: int, results: Sequence[Generated]) -> dict[str, Any]:
    """Write the answer to a request without `stream`."""
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


def recorded(found: Recorded, answer_id: str) -> dict[str, Any]:
    """Write an answer that was found in the log, or what became of it."""
    if isinstance(found.result, Generated):
        return whole(found.turn, answer_id, found.created, [found.result])
    fault = None
    if (failed := found.result) is not None:
        fault = fault_of(RequestFailedError(failed.code, failed.message, retryable=failed.retryable))
    return _response(found.turn, answer_id, found.created, [], fault=fault)


@dataclass(slots=True)
class _Begun:
    """An item of a stream; `write` makes it of its text and status."""

    id: str
    index: int
    kind: tuple[str, str]
    write: Callable[[str, str], dict[str, Any]]
    texts: list[str] = field(default_factory=list)


class Events:
    """Writes the events of one stream. An item begins with its first part; all but reasoning end last."""

    def __init__(self, turn: Turn, answer_id: str, created: int) -> None:
        self._turn = turn
        self._id = answer_id
        self._created = created
        self._num_events = self._num_items = 0
        #: By what they are: `reasoning`, `message`, or the number of a call.
        self._begun: dict[str | int, _Begun] = {}
        self._call_ids: dict[int, str] = {}
        self._output: dict[int, dict[str, Any]] = {}
        self._tokens: list[TokenLogprob] = []
        self._num_told = 0
        #: White space before a text, which is sent only with the text.
        self._space = ""

    @property
    def heartbeat(self) -> bytes:
        """An event that says nothing new: some clients do not count comments as life."""
        return self._life("in_progress")

    def start(self, index: int) -> bytes:  # noqa: ARG002  # there is one answer
        """Write what comes before the answer."""
        return self._life("created") + self._life("in_progress")

    def chunk(self, index: int, chunk: Chunk) -> bytes:  # noqa: ARG002  # there is one answer
        """Write a part of the answer; empty if there is nothing to say."""
        self._tokens += chunk.logprobs
        written = self._reason(chunk.reasoning) if chunk.reasoning else b""
        if chunk.text:
            written += self._say(chunk.text)
        return written + b"".join(self._call(part) for part in chunk.tool_calls)

    def finish(self, index: int, result: Generated) -> bytes:  # noqa: ARG002  # there is one answer
        """Write the end of the answer."""
        written, called = self._end("reasoning"), {call.id for call in result.tool_calls}
        if not called and "message" not in self._begun:
            written += self._say(self._space, may_wait=False)
        written += self._end("message", _item_status(result))
        for number, call_id in self._call_ids.items():
            written += self._end(number, "completed" if call_id in called else "incomplete")
        # A call that turned out to be malformed is in the text.
        output = [self._output[index] for index in sorted(self._output)]
        output = [item for item in output if item.get("call_id") in {None, *called}]
        body = _response(self._turn, self._id, self._created, output, result)
        kind = "completed" if body["status"] == "completed" else "incomplete"
        return written + self._event(f"response.{kind}", response=body)

    def end(self, results: Sequence[Generated]) -> bytes:  # noqa: ARG002  # the result is written already
        """Write the end of the stream: nothing."""
        return b""

    def error(self, fault: Fault) -> bytes:
        """Write an error, after which nothing comes: twice, since clients know only one of the two events."""
        failed = _response(self._turn, self._id, self._created, [], fault=fault)
        told = {"code": fault.code, "message": fault.message, "param": fault.param, **openai.error(fault)}
        return self._event("response.failed", response=failed) + self._event("error", **told)

    def _reason(self, text: str) -> bytes:
        item_id = f"rs_{self._id}" + (f"_{self._num_items}" if self._num_items else "")
        written = self._begin(
            "reasoning", item_id, _REASONING, lambda said, _: _reasoning(self._turn, item_id, said)
        )
        return written + self._grow("reasoning", text)

    def _say(self, text: str, *, may_wait: bool = True) -> bytes:
        text, written = self._space + text if may_wait else text, b""
        self._space = ""
        if "message" not in self._begun:
            if may_wait and not text.strip():
                self._space = text
                return b""
            item_id = f"msg_{self._id}"
            written = self._end("reasoning") + self._begin(
                "message",
                item_id,
                _TEXT,
                lambda said, status: _message(item_id, said, self._tokens if said else (), status),
            )
        new, self._num_told = self._tokens[self._num_told :], len(self._tokens)
        return written + (self._grow("message", text, logprobs=openai.likelihoods(new)) if text else b"")

    def _call(self, part: CallPart) -> bytes:
        written = b""
        if part.index not in self._begun:
            call_id, name, key = part.id or "", part.name or "", f"{self._id}_{part.index}"
            self._call_ids[part.index] = call_id
            is_custom = _kind(self._turn, name).get("type") == "custom"
            written = self._end("reasoning") + self._begin(
                part.index,
                f"{'ctc' if is_custom else 'fc'}_{key}",
                _INPUT if is_custom else _ARGUMENTS,
                lambda said, status: _call(self._turn, key, call_id, name, said, status),
            )
        return written + (self._grow(part.index, part.arguments) if part.arguments else b"")

    def _begin(
        self,
        key: str | int,
        item_id: str,
        kind: tuple[str, str],
        write: Callable[[str, str], dict[str, Any]],
    ) -> bytes:
        """Begin an item, unless it has begun."""
        if key in self._begun:
            return b""
        begun = self._begun[key] = _Begun(item_id, self._num_items, kind, write)
        self._num_items += 1
        item = write("", "in_progress")
        parts = item.get("content", ())
        shown = item | {"content": []} if parts else item
        written = self._event("response.output_item.added", output_index=begun.index, item=shown)
        for part in parts:
            written += self._of(begun, "content_part.added", content_index=0, part=part)
        return written

    def _grow(self, key: str | int, text: str, **more: Any) -> bytes:
        begun = self._begun[key]
        begun.texts.append(text)
        if begun.kind == _INPUT:  # of the arguments only the input is told, when it is whole
            return b""
        if begun.kind != _ARGUMENTS:
            more["content_index"] = 0
        return self._of(begun, f"{begun.kind[0]}.delta", delta=text, **more)

    def _end(self, key: str | int, status: str = "completed") -> bytes:
        """End an item, if it has begun."""
        if (begun := self._begun.pop(key, None)) is None:
            return b""
        item = self._output[begun.index] = begun.write("".join(begun.texts), status)
        event, name = begun.kind
        parts = item.get("content", ())
        more = {"content_index": 0, **{k: v for k, v in parts[0].items() if k != "type"}} if parts else {}
        written = b""
        if begun.kind == _INPUT:
            written = self._of(begun, f"{event}.delta", delta=item[name])
        if not parts:
            more = {name: item[name], "name": item["name"]}
        written += self._of(begun, f"{event}.done", **more)
        for part in parts:
            written += self._of(begun, "content_part.done", content_index=0, part=part)
        return written + self._event("response.output_item.done", output_index=begun.index, item=item)

    def _life(self, kind: str) -> bytes:
        return self._event(f"response.{kind}", response=_response(self._turn, self._id, self._created, []))

    def _of(self, begun: _Begun, event: str, **fields: Any) -> bytes:
        return self._event(f"response.{event}", item_id=begun.id, output_index=begun.index, **fields)

    def _event(self, type: str, **fields: Any) -> bytes:  # noqa: A002  # as the events have it
        self._num_events += 1
        return event(type, sequence_number=self._num_events - 1, **fields)


def _item_status(result: Generated) -> str:
    return "incomplete" if result.finish_reason in _STATUSES else "completed"


def _reasoning(turn: Turn, item_id: str, text: str) -> dict[str, Any]:
    item = {"id": item_id, "type": "reasoning", "summary": []}
    parts = [{"type": "reasoning_text", "text": text}]
    sealed = {"encrypted_content": signature([text])} if turn.asked.get("encrypted") else {}
    return {**item, "content": parts, **sealed}


def _message(item_id: str, text: str, tokens: Sequence[TokenLogprob], status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": openai.likelihoods(tokens)}
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}


def _kind(turn: Turn, name: str) -> dict[str, str]:
    """Return what is special about the tool that the model knows by this name."""
    found: dict[str, str] = turn.asked.get("kinds", {}).get(name, {})
    return found


def _call(  # the fields of an item
    turn: Turn, key: str, call_id: str, name: str, arguments: str, status: str = "completed"
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
    turn: Turn,
    answer_id: str,
    created: int,
    output: Sequence[dict[str, Any]],
    result: Generated | None = None,
    *,
    fault: Fault | None = None,
) -> dict[str, Any]:
    """Write a response that has a result, or failed, or still runs."""
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
        "background": False,
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
        "temperature": options.get("temperature"),
        "text": {"format": _format(options.get("response_format", {"type": "text"}))},
        "tool_choice": _flat(options.get("tool_choice", "auto")),
        "tools": [{"strict": False, "parameters": None, **_flat(tool)} for tool in options.get("tools", ())],
        "top_logprobs": options.get("top_logprobs", 0),
        "top_p": options.get("top_p"),
        "truncation": "disabled",
        "usage": result and _usage(result),
    }


def _flat(nested: Any) -> Any:
    """Write a tool, or a choice of one, with the function's fields beside its type."""
    return nested if isinstance(nested, str) else {"type": nested["type"], **nested["function"]}


def _format(nested: dict[str, Any]) -> dict[str, Any]:
    return {"type": nested["type"], **nested.get("json_schema", {})}


def _usage(result: Generated) -> dict[str, Any]:
    used = result.usage
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }
