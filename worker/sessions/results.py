"""Builds the results of requests, and counts them in metrics and traces once they are stored.

A result has its request's costs, and the session's state after it. What is counted has no text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from msgspec import structs

from turnkeep_client.errors import ERROR_CODES
from turnkeep_client.messages import (
    Append,
    Appended,
    Closed,
    Failed,
    Generate,
    Generated,
    Opened,
    Seconds,
    Usage,
    failure,
)
from worker.observe.traces import Phase, TurnTimes
from worker.process.clock import monotonic

from .history import digests_of, policy_fields

if TYPE_CHECKING:
    from turnkeep_client.errors import ErrorCode
    from turnkeep_client.messages import Called, Chunk, Open, Result
    from turnkeep_client.subjects import SessionKey
    from worker.engine.port import TurnResult
    from worker.text.answer import Answer

    from .history import ExtendedHistory, TokenHistory
    from .pending import PendingRequest
    from .services import Services

log = structlog.get_logger()


class Outcome(NamedTuple):
    """The outcome of a request, before it is stored in the log."""

    result: Result
    #: The session's history after the request.
    history: TokenHistory
    #: The unpublished end of an answer that was ended early.
    held: Chunk | None = None
    #: If the request repeats an answered id: the body of that id's first result.
    first: bytes = b""


def is_close(result: Result) -> bool:
    """Whether a result closes the session, and does not only repeat that of an earlier close."""
    return isinstance(result, Closed) and result.repeat_of is None


def failed(pending: PendingRequest, position: int, code: ErrorCode, message: str, **fields: Any) -> Failed:
    """Build the `failed` result of a request; the session stays at `position`."""
    return failure(pending.id, code, message, seq=pending.seq, position=position, **fields)


def opened_result(request: Open, pending: PendingRequest, after: TokenHistory) -> Opened:
    """Build the result of an `open`; `after` is the session's history after it."""
    return Opened(
        id=request.id,
        seq=pending.seq,
        position=after.position,
        parent=after.parent,
        tags=after.tags,
        model=after.model,
        **policy_fields(after),
    )


def rewritten_from(before: TokenHistory, extended: ExtendedHistory) -> int | None:
    """Return the first position at which an input has changed earlier tokens; None if it has changed none."""
    return extended.kept if extended.kept < before.position else None


def input_fields(
    before: TokenHistory, extended: ExtendedHistory, *, holds_answer: bool = False
) -> dict[str, Any]:
    """Build a result's fields about input tokens and model; `before` is the history without the input."""
    model = extended.history.model
    previous = before.model if before.position else None
    if previous is not None and model is not None and digests_of(previous) == digests_of(model):
        previous = None  # maybe under another name
    return {
        "change": structs.replace(extended.change, holds_answer=holds_answer),
        "model": model,
        "previous_model": previous,
        "rewritten_from": rewritten_from(before, extended),
    }


def withdrawn_result(
    pending: PendingRequest, history: TokenHistory, position: int, turn: TurnResult | None = None
) -> Result:
    """Build the result of a request that was cancelled or expired before it changed the session.

    `position` is the session's position: if the log cannot be read, `history` may be incomplete. Returns
    `Failed`; for a cancelled generate `Generated` with the cost of its `turn`, which ended in the prompt.
    """
    if pending.expired and not pending.cancelled:
        return failed(pending, position, "expired", "its deadline passed; nothing was added")
    if not isinstance(pending.request, Generate):
        return failed(pending, position, "expired", "cancelled before it was carried out; nothing was added")
    num_prompt = turn.num_cached + turn.num_prefilled if turn else 0
    return Generated(
        position=position,
        text="",
        tokens=(),
        finish_reason="cancelled",
        kv_live_bytes=0,
        **_costs(pending, turn, num_prompt, 0),
        **policy_fields(history),
    )


