"""A JetStream in memory: the features of streams, consumers and their API that this project uses.

`tests/simulation/test_conformance.py` runs the same checks on this module and on a real nats-server.
"""

from __future__ import annotations

import base64
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from .loop import BEGIN_S, Loop, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .world import Server

Headers = dict[str, str]

#: The error for a request for a missing message.
_NO_MESSAGE: Final = {"code": 404, "err_code": 10037, "description": "no message found"}
_NO_STREAM: Final = {"code": 404, "err_code": 10059, "description": "stream not found"}
#: How long after a change of `ack_wait` the server looks for overdue deliveries.
_LOOK_S: Final = 0.1
_NO_CONSUMER: Final = {"code": 404, "err_code": 10014, "description": "consumer not found"}
_IN_USE: Final = {
    "code": 400,
    "err_code": 10058,
    "description": "stream name already in use with a different configuration",
}
_WRONG: Final = {"code": 400, "err_code": 10071}
_TOO_LARGE: Final = {"code": 400, "err_code": 10054, "description": "message size exceeds maximum allowed"}
_FULL: Final = {"code": 503, "err_code": 10077, "description": "maximum bytes exceeded"}
_INCOMPLETE: Final = {"code": 400, "err_code": 10176, "description": "atomic publish batch is incomplete"}
_BUSY: Final = {"code": 400, "err_code": 10164, "description": "last sequence by subject is in process"}


@lru_cache(65_536)
def matches(pattern: str, subject: str) -> bool:
    """Whether a subject matches a pattern with NATS's wildcards, `*` and `>`."""
    if pattern == subject:
        return True
    wanted, words = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(words) <= len(wanted):
            return False
        words = words[: len(wanted)]
    return len(wanted) == len(words) and all(
        one in ("*", word) for one, word in zip(wanted, words, strict=True)
    )


