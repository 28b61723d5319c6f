"""Answers asks: a generate or a close whose result is also the reply. The log has it like any other."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import nats.errors
from anyio import fail_after, move_on_after
from msgspec import structs
from nats.js.errors import APIError

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.images import files_of
from turnkeep_client.log import why_refused
from turnkeep_client.messages import Close, Failed, decode_ask, decode_result, encode, failure
from worker.observe.traces import trace_headers
from worker.process.concurrency import shielded

from .journal import MESSAGE_TOO_LARGE

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

    from turnkeep_client.messages import Generate, Result
    from turnkeep_client.subjects import SessionKey, Subjects

    from .journal import Journal

_PUBLISH_TIMEOUT_S: Final = 5.0
#: How often an ask looks for its result in the log: while its connection was lost, it received nothing.
_LOOK_S: Final = 10.0
_REMOVED: Final = "the request was removed from the log with its session; whether it was answered is unknown"
_TOO_LARGE: Final = "the request is larger than a message may be: send it as several appends"


class Asks:
    """Answers asks. Event loop only."""

    def __init__(self, nc: Client, journal: Journal, subjects: Subjects, *, timeout_s: float) -> None:
        """An ask waits `timeout_s` for its result on `out`."""
        self._nc = nc
        self._js = nc.jetstream()
        self._journal = journal
        self._subjects = subjects
        self._timeout_s = timeout_s

    async def answer(self, message: Msg, request_id: str) -> Result:
        """Store an ask in the log, and return its result; `request_id` is its id if it has none.

        Returns `Failed` if it is invalid, cannot be stored, or has no result in time but may get one later.
        """
        try:
            key, _, _ = self._subjects.parse(message.subject)
            request = decode_ask(message.data, request_id)
        except InvalidMessageError as error:
            return failure(error.request_id, "invalid_request", str(error), field=error.field)
        results = await self._nc.subscribe(self._subjects.of(key, "out"))
        try:
            seq = await self._store(key, request, trace_headers(message.headers or {}))
            if isinstance(seq, Failed):
                return seq
            with fail_after(self._timeout_s):
                return await self._result(results, key, request.id, seq)
        except TimeoutError:
            text = f"no result within {self._timeout_s:g} s; it comes on the session's out"
            late = failure(request.id, "overloaded", text)
            return structs.replace(late, retryable=False)  # it would be a second request
        finally:
            await shielded(results.unsubscribe)

    async def _store(
        self, key: SessionKey, request: Generate | Close, headers: dict[str, str]
    ) -> int | Failed:
        """Store the request in the log, its images first; return its sequence, or the failure."""
        for data in files_of(request).values():
            await self._journal.store_image(key, data)
        subject, body = self._subjects.of(key, "in"), encode(request)
        try:
            if isinstance(request, Close):  # it makes room in a full log
                ack = await self._journal.room.publish(subject, body, headers)
            else:
                ack = await self._js.publish(subject, body, timeout=_PUBLISH_TIMEOUT_S, headers=headers)
        except nats.errors.MaxPayloadError:
            return failure(request.id, "invalid_request", _TOO_LARGE)
        except APIError as error:
            if error.err_code == MESSAGE_TOO_LARGE:
                return failure(request.id, "invalid_request", _TOO_LARGE)
            return failure(request.id, "overloaded", why_refused(error.err_code, error.description))
        except (nats.errors.Error, OSError) as error:
            reason = str(error) or type(error).__name__
            return failure(request.id, "overloaded", f"the log did not confirm the request: {reason}")
        return ack.seq

    async def _result(self, results: Subscription, key: SessionKey, request_id: str, seq: int) -> Result:
        """Wait for the result of the request at `seq` on `out`; look for it in the log too, every 10 s.

        Returns `Failed` if the log has neither the request nor its result, as after a close with `forget`.
        """
        while True:
            with move_on_after(_LOOK_S):
                while True:
                    body = (await results.next_msg(timeout=None)).data
                    if (result := _as_result(body, request_id, seq)) is not None:
                        return result
            # Asked before the results are read: an answered request leaves the log too.
            is_there = await self._journal.entry(seq) is not None
            async for entry in self._journal.every(key, "out", seq):
                if (result := _as_result(entry.body, request_id, seq)) is not None:
                    return result
            if not is_there:
                return failure(request_id, "unknown_session", _REMOVED)


def _as_result(body: bytes, request_id: str, seq: int) -> Result | None:
    """Decode a message on `out`; None if it is not the result of this request."""
    with contextlib.suppress(InvalidMessageError):  # not from a worker
        if (result := decode_result(body)).seq == seq and result.id == request_id:
            return result
    return None
