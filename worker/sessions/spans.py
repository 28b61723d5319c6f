"""Builds the attributes of a turn's span from its request and result: numbers and names, no text. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turnkeep_client.messages import Appended, Failed, Generate, Generated
from worker.observe.traces import Phase, TurnTimes
from worker.process.clock import monotonic

if TYPE_CHECKING:
    from turnkeep_client.messages import Result
    from turnkeep_client.subjects import SessionKey

    from .record import Pending


def turn_times(key: SessionKey, pending: Pending, result: Result, model: str) -> TurnTimes:
    """Build the times and attributes for the span of a turn whose result is in the log.

    The attributes have OpenTelemetry's names for generative AI where such names exist.
    """
    operation = _operation(pending)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "turnkeep",
        "gen_ai.request.model": model,
        "gen_ai.conversation.id": key.session,
        "turnkeep.tenant": key.tenant,
        "turnkeep.seq": pending.seq,
    }
    if isinstance(result, Generated):
        attributes["gen_ai.usage.input_tokens"] = result.usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = result.usage.completion_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = result.usage.cached_tokens
        attributes["gen_ai.response.finish_reasons"] = (result.finish_reason,)
    elif isinstance(result, Appended):
        attributes["gen_ai.usage.input_tokens"] = result.tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = result.cached_tokens
    if pending.num_resumed:
        attributes["turnkeep.resumed_tokens"] = pending.num_resumed
    if result.repeat_of is not None:
        attributes["turnkeep.repeat_of"] = result.repeat_of
    end_s = monotonic()
    return TurnTimes(
        name=f"{operation} {model}",
        parent=pending.parent,
        attributes=attributes,
        phases=pending.phases or [Phase("queue", pending.received_s, end_s)],
        waited_s=pending.waited_s(end_s),
        error=result.code if isinstance(result, Failed) else None,
        end_s=end_s,
    )


def _operation(pending: Pending) -> str:
    request = pending.request
    if not isinstance(request, Generate):
        return "append"
    return "text_completion" if request.text or request.tokens or request.raw else "chat"
