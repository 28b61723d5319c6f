"""Cancels a request of a session, at the wish of a client, or says why there is nothing to cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from turnkeep_client.messages import Cancelled, Failed, Generated, failure
from worker.wire.fence import FencedError

if TYPE_CHECKING:
    from .pending import PendingRequest
    from .session import ServedSession
    from .session_log import AnsweredRequest


async def cancel(session: ServedSession, request_id: str) -> Cancelled | Failed:
    """Cancel a request that has no result yet; return `Cancelled` once its result is in the log.

    Returns `Failed` if the log has no such request, or if it was answered before it could be cancelled. A
    request that is only waiting gets its result here, one that may have begun from the session's task. Each
    await may change the log: then it is looked at again. Raises `FencedError`.
    """
    was: Literal["running", "waiting"] | None = None  # what the request was when it was cancelled here
    while True:
        try:
            await session.refresh()  # the request may be in the log before it is delivered
        except FencedError:
            session.stop_active()  # its result can no longer be committed
            raise
        record = session.log.record
        known = await session.log.find_answered(request_id)
        if known is not None:  # if so, a pending request with this id is a repeat
            return _ended(known, was) if was else _no_cancel(request_id, is_answered=True)
        pending = await session.log.find_waiting(request_id)
        if record is not session.log.record or (pending and not record.lacks_result(pending)):
            continue
        if pending is None:
            return _no_cancel(request_id, is_answered=False)
        was, waits = "waiting", not record.is_next(pending)
        pending.cancelled = True  # before the next await: now the session's task does not begin it
        try:
            is_begun = await _is_begun(session, pending)
        except FencedError:  # a worker, perhaps this one, has begun it meanwhile
            continue
        if is_begun:
            was = "running"
            await session.end_early(pending)
        elif await session.commit(pending, None, waits=waits):
            return Cancelled(id=request_id, was=was)


async def _is_begun(session: ServedSession, pending: PendingRequest) -> bool:
    """Return whether the request was started, here or by a worker that died.

    If it was, its published tokens stay. Only the first pending request can have been started, unless the
    server has lost results. So chunks of any other request do not come from a worker, unless they name
    the digest of the session before the answer.
    """
    if pending is session.active:
        return True
    if session.log.record.is_next(pending):
        return await session.log.is_streamed(pending) or pending is session.active
    return bool((await session.log.published(pending)).base)


def _ended(known: AnsweredRequest, was: Literal["running", "waiting"]) -> Cancelled | Failed:
    """Return a cancel's reply: `Cancelled` if the request ended early, `Failed` if it was complete."""
    result, request_id = known.result, known.result.id or ""
    how = result.finish_reason if isinstance(result, Generated) else getattr(result, "code", "")
    if how in ("cancelled", "expired"):
        return Cancelled(id=request_id, was=was)
    return _no_cancel(request_id, is_answered=True)


def _no_cancel(request_id: str, *, is_answered: bool) -> Failed:
    why = "it was answered already" if is_answered else "the session has no request with this id that waits"
    return failure(request_id, "invalid_request", f"nothing to cancel under {request_id!r}: {why}")
