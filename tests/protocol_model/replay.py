"""Replays recorded histories of the simulation: each step of the real code is one of the model's.

Recorded is what a server sees: entries of the log, chunks and seals that it stores, with the worker process
that sent them; what is removed; its restarts, with what it loses. What a worker reads and when it wakes is
not seen. So for each worker all states are kept in which the model says that it may be; a step that none of
them allows is an error. A result that changes nothing (a failure, a repeat, a cancel) is only checked for its
fence: why it is given is not modelled.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from cache.names.policy import FULL
from tests.simulation import history, jetstream
from tests.simulation import world as simulated_world
from tests.simulation.actors import EXPECT_HEADER, SUBJECTS
from tests.simulation.jetstream import Message, Stream
from tests.simulation.world import Server
from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import ENDED_HEADER, SEALED_HEADER
from turnkeep_client.messages import Close, Generate, decode_chunk, decode_request, decode_result
from turnkeep_client.session_log import changes_session
from turnkeep_client.subjects import SessionKey
from worker.process.setting_kinds import TenantLimits

from .model import Chunk, Entry, Memory, Model, Rules, Session, Shared, Worker, last_out

#: Steps that only the worker itself sees.
_HIDDEN = {"look on", "list", "read", "next", "repeat", "begin", "end", "seen", "check", "ack"}
_HIDDEN |= {"leave", "read anew"}
_RULES = Rules(num_faults=0, num_losses=1, num_drains=0, num_ends=10**6, routes_freely=True, most_chunks=None)
_SETTINGS: Final = {
    "ack_wait_s": 1.0,
    "max_attempts": 3,
    "max_batch": 16,
    "max_waiting": 100,
    "tenants": TenantLimits(sessions=100),
    "history_idle_timeout_s": 0.3,
    "closed_ttl_s": None,  # sessions that were closed and not forgotten stay
    "cache_policy": FULL,
    "token_ttl_s": 600.0,
    "block_tokens": 8,
}
_PLAN: Final[dict[str, Any]] = {
    "settings": _SETTINGS,
    "kinds": ("crash", "crash at", "stall", "cut", "stop", "drain"),
    "num_faults": 3,
    "num_visitors": 0,
    "sync_s": 0.0,
    "tight": False,
    "weights": (30, 45, 10, 15, 8, 0),
    "num_sessions": 2,
}
#: Fields of the plans of histories that the model can follow.
PLANS: Final[tuple[dict[str, Any], ...]] = (
    {**_PLAN, "num_workers": 2, "leases": False},
    {**_PLAN, "num_workers": 3, "leases": True},
    {**_PLAN, "num_workers": 3, "leases": True, "sync_s": 0.2, "kinds": ("crash", "crash server", "stall")},
)


class NotAStepError(Exception):
    """The model does not allow a step of the real code."""


class Event(NamedTuple):
    """What the server has seen: `stored`, `removed`, or `restarted` with the sequences that it kept."""

    kind: str
    message: Message | None = None
    worker: str = ""
    kept: tuple[tuple[str, int], ...] = ()


@contextmanager
def recording() -> Iterator[list[Event]]:
    """Record what the simulated servers see in the block."""
    events: list[Event] = []
    writers: list[str] = [""]
    is_losing = [False]
    stored, keep = simulated_world.Server._stored, jetstream.Stream._keep
    remove, lose, start = jetstream.Stream.remove, jetstream.Stream.lose, simulated_world.Server.start

    def _stored(server: Server, name: str, subject: str, reply: str, data: bytes, headers: Any) -> None:
        link = server._by_name.get(reply.split(".")[1]) if reply.startswith("_INBOX.") else None
        process = link.connection._process if link else None
        writers.append(process.name if process else "")
        stored(server, name, subject, reply, data, headers)
        writers.pop()

    def _keep(stream: Stream, subject: str, data: bytes, headers: Any) -> Message:
        message = keep(stream, subject, data, headers)
        events.append(Event("stored", message, writers[-1]))
        return message

    def _remove(stream: Stream, message: Message) -> None:
        if message.removed_s is None and not is_losing[0]:
            events.append(Event("removed", message))
        remove(stream, message)

    def _lose(stream: Stream, kept: int) -> None:
        is_losing[0] = True
        lose(stream, kept)
        is_losing[0] = False

    def _start(server: Server) -> None:
        kept = tuple((name, one.last_seq) for name, one in server.jetstream.streams.items())
        events.append(Event("restarted", kept=kept))
        start(server)

    with ExitStack() as stack:
        for owner, name, new in (
            (simulated_world.Server, "_stored", _stored),
            (simulated_world.Server, "start", _start),
            (jetstream.Stream, "_keep", _keep),
            (jetstream.Stream, "remove", _remove),
            (jetstream.Stream, "lose", _lose),
        ):
            stack.enter_context(patch.object(owner, name, new))
        yield events


def record(seed: int, **favoured: Any) -> list[Event]:
    """Run a history whose plan has the fields `favoured`; return what the server has seen."""
    with recording() as events:
        outcome = history.simulate(seed, favoured=favoured)
    assert not outcome.wrong, outcome.wrong
    return events


class Replay:
    """Follows recorded events in the model, for all sessions; `counts` has the steps by kind."""

    def __init__(self, events: list[Event]) -> None:
        self.counts: Counter[str] = Counter()
        self._events = events
        names = {one.worker for one in events if one.worker.startswith("worker")}
        self._workers = {name: w for w, name in enumerate(sorted(names))}
        self._life = 0
        self._sessions: dict[SessionKey, _Session] = {}

    def run(self) -> None:
        """Follow all events. Raises `NotAStepError`."""
        for at, event in enumerate(self._events):
            if event.kind == "restarted":
                self._life += 1
                self.counts["restarts of the server"] += 1
                for one in self._sessions.values():
                    one.restart(dict(event.kept), self._life)
                continue
            assert event.message is not None
            try:
                key, kind, name = SUBJECTS.parse(event.message.subject)
            except InvalidMessageError:
                continue
            if key not in self._sessions:
                self._sessions[key] = _Session(len(self._workers), self._life)
            try:
                done = self._sessions[key].follow(event, kind, name or "", self._workers.get(event.worker))
            except NotAStepError as error:
                raise NotAStepError(f"event {at}, {key}, {event}: {error}") from None
            self.counts[done] += 1


class _Session:
    """One session: its log in the model, and for each worker all states in which it may be."""

    def __init__(self, num_workers: int, life: int) -> None:
        self._shared = Shared((Worker(),) * num_workers, 0, 1, 0, life)
        self._model = Model(_RULES._replace(num_workers=num_workers), "")
        self._ids: dict[str, int] = {}
        self._now = self._model.begin()
        self._maybe: list[set[Memory | None]] = [{None} for _ in range(num_workers)]
        self._seqs: list[int] = []  # of the entries, in the stream
        self._requests: dict[int, int] = {}  # by sequence
        self._chunks: list[list[Message]] = []  # by request

    def follow(self, event: Event, kind: str, name: str, w: int | None) -> str:
        message = event.message
        assert message is not None
        if event.kind == "removed":
            return self._removed(message, kind)
        if kind == "in":
            self._asked(message)
        elif kind == "out" and w is not None:
            self._closed_all()  # what other workers may have read before
            self._answered(message, w)
        elif kind == "closed" and w is not None:
            self._noted(w)
            self._seqs.append(message.seq)
        elif kind in ("tok", "chunk") and w is not None and ENDED_HEADER not in message.headers:
            self._published(message, w)
        else:
            return "other"
        return kind

    def _asked(self, message: Message) -> None:
        request = decode_request(message.data)
        letter = "G" if isinstance(request, Generate) else "A"
        if isinstance(request, Close):  # it may be begun and noted, and fail: cancelled at another worker
            letter = "F" if request.forget else "C"
        number = len(self._model.program)
        one_id = self._ids.setdefault(request.id, len(self._ids))
        self._model = self._model._replace(
            program=self._model.program + letter, ids=(*self._model.ids, one_id)
        )
        self._requests[message.seq] = number
        self._chunks.append([])
        self._seqs.append(message.seq)
        now = self._now
        log = (*now.log, Entry("in", number, by=frozenset()))
        self._now = now._replace(log=log, chunks=(*now.chunks, ()))

    def _answered(self, message: Message, w: int) -> None:
        result, fence = decode_result(message.data), int(message.headers.get(EXPECT_HEADER, -1))
        if result.seq not in self._requests:
            return  # refused names
        request, known = self._requests[result.seq], self._place(fence)
        if not changes_session(result):
            self._settled(request, known, w)
        else:
            self._take(w, "commit", request)
            if self._now.log[-1].fence != known:
                raise NotAStepError(f"its fence is {known}, the model's {self._now.log[-1].fence}")
        self._seqs.append(message.seq)

    def _place(self, seq: int) -> int:
        """Return an entry's place in the model's log, from 1; 0 without one."""
        return self._seqs.index(seq) + 1 if seq in self._seqs else 0 if not seq else -1

    def _settled(self, request: int, known: int, w: int) -> None:
        """Store a result that changes nothing, by a worker that knows the last one."""
        last = last_out(self._now.log)
        self._close(w)
        knowing = {
            one for one in self._maybe[w] if one and one.known == known and one.life == self._shared.life
        }
        if known != last or not knowing:
            raise NotAStepError(f"worker {w} does not know {last} as the last result")
        after = self._now.log[last - 1].after if last else ()
        entry = Entry("out", request, by=w, fence=known, after=after, fails=True)
        self._now = self._now._replace(log=(*self._now.log, entry))
        seq = len(self._now.log)
        done = {one._replace(known=seq) for one in knowing}
        self._maybe[w] = done | {Memory("fresh", self._shared.life, seq, one.history) for one in knowing}

    def _noted(self, w: int) -> None:
        """Store a note of a close: a first one, or the same again, as its ack was lost."""
        self._close(w)
        noted = {
            one
            for one in self._maybe[w]
            if one and one.phase == "noted" and self._model.kind(one.request) in "FC"
        }
        if any(label[0] == "note" for memory in self._maybe[w] for label, _ in self._steps(w, memory)):
            self._take(w, "note")
            self._maybe[w] |= noted
            return
        if not noted:
            raise NotAStepError(f"worker {w} cannot note a close")
        self._maybe[w] = noted
        entry = Entry("note", next(iter(noted)).request, by=frozenset())
        self._now = self._now._replace(log=(*self._now.log, entry))

    def _published(self, message: Message, w: int) -> None:
        if message.data:
            seq = decode_chunk(message.data).seq or 0
        else:
            seq = int(message.headers.get(SEALED_HEADER, "0").split()[0])
        request = self._requests[seq]
        if message.data:
            self._take(w, "chunk", request)
        else:
            self._take(w, "seal", request, strict=False)
        self._chunks[request].append(message)

    def _take(self, w: int, label: str, request: int | None = None, *, strict: bool = True) -> None:
        """Take the step of a worker that the server has seen, from each state in which it may be."""
        self._close(w)
        found: dict[Memory | None, Session] = {}
        for memory in self._maybe[w]:
            for one, after in self._steps(w, memory):
                if one[0] == label and request in (None, one[2]):
                    found[after.memory[w]] = after
        if not found and not strict:  # an answer with chunks may be sealed too, before it ends
            told = (*self._now.chunks[request or 0], Chunk(w))
            chunks = list(self._now.chunks)
            chunks[request or 0] = told
            self._now = self._now._replace(chunks=tuple(chunks))
            self._maybe[w] = {one._replace(after=len(told)) if one else one for one in self._maybe[w]}
            return
        if not found:
            raise NotAStepError(f"worker {w} cannot {label} for request {request}")
        after = next(iter(found.values()))
        self._now = after._replace(memory=self._now.memory, kv=self._now.kv)
        self._maybe[w] = set(found)

    def _steps(self, w: int, memory: Memory | None) -> list[tuple[Any, Session]]:
        if memory is None:
            return []
        memories = list(self._now.memory)
        memories[w] = memory
        return [*self._model._work(self._shared, self._now._replace(memory=tuple(memories)), w, memory)]

    def _close(self, w: int) -> None:
        """Add the states to which a worker may come by steps that only the worker itself sees."""
        maybe, queue = self._maybe[w], [*self._maybe[w]]
        while queue:
            memory = queue.pop()
            found: set[Memory | None] = {
                one.memory[w] for label, one in self._steps(w, memory) if label[0] in _HIDDEN
            }
            if memory is None:
                found.add(Memory())
            elif memory.phase == "idle":
                found |= {memory._replace(phase="rung"), None}
            queue += found - maybe
            maybe |= found

    def _closed_all(self) -> None:
        for w in range(len(self._maybe)):
            self._close(w)

    def _removed(self, message: Message, kind: str) -> str:
        if kind in ("tok", "chunk"):
            for request, told in enumerate(self._chunks):
                if message in told:
                    told.remove(message)
                    if not told:
                        self._closed_all()
                        chunks = list(self._now.chunks)
                        chunks[request] = ()
                        self._now = self._now._replace(chunks=tuple(chunks))
            return "removed chunk"
        place = self._place(message.seq)
        if kind not in ("in", "out") or place < 1 or self._now.log[place - 1].kind != kind:
            return "other"
        self._closed_all()  # what workers may have read before
        for label, after in self._model._sweep(self._shared, self._now):
            if after.log[place - 1].is_gone:
                self._now = after
                return f"{label[0]} {kind}"
        raise NotAStepError(f"the {kind} at {place} must not be removed")

    def restart(self, kept: dict[str, int], life: int) -> None:
        self._closed_all()
        self._shared = self._shared._replace(life=life)
        num = sum(seq <= kept[SUBJECTS.log_stream] for seq in self._seqs)
        if num < self._now.synced:
            raise NotAStepError("a request was removed before its result was safe")
        for seq in self._seqs[num:]:
            self._requests.pop(seq, None)
        del self._seqs[num:]
        chunks = []
        for request, told in enumerate(self._chunks):
            left = [one for one in told if one.seq <= kept.get(SUBJECTS.token_stream, 0)]
            self._chunks[request] = left
            chunks.append(self._now.chunks[request][: len(left)])
        self._now = self._now._replace(log=self._now.log[:num], chunks=tuple(chunks))


def replay(seed: int, **favoured: Any) -> Counter[str]:
    """Play a history, and follow it in the model; return the number of its steps by kind."""
    found = Replay(record(seed, **favoured))
    found.run()
    return found.counts
