"""A simulated NATS server with faults, and connections to it that replace nats-py's client.

`Connection` has the methods of `turnkeep_client.nats_client.Nats` that this project calls. Subscriptions and
messages are nats-py's own, and so is everything above them: `JetStreamContext`, acks, direct gets.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlparse

import msgspec
import nats.errors
from nats.aio.client import ServerVersion
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.client import JetStreamContext

from .jetstream import Headers, JetStream, matches

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from .loop import Loop, Process

MAX_PAYLOAD: Final = 2**20
_RECONNECT_S: Final = 0.25
#: A message takes 1 / `_RATE` seconds on average.
_RATE: Final = 5000
#: The probability that the messages of a batch arrive one by one.
_IN_PIECES: Final = 0.2
_T = TypeVar("_T")
#: Subject, reply, data and headers.
Delivered = tuple[str, str, bytes, Headers | None]


async def _within(future: asyncio.Future[_T], timeout: float) -> _T:  # noqa: ASYNC109
    """Do what `asyncio.wait_for` does, with one callback fewer. As in Python 3.11, which nats-py may run on,
    a cancellation that comes together with the result is lost.
    """
    timer = future.get_loop().call_later(timeout, _expire, future)
    try:
        return await future
    except asyncio.CancelledError:
        if future.cancelled() or not future.done():
            raise
        return future.result()
    finally:
        timer.cancel()


def _expire(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_exception(TimeoutError())


@dataclass(eq=False)
class Link:
    """A simulated TCP connection: each direction delivers in order, and nothing once the link is cut."""

    connection: Connection
    loop: Loop
    is_cut: bool = False
    up_s: float = 0.0
    down_s: float = 0.0
    interest: dict[int, tuple[str, str]] = field(default_factory=dict)  # by sid: pattern, queue

    def send(self, arrive: Callable[..., None], *what: Any) -> None:
        """Call `arrive` on the server's side after a random delay, unless the link is cut by then."""
        self.up_s = max(self.up_s + 1e-7, self.loop.time() - log(1.0 - self.loop.random.random()) / _RATE)
        self.loop.outside(self.up_s, self._unless_cut, arrive, *what)

    def deliver(self, sid: int, *messages: Delivered) -> None:
        """Deliver messages to the client's subscription `sid`, all at once, after a random delay."""
        self.down_s = max(self.down_s + 1e-7, self.loop.time() - log(1.0 - self.loop.random.random()) / _RATE)
        self.loop.outside(self.down_s, self._unless_cut, self.connection.arrived, sid, messages)

    def _unless_cut(self, arrive: Callable[..., None], *what: Any) -> None:
        if not self.is_cut:
            arrive(*what)


@dataclass
class Faults:
    """The faults that are active now. Probabilities apply to each message; times are the loop's."""

    late_ack: float = 0.0
    busy: float = 0.0
    lag_s: float = 0.0
    silent_until_s: float = 0.0  # JetStream answers nothing, and stores nothing
    refusing_until_s: float = 0.0  # requests to JetStream get "no responders"
    undeletable: str = ""  # deletes of messages with this in their subject fail, as on a full disk
    stalled_until_s: float = 0.0  # published messages are stored after this time
    full_until_s: float = 0.0
    num_torn: int = 0  # the connections of so many readers are lost in the middle of their next batch