def _costs(
    pending: PendingRequest, turn: TurnResult | None, num_prompt: int, num_new: int, num_thought: int = 0
) -> dict[str, Any]:
    """Return the fields of a generate's result that name it, and say what it took until now."""
    begun_s = pending.received_s
    now_s = monotonic() - begun_s
    # Without a turn, no token was prefilled.
    num_cached = min(turn.num_cached, num_prompt) if turn else num_prompt
    usage = Usage(
        prompt_tokens=num_prompt,
        cached_tokens=num_cached,
        prefilled_tokens=num_prompt - num_cached,
        completion_tokens=num_new,
        reasoning_tokens=num_thought,
    )
    seconds = Seconds(
        queued=turn.started_s - begun_s if turn else now_s,
        prefill=turn.prefill_s if turn else 0.0,
        first_token=turn.first_token_s - begun_s if turn and num_new else now_s,
        total=now_s,
    )
    return {"id": pending.id or "", "seq": pending.seq, "usage": usage, "seconds": seconds}


def appended_result(
    pending: PendingRequest,
    turn: TurnResult | None,
    before: TokenHistory,
    extended: ExtendedHistory,
    live_bytes: int,
) -> Appended:
    """Build the result of an append; without a `turn`, the session still has `live_bytes` on the device."""
    cached, prefilled = (turn.num_cached, turn.num_prefilled) if turn else (0, 0)
    return Appended(
        id=pending.id or "",
        seq=pending.seq,
        position=extended.history.position,
        tokens=cached + prefilled,
        cached_tokens=cached,
        prefilled_tokens=prefilled,
        kv_live_bytes=turn.live_bytes if turn else live_bytes,
        seconds=monotonic() - pending.received_s,
        **input_fields(before, extended),
        warnings=extended.warnings,
        **policy_fields(extended.history),
    )


def foreign_result(
    pending: PendingRequest,
    chunk: Chunk,
    calls: tuple[Called, ...],
    before: TokenHistory,
    extended: ExtendedHistory,
) -> Generated:
    """Build the result of an answer begun with another tokenizer; `chunk` has its published part."""
    return Generated(
        position=extended.history.position,
        text=chunk.text,
        tokens=chunk.tokens,
        logprobs=chunk.logprobs,
        reasoning=chunk.reasoning,
        tool_calls=calls,
        finish_reason="model_changed",
        kv_live_bytes=0,
        resumed_tokens=len(chunk.tokens),
        warnings=extended.warnings,
        **_costs(pending, None, 0, len(chunk.tokens)),
        **input_fields(before, extended, holds_answer=True),
        **policy_fields(extended.history),
    )


def generated_result(
    pending: PendingRequest,
    answer: Answer,
    turn: TurnResult | None,
    before: TokenHistory,
    extended: ExtendedHistory,
    after: TokenHistory,
) -> Generated:
    """Build the result of a generate; `extended` has the prompt, `after` also the answer."""
    num_prompt = extended.history.position  # without the tokens that were published before a crash
    return Generated(
        position=after.position,
        text=answer.text,
        tokens=tuple(answer.tokens),
        logprobs=tuple(answer.logprobs),
        reasoning=answer.reasoning,
        tool_calls=answer.calls,
        finish_reason=answer.finish_reason or "cancelled",
        stop=answer.stop,
        kv_live_bytes=turn.live_bytes if turn else 0,
        prefix_tokens=extended.num_given,
        **_costs(pending, turn, num_prompt, len(answer.tokens), answer.num_thought),
        **input_fields(before, extended),
        **policy_fields(after),
    )


def count_result(
    services: Services, key: SessionKey, pending: PendingRequest, result: Result, position: int
) -> None:
    """Count and log a stored result, and hand its turn to tracing; the session is at `position` now."""
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


def turn_times(key: SessionKey, pending: PendingRequest, result: Result, model: str) -> TurnTimes:
    """Build the span of a turn whose result is in the log, ending now: its times and attributes.

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


def _operation(pending: PendingRequest) -> str:
    request = pending.request
    if not isinstance(request, Generate):
        return "append"
    return "text_completion" if request.text or request.tokens or request.raw else "chat"