@lru_cache(4096)
def _written(at_s: float) -> str:
    moment = datetime.fromtimestamp(BEGIN_S + at_s, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(slots=True, eq=False)
class Message:
    """A message that a stream has stored. `removed_s` is the time of its removal, None before it."""

    seq: int
    subject: str
    data: bytes
    headers: Headers
    stored_s: float
    removed_s: float | None = None

    @property
    def stored(self) -> str:
        """The time at which the message was stored, in the server's text format (RFC 3339)."""
        return _written(self.stored_s)

    @property
    def size_bytes(self) -> int:
        return len(self.data) + len(self.subject) + sum(len(k) + len(v) for k, v in self.headers.items())


class RefusedError(Exception):
    """JetStream has refused a request. `error` is the error in the server's reply."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["description"])
        self.error = error


class Stream:
    """A JetStream stream. Remembers removed and lost messages too, for the checks after a history."""

    def __init__(self, server: Server, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config["name"]
        self.last_seq = 0
        self.num_bytes = 0
        #: All messages that were not lost, removed ones too; sequence n is at index n - 1.
        self.all: list[Message] = []
        #: The messages lost in power failures. Later messages have used their sequences again.
        self.lost: list[Message] = []
        self.consumers: dict[str, Consumer] = {}
        self._by_subject: dict[str, list[int]] = {}
        self._ids: dict[str, tuple[float, int]] = {}
        self._server = server
        self._loop: Loop = server.loop

    def takes(self, subject: str) -> bool:
        return any(matches(one, subject) for one in self.config["subjects"])

    def store(self, subject: str, data: bytes, headers: Headers) -> tuple[int, bool]:
        """Store a message; return its sequence, and whether it was stored before. Raises `RefusedError`."""
        limit = self.config.get("max_msg_size") or -1
        if 0 < limit < len(data) + sum(len(name) + len(value) + 4 for name, value in headers.items()):
            raise RefusedError(_TOO_LARGE)
        subject = self._transformed(subject)
        window_s = (self.config.get("duplicate_window") or 0) / 1e9
        if (message_id := headers.get("Nats-Msg-Id")) is not None:
            stored_s, seq = self._ids.get(message_id, (-1e9, 0))
            if self._loop.time() - stored_s < window_s:
                return seq, True
        if int(headers.get("Nats-Expected-Last-Sequence", self.last_seq)) != self.last_seq:
            raise RefusedError({**_WRONG, "description": f"wrong last sequence: {self.last_seq}"})
        expected = headers.get("Nats-Expected-Last-Subject-Sequence")
        if expected is not None:
            last = self.last(subject)
            if int(expected) != (last.seq if last else 0):
                found = last.seq if last else 0
                raise RefusedError({**_WRONG, "description": f"wrong last sequence: {found}"})
            if self._server.is_busy():
                raise RefusedError(_BUSY)
        if self.is_full(len(data)):
            raise RefusedError(_FULL)
        message = self._keep(subject, data, headers)
        if message_id is not None:
            self._ids[message_id] = (self._loop.time(), message.seq)
        return message.seq, False

    def is_full(self, num_bytes: int) -> bool:
        """Whether the stream refuses so many bytes more."""
        if self.config.get("discard") != "new":
            return False
        most = self.config.get("max_bytes") or -1
        over = most > 0 and self.num_bytes + num_bytes > most
        return over or self._server.is_full(self.name)

    def _keep(self, subject: str, data: bytes, headers: Headers) -> Message:
        self.last_seq += 1
        message = Message(self.last_seq, subject, data, headers, self._loop.time())
        self.all.append(message)
        self.num_bytes += message.size_bytes
        earlier = self._by_subject.setdefault(subject, [])
        if (most := self.config.get("max_msgs_per_subject") or -1) > 0:
            for seq in earlier[-most:]:
                self.remove(self.all[seq - 1])
        earlier.append(message.seq)
        lives_s = [float(headers.get("Nats-TTL", "inf")), (self.config.get("max_age") or float("inf")) / 1e9]
        if min(lives_s) < 1e6:
            self._loop.outside(self._loop.time() + min(lives_s), self.remove, message)
        republish = self.config.get("republish")
        if republish and matches(republish["src"], subject):
            self._server.tell(_mapped(republish["src"], republish["dest"], subject), data, headers)
        for consumer in self.consumers.values():
            consumer.pump()
        return message

    def _transformed(self, subject: str) -> str:
        transform = self.config.get("subject_transform")
        if transform and matches(transform["src"], subject):
            return _mapped(transform["src"], transform["dest"], subject)
        return subject

    def remove(self, message: Message) -> None:
        if message.removed_s is None:
            message.removed_s = self._loop.time()
            self.num_bytes -= message.size_bytes

    def lose(self, kept: int) -> None:
        """Lose the messages after sequence `kept`, as a power failure loses unsynced messages."""
        for message in self.all[kept:]:
            self.remove(message)
        self.lost += self.all[kept:]
        self._server.counts["lost messages"] += len(self.all) - kept
        del self.all[kept:]
        self.last_seq = kept
        for seqs in self._by_subject.values():
            del seqs[bisect_right(seqs, kept) :]
        for consumer in self.consumers.values():
            consumer.set_back(kept)

    def purge(self, *, before: int | None, pattern: str | None) -> int:
        gone = [one for one in self.matching(pattern or ">") if before is None or one.seq < before]
        for one in gone:
            self.remove(one)
        return len(gone)

    def get(self, seq: int) -> Message | None:
        found = self.all[seq - 1] if 0 < seq <= len(self.all) else None
        return found if found and found.removed_s is None else None

    def last(self, pattern: str, at_s: float | None = None) -> Message | None:
        """Return the last message on the subjects of `pattern`: the present one, or the last at `at_s`."""
        best: Message | None = None
        for subject in self._subjects(pattern):
            for seq in reversed(self._by_subject[subject]):
                message = self.all[seq - 1]
                if _is_there(message, at_s):
                    best = message if best is None or message.seq > best.seq else best
                    break
        return best

    def matching(self, pattern: str, start: int = 1, at_s: float | None = None) -> list[Message]:
        """Return the messages on `pattern` from sequence `start` on: present ones, or those at `at_s`."""
        subjects = self._subjects(pattern)
        seqs: Iterable[int]
        if len(subjects) == 1:
            all_seqs = self._by_subject[subjects[0]]
            seqs = all_seqs[bisect_left(all_seqs, start) :]
        else:
            seqs = sorted(seq for one in subjects for seq in self._by_subject[one] if seq >= start)
        return [message for seq in seqs if _is_there(message := self.all[seq - 1], at_s)]

    def counts(self, pattern: str) -> dict[str, int]:
        found = {subject: len(self.matching(subject)) for subject in self._subjects(pattern)}
        return {subject: number for subject, number in found.items() if number}

    def _subjects(self, pattern: str) -> list[str]:
        if "*" not in pattern and not pattern.endswith(">"):
            return [pattern] if pattern in self._by_subject else []
        return [subject for subject in self._by_subject if matches(pattern, subject)]

    def info(self, pattern: str | None = None) -> dict[str, Any]:
        live = [one.seq for one in self.all if one.removed_s is None]
        state: dict[str, Any] = {
            "messages": len(live),
            "bytes": self.num_bytes,
            "first_seq": live[0] if live else self.last_seq + 1,
            "last_seq": self.last_seq,
            "consumer_count": len(self.consumers),
        }
        if pattern:
            state["subjects"] = self.counts(pattern)
        created = datetime.fromtimestamp(BEGIN_S, UTC).isoformat()
        now = datetime.fromtimestamp(now_ns(self._server.loop) / 1e9, UTC).isoformat()
        return {"config": {**self.config}, "state": state, "created": created, "ts": now}


def _is_there(message: Message, at_s: float | None) -> bool:
    if at_s is None:
        return message.removed_s is None
    return message.stored_s <= at_s and (message.removed_s is None or message.removed_s > at_s)


def _mapped(source: str, target: str, subject: str) -> str:
    """Map a subject by a subject transform, which has `{{wildcard(n)}}` in its `target`."""
    words = [word for one, word in zip(source.split("."), subject.split("."), strict=True) if one == "*"]
    for number, word in enumerate(words, 1):
        target = target.replace(f"{{{{wildcard({number})}}}}", word)
    return target


@dataclass(slots=True, eq=False)
class _Pending:
    """The state of a message that was delivered and is not acknowledged yet."""

    deadline_s: float
    num_delivered: int = 1


@dataclass(slots=True)
class _Pull:
    """A client's pull request, with the number of messages and bytes that it still accepts."""

    inbox: str
    num_left: int
    bytes_left: int
    expires_s: float


@dataclass(eq=False)
class Consumer:
    """A durable pull consumer with explicit acknowledgement."""

    stream: Stream
    config: dict[str, Any]
    server: Server
    num_delivered: int = 0
    pending: dict[int, _Pending] = field(default_factory=dict)
    _next_seq: int = 1
    _again: list[int] = field(default_factory=list)
    _pulls: deque[_Pull] = field(default_factory=deque)
    _timer_s: float = float("inf")

    @property
    def ack_wait_s(self) -> float:
        return float(self.config["ack_wait"]) / 1e9

    def update(self, config: dict[str, Any]) -> None:
        """Change the configuration. A new `ack_wait` applies to earlier deliveries too, after 0.1 s."""
        longer_s = (config["ack_wait"] - self.config["ack_wait"]) / 1e9
        self.config = config
        if longer_s:
            for one in self.pending.values():
                one.deadline_s += longer_s
            self.server.later(_LOOK_S, self._redeliver)

    def pull(self, inbox: str, request: dict[str, Any]) -> None:
        expires_s = self.server.loop.time() + request.get("expires", 0) / 1e9
        self._pulls.append(_Pull(inbox, request["batch"], request.get("max_bytes") or 2**60, expires_s))
        self.server.later(request.get("expires", 0) / 1e9, self._expire)
        self.pump()

    def forget_pulls(self) -> None:
        """Handle a restart of the server: drop all pulls, and redeliver pending messages after `ack_wait`."""
        self._pulls.clear()
        self._timer_s = float("inf")
        for one in self.pending.values():
            one.deadline_s = self.server.loop.time() + self.ack_wait_s
        self._set_timer()

    def set_back(self, last_seq: int) -> None:
        """Handle a power failure: the stream ends at `last_seq`, and the consumer's state may be older."""
        chance = self.server.loop.random
        first = last_seq + 1 if chance.random() < 0.5 else chance.randint(1, last_seq + 1)
        self._next_seq = min(self._next_seq, first)
        self.pending = {seq: one for seq, one in self.pending.items() if seq < self._next_seq}
        self._again = [seq for seq in self._again if seq < self._next_seq]

    def _expire(self) -> None:
        now_s = self.server.loop.time()
        for pull in [one for one in self._pulls if one.expires_s <= now_s]:
            self._end(pull, "408", "Request Timeout")

    def _end(self, pull: _Pull, status: str, reason: str) -> None:
        self._pulls.remove(pull)
        self.server.to_inbox(pull.inbox, pull.inbox, b"", {"Status": status, "Description": reason})

    def pump(self) -> None:
        """Deliver available messages to the waiting pulls, first come first served."""
        while self._pulls and (message := self._next()) is not None:
            pull = self._pulls[0]
            if not self.server.has_interest(pull.inbox):
                self._pulls.popleft()
                continue
            if message.size_bytes > pull.bytes_left:
                self._end(pull, "409", "Message Size Exceeds MaxBytes")
                continue
            self._deliver(message, pull)

    def _next(self) -> Message | None:
        while self._again:
            if (message := self.stream.get(self._again[0])) is not None:
                return message
            self.pending.pop(self._again.pop(0), None)
        while self._next_seq <= self.stream.last_seq:
            message = self.stream.get(self._next_seq)
            if message is not None and matches(self.config["filter_subject"], message.subject):
                return message
            self._next_seq += 1
        return None

    def _deliver(self, message: Message, pull: _Pull) -> None:
        deadline_s = self.server.loop.time() + self.ack_wait_s
        if self._again and self._again[0] == message.seq:
            self._again.pop(0)
            pending = self.pending[message.seq]
            self.server.counts["redeliveries"] += 1
            pending.deadline_s, pending.num_delivered = deadline_s, pending.num_delivered + 1
        else:
            self._next_seq = message.seq + 1
            pending = self.pending[message.seq] = _Pending(deadline_s)
        self.num_delivered += 1
        place = f"{self.stream.name}.{self.config['durable_name']}.{pending.num_delivered}.{message.seq}"
        stored_ns = now_ns(self.server.loop) - int((self.server.loop.time() - message.stored_s) * 1e9)
        reply = f"$JS.ACK.{place}.{self.num_delivered}.{stored_ns}.0"
        pull.num_left -= 1
        pull.bytes_left -= message.size_bytes
        if not pull.num_left:
            self._pulls.popleft()
        self.server.to_inbox(pull.inbox, message.subject, message.data, message.headers, reply)
        self._set_timer()

    def ack(self, seq: int, what: bytes) -> None:
        """Handle a client's reply to a delivery: acknowledged, rejected (nak), terminated or in progress."""
        pending = self.pending.get(seq)
        if pending is None:
            return
        now_s = self.server.loop.time()
        if what.startswith(b"+WPI"):
            pending.deadline_s = now_s + self.ack_wait_s
        elif what.startswith(b"-NAK"):
            given = msgspec.json.decode(what[4:]) if len(what) > 4 else {}
            pending.deadline_s = now_s + given.get("delay", 0) / 1e9
        elif what in (b"", b"+ACK", b"+TERM"):
            del self.pending[seq]
            if seq in self._again:
                self._again.remove(seq)
        self._set_timer()

    def _set_timer(self) -> None:
        waiting = [one.deadline_s for seq, one in self.pending.items() if seq not in self._again]
        if waiting and min(waiting) < self._timer_s:
            self._timer_s = min(waiting)
            self.server.later(max(self._timer_s - self.server.loop.time(), 0.0), self._redeliver)

    def _redeliver(self) -> None:
        self._timer_s = float("inf")
        now_s = self.server.loop.time() + 1e-6
        late = [
            seq for seq, one in self.pending.items() if one.deadline_s <= now_s and seq not in self._again
        ]
        self._again += sorted(late)
        self.pump()
        self._set_timer()

    def info(self) -> dict[str, Any]:
        pattern = self.config["filter_subject"]
        return {
            "name": self.config["durable_name"],
            "stream_name": self.stream.name,
            "config": {**self.config},
            "created": datetime.fromtimestamp(BEGIN_S, UTC).isoformat(),
            "num_ack_pending": len(self.pending),
            "num_redelivered": sum(one.num_delivered > 1 for one in self.pending.values()),
            "num_pending": len(self.stream.matching(pattern, self._next_seq)),
        }


class JetStream:
    """The streams of a simulated server, and the JetStream API."""

    def __init__(self, server: Server) -> None:
        self.streams: dict[str, Stream] = {}
        #: Messages of atomic batches that are not committed yet.
        self._batches: dict[str, list[tuple[str, bytes, Headers]]] = {}
        self._server = server
        self._api: list[tuple[str, Callable[..., dict[str, Any]]]] = [
            ("STREAM.INFO.", self._stream_info),
            ("STREAM.CREATE.", self._create),
            ("STREAM.UPDATE.", self._update),
            ("STREAM.PURGE.", self._purge),
            ("STREAM.MSG.GET.", self._get),
            ("STREAM.MSG.DELETE.", self._delete),
            ("CONSUMER.DURABLE.CREATE.", self._add_consumer),
            ("CONSUMER.INFO.", self._consumer_info),
            ("INFO", self._account),
        ]

    def stream_for(self, subject: str) -> Stream | None:
        return next((one for one in self.streams.values() if one.takes(subject)), None)

    def lose(self, sync_s: float) -> None:
        """Lose each stream's messages since its last sync, which was at most `sync_s` seconds ago."""
        for stream in self.streams.values():
            if stream.config["storage"] == "file":
                synced_s = self._server.loop.time() - self._server.loop.random.uniform(0, sync_s)
                stream.lose(bisect_right(stream.all, synced_s, key=lambda one: one.stored_s))

    def restart(self) -> None:
        """Handle a restart of the server: drop streams in memory, unfinished batches and pulls."""
        self._batches.clear()
        kept = {name: one for name, one in self.streams.items() if one.config["storage"] == "file"}
        self.streams = kept
        for stream in kept.values():
            for consumer in stream.consumers.values():
                consumer.forget_pulls()

    def acked(self, subject: str, data: bytes) -> None:
        """Handle a message on a delivery's reply subject, `$JS.ACK...`: pass it to the consumer."""
        _, _, stream, consumer, _, seq, *_ = subject.split(".")
        found = self.streams.get(stream)
        if found is not None and consumer in found.consumers:
            found.consumers[consumer].ack(int(seq), data)

    def publish(self, stream: Stream, subject: str, data: bytes, headers: Headers) -> dict[str, Any] | None:
        """Store a published message; return the server's reply, or None if the reply is empty."""
        try:
            if "Nats-Batch-Id" in headers:
                return self._publish_together(stream, subject, data, headers)
            seq, is_duplicate = stream.store(subject, data, headers)
        except RefusedError as error:
            return {"error": error.error, "stream": stream.name, "seq": 0}
        return {"stream": stream.name, "seq": seq, **({"duplicate": True} if is_duplicate else {})}

    def _publish_together(
        self, stream: Stream, subject: str, data: bytes, headers: Headers
    ) -> dict[str, Any] | None:
        batch = self._batches.setdefault(name := headers["Nats-Batch-Id"], [])
        batch.append((subject, data, headers))
        if "Nats-Batch-Commit" not in headers:
            return None
        del self._batches[name]
        if len(batch) != int(headers["Nats-Batch-Sequence"]):
            raise RefusedError(_INCOMPLETE)
        if stream.is_full(sum(len(body) for _, body, _ in batch)):  # then nothing of it is stored
            raise RefusedError(_FULL)
        seqs = [stream.store(*one)[0] for one in batch]
        return {"stream": stream.name, "seq": seqs[-1], "batch": name, "count": len(batch)}

    def call(self, subject: str, data: bytes, inbox: str) -> dict[str, Any] | None:
        """Execute a request to the API; return its reply, or None if replies go to `inbox` separately."""
        what = subject.removeprefix("$JS.API.")
        request = msgspec.json.decode(data) if data else {}
        if what.startswith("DIRECT.GET."):
            name, _, wanted = what.removeprefix("DIRECT.GET.").partition(".")
            self._direct(name, {"last_by_subj": wanted} if wanted else request, inbox)
            return None
        if what.startswith("CONSUMER.MSG.NEXT."):
            stream, consumer = what.removeprefix("CONSUMER.MSG.NEXT.").split(".")
            self._consumer(stream, consumer).pull(inbox, request)
            return None
        for prefix, answer in self._api:
            if what.startswith(prefix):
                try:
                    return answer(*what.removeprefix(prefix).split("."), request)
                except RefusedError as error:
                    return {"error": error.error}
        raise NotImplementedError(subject)

    def _stream(self, name: str) -> Stream:
        if name not in self.streams:
            raise RefusedError(_NO_STREAM)
        return self.streams[name]

    def _consumer(self, stream: str, name: str) -> Consumer:
        found = self._stream(stream).consumers
        if name not in found:
            raise RefusedError(_NO_CONSUMER)
        return found[name]

    def _account(self, *_: Any) -> dict[str, Any]:
        names = ("max_memory", "max_storage", "max_streams", "max_consumers", "max_ack_pending")
        names += ("memory_max_stream_bytes", "storage_max_stream_bytes")
        limits = dict.fromkeys(names, -1) | {"max_bytes_required": False}
        counts = {"memory": 0, "storage": 0, "streams": len(self.streams), "consumers": 0}
        return {**counts, "limits": limits, "api": {"total": 0, "errors": 0}}

    def _stream_info(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        return self._stream(name).info(request.get("subjects_filter"))

    def _create(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        found = self.streams.get(name)
        if found is not None and found.config != config:
            raise RefusedError(_IN_USE)
        if found is None:
            found = self.streams[name] = Stream(self._server, config)
        return found.info()

    def _update(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        self._stream(name).config = config
        return self._stream(name).info()

    def _purge(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        number = self._stream(name).purge(before=request.get("seq"), pattern=request.get("filter"))
        return {"success": True, "purged": number}

    def _get(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        stream = self._stream(name)
        if "last_by_subj" in request:
            found = stream.last(request["last_by_subj"])
        elif "next_by_subj" in request:
            found = next(iter(stream.matching(request["next_by_subj"], request["seq"])), None)
        else:
            found = stream.get(request["seq"])
        if found is None:
            raise RefusedError(_NO_MESSAGE)
        message: dict[str, Any] = {"subject": found.subject, "seq": found.seq, "time": found.stored}
        if found.data:
            message["data"] = base64.b64encode(found.data).decode()
        if found.headers:
            lines = "".join(f"{name}: {value}\r\n" for name, value in found.headers.items())
            message["hdrs"] = base64.b64encode(f"NATS/1.0\r\n{lines}\r\n".encode()).decode()
        return {"message": message}

    def _delete(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        found, bad = self._stream(name).get(request["seq"]), self._server.faults.undeletable
        if found is None or (bad and bad in found.subject):
            raise RefusedError({**_NO_MESSAGE, "code": 500, "err_code": 10057})
        self._stream(name).remove(found)
        return {"success": True}

    def _add_consumer(self, stream: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
        found = self._stream(stream)
        if name in found.consumers:
            found.consumers[name].update(request["config"])
        else:
            found.consumers[name] = Consumer(found, request["config"], self._server)
        return found.consumers[name].info()

    def _consumer_info(self, stream: str, name: str, _: dict[str, Any]) -> dict[str, Any]:
        return self._consumer(stream, name).info()

    def _direct(self, name: str, request: dict[str, Any], inbox: str) -> None:
        """Answer a direct get, of one message or a batch, from a replica, which may lag."""
        stream = self.streams.get(name)
        if stream is None:
            self._server.no_responders(inbox)
            return
        at_s = self._server.seen_s()
        is_batch = "batch" in request
        if "multi_last" in request:
            subjects = dict.fromkeys(
                one for pattern in request["multi_last"] for one in stream.counts(pattern)
            )
            lasts = (stream.last(one, at_s) for one in subjects)
            found = sorted((one for one in lasts if one), key=lambda one: one.seq)
        elif "last_by_subj" in request:
            found = [one for one in [stream.last(request["last_by_subj"], at_s)] if one]
        elif "next_by_subj" in request:
            found = stream.matching(request["next_by_subj"], request.get("seq", 1), at_s)
        else:
            one = stream.all[request["seq"] - 1] if request["seq"] <= len(stream.all) else None
            found = [one] if one is not None and _is_there(one, at_s) else []
        batch: list[tuple[bytes, Headers]] = []
        left_bytes, last = request.get("max_bytes") or 2**60, "0"
        for message in found[: request.get("batch", 1)]:
            if batch and message.size_bytes > left_bytes:
                break
            left_bytes -= message.size_bytes
            own = {"Nats-Stream": name, "Nats-Subject": message.subject, "Nats-Sequence": str(message.seq)}
            own["Nats-Time-Stamp"] = message.stored
            if is_batch:
                own["Nats-Last-Sequence"] = last
                last = str(message.seq)
            batch.append((message.data, {**message.headers, **own}))
        if not batch:
            batch.append((b"", {"Status": "404", "Description": "Message Not Found"}))
        elif is_batch:
            end = {"Nats-Num-Pending": str(len(found) - len(batch)), "Nats-Last-Sequence": last}
            batch.append((b"", {"Status": "204", "Description": "EOB"} | end))
        self._server.batch_to_inbox(inbox, batch)
