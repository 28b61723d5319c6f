"""Counts stored results in metrics, the program's log and traces: numbers and names, no text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from turnkeep_client.errors import ERROR_CODES
from turnkeep_client.messages import Append, Appended, Failed, Generate, Generated
from worker.observe.traces import Phase, TurnTimes
from worker.process.clock import monotonic

if TYPE_CHECKING:
    from turnkeep_client.messages import Result
    from turnkeep_client.subjects import SessionKey

    from .record import Pending
    from .services import Services

log = structlog.get_logger()


def count_result(
    services: Services, key: SessionKey, pending: Pending, result: Result, position: int
) -> None:
    """Count a stored result, which left the session at `position`, and hand its turn to tracing."""
    telemetry = services.telemetry
    is_given_up = isinstance(result, Generated) and result.finish_reason == "given_up"
    outcome = result.code if isinstance(result, Failed) else "internal" if is_given_up else "ok"
    counted = outcome if outcome in ("ok", *ERROR_CODES) else "other"  # a repeat may have an unknown code
    telemetry.requests[pending.type][counted] += 1
    telemetry.tenants.count_request(key.tenant, counted)
    seconds = pending.waited_s(monotonic())
    if isinstance(result, Appended | Generated) and result.repeat_of is None:
        telemetry.request_duration.observe(seconds)
    if services.traces is not None and isinstance(pending.request, Append | Generate):
        services.traces.add(turn_times(key, pending, result, services.model))
    log.info(
        "answered",
        type=pending.type,
        outcome=outcome,
        seq=pending.seq,
        position=position,
        seconds=round(seconds, 2),
        **({"tokens": result.usage.completion_tokens} if isinstance(result, Generated) else {}),
    )


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
        if result.resumed_tokens:
            attributes["turnkeep.resumed_tokens"] = result.resumed_tokens
    elif isinstance(result, Appended):
        attributes["gen_ai.usage.input_tokens"] = result.tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = result.cached_tokens
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
