"""Knows which worker of a prefix serves a session: the one that has its KV.

This only saves prefills; correctness depends on the fence alone (see `journal`). A session belongs to the
worker of its last result, while that worker serves and does not drain. Otherwise a fork belongs to the worker
of its parent, and any other session to the worker that hashing chooses among those that serve (rendezvous
hashing: all workers choose alike, and only the sessions of a worker that ends move).

A worker also remembers where a session was last: at work when this worker joined, or taken by that worker.
So it looks nothing up for most requests. What it remembers may be wrong; the worker that is asked knows
better (see `routing`).
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import nats.errors
from anyio import Event, sleep

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import BUILD_HEADER, words
from turnkeep_client.messages import Open, decode_request, decode_result
from turnkeep_client.subjects import SessionKey
from worker.process.concurrency import task_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nats.aio.client import Client

    from worker.wire.intake import Intake
    from worker.wire.journal import Journal
    from worker.wire.records import Member

    from .liveness import Members

#: Most sessions whose worker is remembered, so that it is not looked up again.
_MAX_REMEMBERED: Final = 65_536
#: How often to look whether a worker that answers a control request has ended.
_CHECK_S: Final = 0.1
#: How long a worker may take to say which sessions it is at work on: to one that joins, and to one that
#: would else begin a request a second time.
_AT_WORK_S: Final = 0.25
_SURE_S: Final = 5.0
#: How long a control request may take at another worker.
_CONTROL_S: Final = 120.0
#: How long another worker may take to erase a session's KV.
_ERASE_S: Final = 3.0
#: The answer of a worker that stops, to any request: as if it did not answer.
STOPS: Final = b'"stops"'
SUBJECT_HEADER: Final = "Turnkeep-Subject"
#: Most forks of forks that are followed to find the worker of a parent.
_MAX_FORK_DEPTH: Final = 64


class Owner(NamedTuple):
    """The worker that a session belongs to."""

    member: Member
    #: Whether hashing chose it, as no worker has the session's KV.
    is_free: bool = False


def choose_by_hash(members: Sequence[Member], key: SessionKey) -> Member:
    """Return the worker that gets a session without KV: the one with the highest hash of both names."""

    def score(member: Member) -> bytes:
        return blake2b(f"{member.worker} {key}".encode(), digest_size=8).digest()

    return max(members, key=score)


class Owners:
    """Knows which worker serves a session, and asks other workers about theirs. Event loop only."""

    def __init__(self, nc: Client, members: Members, journal: Journal, intake: Intake) -> None:
        self._nc = nc
        self._members = members
        self._journal = journal
        self._intake = intake
        self._boots: OrderedDict[SessionKey, str] = OrderedDict()  # `Member.boot` of where a session was last
        self._cut = Event()  # set once the connection was lost: it may have had an answer

    def is_me(self, member: Member) -> bool:
        """Whether `member` is this worker."""
        return member.boot == self._members.me.boot

    def takers(self) -> list[Member]:
        """Return the workers that take sessions: those that serve, and do not drain unless all of them do."""
        serving = [one for one in (self._members.me, *self._members.others.values()) if one.serves]
        return [one for one in serving if not one.drains] or serving or [self._members.me]

    def _asked(self) -> list[Member]:
        """Return the workers that may have a session: also others that drain, if they are at work on it."""
        takers = self.takers()
        drain = [one for one in self._members.others.values() if one.serves and one not in takers]
        return takers + drain

    def remember(self, key: SessionKey, boot: str) -> None:
        """Remember that a session is now at the worker `boot`; with an empty one, that this is not known."""
        self._boots.pop(key, None)
        if boot:
            self._boots[key] = boot
        if len(self._boots) > _MAX_REMEMBERED:
            self._boots.popitem(last=False)

    def forget(self) -> None:
        """Look all sessions up again: while this worker was paused, other workers may have taken some."""
        self._boots.clear()

    def reconnected(self) -> None:
        """Look all sessions up again, and ask other workers again, as the connection was lost."""
        self.forget()
        self._cut.set()
        self._cut = Event()

    def is_here(self, key: SessionKey) -> bool:
        """Whether a session belongs to this worker, as far as that is known without a look-up."""
        me = self._members.me
        if not self._members.others:
            return True
        if not self._members.has_record:  # it was paused, and may be counted as ended
            self.forget()
        return not me.drains and (key in self._intake.at_work or self._boots.get(key) == me.boot)

    async def owner(self, key: SessionKey) -> Owner:
        """Return the worker to ask for a session: by what this one remembers, else by the log.

        A worker that drains is asked, too. If it is not at work on the session, it names another one.
        """
        if not self._members.others or key in self._intake.at_work:
            return Owner(self._members.me)
        boot, members = self._boots.get(key), self._asked()
        known = next((one for one in members if one.boot == boot), None)
        return Owner(known) if known else await self.owner_in_log(key, members)

    async def owner_in_log(self, key: SessionKey, members: Sequence[Member]) -> Owner:
        """Return the worker among `members` that a session belongs to, by the log and else by hashing."""
        for _ in range(_MAX_FORK_DEPTH):
            last = await self._journal.last(key, "out")
            name = words(last.headers.get(BUILD_HEADER, "")).get("worker", "") if last else ""
            member = next((one for one in members if one.worker == name), None)
            if member is not None:
                return Owner(member)
            parent = await self._parent(key)
            if parent is None:
                break
            key = parent
        return Owner(choose_by_hash(members, key), is_free=True)

    async def _parent(self, key: SessionKey) -> SessionKey | None:
        """Return the session that this one was forked from; None if it is no fork."""
        result = await self._journal.first(key, "out")
        asked = None if result else await self._journal.first(key, "in")
        with suppress(InvalidMessageError):
            if result is not None:
                parent = getattr(decode_result(result.body), "parent", None)
                return SessionKey(key.tenant, parent.session) if parent else None
            request = decode_request(asked.body) if asked else None
            if isinstance(request, Open) and request.from_ is not None:
                return SessionKey(key.tenant, request.from_.session)
        return None

    async def is_elsewhere(self, key: SessionKey) -> bool:
        """Whether another running worker has gone on with a session, as after this one was paused.

        That worker is remembered. One that drains counts only while it is at work on the session.
        """
        self.remember(key, "")
        if not self._members.others:
            return False
        if not (boots := await self._busy(key)):
            owner = await self.owner_in_log(key, self.takers())
            boots = [] if self.is_me(owner.member) or owner.is_free else [owner.member.boot]
        if boots:
            self.remember(key, boots[0])
        return bool(boots)

    async def at_work_elsewhere(self, patience_s: float = _AT_WORK_S) -> dict[str, set[SessionKey]]:
        """Ask all other workers for the sessions that they are at work on; return them by `Member.boot`.

        A worker that has not answered after `patience_s` counts as at work on none.
        """
        found: dict[str, set[SessionKey]] = {}

        async def look(member: Member) -> None:
            answer = await self._ask_while_known(member, "at_work", b"", patience_s)
            keys = msgspec.json.decode(answer or b"[]", type=list[tuple[str, str]])
            found[member.boot] = {SessionKey(*key) for key in keys}

        async with task_group() as tasks:
            for member in list(self._members.others.values()):
                tasks.start_soon(look, member)
        return found

    async def learn(self) -> None:
        """Remember which sessions the other workers are at work on: the log may not name them yet."""
        for boot, keys in (await self.at_work_elsewhere()).items():
            for key in keys:
                self.remember(key, boot)

    async def num_busy(self, key: SessionKey) -> int:
        """Count the other workers that have requests of a session; waits up to 5 s for their answers."""
        return len(await self._busy(key))

    async def _busy(self, key: SessionKey) -> list[str]:
        return [boot for boot, keys in (await self.at_work_elsewhere(_SURE_S)).items() if key in keys]

    async def erase(self, key: SessionKey) -> dict[str, bool]:
        """Have all other workers drop a session's KV; return by `Member.boot` whether surely none is left."""
        names = msgspec.json.encode([key.tenant, key.session])
        others = list(self._members.others.values())
        return {one.boot: await self.ask(one, "erase", names, _ERASE_S) == b"true" for one in others}

    async def control(self, key: SessionKey, subject: str, body: bytes) -> bytes | None:
        """Return the owner's answer to a control request; None if this worker owns it, or on failure.

        An owner that ends meanwhile, or is paused for so long that it counts as ended, is a failure. After a
        loss of its connection or of this worker's asks again: clients repeat these requests too.
        """
        while not (self.is_here(key) or self.is_me(member := (await self.owner(key)).member)):
            cut, headers = self._cut, {SUBJECT_HEADER: subject}
            answer = await self._ask_while_known(member, "control", body, _CONTROL_S, headers)
            if answer is not None or not (cut.is_set() or self._members.has_reconnected(member)):
                return answer
        return None

    async def _ask_while_known(
        self, member: Member, verb: str, body: bytes, timeout_s: float, headers: Any = None
    ) -> bytes | None:
        """Ask another worker; return None if it does not answer, ends, or is paused so long as if it had.

        Also if its connection or this worker's is lost meanwhile.
        """
        answer: bytes | None = None
        cut = self._cut
        async with task_group() as tasks:

            async def give_up() -> None:
                members = self._members
                while members.knows(member) and not (cut.is_set() or members.has_reconnected(member)):  # noqa: ASYNC110
                    await sleep(_CHECK_S)
                tasks.cancel_scope.cancel()

            tasks.start_soon(give_up)
            answer = await self.ask(member, verb, body, timeout_s, headers)
            tasks.cancel_scope.cancel()
        return answer

    async def ask(self, member: Member, verb: str, body: bytes, timeout_s: float, headers: Any = None) -> Any:
        """Send a request to another worker; return its answer, None if it does not answer or stops."""
        address = self._members.address(member, verb)
        try:
            answer = (await self._nc.request(address, body, timeout=timeout_s, headers=headers)).data
        except (nats.errors.Error, OSError):
            return None
        return None if answer == STOPS else answer
