"""Writes Ollama's answers: one JSON object, or a line for each part; and its descriptions of models. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.openai import common as openai

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.turn import Fault, Turn
    from turnkeep_client.messages import Called, CallPart, Chunk, Generated

NDJSON: Final = "application/x-ndjson"
_NS: Final = 1_000_000_000
_DETAILS: Final = {
    **dict.fromkeys(("parent_model", "family", "parameter_size", "quantization_level"), ""),
    "format": "mlx",
    "families": None,
}


def _said(text: str, reasoning: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Write what a message of `/api/chat` says."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def _generated(text: str, reasoning: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:  # noqa: ARG001  # there are no tools
    """Write what an answer of `/api/generate` says."""
    return {"response": text, **({"thinking": reasoning} if reasoning else {})}


class _Words:
    """One of the two shapes, which differ in where the text is."""

    def __init__(self, say: Callable[..., dict[str, Any]]) -> None:
        self.say = say

    def whole(self, turn: Turn, answer_id: str, created: int, results: Sequence[Generated]) -> dict[str, Any]:  # noqa: ARG002  # as of other dialects
        """Write the answer to a request without a stream."""
        (result,) = results
        calls = [_call(one) for one in result.tool_calls]
        said = self.say(result.text, result.reasoning, calls)
        tokens = {"logprobs": openai.likelihoods(result.logprobs)} if turn.options.get("logprobs") else {}
        return {**_head(turn, created), **said, **tokens, **_end(result)}

    def events(self, turn: Turn, answer_id: str, created: int) -> Lines:  # noqa: ARG002  # as of other dialects
        """Return a writer of one stream."""
        return Lines(self.say, _head(turn, created))


class Lines:
    """Writes the lines of one stream."""

    def __init__(self, say: Callable[..., dict[str, Any]], head: dict[str, Any]) -> None:
        self._say = say
        self._head = head

    @property
    def heartbeat(self) -> bytes:
        """A line that says nothing: there are no comments."""
        return self._line(self._say(""), done=False)

    def start(self, index: int) -> bytes:  # noqa: ARG002  # there is one answer
        """Write what comes before the answer: nothing."""
        return b""

    def chunk(self, index: int, chunk: Chunk) -> bytes:  # noqa: ARG002  # there is one answer
        """Write a part of the answer; empty if there is nothing to say."""
        calls = [_call(part) for part in chunk.tool_calls]
        if not (chunk.text or chunk.reasoning or calls or chunk.logprobs):
            return b""
        tokens = {"logprobs": openai.likelihoods(chunk.logprobs)} if chunk.logprobs else {}
        return self._line(self._say(chunk.text, chunk.reasoning, calls), **tokens, done=False)

    def finish(self, index: int, result: Generated) -> bytes:  # noqa: ARG002  # there is one answer
        """Write the end of the answer."""
        return self._line(self._say(""), **_end(result))

    def end(self, results: Sequence[Generated]) -> bytes:  # noqa: ARG002  # the result is written already
        """Write the end of the stream: nothing."""
        return b""

    def error(self, fault: Fault) -> bytes:
        """Write an error, after which nothing comes."""
        return msgspec.json.encode(error(fault)) + b"\n"

    def _line(self, said: dict[str, Any], **more: Any) -> bytes:
        return msgspec.json.encode({**self._head, **said, **more}) + b"\n"


CHAT: Final = _Words(_said)
GENERATE: Final = _Words(_generated)


def error(fault: Fault) -> dict[str, Any]:
    """Write a fault in Ollama's shape."""
    return {"error": fault.message}


def tags(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write the list of models."""
    return {"models": [_listed(one) for one in models]}


def running(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write the list of models that are loaded."""
    shown = []
    for one in models:
        if (context := one.get("max_model_len")) is not None:
            more = {"size_vram": 0, "context_length": context, "expires_at": "9999-12-31T23:59:59Z"}
            shown.append({**_listed(one), **more})
    return {"models": shown}


def shown(model: dict[str, Any]) -> dict[str, Any]:
    """Describe one model."""
    info = {"general.architecture": "mlx", "general.basename": model["id"]}
    if (context := model.get("max_model_len")) is not None:
        info["mlx.context_length"] = context
    return {
        "modelfile": f"FROM {model['id']}\n",
        **dict.fromkeys(("parameters", "template", "license"), ""),
        "details": _DETAILS,
        "model_info": info,
        "capabilities": ["completion", "tools", "thinking"],
        "modified_at": model["created_at"],
    }


def _listed(model: dict[str, Any]) -> dict[str, Any]:
    name = model["id"]
    more = {"modified_at": model["created_at"], "size": 0, "digest": ""}
    return {"name": name, "model": name, **more, "details": _DETAILS}


def _head(turn: Turn, created: int) -> dict[str, Any]:
    at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {"model": turn.model, "created_at": at}


def _call(given: Called | CallPart) -> dict[str, Any]:
    """Write a call, whose arguments are an object."""
    name, written = (
        (given.function.name, given.function.arguments)
        if hasattr(given, "function")
        else (given.name or "", given.arguments)
    )
    try:
        arguments = msgspec.json.decode(written or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = {}
    return {"function": {"name": name, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _end(result: Generated) -> dict[str, Any]:
    used, took = result.usage, result.seconds
    is_cut = result.finish_reason in {"length", "expired", "model_changed", "given_up"}
    reason = "length" if is_cut else "stop"
    return {
        "done": True,
        "done_reason": reason,
        "total_duration": int(took.total * _NS),
        "load_duration": int(took.queued * _NS),
        "prompt_eval_count": used.prompt_tokens,
        "prompt_eval_duration": int(took.prefill * _NS),
        "eval_count": used.completion_tokens,
        "eval_duration": max(0, int((took.total - took.queued - took.prefill) * _NS)),
    }
