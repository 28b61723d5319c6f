"""Sends answers over HTTP, whole or as a stream of events, in any dialect."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
from starlette.responses import Response

from gateway import images, logged_answers
from gateway.answer_feed import Receipt, SessionMatch
from gateway.event_ids import ResumedEvents
from gateway.turn import Fault, fault_of, renamed, warning_header
from turnkeep_client.content_blocks import ContentWarning
from turnkeep_client.errors import RequestFailedError, TurnkeepError
from turnkeep_client.messages import Chunk, Generated

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from gateway.answer_feed import AnswerFeed
    from gateway.conversations import Conversations
    from gateway.event_ids import Cursor
    from gateway.form import Events, Form
    from gateway.keys import ApiKey
    from gateway.metrics import Counters
    from gateway.planning import How
    from gateway.turn import ClientTurn

_T = TypeVar("_T")

#: The headers with an answer's id, by which OpenAI's and Anthropic's libraries name a request to their users.
IDS: Final = ("x-request-id", "request-id")
#: The headers of an answer that pages of other origins may read.
SHOWN: Final = ("x-turnkeep-session", "x-turnkeep-explain", *IDS)
#: How long a stream waits for its first events, or for an error, before it sends status 200.
_PATIENCE_S: Final = 1.0
#: The pause before a heartbeat.
_HEARTBEAT_S: Final = 5.0
#: How long a cancelled response has to send its error.
_LAST_S: Final = 1.0
#: The heartbeat before the first event, in streams of server-sent events.
_COMMENT: Final = b": the log does not have the request yet\n"
_CANCELLED: Final = (
    "the answer was cancelled: by a request, or, without an Idempotency-Key, since its client had left"
)
_CANCELLED_KEY: Final = "the answer was cancelled; another one needs an Idempotency-Key of its own"


class Accounting(NamedTuple):
    """Where the use of one request is counted."""

    key: ApiKey
    counters: Counters
    #: Whether a header of the response says how much of the conversation was found.
    explain: bool
    #: The request counts as running until this is closed.
    running: contextlib.ExitStack

    def note(self, how: How, result: Generated) -> None:
        """Count an answer in the metrics, and its tokens against the key's limit."""
        self.counters.note(how, result)
        if how != "repeated":
            used = result.usage
            self.key.spend(used.prompt_tokens - used.cached_tokens + used.completion_tokens)


