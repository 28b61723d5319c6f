"""Brings requests to the workers of their sessions, and takes over the sessions of workers that have ended.

Any worker may get a delivery from the shared consumer. If the session belongs to another worker (see
`owners`), the delivery is passed on. That worker answers that it has taken it, or has not yet, or that the
session belongs elsewhere. The worker that is named then takes the delivery, even if it knows nothing of the
session. So a delivery is passed on twice at most. A worker that is alone asks nobody.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final

import msgspec
import nats.errors
import structlog
from anyio import Event, get_cancelled_exc_class, move_on_after, sleep
from nats.aio.msg import Msg
from nats.js.errors import APIError

from turnkeep_client.subjects import SessionKey
from worker.wire.intake import Delivery, is_of, session_of

from .owners import STOPS, SUBJECT_HEADER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup
    from nats.aio.client import Client

    from turnkeep_client.subjects import Subjects
    from worker.wire.consistent_reads import StoredMessage
    from worker.wire.intake import Intake, Ring
    from worker.wire.journal import Journal
    from worker.wire.records import Member

    from .liveness import Members
    from .owners import Owner, Owners

log = structlog.get_logger()

_PASS_S: Final = 1.0
_RETRY_S: Final = 0.1
#: A free session goes to a worker that has this many fewer sessions at work, and at most two thirds as many.
_GAP: Final = 8
_RATIO: Final = 1.5


class _Passed(msgspec.Struct, frozen=True):
    """A delivery that is passed on: the request's subject and sequence, and the subject of its ack, if any.

    `sender` is the `Member.boot` of the worker that has the delivery. `is_sent` says that the last worker
    which was asked has named the receiver, so the receiver takes the session.
    """

    subject: str
    seq: int
    reply: str = ""
    sender: str = ""
    is_sent: bool = False


class _Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's answer to a delivery that another one passes on to it."""

    has_taken: bool = False
    #: The `Member.boot` of the worker that the session belongs to, which takes it; empty if it is this one.
    boot: str = ""


_TAKEN: Final = _Answer(has_taken=True)
#: The worker stops, or drains while it is at work on the session: ask again soon.
_LATER: Final = _Answer()


