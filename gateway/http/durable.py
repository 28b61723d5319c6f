"""Serves an answer's events as a read-only stream of the Durable Streams protocol.

The stream's messages are an API's numbered events as JSON; the offset is the next event's number.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.responses import Response

from gateway.event_ids import ResumedEvents, behind_number
from gateway.form import EVENT_STREAM
from gateway.turn import fault_of, number_in, refused, renamed
from turnkeep_client.errors import NoWorkerError, TurnkeepError
from turnkeep_client.messages import Chunk, Generated

from .answer_response import while_connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.types import Receive, Scope, Send

    from gateway.answer_feed import AnswerFeed, Event
    from gateway.answer_lookup import LocatedAnswer
    from gateway.form import Form

#: How long a read without `live` collects the events of a running answer.
_COLLECT_S: Final = 0.1
#: How long a poll waits for new events.
_POLL_S: Final = 20.0
#: Response headers that web pages must be able to read.
HEADERS: Final = ("stream-next-offset", "stream-up-to-date", "stream-cursor", "stream-closed")
_END: Final = b"\n\n"
_DATA: Final = b"\ndata: "


class DurableRead(Response):
    """The response to one read of an answer's events, from an offset on.

    The query's `live` decides: without it, the events so far; with `long-poll`, also wait for the next ones;
    with `sse`, a stream of all events as they come.
    """

    def __init__(self, form: Form, kept: LocatedAnswer, query: Mapping[str, str]) -> None:
        """`kept` is the answer; `query` has the request's `offset` and `live`. Raises `Fault`."""
        super().__init__()
        self._conversations, answer = kept
        self._answer = answer
        self._names = form.names
        self._live = query.get("live", "")
        self._skips = query.get("offset") == "now"
        self._num_known = 0 if query.get("offset") in {"-1", "now"} else number_in(query, "offset") or 0
        if self._live not in {"", "sse", "long-poll"}:
            raise refused("live must be sse or long-poll", "live")
        after = behind_number(self._num_known - 1) if self._num_known else None
        self._events = ResumedEvents(
            form.events(answer.turn, answer.id, answer.note.created), answer.id, after
        )
        self._begun = self._events.start(0)
        self._is_closed = False
        self._is_cut = False  # the rest of the answer cannot be read now

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events from the offset on, unless the client disconnects first."""
        feed = self._conversations.follow(self._answer)
        write = self._stream if self._live == "sse" else self._page
        try:
            if self._skips:
                await self._skip(feed)
            await while_connected(receive, write(feed, send), feed.stop)
        finally:
            self._conversations.abandon(feed)

    async def _skip(self, feed: AnswerFeed) -> None:
        """Read the events so far, without sending them."""
        until_s = asyncio.get_running_loop().time() + _COLLECT_S
        while not (self._is_closed or self._is_cut) and (taken := await feed.next_events(until_s)):
            self._begun += self._encoded(taken)
        self._new(self._begun)
        self._begun = b""

    async def _page(self, feed: AnswerFeed, send: Send) -> None:
        found: list[bytes] = []
        if self._live or not self._skips:
            async for batch in self._batches(feed):
                found += batch
                if self._is_closed or (found and self._live):
                    break
        body = b"[%s]" % b",".join(found)
        status = 200 if found or not self._live or self._is_closed else 204
        headers = {"stream-next-offset": self._offset, "stream-up-to-date": "true", "stream-cursor": "0"}
        headers |= {"stream-closed": "true"} if self._is_closed else {}
        page = Response(b"" if status == 204 else body, status, headers, media_type="application/json")
        page.headers["cache-control"] = "no-store"
        await page({"type": "http"}, _nothing, send)

    async def _stream(self, feed: AnswerFeed, send: Send) -> None:
        kind = [(b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        async for batch in self._batches(feed):
            control: dict[str, Any] = {"streamNextOffset": self._offset, "upToDate": True}
            control |= {"streamClosed": True} if self._is_closed else {"streamCursor": "0"}
            written = b"event: data\ndata: [%s]\n\n" % b",".join(batch) if batch else b""
            written += b"event: control\ndata: %s\n\n" % msgspec.json.encode(control)
            await send({"type": "http.response.body", "body": written, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _batches(self, feed: AnswerFeed) -> AsyncIterator[list[bytes]]:
        """Yield batches of events that the client does not have, until the answer ends.

        A read without `live` ends after `_COLLECT_S` too, and a long poll after `_POLL_S`.
        """
        written, clock = self._begun, asyncio.get_running_loop().time
        until_s = clock() + (_POLL_S if self._live else _COLLECT_S)
        is_endless = self._live == "sse"
        while not (self._is_closed or self._is_cut):
            if written or (is_endless and clock() >= until_s):
                yield self._new(written)  # without events a heartbeat
                until_s = clock() + _POLL_S if is_endless else until_s
            taken = await feed.next_events(until_s)
            if not (taken or is_endless):
                return
            written = self._encoded(taken)
        yield self._new(written)

    def _encoded(self, taken: list[tuple[int, Event]]) -> bytes:
        written = b""
        for index, event in taken:
            match event:
                case Chunk():
                    written += self._events.chunk(index, event)
                case Generated():
                    self._is_closed = True
                    written += self._events.finish(index, event)
                case NoWorkerError():  # the client reads on from here
                    self._is_cut = True
                case TurnkeepError():
                    self._is_closed = True
                    written += self._events.error(renamed(fault_of(event), self._names))
        return written

    def _new(self, written: bytes) -> list[bytes]:
        events = [one.partition(_DATA)[2] for one in written.split(_END)[:-1]]
        self._num_known += len(events)
        return events

    @property
    def _offset(self) -> str:
        return f"{self._num_known:010}"


async def _nothing() -> dict[str, Any]:
    return {"type": "http.disconnect"}
