"""Converts errors, events, token counts and stop reasons to the formats of Anthropic's API. Pure."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.turn import Fault
    from turnkeep_client.messages import Generated

_REASONS: Final = {
    "length": "max_tokens",
    "expired": "max_tokens",
    "model_changed": "max_tokens",
    "given_up": "max_tokens",
    "tool_calls": "tool_use",
}
#: Anthropic's error types by HTTP status; others are `api_error` from 500 on, else `invalid_request_error`.
_KINDS: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"} | {
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
#: The code by which Anthropic's libraries know that they must send a thread's whole conversation.
NO_THREAD: Final = "thread_not_found"
#: The cache's token counts before they are known; the gateway never counts writes to the cache.
CACHE_USAGE: Final = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def error(fault: Fault) -> dict[str, Any]:
    """Convert a `Fault` to the JSON of Anthropic's errors."""
    kind = _KINDS.get(fault.status, "api_error" if fault.status >= 500 else "invalid_request_error")
    message = fault.sentence
    if fault.code == "context_length_exceeded":
        message = "prompt is too long"  # agents look for these words before they compact a conversation
        if (limit := fault.limit) is not None:
            # A prompt that fits, but without room for an answer, counts as one token more.
            message += f": {max(limit.asked, limit.allowed + 1)} tokens > {limit.allowed} maximum"
    details = {"details": {"error_code": NO_THREAD}} if fault.code == NO_THREAD else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


def usage(result: Generated) -> dict[str, Any]:
    """Return an answer's token counts in Anthropic's fields; `input_tokens` leaves out cached tokens."""
    used = result.usage
    return CACHE_USAGE | {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.completion_tokens,
    }


def end(result: Generated) -> dict[str, Any]:
    """Return why an answer ended, as Anthropic's `stop_reason` and `stop_sequence`."""
    reason = "end_turn" if result.stop is None else "stop_sequence"
    return {"stop_reason": _REASONS.get(result.finish_reason, reason), "stop_sequence": result.stop}


def signature(texts: Iterable[str]) -> str:
    """Return a digest of reasoning texts, as the `signature` that some clients require and none checks."""
    return blake2b("".join(texts).encode(), digest_size=32).hexdigest()


def event(type: str, **fields: Any) -> bytes:  # noqa: A002  # the field's name in an event
    """Encode one server-sent event."""
    body = {"type": type, **fields}
    return f"event: {type}\ndata: ".encode() + msgspec.json.encode(body) + b"\n\n"