class AnswerResponse(Response):
    """The HTTP response with the answers to a `ClientTurn`.

    If the client disconnects, the answers are cancelled unless `AnswerFeed.stays`.
    """

    def __init__(
        self,
        form: Form,
        turn: ClientTurn,
        conversations: Conversations,
        accounting: Accounting,
        begin: Callable[[], AnswerFeed],
        after: Cursor | None = None,
    ) -> None:
        """`begin` starts the answers; the client has the stream's events up to the place `after` already."""
        super().__init__()
        self._form = form
        self._turn = turn
        self._conversations = conversations
        self._accounting = accounting
        self._begin = begin
        self._after = after
        self._found: dict[int, SessionMatch] = {}
        self._results: dict[int, Generated] = {}
        #: The worker's warnings, which come with the first chunk of an answer.
        self._warnings: dict[str, None] = {}
        self._has_begun = self._has_failed = False
        #: The event loop's time at which the stream's last bytes were sent.
        self._told_s = 0.0

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answers, or the error in the dialect's form, unless the client disconnects first."""
        with self._accounting.running:
            await self._answer(receive, send)

    async def _answer(self, receive: Receive, send: Send) -> None:
        self._feed = feed = self._begin()
        try:
            await while_connected(receive, self._write(feed, send), feed.stop)
        finally:
            if feed.stays and (feed.running or not self._is_over):
                self._conversations.leave(feed)
                self._conversations.beside(self._drain(feed, self._accounting.running.pop_all()))
            else:
                self._conversations.abandon(feed)  # without effect on answers that have ended

    async def _drain(self, feed: AnswerFeed, running: contextlib.ExitStack) -> None:
        """Count a request as running until its answers have ended, after its client has disconnected."""
        with running, contextlib.suppress(TurnkeepError):
            while not self._is_over:
                self._take(*await feed.events.get())

    @property
    def _is_over(self) -> bool:
        return self._has_failed or len(self._results) == self._turn.n

    async def _write(self, feed: AnswerFeed, send: Send) -> None:
        event: Any = None
        try:
            if self._turn.stream:
                await self._write_events(feed, send)
                return
            is_left = bool(self._form.object and self._turn.asked.get("background"))
            while not (self._is_over or (is_left and isinstance(event, Receipt))):
                index, event = await feed.events.get()
                self._take(index, event)
        except TurnkeepError as error:
            fault = self._fault(error)
            await self._write_json(send, fault.status, self._form.error(fault), fault.headers)
            return
        if isinstance(event, Receipt) and (written := self._form.object):
            body = written.write(self._turn, self._id, feed.note.created, None)
            await self._write_json(send, 200, body)
            return
        whole = self._form.whole(self._turn, self._id, feed.note.created, self._in_order())
        await self._write_json(send, 200, whole)

    async def _write_events(self, feed: AnswerFeed, send: Send) -> None:
        """Send a stream of events. Raises `TurnkeepError` only before the stream has begun."""
        self._take(*await feed.events.get())  # the session, which is known at once
        (events, start), first, failure = self._new_events(), b"", None
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not first and not self._is_over:
                    index, event = await feed.events.get()
                    first = self._take_events(events, index, event)
                    if isinstance(event, SessionMatch | Receipt):  # the session or the note has changed
                        events, start = self._new_events()
        except TimeoutError:
            pass
        except TurnkeepError as error:
            if feed.following is None or self._form.object is None:
                raise
            failure = error  # the stream itself tells the failure of a recorded answer
        kind = {"content-type": f"{self._form.media_type}; charset=utf-8"}
        await send(_head(200, self._own_headers() | kind))
        try:
            if failure is None and feed.stays and not self._has_begun:
                await self._until_begun(feed, send)
                events, start = self._new_events()
        except RequestFailedError as error:  # the log has no such request: send no id
            events, start, failure = self._unmarked_events(), b"", error
        except TurnkeepError as error:
            failure = error
        written = start + first
        while failure is None and not self._is_over:
            await self._tell(send, written)
            events, written, failure = await self._next(feed, events)
        last = events.end(self._in_order()) if failure is None else events.error(self._fault(failure))
        await send(_part(written + last, more=False))

    async def _until_begun(self, feed: AnswerFeed, send: Send) -> None:
        """Wait until the log has the request of an answer that goes on without its client.

        The stream's first event has the answer's id, with which the client may resume at any gateway at once.
        Raises `TurnkeepError`.
        """
        while not self._has_begun:
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    self._take(*await feed.events.get())
            except TimeoutError:
                await send(_part(_COMMENT if self._form.is_marked else self._unmarked_events().heartbeat))

    async def _next(self, feed: AnswerFeed, events: Events) -> tuple[Events, bytes, TurnkeepError | None]:
        """Return the encoder of later events, the encoded next ones or a heartbeat, and what has failed."""
        written, failure, due_s = b"", None, self._told_s + _HEARTBEAT_S
        try:
            for index, event in await feed.next_events(due_s):
                events, more = self._moved_or_next(events, index, event)
                written += more
        except TurnkeepError as error:
            failure = error
        # Chunks may add nothing for long: a call is told when it is complete.
        if not written and failure is None and asyncio.get_running_loop().time() >= due_s:
            written = events.heartbeat
        return events, written, failure

    async def _tell(self, send: Send, written: bytes) -> None:
        if written:
            await send(_part(written))
            self._told_s = asyncio.get_running_loop().time()

    def _moved_or_next(self, events: Events, index: int, event: Any) -> tuple[Events, bytes]:
        """Encode an event; if it moves the answer to another session, return a new encoder, for its new id.

        Such an event (a `SessionMatch`) comes only before anything of the answer is sent. Only the Responses
        API needs the new id in the stream's first events: its clients continue from it.
        """
        has_moved = (
            isinstance(event, SessionMatch) and self._turn.n == 1 and event.session != self._found[0].session
        )
        written = self._take_events(events, index, event)
        if has_moved:
            events, start = self._new_events()
            written = start if self._form.object else b""
        return events, written

    def _new_events(self) -> tuple[Events, bytes]:
        """Return the dialect's `Events`, and the encoded events that open the answers."""
        events = self._unmarked_events()
        if self._turn.n == 1 and self._form.is_marked:
            events = ResumedEvents(events, self._id, self._after)
        return events, b"".join(events.start(index) for index in range(self._turn.n))

    def _unmarked_events(self) -> Events:
        return self._form.events(self._turn, self._id, self._feed.note.created)

    def _fault(self, error: TurnkeepError) -> Fault:
        return renamed(fault_of(error), self._form.names)

    @property
    def _id(self) -> str:
        """The answer's id, which names its session and its request in the log."""
        return logged_answers.answer_id(self._found[0].session, self._feed.note)

    def _take_events(self, events: Events, index: int, event: Any) -> bytes:
        self._take(index, event)
        match event:
            case Chunk():
                return events.chunk(index, event)
            case Generated():
                return events.finish(index, event)
        return b""

    def _take(self, index: int, event: Any) -> None:
        self._has_begun = self._has_begun or not isinstance(event, SessionMatch) or event.how == "repeated"
        match event:
            case TurnkeepError():
                self._has_failed = True
                raise event
            case SessionMatch():
                self._found[index] = event
            case Chunk():
                self._warnings |= dict.fromkeys(event.warnings)
            case Generated():
                self._warnings |= dict.fromkeys(event.warnings)
                is_of_log = self._feed.following is not None or self._found[index].how == "repeated"
                is_cut = event.finish_reason == "cancelled" and self._form.object is None
                if is_of_log and is_cut:  # else a part would look like the whole
                    why = _CANCELLED_KEY if self._feed.key_id else _CANCELLED
                    raise RequestFailedError("cancelled", why, retryable=False)
                self._results[index] = event

    def _in_order(self) -> list[Generated]:
        return [self._results[index] for index in range(self._turn.n)]

    def _own_headers(self) -> dict[str, str]:
        found = self._found.get(0)
        own = self._turn.warnings
        answers = (ContentWarning("answer", one) for one in images.other_warnings(self._warnings, own))
        headers = {"cache-control": "no-store", **warning_header((*own, *answers))}
        if found and self._accounting.explain:
            headers["x-turnkeep-explain"] = str(found)
        if found:
            headers |= {"x-turnkeep-session": f"{found.session} {found.how}", **dict.fromkeys(IDS, self._id)}
        return headers

    async def _write_json(
        self, send: Send, status: int, body: dict[str, Any], more: Mapping[str, str] | None = None
    ) -> None:
        written = msgspec.json.encode(body)
        headers = {"content-type": "application/json", "content-length": str(len(written))}
        await send(_head(status, self._own_headers() | headers | dict(more or {})))
        await send(_part(written, more=False))


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, _T], stop: Callable[[], None] | None = None
) -> _T | None:
    """Await `work` and return its result; cancel it and return None if the client disconnects first.

    If this is cancelled, as by a server that stops, `stop` is called, and `work` has a moment to end.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    except asyncio.CancelledError:
        if stop is not None:
            stop()
            await asyncio.wait([working], timeout=_LAST_S)
        raise
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def unless_left(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work` for a request whose body was read. Raises `Fault` if the client disconnects first."""
    if (done := await while_connected(request.receive, work)) is None:
        raise Fault(400, "the client went away")
    return done


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}
