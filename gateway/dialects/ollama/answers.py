"""Writes Ollama's answers, as one JSON object or a line for each chunk, and descriptions of models. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.dialects.openai import common as openai
from gateway.form import Events

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.models import GatewayModel
    from gateway.turn import ClientTurn, Fault
    from turnkeep_client.messages import Called, CallPart, Chunk, Generated

NDJSON: Final = "application/x-ndjson"
_NS: Final = 1_000_000_000
#: Ollama's names of what a model makes.
_CAPABILITIES: Final = {"answers": "completion", "embeddings": "embedding", "scores": "rerank"}
_DETAILS: Final = {
    **dict.fromkeys(("parent_model", "family", "parameter_size", "quantization_level"), ""),
    "format": "mlx",
    "families": None,
}


def _said(text: str, reasoning: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the fields for text, reasoning and tool calls in an answer of `/api/chat`."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def _generated(text: str, reasoning: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:  # noqa: ARG001  # there are no tools
    """Return the fields for text and reasoning in an answer of `/api/generate`."""
    return {"response": text, **({"thinking": reasoning} if reasoning else {})}


class AnswerWriter:
    """Writes answers of `/api/chat` or `/api/generate`; `say` returns the fields in which the two differ."""

    def __init__(self, say: Callable[..., dict[str, Any]]) -> None:
        self.say = say

    def whole(self, turn: ClientTurn, _id: str, created: int, results: Sequence[Generated]) -> dict[str, Any]:
        """Return the JSON body of the response to a request with `stream: false`."""
        (result,) = results
        calls = [_call(one) for one in result.tool_calls]
        said = self.say(result.text, result.reasoning, calls)
        tokens = {"logprobs": openai.likelihoods(result.logprobs)} if turn.options.get("logprobs") else {}
        return {**_head(turn, created), **said, **tokens, **_end(result)}

    def events(self, turn: ClientTurn, answer_id: str, created: int) -> Lines:  # noqa: ARG002  # the same parameters in all dialects
        """Return the encoder of the lines of one streamed response."""
        return Lines(self.say, _head(turn, created))


class Lines(Events):
    """Encodes the JSON lines of one streamed response."""

    def __init__(self, say: Callable[..., dict[str, Any]], head: dict[str, Any]) -> None:
        self._say = say
        self._head = head

    @property
    def heartbeat(self) -> bytes:
        """A line with an empty text, which shows that the stream is alive: JSON lines have no comments."""
        return self._line(self._say(""), done=False)

    def chunk(self, index: int, chunk: Chunk) -> bytes:  # noqa: ARG002  # there is one answer
        """Encode the line for a chunk of the answer; return empty bytes if the chunk adds nothing."""
        calls = [_call(part) for part in chunk.tool_calls]
        if not (chunk.text or chunk.reasoning or calls or chunk.logprobs):
            return b""
        tokens = {"logprobs": openai.likelihoods(chunk.logprobs)} if chunk.logprobs else {}
        return self._line(self._say(chunk.text, chunk.reasoning, calls), **tokens, done=False)

    def finish(self, index: int, result: Generated) -> bytes:  # noqa: ARG002  # there is one answer
        """Encode the answer's last line, with token counts and durations."""
        return self._line(self._say(""), **_end(result))

    def error(self, fault: Fault) -> bytes:
        """Encode the line with the error that ends the stream."""
        return msgspec.json.encode(error(fault)) + b"\n"

    def _line(self, said: dict[str, Any], **more: Any) -> bytes:
        return msgspec.json.encode({**self._head, **said, **more}) + b"\n"


CHAT: Final = AnswerWriter(_said)
GENERATE: Final = AnswerWriter(_generated)


def error(fault: Fault) -> dict[str, Any]:
    """Convert a `Fault` to the JSON of Ollama's errors."""
    return {"error": fault.sentence}


def tags(models: Sequence[GatewayModel]) -> dict[str, Any]:
    """Return the list of models for `/api/tags`."""
    return {"models": [_listed(one) for one in models]}


def running(models: Sequence[GatewayModel]) -> dict[str, Any]:
    """Return the list of loaded models for `/api/ps`."""
    return {"models": [_running(one) for one in models if one.is_loaded]}


def _running(model: GatewayModel) -> dict[str, Any]:
    worker, listed = model.worker, _listed(model)
    on_gpu = worker is not None and "cpu" not in worker.device.lower()
    more = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": listed["size"] if on_gpu else 0}
    return {**listed, **more, "context_length": model.context_tokens}


def description(model: GatewayModel) -> dict[str, Any]:
    """Return the description of one model for `/api/show`."""
    info: dict[str, Any] = {"general.architecture": "mlx", "general.basename": model.name}
    if model.context_tokens is not None:
        info["mlx.context_length"] = model.context_tokens
    found = {"tools": True, "thinking": model.can_reason, "vision": model.can_see}
    answering = [name for name, has in found.items() if has and "answers" in model.makes]
    return {
        "modelfile": f"FROM {model.name}\n",
        **dict.fromkeys(("parameters", "template", "license"), ""),
        "details": _DETAILS,
        "model_info": info,
        "capabilities": [*(_CAPABILITIES[one] for one in model.makes), *answering],
        "modified_at": _at(model.changed_s),
    }


def page_v0(models: Sequence[GatewayModel]) -> dict[str, Any]:
    """Return a list of models in the format of LM Studio."""
    return {"object": "list", "data": [_described_v0(one) for one in models]}


def _described_v0(model: GatewayModel) -> dict[str, Any]:
    kind = "vlm" if model.can_see else "llm" if "answers" in model.makes else "embeddings"
    fields = {"object": "model", "type": kind, "publisher": "turnkeep", "arch": "", "quantization": ""}
    more: dict[str, Any] = {"state": "loaded" if model.is_loaded else "not-loaded"}
    if model.context_tokens is not None:
        more["max_context_length"] = model.context_tokens
        if model.is_loaded:
            more["loaded_context_length"] = model.context_tokens
    return {"id": model.name, **fields, "compatibility_type": "mlx", **more}


def _listed(model: GatewayModel) -> dict[str, Any]:
    size = 0 if model.worker is None else model.worker.weight_bytes
    named = f"{model.name} {size} {model.changed_s}"  # a digest of the weights may take minutes
    more = {"modified_at": _at(model.changed_s), "size": size, "digest": sha256(named.encode()).hexdigest()}
    return {"name": model.name, "model": model.name, **more, "details": _DETAILS}


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _head(turn: ClientTurn, created: int) -> dict[str, Any]:
    return {"model": turn.model, "created_at": _at(created)}


def _call(given: Called | CallPart) -> dict[str, Any]:
    """Return a tool call in Ollama's form, with its arguments as an object instead of JSON text."""
    name, written = (
        (given.function.name, given.function.arguments)
        if hasattr(given, "function")
        else (given.name or "", given.arguments)
    )
    try:
        arguments = msgspec.json.decode(written or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = {}
    function = {"name": name, "arguments": arguments if isinstance(arguments, dict) else {}}
    return {"id": given.id or "", "function": function}


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
