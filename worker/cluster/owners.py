"""Decides which worker of a prefix serves a session: the one that has its KV.

This only saves prefills; correctness depends on the fence alone (see `journal`). A session belongs to the
worker that stored its last result, as long as that worker runs. Any other worker that gets one of its
deliveries or control requests passes it on. A session without an owner belongs to the first worker that
claims it. A claim is a record in the members' stream; it is removed once the log names the worker. A fork
goes to its parent's worker. Any other new session goes to a worker with far less work than the one that
received it, if there is one. Between two requests a worker gives a session away if it drains, or if another
worker has far less work.

A worker that is alone claims nothing, and asks nobody.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import nats.errors
import structlog
from anyio import Event, get_cancelled_exc_class, move_on_after, sleep
from nats.aio.msg import Msg
from nats.js.errors import APIError, NotFoundError

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import BUILD_HEADER, EXPECT_HEADER, words
from turnkeep_client.messages import Open, decode_request
from turnkeep_client.subjects import SessionKey
from worker.process.concurrency import task_group
from worker.wire.intake import Delivery, is_of, session_of

from .members import WRONG_LAST_SEQUENCE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from anyio.abc import TaskGroup
    from nats.aio.client import Client

    from turnkeep_client.subjects import Subjects
    from worker.wire.consistent_reads import Entry
    from worker.wire.intake import Intake, Ring
    from worker.wire.journal import Journal

    from .members import Member, Members

log = structlog.get_logger()

#: Most sessions whose worker is remembered, so that it is not looked up again.
_MAX_HELD: Final = 65_536
_PASS_S: Final = 1.0
_RETRY_S: Final = 0.1
#: How long a control request may take at another worker.
_CONTROL_S: Final = 120.0
#: How long another worker may take to erase a session's KV.
_ERASE_S: Final = 3.0
#: Answers to a delivery that is passed on: accepted; the sender may claim the session; neither, try again.
_TAKEN: Final = b"+"
_GIVEN: Final = b"~"
_NOT_YET: Final = b"-"
#: The answer of a worker that stops, to any request: as if it did not answer.
_STOPS: Final = b""
_SUBJECT: Final = "Turnkeep-Subject"

#: A delivery, and the function that accepts it at this worker.
_Routed = tuple[Msg, "Callable[[], Awaitable[None]]"]

#: A new session goes to a worker that has this many fewer sessions at work, and at most two thirds as many.
_GAP: Final = 8
_RATIO: Final = 1.5
#: The same gap for giving away an idle session of this worker, whose KV the other worker must restore.
_GAP_TO_GIVE: Final = 64


class _Passed(msgspec.Struct, frozen=True):
    """A delivery that is passed on: the request's subject and sequence, and the subject of its ack, if any.

    `giver` is the `Member.boot` of a worker that gives the session away, or that drains and so keeps no new
    session.
    """

    subject: str
    seq: int
    reply: str = ""
    giver: str = ""


class _Owner(NamedTuple):
    """The other worker that a session belongs to, if any; the sequence of its claim, 0 without one.

    `is_known` says that the session belongs, or has belonged, to any worker.
    """

    member: Member | None
    claim_seq: int
    is_known: bool


class Owners:
    """Passes requests on to the sessions' owners, and takes over from ended workers. Event loop only."""

    def __init__(
        self,
        nc: Client,
        subjects: Subjects,
        members: Members,
        journal: Journal,
        tasks: TaskGroup,
        *,
        erase: Callable[[SessionKey], Awaitable[bool]],
    ) -> None:
        """`erase` drops this worker's KV of a session; it returns whether none is left."""
        self._nc = nc
        self._js = nc.jetstream()
        self._subjects = subjects
        self._members = members
        self._journal = journal
        self._tasks = tasks
        self._erase = erase
        self._held: OrderedDict[SessionKey, int] = OrderedDict()  # with the sequences of their claims, or 0
        self._takers: OrderedDict[SessionKey, str] = OrderedDict()  # `boot` of the worker that took it last
        self._routed: dict[SessionKey, dict[int, _Routed]] = {}  # deliveries being passed on, by sequence
        self._leaving = Event()
        self.intake: Intake  # set before the first request is heard
        self._ring: Ring
        self._answer: Callable[[str, bytes], Awaitable[bytes]]

    async def open(self, ring: Ring, answer: Callable[[str, bytes], Awaitable[bytes]]) -> None:
        """Subscribe to other workers' requests, and claim sessions without an owner that have requests.

        `ring` wakes a session for a delivery; `answer` answers a control request.
        """
        self._ring, self._answer = ring, answer
        heard = {
            "deliver": self._delivered,
            "control": self._asked,
            "erase": self._erased,
            "busy": self._has_requests,
            "returned": self._returned,
            "drain": self._drained,
        }
        for verb, hear in heard.items():
            address = self._members.address(self._members.me, verb)
            await self._nc.subscribe(address, cb=self._spawning(hear))
        self._members.load = lambda: self.intake.num_sessions
        self._members.on_gone = self._take_over
        self._members.on_joined = self._claim_all
        await self._members.serve()
        if self._members.others:
            self._tasks.start_soon(self._take_unanswered)

    def close(self) -> None:
        """Take no more sessions or deliveries from other workers."""
        self._leaving.set()
        self._members.on_gone = lambda _: None

    def _spawning(self, hear: Callable[[Msg], Awaitable[bytes]]) -> Callable[[Msg], Awaitable[None]]:
        async def refuse(message: Msg) -> None:
            with move_on_after(_PASS_S, shield=True), contextlib.suppress(nats.errors.Error, OSError):
                await message.respond(_STOPS)

        async def reply(message: Msg) -> None:
            try:
                await message.respond(await hear(message))
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

    def holds(self, key: SessionKey) -> bool:
        """Whether a session belongs to this worker, as far as that is known without a look-up."""
        if not self._members.others:
            return True
        if key in self.intake.at_work:  # a worker that drains gives it away after its running requests
            return not self._members.me.drains
        return key in self._held and self._heir() is None

    def accepts(self, key: SessionKey, message: Msg) -> bool:
        """Whether this worker accepts a delivery of a session without asking other workers about it.

        They are asked whose session it is, and whether one of them only returned the request to the server.
        A delivery waits behind earlier ones of its session that are being passed on, perhaps of its request.
        """
        if key in self._routed or not self.holds(key):
            return False
        came_before = bool(self._members.others) and _came_before(message)
        return not came_before or self.intake.expects(key, _seq(message))

    async def is_elsewhere(self, key: SessionKey) -> bool:
        """Whether a session belongs to another running worker now, as after this one was paused."""
        return bool(self._members.others) and (await self._owner(key)).member is not None

    def disown(self, key: SessionKey) -> None:
        """Give up this worker's ownership of a session, and remove its claim."""
        if claim_seq := self._held.pop(key, 0):
            self._tasks.start_soon(self._remove_claim, claim_seq)

    async def settle(self, key: SessionKey) -> None:
        """Remove this worker's claim of a session, as the session's last result now names the worker."""
        if claim_seq := self._held.get(key, 0):
            self._held[key] = 0
            await self._remove_claim(claim_seq)

    async def _remove_claim(self, claim_seq: int) -> None:
        with contextlib.suppress(APIError, nats.errors.Error, OSError):  # another worker may have replaced it
            await self._js.delete_msg(self._members.stream, claim_seq)

    def route(self, key: SessionKey, message: Msg, accept: Callable[[], Awaitable[None]]) -> None:
        """Pass a delivery on to the worker that its session belongs to, or claim the session and `accept`.

        If the server redelivers a request while that worker does not answer, only the last delivery counts.
        """
        is_first, seq = key not in self._routed, _seq(message)
        waiting = self._routed.setdefault(key, {})
        if seq in waiting and not _came_before(waiting[seq][0]):
            self.intake.note_unbegun(key, [seq])
        waiting[seq] = message, accept
        if is_first:
            self._tasks.start_soon(self._route, key)

    def first_routed(self) -> dict[SessionKey, int]:
        """Return, by session, the first request on its way to a worker, if no other worker got it before."""
        firsts = {key: min(waiting.items()) for key, waiting in self._routed.items() if waiting}
        return {key: seq for key, (seq, (one, _)) in firsts.items() if not _came_before(one)}

    async def _route(self, key: SessionKey) -> None:
        waiting = self._routed[key]
        while waiting and not self._leaving.is_set():
            taker = self._takers.pop(key, "")  # that worker is tried first, without a look-up
            member = next((one for one in self._members.others.values() if one.boot == taker), None)
            if member is not None and await self._pass_on(member, waiting) == _TAKEN:
                self._note_taker(key, member)
                continue
            owner = await self._owner(key)
            heir = None if owner.member or key not in self._held else self._heir()
            is_new = not (owner.member or owner.is_known or key in self._held)
            if is_new:
                owner = owner._replace(member=await self._place(key, waiting))
            answer = _GIVEN
            if owner.member is not None:
                gives = is_new and self._members.me.drains
                answer = await self._pass_on(owner.member, waiting, gives=gives)
            elif heir is not None:
                answer = await self._give(key, heir, waiting)
            is_over = answer == _TAKEN
            if is_over and (taken := owner.member or heir) is not None:
                self._note_taker(key, taken)
            if answer == _GIVEN:
                is_over = await self._accept(key, owner.claim_seq, waiting)
            if not is_over:
                await sleep(_RETRY_S)  # until that worker has ended, or another one has claimed the session
        if not waiting:  # else this worker stops, and returns them
            del self._routed[key]

    async def return_routed(self) -> None:
        """Return the deliveries that were not passed on to the server (nak)."""
        for message, _ in itertools.chain.from_iterable(one.values() for one in self._routed.values()):
            with contextlib.suppress(nats.errors.Error, OSError):
                await message.nak()

    async def _accept(self, key: SessionKey, claim_seq: int, waiting: dict[int, _Routed]) -> bool:
        """Claim a session and accept its deliveries; return false if another worker was faster.

        If this worker has no room, it returns the deliveries to the server, and does not claim the session.
        """
        seqs = list(waiting)  # what comes meanwhile is asked about later
        await self._note_returned(key, [seq for seq in seqs if _came_before(waiting[seq][0])])
        if self.intake.room(key.tenant) and not await self._claim(key, claim_seq):
            return False
        for seq in seqs:
            if self._leaving.is_set():
                return False
            _, accept = waiting.pop(seq)
            await accept()
        self._leave_if_returned(key)
        return True

    def _leave_if_returned(self, key: SessionKey) -> None:
        if not self.intake.expects(key):
            self.disown(key)

    async def _note_returned(self, key: SessionKey, seqs: Sequence[int]) -> None:
        """Ask the other workers which of these requests they only returned to the server, and note these."""
        if seqs := [seq for seq in seqs if not self.intake.expects(key, seq)]:
            for other in list(self._members.others.values()):
                answer = await self._ask(other, "returned", msgspec.json.encode(seqs), _PASS_S)
                self.intake.note_unbegun(key, msgspec.json.decode(answer or b"[]", type=list[int]))

    async def _returned(self, message: Msg) -> bytes:
        asked = msgspec.json.decode(message.data, type=list[int])
        return msgspec.json.encode(self.intake.pass_returned(asked))

    def _note_taker(self, key: SessionKey, member: Member) -> None:
        self._takers[key] = member.boot
        while len(self._takers) > _MAX_HELD:
            self._takers.popitem(last=False)

    async def _give(self, key: SessionKey, heir: Member, waiting: dict[int, _Routed]) -> bytes:
        """Give a session with its new requests to `heir`; return the answer of `heir`.

        If the session is at work here, accept its redelivered requests instead, and return `_NOT_YET`.
        """
        if key not in self.intake.at_work:
            answer = await self._pass_on(heir, waiting, gives=True)
            if answer == _TAKEN:
                self.disown(key)
            return answer
        for seq, (message, accept) in list(waiting.items()):
            if _came_before(message):  # it may be the one at work
                del waiting[seq]
                await accept()
        return _NOT_YET

    async def _pass_on(self, owner: Member, waiting: dict[int, _Routed], *, gives: bool = False) -> bytes:
        """Pass deliveries on to `owner`, and their session too if `gives`; return the owner's last answer."""
        giver = self._members.me.boot if gives else ""
        for seq, (message, _) in list(waiting.items()):
            passed = msgspec.json.encode(_Passed(message.subject, seq, message.reply, giver))
            answer = await self._ask(owner, "deliver", passed, _PASS_S)
            if answer != _TAKEN:
                return answer or _NOT_YET
            if waiting[seq][0] is message:  # else it was delivered again meanwhile
                del waiting[seq]
        return _TAKEN

    async def wake(self, delivery: Delivery) -> None:
        """Wake the session of an undelivered request: at its owner, or here if it has none."""
        owner = None if self.holds(delivery.key) else await self._owner(delivery.key)
        if owner is not None and owner.member is not None:
            passed = _Passed(self._subjects.of(delivery.key, "in"), delivery.seq)
            await self._ask(owner.member, "deliver", msgspec.json.encode(passed), _PASS_S)
        elif owner is None or await self._claim(delivery.key, owner.claim_seq):
            self._ring(delivery)

    async def control(self, key: SessionKey, subject: str, body: bytes) -> bytes | None:
        """Return the owner's answer to a control request; None if this worker owns it, or on failure.

        An owner that ends meanwhile, or is paused for so long that it counts as ended, is a failure.
        """
        owner = None if self.holds(key) else await self._owner(key)
        if owner is None or (member := owner.member) is None:
            return None
        answer: bytes | None = None
        async with task_group() as tasks:

            async def give_up() -> None:
                while True:
                    await sleep(_RETRY_S)
                    if not self._members.knows(member):
                        tasks.cancel_scope.cancel()

            tasks.start_soon(give_up)
            answer = await self._ask(member, "control", body, _CONTROL_S, {_SUBJECT: subject})
            tasks.cancel_scope.cancel()
        return answer

    async def erase(self, key: SessionKey) -> dict[str, bool]:
        """Have all other workers drop a session's KV; return, by data directory, whether none is left."""
        names = msgspec.json.encode([key.tenant, key.session])
        others = list(self._members.others.values())
        return {one.directory: await self._ask(one, "erase", names, _ERASE_S) == _TAKEN for one in others}

    async def num_busy(self, key: SessionKey) -> int:
        """Count the other workers that have requests of a session."""
        names = msgspec.json.encode([key.tenant, key.session])
        others = list(self._members.others.values())
        return [await self._ask(one, "busy", names, _PASS_S) for one in others].count(_TAKEN)

    async def _has_requests(self, message: Msg) -> bytes:
        tenant, session = msgspec.json.decode(message.data, type=tuple[str, str])
        return _TAKEN if SessionKey(tenant, session) in self.intake.at_work else _NOT_YET

    async def _owner(self, key: SessionKey) -> _Owner:
        name, claim_seq = await self._claimed(key)
        if not name:
            last = await self._journal.last(key, "out")
            name = words(last.headers.get(BUILD_HEADER, "")).get("worker", "") if last else ""
        if name == self._members.me.worker:
            self._hold(key, claim_seq)
        member = self._members.others.get(name)
        return _Owner(member if member and member.serves else None, claim_seq, is_known=bool(name))

    async def _place(self, key: SessionKey, waiting: dict[int, _Routed]) -> Member | None:
        """Choose another worker for a new session; None if this worker should keep it."""
        with contextlib.suppress(InvalidMessageError):
            request = decode_request(waiting[min(waiting)][0].data)
            if isinstance(request, Open) and request.from_ is not None:
                parent = await self._owner(SessionKey(key.tenant, request.from_.session))
                return parent.member or self._heir()
        return self._less_busy(_GAP)

    def _less_busy(self, gap: int) -> Member | None:
        """Return the least busy other worker if this one drains or has far more sessions; else None.

        Far more means `gap` more, and at least `_RATIO` times as many.
        """
        others = [one for one in self._members.others.values() if one.serves and not one.drains]
        mine, idlest = self.intake.num_sessions, min(others, key=lambda one: one.load, default=None)
        if idlest is None or self._members.me.drains:
            return idlest
        return idlest if mine - idlest.load >= gap and mine >= _RATIO * idlest.load else None

    def _heir(self) -> Member | None:
        """Return the worker that should take over an idle session of this one; None to keep it."""
        return self._less_busy(_GAP_TO_GIVE)

    async def _claimed(self, key: SessionKey) -> tuple[str, int]:
        try:
            found = await self._js.get_last_msg(self._members.stream, self._claim_subject(key))
        except (NotFoundError, APIError, nats.errors.Error, OSError):
            return "", 0  # without claims a session may be begun twice, and one of the two is fenced off
        return (found.data or b"").decode(errors="replace"), found.seq or 0

    def _claim_subject(self, key: SessionKey) -> str:
        return f"$KV.{self._subjects.workers_bucket}.own.{key.tenant}.{key.session}"

    async def _claim(self, key: SessionKey, after: int) -> bool:
        """Claim a session in place of the claim at `after` (0: none); return false if another was faster."""
        if key in self._held:
            return True
        body, headers, seq = self._members.me.worker.encode(), {EXPECT_HEADER: str(after)}, 0
        try:
            ack = await self._js.publish(self._claim_subject(key), body, timeout=_PASS_S, headers=headers)
            seq = ack.seq
        except APIError as error:
            if error.err_code in WRONG_LAST_SEQUENCE:
                return False
        except (nats.errors.Error, OSError):
            pass
        self._hold(key, seq)
        return True

    def _hold(self, key: SessionKey, claim_seq: int) -> None:
        self._held[key] = claim_seq
        while len(self._held) > _MAX_HELD:
            self._held.popitem(last=False)

    async def _ask(
        self, member: Member, verb: str, body: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> bytes | None:
        """Send a request to another worker; return its answer, None if it does not answer or stops."""
        try:
            address = self._members.address(member, verb)
            return (await self._nc.request(address, body, timeout=timeout_s, headers=headers)).data or None
        except nats.errors.NoRespondersError:
            self._members.look_now()
            return None
        except (nats.errors.Error, OSError):
            return None

    async def _delivered(self, message: Msg) -> bytes:
        passed = msgspec.json.decode(message.data, type=_Passed)
        key = session_of(passed.subject)  # names that break the rule for ids are refused by the session
        if self._leaving.is_set() or key is None:
            return _NOT_YET
        entry = await self._journal.entry(passed.seq)
        if entry is None:
            return _TAKEN  # it has left the log
        if key not in self._held:
            owner = await self._owner(key)
            is_free = owner.member is None or owner.member.boot == passed.giver
            is_other = bool(passed.reply) and not passed.giver and key not in self._held
            if is_free and is_other and not (self.intake.expects(key) or self.intake.room(key.tenant)):
                return _GIVEN  # the sender may have room
            if not is_free or not await self._claim(key, owner.claim_seq):
                return _NOT_YET  # it belongs to a third worker by now
        if passed.reply:
            delivery = Msg(self._nc, passed.subject, passed.reply, entry.body, dict(entry.headers))
            if not is_of(delivery, entry):
                return _TAKEN  # a restarted server has lost it
            if self._members.me.drains and not _came_before(delivery):
                if key in self.intake.at_work:
                    return _NOT_YET
                self.disown(key)
                return _GIVEN
            await self._note_returned(key, [passed.seq] if _came_before(delivery) else [])
            if self._leaving.is_set():
                return _NOT_YET
            await self.intake.deliver(delivery, self._ring)
            self._leave_if_returned(key)
        elif not self.intake.expects(key, passed.seq):
            self._ring(_lost(key, entry))
        return _TAKEN

    async def _asked(self, message: Msg) -> bytes:
        return await self._answer((message.headers or {}).get(_SUBJECT, ""), message.data)

    async def _drained(self, message: Msg) -> bytes:
        """Start or stop to give sessions away; answer with the names of the workers that take them."""
        on = msgspec.json.decode(message.data, type=bool)
        takers = [one.worker for one in self._members.others.values() if one.serves and not one.drains]
        if takers or not on:
            await self._members.drain(on=on)
        return msgspec.json.encode(takers)

    async def _erased(self, message: Msg) -> bytes:
        tenant, session = msgspec.json.decode(message.data, type=tuple[str, str])
        return _TAKEN if await self._erase(SessionKey(tenant, session)) else _NOT_YET

    def _claim_all(self, _: Member) -> None:
        """Claim the sessions at work here when another worker joins: while alone, this one claimed none."""
        for key in self.intake.at_work:
            if key not in self._held:
                self._held[key] = 0
                self._tasks.start_soon(self._claim_again, key)

    async def _claim_again(self, key: SessionKey) -> None:
        self._held.pop(key, None)
        _, claim_seq = await self._claimed(key)
        await self._claim(key, claim_seq)

    def _take_over(self, gone: Member) -> None:
        self._tasks.start_soon(self._take_unanswered, not gone.serves)

    async def _take_unanswered(self, has_stopped: bool = False) -> None:
        """Claim sessions with requests that no running worker has, before the server redelivers them.

        With `has_stopped`, a worker has stopped in order: it crashed over none of them, and has noted which
        attempts count. The server may have sent it deliveries after it unsubscribed (nats-server 2.15.1 does,
        for some milliseconds), of which it cannot know.
        """
        if self._members.me.drains and self._heir() is not None:
            return  # the heir takes them
        try:
            keys = await self._journal.unanswered()
        except (APIError, nats.errors.Error, OSError):
            return  # they are delivered again
        keys.sort(key=lambda key: hash((self._members.me.boot, key)))  # others do the same, in another order
        num_taken = Counter[str]()
        for key in keys:
            entry = await self._journal.last(key, "in")
            if entry is None or self.intake.expects(key, entry.seq) or self._leaving.is_set():
                continue
            if key in self._routed:  # and is claimed there
                continue
            owner = await self._owner(key)
            has_room = num_taken[key.tenant] < self.intake.room(key.tenant)
            if owner.member is None and has_room and await self._claim(key, owner.claim_seq):
                num_taken[key.tenant] += 1
                if not owner.is_known:
                    await self._note_returned(key, [entry.seq])
                again = not self.intake.expects(key, entry.seq)
                self._ring(_lost(key, entry, again=again, first_seq=1 if has_stopped else 0))


def _seq(message: Msg) -> int:
    return message.metadata.sequence.stream


def _came_before(message: Msg) -> bool:
    return (message.metadata.num_delivered or 1) > 1


def _lost(key: SessionKey, entry: Entry, *, again: bool = True, first_seq: int = 0) -> Delivery:
    """Build the delivery of a request whose worker has ended.

    With `again`, that worker may have crashed because of the request.
    """
    return Delivery(key, entry.seq, entry.stored, entry.body, again, first_seq)
