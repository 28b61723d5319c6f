"""Removes safeguards of worker, client and gateway one at a time, to prove that simulated runs then fail."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
from anyio import sleep, sleep_forever

from gateway import conversations, following, lookups
from gateway.responses import answers
from turnkeep_client import calls, direct, messages
from worker.sessions import attachments, attempts, record, session, session_log
from worker.wire import chunks, consistent_reads, erasures, intake, journal, retention, undelivered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: An attribute to replace: its owner, its name, and a function from the old value to the new one.
Change = tuple[Any, str, "Callable[[Any], Any]"]


async def _nothing(*_: Any, **__: Any) -> None:
    pass


def _ack_at_once(deliver: Any) -> Any:
    async def mutated(self: Any, message: Any, ring: Any) -> None:
        await deliver(self, message, ring)
        if not message._ackd:
            await message.ack()
            message._ackd = False

    return mutated


def _give_up_anchor(answer: Any) -> Any:
    async def mutated(self: Any, *args: Any) -> None:
        await answer(self, *args)
        await self._services.ack(self.key)

    return mutated


async def _no_chunks(*_: Any) -> chunks.Published:
    return chunks.Published([])


async def _never(_: Any) -> None:
    await sleep_forever()


async def _unknown(*_: Any) -> None:
    return None


def _strictly(decode: Any) -> Any:
    def mutated(body: bytes) -> Any:
        result = decode(body)
        if isinstance(result, messages.UnknownResult):
            raise messages.InvalidMessageError("a type of no result")
        return result

    return mutated


def _from_delivery(_: Any) -> Any:
    def mutated(self: Any) -> float | None:
        deadline_s = getattr(self.request, "deadline_s", None)
        return None if deadline_s is None else record.time() + deadline_s

    return property(mutated)


def _unconfirmed(confirmed: Any) -> Any:
    async def mutated(self: Any, checkpoint: Any, named: Any) -> Any:
        history = checkpoint.history
        seen = type(history).digest
        entries, _ = await self._shared.journal.page(self.key, "out", checkpoint.in_seq)
        told = {
            journal.answers(one): one.headers.get(attachments.HISTORY_HEADER, "") for one in reversed(entries)
        }
        type(history).digest = lambda *_: told.get(checkpoint.in_seq, "")
        try:
            return await confirmed(self, checkpoint, named)
        finally:
            type(history).digest = seen

    return mutated


async def _never_replicated(*_: Any) -> bool:
    return False


async def _publish_anyhow(self: Any, key: Any, request_id: str, body: bytes, *_: Any, **__: Any) -> int:
    while True:
        try:
            return int((await self._js.publish(self._subjects.tokens(key, request_id, "chunk"), body)).seq)
        except journal.nats.errors.Error:
            await sleep(0.1)


def _uncounted(self: Any, seq: int, num_tokens: int, **_: Any) -> Any:
    return attempts.AttemptNote(seq, 1, num_tokens)


def _but_checkpoints(remove: Any) -> Any:
    async def mutated(self: Any, key: Any, before: int, kind: str | None = None, **how: bool) -> None:
        if kind != "checkpoint":
            await remove(self, key, before, kind, **how)

    return mutated


def _numbered_anew(start: Any) -> Any:
    counted = itertools.count(0, 2)

    def mutated(self: Any, index: int) -> bytes:
        self.num_events = next(counted)
        return bytes(start(self, index))

    return mutated


async def _never_asked(_: Any, answer_id: str, __: str) -> Any:
    return following.Standing(f"{following.PREFIX}{answer_id[:32]}")


def _one_earlier(behind: Any) -> Any:
    return lambda number: behind(max(number - 1, 0))


#: Removes the search for undelivered requests, which would repair acknowledgements that come too early.
_NO_LOOK: Final[Change] = (undelivered.Undelivered, "run", lambda _: _never)

MUTATIONS: Final[dict[str, tuple[Change, ...]]] = {
    "no fence": ((journal, "EXPECT_HEADER", lambda _: "Nats-Expected-Nothing"),),
    "ack before commit": ((intake.Intake, "deliver", _ack_at_once), _NO_LOOK),
    "no idempotency": ((session_log.SessionLog, "find_answered", lambda _: _unknown),),
    "chunks not read back": ((chunks.AnswerChunks, "read", lambda _: _no_chunks),),
    "an undecodable result taken for none": (
        (record, "decode_result", _strictly),
        (journal, "decode_result", _strictly),
    ),
    "a deadline from the delivery's time": ((record.Pending, "deadline_s", _from_delivery),),
    "a checkpoint believed without its digest": (
        (attachments.SessionAttachments, "_confirmed", _unconfirmed),
        (attachments, "digest", lambda _: lambda _: b""),
        (attachments, "backwards", lambda _: _unchecked),
    ),
    "an anchor given up too early": ((session.Session, "_answer", _give_up_anchor), _NO_LOOK),
    "chunks of what was forgotten": ((chunks.AnswerChunks, "_check_not_forgotten", lambda _: _nothing),),
    "a page with a hole": ((direct._Batch, "check_whole", lambda _: lambda _: None),),
    "chunks without a fence": ((chunks.AnswerChunks, "_publish", lambda _: _publish_anyhow),),
    "a lagging replica believed": (
        (consistent_reads.ConsistentReads, "_is_replicated", lambda _: _never_replicated),
    ),
    "chunks left behind a close that forgets": ((chunks.AnswerChunks, "remove", lambda _: _nothing),),
    "checkpoints left behind a close that forgets": ((journal.Journal, "remove", _but_checkpoints),),
    "results left behind a close that forgets": ((retention, "answers", lambda _: lambda _: 2**60),),
    "a forget that skips absent workers": ((erasures.Erasures, "note", lambda _: _nothing),),
    "attempts not counted": ((attempts.AttemptNote, "then", lambda _: _uncounted),),
    "what an earlier server had believed": ((journal.Journal, "server", lambda _: property(lambda _: "")),),
    "a lost result that nobody misses": (_NO_LOOK,),
    "a number of events from memory": ((answers.Events, "start", _numbered_anew),),
    "a key that a gateway forgets": ((conversations, "standing", lambda _: _never_asked),),
    "an event that comes again at the joint": ((lookups.places, "behind_number", _one_earlier),),
    "a client that never reads the log": ((calls._ResultFeed, "read_log", lambda _: _nothing),),
}

_LAGGING: Final[dict[str, Any]] = {
    "kinds": (),
    "num_faults": 0,
    "num_workers": 2,
    "leases": False,
    "lag_s": 0.5,
    "num_requests": 9,
    "meddling": 1.0,
}
_VISITED: Final[dict[str, Any]] = {
    "kinds": (),
    "num_faults": 0,
    "num_clients": 0,
    "num_requests": 5,
    "sync_s": 0.0,
    "num_visitors": 1,
    "num_gates": 2,
    "tight": False,
}
#: By removed safeguard: fields of the plans that fail soonest without the safeguard.
FAVOURED: Final[dict[str, dict[str, Any]]] = {
    "chunks left behind a close that forgets": {"kinds": ("crash",), "num_faults": 1},
    "results left behind a close that forgets": {"num_clients": 3, "num_requests": 9},
    "a checkpoint believed without its digest": {
        "kinds": ("rot", "rot", "stop"),
        "num_faults": 5,
        "checkpoint_every": 1,
    },
    "what an earlier server had believed": {
        "kinds": ("crash server",),
        "num_faults": 3,
        "num_requests": 9,
        "num_workers": 1,
        "leases": True,
        "sync_s": 0.2,
    },
    "a lost result that nobody misses": {
        "kinds": ("crash server",),
        "num_faults": 1,
        "num_requests": 2,
        "num_workers": 1,
        "leases": True,
        "sync_s": 0.2,
    },
    "a number of events from memory": _VISITED,
    "a key that a gateway forgets": _VISITED,
    "an event that comes again at the joint": _VISITED,
    "a deadline from the delivery's time": {
        "kinds": ("crash",),
        "num_faults": 5,
        "num_workers": 1,
        "num_clients": 3,
        "num_requests": 9,
        "num_visitors": 0,
        "skews": (0.0, 0.0),
        "weights": (60, 10, 0, 0, 0, 0),
    },
    "a forget that skips absent workers": {
        "kinds": ("crash",),
        "num_faults": 5,
        "num_workers": 2,
        "weights": (10, 45, 0, 20, 5, 0),
    },
    "attempts not counted": {"kinds": ("poison",), "num_faults": 2},
    "an anchor given up too early": {"kinds": ("crash at", "crash"), "num_faults": 5},
    "an undecodable result taken for none": {"kinds": ("newer worker",), "num_faults": 5},
    "chunks not read back": {"kinds": ("crash at", "crash"), "num_faults": 5},
    "chunks of what was forgotten": _LAGGING
    | {
        "kinds": ("stall",),
        "num_faults": 8,
        "lag_s": 0.0,
        "busy": 0.5,
        "late_ack": 0.1,
        "num_visitors": 0,
        "num_clients": 3,
        "num_sessions": 1,
        "patience": 0.0,
        "meddling": 0.3,
        "weights": (10, 45, 0, 20, 5, 0),
    },
    "a page with a hole": {"kinds": ("torn read", "crash"), "num_faults": 5, "num_requests": 9},
    "chunks without a fence": {"kinds": ("stall", "cut", "crash at"), "num_faults": 5},
    "a client that never reads the log": {"kinds": ("cut", "crash server"), "num_faults": 5},
}


async def _unchecked(link: Any, read: Any) -> Any:
    """Yield a chain of checkpoints by their stream sequences, without comparing digests."""
    while link is not None:
        body = await read(link.seq)
        message = msgspec.json.decode(body, type=attachments.CheckpointMessage) if body else None
        yield message
        link = attachments.Link.parse(message.before) if message else None


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Remove the safeguard with this name from the program during the block."""
    changes = [(owner, what, make(_get(owner, what))) for owner, what, make in MUTATIONS[name]]
    before = [(owner, what, _get(owner, what)) for owner, what, _ in changes]
    for owner, what, value in changes:
        setattr(owner, what, value)
    try:
        yield
    finally:
        for owner, what, value in before:
            setattr(owner, what, value)


def _get(owner: Any, name: str) -> Any:
    return vars(owner)[name]