class Server:
    """A simulated NATS server. Calls `note(who, what)` for each event of a history's story."""

    def __init__(self, loop: Loop, note: Callable[[str, str], None] | None = None) -> None:
        self.loop = loop
        self.links: list[Link] = []
        self.is_up = True
        #: Whether the server tells clients that it belongs to a cluster.
        self.is_clustered = False
        self.faults = Faults()
        self.jetstream = JetStream(self)
        #: A checksum of all published messages, equal in each run of a seed.
        self.trace = 0
        self.num_messages = 0
        #: The number of events of each kind.
        self.counts: Counter[str] = Counter()
        self.note = note
        #: Called with the subject of each stored message, before any client receives it or its ack.
        self.on_stored: Callable[[str], None] = lambda _: None
        self._by_name: dict[str, Link] = {}
        self._names = itertools.count(1)
        self.life = 0
        self._queue: list[tuple[Any, ...]] = []

    def connection(self, process: Process | None = None) -> Connection:
        """Make a connection to this server, not yet connected, for a client in `process`."""
        return Connection(self, f"c{next(self._names)}", process)

    def connect(self, connection: Connection) -> Link | None:
        if not self.is_up:
            return None
        link = Link(connection, self.loop)
        self.links.append(link)
        self._by_name[connection.name] = link
        return link

    def cut(self, link: Link) -> None:
        """Cut a TCP connection. The client notices after 10 ms on average."""
        if link.is_cut:
            return
        link.is_cut = True
        self.links.remove(link)
        delay_s = self.loop.random.expovariate(100)
        self.loop.outside(self.loop.time() + delay_s, link.connection.lost, link)

    def crash(self) -> None:
        """Crash the server: cut all connections, and lose the messages that wait to be stored."""
        self.is_up = False
        self.counts["crashes of the server"] += 1
        self.life += 1
        self._queue.clear()
        for link in [*self.links]:
            self.cut(link)

    def start(self) -> None:
        """Restart the server with the streams that are in files."""
        self.is_up = True
        self.jetstream.restart()

    def later(self, delay_s: float, act: Callable[..., None], *what: Any) -> None:
        """Call `act` after `delay_s` seconds, unless the server crashes before."""
        life = self.life

        def do() -> None:
            if life == self.life:
                act(*what)

        self.loop.outside(self.loop.time() + delay_s, do)

    def is_busy(self) -> bool:
        return self.faults.busy > 0 and self.loop.random.random() < self.faults.busy

    def is_full(self, stream: str) -> bool:
        return self.loop.time() < self.faults.full_until_s

    def seen_s(self) -> float | None:
        """Return the time up to which the answering replica has copied; None if it is up to date."""
        if not self.faults.lag_s or self.loop.random.random() < 0.5:
            return None
        return self.loop.time() - self.loop.random.random() * self.faults.lag_s

    def handle(self, subject: str, reply: str, data: bytes, headers: Headers | None) -> None:
        """Handle a message from a client: an API request, an ack, an entry to store, or a plain message."""
        self.num_messages += 1
        self.trace = hash((self.trace, self.loop.time(), subject, len(data))) & 0xFFFFFFFF
        if subject.startswith("$JS.API."):
            self._api(subject, reply, data)
        elif subject.startswith("$JS.ACK."):
            self.jetstream.acked(subject, data)
        elif (stream := self.jetstream.stream_for(subject)) is not None:
            self._store(stream.name, subject, reply, data, headers or {})
            self._route(subject, reply, data, headers)
        elif not self._route(subject, reply, data, headers) and reply:
            self.no_responders(reply)

    def _is_out(self, reply: str) -> bool:
        now_s = self.loop.time()
        if now_s < self.faults.refusing_until_s:
            self.no_responders(reply)
            return True
        return now_s < self.faults.silent_until_s

    def _api(self, subject: str, reply: str, data: bytes) -> None:
        if self._is_out(reply):
            return
        answer = self.jetstream.call(subject, data, reply)
        if answer is not None:
            self.to_inbox(reply, reply, msgspec.json.encode(answer))

    def _store(self, name: str, subject: str, reply: str, data: bytes, headers: Headers) -> None:
        if self._is_out(reply):
            return
        wait_s = self.faults.stalled_until_s - self.loop.time()
        if self._queue or wait_s > 0:  # in order, also messages that come later
            self._queue.append((name, subject, reply, data, headers))
            if len(self._queue) == 1:
                self.later(max(wait_s, 0.0), self._unstall)
            return
        self._stored(name, subject, reply, data, headers)

    @property
    def num_queued(self) -> int:
        """The number of messages that wait to be stored, because the log is slow."""
        return len(self._queue)

    def _unstall(self) -> None:
        queue, self._queue, life = self._queue, [], self.life
        for one in queue:
            if life == self.life:  # else the server died over an earlier one
                self._stored(*one)

    def _stored(self, name: str, subject: str, reply: str, data: bytes, headers: Headers) -> None:
        stream = self.jetstream.streams.get(name)
        if stream is None:
            return
        answer = self.jetstream.publish(stream, subject, data, headers)
        if self.note is not None and "_workers." not in subject:  # workers renew their records twice a second
            said = data[:100].decode(errors="replace")
            self.note("log", f"{subject} {answer and answer.get('error', answer['seq'])} {said}")
        if answer is not None and "error" not in answer:
            self.on_stored(subject)
        if not reply:
            return
        body = msgspec.json.encode(answer) if answer is not None else b""
        if self.faults.late_ack and self.loop.random.random() < self.faults.late_ack:
            self.counts["late acks"] += 1
            self.later(self.loop.random.uniform(1.0, 9.0), self.to_inbox, reply, reply, body)
        elif not self.to_inbox(reply, reply, body):
            self.counts["lost acks"] += 1

    def tell(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        """Deliver a message that a stream republishes."""
        self._route(subject, "", data, headers)

    def _route(self, subject: str, reply: str, data: bytes, headers: Headers | None) -> bool:
        """Deliver to all subscribers, and to one of each queue group; return whether there was any."""
        if subject.startswith("_INBOX."):
            return self.to_inbox(subject, subject, data, headers, reply)
        groups: dict[str, list[tuple[Link, int]]] = {}
        message = (subject, reply, data, headers)
        has_any = False
        for link in self.links:
            for sid, (pattern, queue) in link.interest.items():
                if matches(pattern, subject):
                    has_any = True
                    if queue:
                        groups.setdefault(queue, []).append((link, sid))
                    else:
                        link.deliver(sid, message)
        for members in groups.values():
            link, sid = self.loop.random.choice(members)
            link.deliver(sid, message)
        return has_any

    def to_inbox(
        self, inbox: str, subject: str, data: bytes, headers: Headers | None = None, reply: str = ""
    ) -> bool:
        """Deliver a message to the subscriber of `inbox`; return whether there is one."""
        found = self._listener(inbox)
        if found is not None:
            found[0].deliver(found[1], (subject, reply, data, headers))
        return found is not None

    def batch_to_inbox(self, inbox: str, batch: list[tuple[bytes, Headers]]) -> None:
        """Deliver a batch of messages to the subscriber of `inbox`, usually all at once."""
        found = self._listener(inbox)
        if found is None:
            return
        link, sid = found
        messages = [(inbox, "", data, headers) for data, headers in batch]
        if self.faults.num_torn and len(messages) > 1:
            self.faults.num_torn -= 1
            self._tear(link, sid, messages)
        elif self.loop.random.random() < _IN_PIECES:
            for one in messages:
                link.deliver(sid, one)
        else:
            link.deliver(sid, *messages)

    def _tear(self, link: Link, sid: int, messages: list[Delivered]) -> None:
        """Cut a connection in the middle of a batch; what is left may come once the client is back."""
        at = self.loop.random.randrange(len(messages) - 1)
        for one in messages[:at]:
            link.deliver(sid, one)
        self.later(self.loop.random.random() * 0.01, self.cut, link)
        for subject, reply, data, headers in messages[at + 1 :]:
            self.later(0.05, self.to_inbox, subject, subject, data, headers, reply)

    def has_interest(self, inbox: str) -> bool:
        return self._listener(inbox) is not None

    def _listener(self, inbox: str) -> tuple[Link, int] | None:
        _, name, number, *_ = inbox.split(".")
        link = self._by_name.get(name)
        if link is None or link.is_cut:
            return None
        if number == "r":
            return link, 0
        for sid, (pattern, _) in link.interest.items():
            if pattern.startswith("_INBOX.") and matches(pattern, inbox):
                return link, sid
        return None

    def no_responders(self, reply: str) -> None:
        if reply:
            self.to_inbox(reply, reply, b"", {"Status": "503"})


class Connection:
    """A client's connection, which replaces nats-py's `Client`. Reconnects for ever."""

    max_payload = MAX_PAYLOAD
    last_error: Exception | None = None
    connected_server_version = ServerVersion("2.15.1")

    def __init__(self, server: Server, name: str, process: Process | None) -> None:
        self.name = name
        self.is_closed = False
        self.is_draining = False
        self.unreachable_until_s = 0.0
        self.link: Link | None = None
        self._server = server
        self._loop = server.loop
        self._process = process
        self._subs: dict[int, Subscription] = {}
        self._numbers = itertools.count(1)
        self._replies: dict[str, asyncio.Future[Msg]] = {}
        self._pongs: list[asyncio.Future[None]] = []
        self._unsent: list[tuple[Any, ...]] = []
        self._options: dict[str, Any] = {}
        self._server_info: dict[str, Any] = {}
        if process is not None:
            process.on_death.append(self._process_died)

    @property
    def is_connected(self) -> bool:
        return self.link is not None and not self.is_closed

    @property
    def is_reconnecting(self) -> bool:
        return self.link is None and not self.is_closed

    @property
    def connected_url(self) -> Any:
        return urlparse("nats://world:4222") if self.is_connected else None

    async def connect(self, servers: list[str], **options: Any) -> None:
        self._options = options
        while not await self._try():
            await options["error_cb"](ConnectionRefusedError(111, "refused"))
            await asyncio.sleep(options.get("reconnect_time_wait", _RECONNECT_S))

    async def _try(self) -> bool:
        await asyncio.sleep(self._loop.random.expovariate(1000))
        if self.is_closed or self._loop.time() < self.unreachable_until_s:
            return False
        self.link, self._pongs = self._server.connect(self), []
        if self.link is not None:
            self._server_info = {"server_id": f"S{self._server.life}"}
            self._server_info |= {"cluster": "c"} if self._server.is_clustered else {}
        return self.link is not None

    def lost(self, link: Link) -> None:
        """Handle the loss of the TCP connection: reconnect, in the client's process."""
        if self.link is not link or self.is_closed:
            return
        self.link = None
        if self._process is not None:
            self._process.start(self._reconnect())
        else:
            self._loop.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        await self._call("disconnected_cb")
        while not self.is_closed and not await self._try():  # noqa: ASYNC110
            await asyncio.sleep(_RECONNECT_S)
        if self.link is None:
            return
        for sid, sub in self._subs.items():
            self._subscribe(sid, sub)
        unsent, self._unsent = self._unsent, []
        for what in unsent:
            self.link.send(self._server.handle, *what)
        await self._call("reconnected_cb")

    async def _call(self, name: str) -> None:
        if (act := self._options.get(name)) is not None:
            await act()

    def _process_died(self) -> None:
        self.is_closed = True
        if self.link is not None:
            self._server.cut(self.link)

    async def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        await asyncio.sleep(0)
        for sub in self._subs.values():
            sub._stop_processing()
            for call in (sub._pending_next_msgs_calls or {}).values():
                call.cancel()
        self._subs.clear()
        if self.link is not None:
            # Messages that were sent before still arrive.
            self.link.send(self._server.cut, self.link)
        await self._call("closed_cb")

    async def abandon(self) -> None:
        await self.close()

    def new_inbox(self) -> str:
        return f"_INBOX.{self.name}.{next(self._numbers)}"

    def jetstream(self, **options: Any) -> JetStreamContext:
        return JetStreamContext(self, **options)  # type: ignore[arg-type]

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: Headers | None = None
    ) -> None:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        if len(payload) > self.max_payload:
            raise nats.errors.MaxPayloadError
        what = (subject, reply, payload, headers and {**headers})
        if self.link is None:
            self._unsent.append(what)
        else:
            self.link.send(self._server.handle, *what)

    async def request(  # as nats-py has it
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109
        headers: Headers | None = None,
    ) -> Msg:
        inbox = f"_INBOX.{self.name}.r.{next(self._numbers)}"
        future: asyncio.Future[Msg] = asyncio.Future()
        self._replies[inbox] = future
        try:
            await self.publish(subject, payload, reply=inbox, headers=headers)
            message = await _within(future, timeout)
        except TimeoutError:
            raise nats.errors.TimeoutError from None
        finally:
            self._replies.pop(inbox, None)
        if message.headers and message.headers.get("Status") == "503":
            raise nats.errors.NoRespondersError
        return message

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callable[[Msg], Awaitable[None]] | None = None
    ) -> Subscription:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        sid = next(self._numbers)
        sub = Subscription(self, sid, subject, queue=queue, cb=cb)
        sub._start(self._options.get("error_cb"))
        self._subs[sid] = sub
        if self.link is not None:
            self._subscribe(sid, sub)
        return sub

    def _subscribe(self, sid: int, sub: Subscription) -> None:
        assert self.link is not None
        self.link.send(self.link.interest.__setitem__, sid, (sub.subject, sub.queue))

    def _remove_sub(self, sid: int) -> None:
        self._subs.pop(sid, None)

    async def _send_unsubscribe(self, sid: int, limit: int = 0) -> None:
        if self.link is not None:
            self.link.send(self.link.interest.pop, sid, None)

    async def flush(self, timeout: int = 10) -> None:  # noqa: ASYNC109
        if self.is_closed:
            raise nats.errors.ConnectionClosedError
        future: asyncio.Future[None] = asyncio.Future()
        if (link := self.link) is not None:
            self._pongs.append(future)
            link.send(lambda: link.deliver(-1, ("", "", b"", None)))
        try:
            await _within(future, timeout)
        except TimeoutError:
            raise nats.errors.FlushTimeoutError from None

    def arrived(self, sid: int, messages: Iterable[Delivered]) -> None:
        """Queue arriving messages. Runs outside of the process: a stalled process still receives data."""
        for message in messages:
            self._take(sid, *message)

    def _take(self, sid: int, subject: str, reply: str, data: bytes, headers: Headers | None) -> None:
        if sid == -1:
            self._pong()
            return
        received = Msg(self, subject, reply, data, headers and {**headers}, _sid=sid)  # type: ignore[arg-type]
        if sid == 0:
            future = self._replies.get(subject)
            if future is not None and not future.done():
                future.set_result(received)
        elif (sub := self._subs.get(sid)) is not None:
            sub._pending_size += len(data)
            sub._pending_queue.put_nowait(received)

    def _pong(self) -> None:
        with suppress(IndexError):
            future = self._pongs.pop(0)
            if not future.done():
                future.set_result(None)
