"""Sends answers over HTTP, whole or as a stream of events, in the words of any dialect."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from uuid import uuid4

import msgspec
from starlette.responses import Response

from turnkeep_client.blocks import Warned
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Chunk, Generated

from . import recorded
from .conversations import Found
from .turn import Fault, fault_of, renamed, told

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from .conversations import Answering, Conversations
    from .keys import Key
    from .metrics import Counters
    from .planning import How
    from .turn import Turn

#: How long a stream waits for its first part, or for a refusal, before it says that it is one.
_PATIENCE_S: Final = 1.0
#: Between two signs of life.
_HEARTBEAT_S: Final = 5.0


class Events(Protocol):
    """Writes the events of one stream."""

    @property
    def heartbeat(self) -> bytes:
        """What clients count as life."""

    def start(self, index: int) -> bytes:
        """Write what comes before the answer number `index`."""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Write a part of an answer; empty if there is nothing to say."""

    def finish(self, index: int, result: Generated) -> bytes:
        """Write the end of an answer."""

    def end(self, results: Sequence[Generated]) -> bytes:
        """Write the end of the stream."""

    def error(self, fault: Fault) -> bytes:
        """Write an error, after which nothing comes."""


class Dialect(NamedTuple):
    """An API: how its requests are read, and its answers and errors written.

    `names` are those of its fields that have other names in the protocol.
    """

    read: Callable[[bytes], Turn]
    whole: Callable[[Turn, str, int, Sequence[Generated]], dict[str, Any]]
    events: Callable[[Turn, str, int], Events]
    error: Callable[[Fault], dict[str, Any]]
    names: Mapping[str, str] = {}


class Asker(NamedTuple):
    """Whose request it is, and what is told of it; `running` is left when it has ended."""

    key: Key
    counters: Counters
    explain: bool
    running: contextlib.ExitStack

    def note(self, how: How, result: Generated) -> None:
        """Count an answer."""
        self.counters.note(how, result)
        if how != "repeated":
            used = result.usage
            self.key.spend(used.prompt_tokens - used.cached_tokens + used.completion_tokens)


class Answer(Response):
    """Sends the answers to one turn. If the client goes away, they are cancelled."""

    def __init__(self, dialect: Dialect, turn: Turn, conversations: Conversations, asker: Asker) -> None:
        super().__init__()
        self._dialect = dialect
        self._turn = turn
        self._conversations = conversations
        self._asker = asker
        self._own_id = uuid4().hex
        self._created = int(time.time())
        self._note = recorded.new_note(self._own_id, self._created, turn)
        self._found: dict[int, Found] = {}
        self._results: dict[int, Generated] = {}
        #: The worker's: known with the first part of an answer.
        self._warnings: dict[str, None] = {}

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answers, while the client is there."""
        with self._asker.running:
            await self._answer(receive, send)

    async def _answer(self, receive: Receive, send: Send) -> None:
        answering = self._conversations.answer(self._turn, self._asker.note, self._note)
        writing = asyncio.create_task(self._write(answering, send))
        leaving = asyncio.create_task(_departure(receive))
        try:
            await asyncio.wait([writing, leaving], return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
            self._conversations.abandon(answering)  # without effect on answers that have ended

    async def _write(self, answering: Answering, send: Send) -> None:
        try:
            if self._turn.stream:
                await self._write_events(answering, send)
                return
            while len(self._results) < self._turn.n:
                self._take(*await answering.events.get())
        except TurnkeepError as error:
            fault = self._fault(error)
            await self._write_json(send, fault.status, self._dialect.error(fault), fault.headers)
            return
        whole = self._dialect.whole(self._turn, self._id, self._created, self._in_order())
        await self._write_json(send, 200, whole)

    async def _write_events(self, answering: Answering, send: Send) -> None:
        """Send a stream of events. Raises `TurnkeepError` before the stream has begun."""
        self._take(*await answering.events.get())  # the session, which is known at once
        events, first = self._dialect.events(self._turn, self._id, self._created), b""
        start = b"".join(events.start(index) for index in range(self._turn.n))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while not first:
                    first = self._take_events(events, *await answering.events.get())
        await send(_head(200, self._own_headers() | {"content-type": "text/event-stream; charset=utf-8"}))
        await send(_part(start + first))
        try:
            while len(self._results) < self._turn.n:
                written = b""
                try:
                    async with asyncio.timeout(_HEARTBEAT_S):
                        written += self._take_events(events, *await answering.events.get())
                except TimeoutError:
                    written = events.heartbeat
                while not answering.events.empty():  # what came while a slow client was reading
                    written += self._take_events(events, *answering.events.get_nowait())
                if written:
                    await send(_part(written))
            last = events.end(self._in_order())
        except TurnkeepError as error:
            last = events.error(self._fault(error))
        await send(_part(last, more=False))

    def _fault(self, error: TurnkeepError) -> Fault:
        return renamed(fault_of(error), self._dialect.names)

    @property
    def _id(self) -> str:
        """The answer's id: if it is kept, it says where."""
        return self._own_id if self._note is None else recorded.answer_id(self._found[0].session, self._note)

    def _take_events(self, events: Events, index: int, event: Any) -> bytes:
        self._take(index, event)
        match event:
            case Chunk():
                return events.chunk(index, event)
            case Generated():
                return events.finish(index, event)
        return b""

    def _take(self, index: int, event: Any) -> None:
        match event:
            case TurnkeepError():
                raise event
            case Found():
                self._found[index] = event
            case Chunk():
                self._warnings |= dict.fromkeys(event.warnings)
            case Generated():
                self._warnings |= dict.fromkeys(event.warnings)
                self._results[index] = event

    def _in_order(self) -> list[Generated]:
        return [self._results[index] for index in range(self._turn.n)]

    def _own_headers(self) -> dict[str, str]:
        found = self._found.get(0)
        warnings = (*self._turn.warnings, *(Warned("answer", one) for one in self._warnings))
        headers = {"cache-control": "no-store", **told(warnings)}
        if found and self._asker.explain:
            headers["x-turnkeep-explain"] = str(found)
        return headers | ({"x-turnkeep-session": f"{found.session} {found.how}"} if found else {})

    async def _write_json(
        self, send: Send, status: int, body: dict[str, Any], more: Mapping[str, str] | None = None
    ) -> None:
        written = msgspec.json.encode(body)
        headers = {"content-type": "application/json", "content-length": str(len(written))}
        await send(_head(status, self._own_headers() | headers | dict(more or {})))
        await send(_part(written, more=False))


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _part(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}