class Routing:
    """Brings deliveries to their sessions' workers, and takes over from ended ones. Event loop only."""

    def __init__(
        self,
        nc: Client,
        subjects: Subjects,
        members: Members,
        owners: Owners,
        journal: Journal,
        intake: Intake,
        tasks: TaskGroup,
        *,
        ring: Ring,
        control: Callable[[str, bytes], Awaitable[bytes]],
        erase: Callable[[SessionKey], Awaitable[bool]],
    ) -> None:
        """`ring` wakes a session for a delivery; `control` answers a control request.

        `erase` drops this worker's KV of a session; it returns whether none is left.
        """
        self._nc = nc
        self._subjects = subjects
        self._members = members
        self._owners = owners
        self._journal = journal
        self._intake = intake
        self._tasks = tasks
        self._ring = ring
        self._control = control
        self._erase = erase
        self._routed: dict[SessionKey, dict[int, tuple[Msg, str]]] = {}  # on their way, by sequence; server
        self._leaving = Event()

    async def open(self) -> None:
        """Answer other workers from now on, and take the unanswered sessions that belong here."""
        await self._hear("at_work", self._listed)
        await self._hear("returned", self._returned)
        await self._hear("erase", self._erased)
        await self._hear("drain", self._drained)
        await self._members.serve(lambda: self._intake.num_sessions)
        await self._owners.learn()
        await self._hear("deliver", self._delivered)
        await self._hear("control", self._asked)
        if self._members.others:
            self._tasks.start_soon(self._take_unanswered)
        self._tasks.start_soon(self._take_over)

    def close(self) -> None:
        """Take no more sessions or deliveries from other workers."""
        self._leaving.set()

    async def _hear(self, verb: str, answer: Callable[[Msg], Awaitable[bytes]]) -> None:
        address = self._members.address(self._members.me, verb)
        await self._nc.subscribe(address, cb=self._spawning(answer))

    def _spawning(self, answer: Callable[[Msg], Awaitable[bytes]]) -> Callable[[Msg], Awaitable[None]]:
        async def refuse(message: Msg) -> None:
            with move_on_after(_PASS_S, shield=True), contextlib.suppress(nats.errors.Error, OSError):
                await message.respond(STOPS)

        async def reply(message: Msg) -> None:
            try:
                await message.respond(await answer(message))
            except get_cancelled_exc_class():
                await refuse(message)
                raise
            except (nats.errors.Error, OSError):
                pass  # the other worker tries again
            except Exception:
                log.exception("what another worker has passed on cannot be answered")

        async def spawn(message: Msg) -> None:
            if self._tasks.cancel_scope.cancel_called:  # a new task would only spin until the others end
                await refuse(message)
            else:
                self._tasks.start_soon(reply, message)

        return spawn

    async def receive(self, message: Msg) -> None:
        """Take a delivery that the server has sent to this worker, or pass it on to the session's worker.

        A delivery waits behind earlier ones of its session that are being passed on, perhaps of its request.
        """
        key = session_of(message.subject)
        if key is None or self._is_mine(key, message) or self._intake.returns_again(key, message):
            await self._intake.deliver(message, self._ring)
            return
        is_first, seq = key not in self._routed, _seq(message)
        waiting = self._routed.setdefault(key, {})
        if seq in waiting and not _came_before(waiting[seq][0]):  # the server redelivers it meanwhile
            self._intake.note_unbegun({seq: key})
        waiting[seq] = message, self._journal.server
        if is_first:
            self._tasks.start_soon(self._route, key)

    def _is_mine(self, key: SessionKey, message: Msg) -> bool:
        """Whether to take a delivery without asking other workers about it.

        They are asked whose session it is, and whether one of them only returned the request to the server.
        """
        if key in self._routed or not self._owners.is_here(key):
            return False
        came_before = bool(self._members.others) and _came_before(message)
        return not came_before or self._intake.expects(key, _seq(message))

    def first_routed(self) -> dict[SessionKey, int]:
        """Return, by session, the first request on its way to a worker, if no other worker got it before."""
        firsts = {key: min(waiting.items()) for key, waiting in self._routed.items() if waiting}
        return {key: seq for key, (seq, (one, _)) in firsts.items() if not _came_before(one)}

    async def return_routed(self) -> None:
        """Return the deliveries that were not passed on to the server (nak)."""
        for message, _ in itertools.chain.from_iterable(one.values() for one in self._routed.values()):
            with contextlib.suppress(nats.errors.Error, OSError):
                await message.nak()

    async def _route(self, key: SessionKey) -> None:
        waiting = self._routed[key]
        while waiting and not self._leaving.is_set():
            seq = min(waiting)
            message, server = waiting[seq]
            if await self._offer(key, message, server):
                if waiting[seq][0] is message:  # else it was delivered again meanwhile
                    del waiting[seq]
            else:
                await sleep(_RETRY_S)  # until that worker has ended, or is no longer at work on it
        if not waiting:  # else this worker stops, and returns them
            del self._routed[key]

    async def _offer(self, key: SessionKey, message: Msg, server: str) -> bool:
        """Offer a delivery to the session's worker; return whether a worker has taken it."""
        owner = await self._owners.owner(key)
        member, is_sent = owner.member, False
        while True:
            if not self._owners.is_me(member):
                answer = await self._pass_on(member, message, is_sent=is_sent)
            else:
                answer = await self._judge(key, message, owner, is_sent=is_sent)
                if answer.has_taken:
                    return await self._take(key, message, server)
            self._owners.remember(key, member.boot if answer.has_taken else answer.boot)
            if not answer.boot or is_sent:
                return answer.has_taken
            named = [one for one in self._owners.takers() if one.boot == answer.boot]
            if not named:  # this worker does not know it yet, or knows of its end already
                return False
            member, is_sent = named[0], True

    async def _pass_on(self, member: Member, message: Msg, *, is_sent: bool) -> _Answer:
        passed = _Passed(message.subject, _seq(message), message.reply, self._members.me.boot, is_sent)
        answer = await self._owners.ask(member, "deliver", msgspec.json.encode(passed), _PASS_S)
        return msgspec.json.decode(answer, type=_Answer) if answer else _LATER

    async def _judge(
        self, key: SessionKey, message: Msg, owner: Owner | None = None, *, is_sent: bool, sender: str = ""
    ) -> _Answer:
        """Decide about a delivery that this worker has got: take it, or name the worker that does.

        `owner` is the session's, if it is known; `sender` is the other worker that has the delivery, if any.
        """
        takes = self._members.me in self._owners.takers()
        if key in self._intake.at_work:  # what was delivered before may be the request at work
            return _TAKEN if takes or _came_before(message) else _LATER
        if is_sent:
            return _TAKEN if takes else _LATER
        if not takes:
            owner = await self._owners.owner_in_log(key, self._owners.takers())
        owner = owner or await self._owners.owner(key)
        if owner.member.boot == sender and takes:  # the sender would not pass on what is its own
            return _TAKEN
        if not self._owners.is_me(owner.member):
            return _Answer(boot=owner.member.boot)
        other = self._relief(key, sender) if owner.is_free else ""
        return _Answer(boot=other) if other else _TAKEN

    def _relief(self, key: SessionKey, sender: str) -> str:
        """Return the worker that takes a free session in place of this one; empty if this one keeps it.

        It is the least busy one if this worker has far more sessions: `_GAP` more, and at least `_RATIO`
        times as many. If this worker has no room, it is the `sender` of the delivery, which may have some.
        """
        others = [one for one in self._owners.takers() if not self._owners.is_me(one)]
        mine, idlest = self._intake.num_sessions, min(others, key=lambda one: one.load, default=None)
        if idlest is not None and mine - idlest.load >= _GAP and mine >= _RATIO * idlest.load:
            return idlest.boot
        return "" if self._intake.room(key.tenant) else sender

    async def _take(self, key: SessionKey, message: Msg, server: str = "") -> bool:
        """Accept a delivery at this worker; return false if this worker stops.

        If this worker has no room, it returns the delivery to the server, and the session is free.
        """
        await self._note_returned({_seq(message): key} if _came_before(message) else {})
        if self._leaving.is_set():
            return False
        await self._intake.deliver_late(message, self._ring, server or self._journal.server)
        self._owners.remember(key, self._members.me.boot if self._intake.expects(key) else "")
        return True

    async def _note_returned(self, requests: dict[int, SessionKey]) -> None:
        """Ask the other workers which requests they only returned to the server, and note these.

        `requests` has the sessions by the requests' sequences.
        """
        if seqs := [seq for seq, key in requests.items() if not self._intake.expects(key, seq)]:
            for other in list(self._members.others.values()):
                answer = await self._owners.ask(other, "returned", msgspec.json.encode(seqs), _PASS_S)
                returned = msgspec.json.decode(answer or b"[]", type=list[int])
                self._intake.note_unbegun({seq: requests[seq] for seq in returned})

    async def hand_over(self, key: SessionKey) -> None:
        """Return a session's deliveries to the server (nak), and wake the session at its worker.

        The server may have none to deliver there: it can lose a result and keep the request's ack.
        """
        await self._intake.give_back(key)
        if (entry := await self._journal.last(key, "in")) is not None:
            await self.wake(_lost(key, entry))

    async def wake(self, delivery: Delivery) -> None:
        """Wake the session of an undelivered request, at its worker or here. Tries once."""
        member = (await self._owners.owner(delivery.key)).member
        if self._owners.is_me(member):
            self._intake.take(delivery, self._ring)
            return
        passed = _Passed(self._subjects.of(delivery.key, "in"), delivery.seq, is_sent=True)
        await self._owners.ask(member, "deliver", msgspec.json.encode(passed), _PASS_S)

    async def _delivered(self, message: Msg) -> bytes:
        """Answer a delivery that another worker passes on."""
        passed = msgspec.json.decode(message.data, type=_Passed)
        key = session_of(passed.subject)  # names that break the rule for ids are refused by the session
        answer = await self._hear_delivery(key, passed) if key and not self._leaving.is_set() else _LATER
        return msgspec.json.encode(answer)

    async def _hear_delivery(self, key: SessionKey, passed: _Passed) -> _Answer:
        entry = await self._journal.entry(passed.seq)
        if entry is None:
            return _TAKEN  # it has left the log
        if not passed.reply:
            if not self._intake.expects(key, passed.seq):
                self._intake.take(_lost(key, entry), self._ring)
            return _TAKEN
        delivery = Msg(self._nc, passed.subject, passed.reply, entry.body, dict(entry.headers))
        if not is_of(delivery, entry):
            return _TAKEN  # a restarted server has lost it
        answer = await self._judge(key, delivery, is_sent=passed.is_sent, sender=passed.sender)
        if answer.boot:
            self._owners.remember(key, answer.boot)
        if answer.has_taken and not await self._take(key, delivery):
            return _LATER
        return answer

    async def _asked(self, message: Msg) -> bytes:
        return await self._control((message.headers or {}).get(SUBJECT_HEADER, ""), message.data)

    async def _listed(self, _: Msg) -> bytes:
        return msgspec.json.encode([[key.tenant, key.session] for key in self._intake.at_work])

    async def _returned(self, message: Msg) -> bytes:
        asked = msgspec.json.decode(message.data, type=list[int])
        return msgspec.json.encode(self._intake.pass_returned(asked))

    async def _erased(self, message: Msg) -> bytes:
        tenant, session = msgspec.json.decode(message.data, type=tuple[str, str])
        return msgspec.json.encode(await self._erase(SessionKey(tenant, session)))

    async def _drained(self, message: Msg) -> bytes:
        """Start or stop to give sessions away; answer with the names of the workers that take them."""
        on = msgspec.json.decode(message.data, type=bool)
        takers = [one.worker for one in self._members.others.values() if one.serves and not one.drains]
        if takers or not on:
            await self._members.drain(on=on)
        return msgspec.json.encode(takers)

    async def _take_over(self) -> None:
        """Take over from each worker that ends."""
        while True:
            await self._take_unanswered(has_stopped=not (await self._members.next_ended()).serves)

    async def _take_unanswered(self, *, has_stopped: bool = False) -> None:
        """Take the sessions of this worker with requests that no running worker has.

        So these do not wait until the server redelivers the requests. With `has_stopped`, a worker has
        stopped in order: it crashed over none of them, and has noted which attempts count. The server may
        have sent it deliveries after it unsubscribed (nats-server 2.15.1 does, for some milliseconds), of
        which it cannot know.
        """
        try:
            keys = await self._journal.unanswered()
        except (APIError, nats.errors.Error, OSError):
            return  # they are delivered again
        elsewhere = {key for keys in (await self._owners.at_work_elsewhere()).values() for key in keys}
        num_taken = Counter[str]()
        taken: list[tuple[SessionKey, StoredMessage, Owner]] = []
        for key in keys:
            has_room = num_taken[key.tenant] < self._intake.room(key.tenant)
            if key in elsewhere or key in self._routed or not has_room:
                continue
            entry = await self._journal.last(key, "in")
            if entry is None or self._intake.expects(key, entry.seq) or self._leaving.is_set():
                continue
            owner = await self._owners.owner_in_log(key, self._owners.takers())
            if self._owners.is_me(owner.member):
                num_taken[key.tenant] += 1
                taken.append((key, entry, owner))
        await self._note_returned({entry.seq: key for key, entry, owner in taken if owner.is_free})
        for key, entry, _ in taken:
            if not self._intake.room(key.tenant):  # deliveries have come meanwhile
                continue
            again = not self._intake.expects(key, entry.seq)
            self._owners.remember(key, self._members.me.boot)
            lost = _lost(key, entry, again=again, first_seq=1 if has_stopped else 0)
            self._intake.take(lost, self._ring)


def _seq(message: Msg) -> int:
    return message.metadata.sequence.stream


def _came_before(message: Msg) -> bool:
    return (message.metadata.num_delivered or 1) > 1


def _lost(key: SessionKey, entry: StoredMessage, *, again: bool = True, first_seq: int = 0) -> Delivery:
    """Build the delivery of a request whose worker has ended.

    With `again`, that worker may have crashed because of the request.
    """
    return Delivery(key, entry.seq, entry.stored, entry.body, again, first_seq)
