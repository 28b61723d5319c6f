"""Keeps the workers' records. Each worker of a prefix renews its own, so that the others know that it runs.

The records are messages in an in-memory stream, in the layout of a KV bucket; the server removes a record
that is not renewed in time. Correct results do not depend on records, since only one of two workers can
commit a result (see `journal`). Records decide which worker keeps a session's KV (see `owners`).

Each worker pings its neighbours: the two that follow it in the order of the names, after the last name the
first. If one of them is silent, it pings all others too, so it also notices workers that end together. A
worker that notices an end tells the others; each of them pings the ended one before it believes that.
"""

from __future__ import annotations

import os
import socket
from bisect import bisect
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import msgspec
import nats.errors
import structlog
from anyio import Event, current_time, move_on_after, sleep
from msgspec import structs
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from turnkeep_client.direct import DirectGets
from turnkeep_client.log import EXPECT_HEADER
from turnkeep_client.messages import VERSION as PROTOCOL
from turnkeep_client.nats_client import server_id, write_refusal
from worker.process.clock import time
from worker.process.concurrency import task_group
from worker.wire.connection import PATIENCE_S, BrokerError, ask_patiently
from worker.wire.fence import OVERTAKEN
from worker.wire.records import Member, address, ensure_records, read_members, record_subject, records_stream
from worker.wire.streams import reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nats.aio.client import Client
    from nats.aio.msg import Msg

    from turnkeep_client.subjects import Subjects

#: Time from the last renewal of a record to its expiry; the server takes only whole seconds.
TTL_S: Final = 2
_RENEW_S: Final = 0.5
_LOOK_S: Final = 0.1
#: A record that did not change for this time belongs to a dead worker, even if the server still has it.
_STALE_S: Final = 2.0 * TTL_S
_TIMEOUT_S: Final = 5.0
#: Number of other workers that a worker pings while none of them is silent.
_NUM_NEIGHBOURS: Final = 2
#: Pause between two checks of the neighbours; a worker that misses `_MISSES` in a row counts as ended.
_WATCH_S: Final = 0.25
_MISSES: Final = 2
#: Pause between two checks if a worker is missing. A lost connection is back after some milliseconds.
_CONFIRM_S: Final = 0.1
#: How long a worker may take to answer a ping.
_PING_S: Final = 0.25

log = structlog.get_logger()


class Members:
    """Keeps this worker's record, and watches the other workers. Event loop only.

    Run `keep` between `join` and `leave`.
    """

    def __init__(
        self,
        nc: Client,
        subjects: Subjects,
        *,
        worker: str,
        directory: str,
        replicas: int | None = None,
        lost: Callable[[str], None],
    ) -> None:
        """Make the record of `worker`. The stream of records has `replicas` copies; None: as many as the log.

        `lost(why)` is called once if another worker takes this one's name after this one's record expired.
        """
        self.me = Member(worker, socket.gethostname(), os.getpid(), directory, uuid4().hex, time())
        #: The other workers that run now, by name.
        self.others: dict[str, Member] = {}
        self.stream = records_stream(subjects)
        self._gone: deque[Member] = deque()  # not reported yet
        self._has_gone = Event()
        self._load: Callable[[], int] | None = None  # None until this worker serves
        self._nc, self._js = nc, nc.jetstream()
        self._gets = DirectGets(nc, timeout_s=_TIMEOUT_S)
        self._subjects = subjects
        self._subject = record_subject(subjects, worker)
        self._replicas = replicas
        self._lost = lost
        self._seq = 0
        self._is_joined = False
        #: Why JetStream does not renew the record; empty if it says nothing.
        self.refusal = ""
        self._renewed_s = (0.0, 0.0)  # by the monotonic clock, and by the wall clock
        self._misses: dict[str, int] = {}
        self._recorded: frozenset[str] = frozenset()  # names that had a record at the last look
        self._ended: set[str] = set()  # runs of workers that have ended, and may still have a record
        self._server = ""
        self._trusted_s = 0.0  # until then a missing record does not prove that its worker has ended

    def address(self, member: Member, verb: str) -> str:
        """Return the subject on which a worker receives `verb` requests; no stream stores this subject."""
        return address(self._subjects, member, verb)

    def common_address(self, verb: str) -> str:
        """Return the subject on which all workers receive `verb`; no stream stores this subject."""
        return f"$KV.{self._subjects.workers_bucket}.peers.{verb}"

    @property
    def has_record(self) -> bool:
        """Whether this worker's record exists: the worker has joined, and has renewed the record in time."""
        # The record expires by the wall clock. The other clock stands still while a machine sleeps.
        age_s = max(current_time() - self._renewed_s[0], time() - self._renewed_s[1])
        return self._is_joined and age_s < TTL_S

    @property
    def is_first(self) -> bool:
        """Whether this worker started first; the first one does the jobs that must run once per prefix."""
        return all((self.me.since, self.me.boot) < (one.since, one.boot) for one in self.others.values())

    async def join(self) -> None:
        """Make this worker's record; return once each other worker knows of it, or has ended.

        Raises `BrokerError` if a running worker has its name. Waits until the record of a killed worker has
        expired. A record with this data directory is replaced at once: its worker no longer holds the lock.
        """
        await ensure_records(self._js, self._subjects, self._replicas)
        await self._nc.subscribe(self.address(self.me, "ping"), cb=self._pong)
        await self._nc.subscribe(self.address(self.me, "hello"), cb=self._hello)
        await self._nc.subscribe(self.address(self.me, "bye"), cb=self._bye)
        await self._nc.subscribe(self.common_address("gone"), cb=self._told)
        try:
            while not await ask_patiently(self._take_name):
                pass  # another worker was faster: `_free` raises, or waits for its end
            self._is_joined, self._server = True, server_id(self._nc)
            deadline_s = current_time() + PATIENCE_S
            while unknown := await self._unknown(deadline_s):
                for member in unknown:
                    await self._greet(member)
        except (APIError, nats.errors.Error, OSError) as error:
            raise BrokerError(
                f"this worker cannot be recorded on the prefix ({reason(error)}); let the user publish to"
                f" {self._subject}, and read the stream {self.stream}"
            ) from None

    async def check_name(self) -> None:
        """Raise `BrokerError` if `join` would, since a running worker has this one's name; join nothing."""
        with suppress(APIError, nats.errors.Error, OSError):  # nothing is known of others
            await self._free()

    async def serve(self, load: Callable[[], int]) -> None:
        """Tell the other workers, by the record and by a message, that this one serves from now on.

        `load()` returns its load. If NATS fails, the next renewal of the record says so.
        """
        self._load = load
        self.me = structs.replace(self.me, serves=True)
        with suppress(APIError, nats.errors.Error, OSError):  # then the next renewal says so
            await self._renew()
            for member in list(self.others.values()):
                await self._greet(member)

    async def drain(self, *, on: bool) -> None:
        """Set whether this worker gives its sessions away: renew its record, and tell each other worker.

        Raises nats-py's errors; then the next renewal of the record says so.
        """
        self.me = structs.replace(self.me, drains=on)
        log.info("drains" if on else "drains no more", worker=self.me.worker)
        await self._renew()
        for member in list(self.others.values()):
            await self._greet(member)

    def reconnected(self) -> None:
        """Have the record say that the connection was lost, perhaps with answers to other workers."""
        self.me = structs.replace(self.me, num_reconnects=self.me.num_reconnects + 1)

    async def name_model(self, model: str) -> None:
        """Record the digest of this worker's model.

        Raises `BrokerError` if a running worker has another model, or another version of the protocol.
        """
        self.me = structs.replace(self.me, model=model)
        with suppress(APIError, nats.errors.Error, OSError):  # then the next renewal has it
            await self._renew()
            for one in await self._look():
                self._add(one)
        for one in self.others.values():
            if one.protocol != PROTOCOL:
                raise BrokerError(
                    f"{one} serves the prefix {self._subjects.prefix!r} with version {one.protocol} of the"
                    f" protocol, and this worker has {PROTOCOL}; stop all workers, then start the new ones"
                )
            if one.model and one.model != model:
                raise BrokerError(
                    f"{one} serves the prefix {self._subjects.prefix!r} with another model; give this worker"
                    " the same one, or another --prefix"
                )

    async def _unknown(self, deadline_s: float) -> list[Member]:
        """Find the workers that have not answered a greeting; if reading fails, retry until `deadline_s`."""
        while True:
            try:
                return [one for one in await self._look() if one.worker not in self.others]
            except (APIError, nats.errors.Error, OSError):
                if current_time() > deadline_s:
                    raise
                await sleep(_LOOK_S)

    async def _take_name(self) -> bool:
        return await self._put(await self._free())

    async def _free(self) -> int:
        """Wait until this worker's name is free; return the sequence of the record to replace (0: none).

        Raises `BrokerError` if a running worker has the name.
        """
        deadline_s = current_time() + _STALE_S
        seen = 0
        while True:
            holder, seq = await self._holder()
            if holder is None or holder.directory == self.me.directory or current_time() > deadline_s:
                return seq
            if seen and seq != seen:
                raise BrokerError(
                    f"{holder} serves the prefix {self._subjects.prefix!r} on this NATS server under the same"
                    " name; stop it, or choose another --worker name"
                )
            seen = seq
            await sleep(_LOOK_S)

    async def _greet(self, member: Member) -> None:
        """Send this worker's record to another worker; add that worker to `others` if it answers."""
        try:
            greeting = msgspec.json.encode(self.me)
            await self._nc.request(self.address(member, "hello"), greeting, timeout=_RENEW_S)
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError):
            await sleep(_LOOK_S)
        else:
            self._add(member)

    def _add(self, member: Member) -> None:
        if not self.knows(member):
            if (last := self.others.get(member.worker)) is not None:  # only one process has the name
                self._remove(last, "another worker has ended")
            log.info("another worker serves the prefix", worker=member.worker, host=member.host)
            self._misses[member.worker] = 0
        self.others[member.worker] = member

    def knows(self, member: Member) -> bool:
        """Whether this process of another worker is known to run."""
        known = self.others.get(member.worker)
        return known is not None and known.boot == member.boot

    def has_reconnected(self, member: Member) -> bool:
        """Whether another worker, which still runs, has lost its connection since it was this `member`."""
        return self.knows(member) and self.others[member.worker].num_reconnects != member.num_reconnects

    async def _pong(self, message: Msg) -> None:
        if self._is_joined:
            await message.respond(b"")

    async def _hello(self, message: Msg) -> None:
        with suppress(msgspec.MsgspecError):
            member = msgspec.json.decode(message.data, type=Member)
            self._ended.discard(member.boot)
            self._add(member)
            await message.respond(b"")

    async def _bye(self, message: Msg) -> None:
        with suppress(msgspec.MsgspecError):
            self._remove(msgspec.json.decode(message.data, type=Member), "another worker has stopped")
            await message.respond(b"")

    async def _told(self, message: Msg) -> None:
        """Remove a worker that another one has found to have ended, unless it answers."""
        with suppress(msgspec.MsgspecError):
            member = msgspec.json.decode(message.data, type=Member)
            if self.knows(member) and not await self._answers(member):
                self._remove(member, "another worker has ended")

    def _remove(self, member: Member, what: str) -> None:
        if self.knows(member):
            log.info(what, worker=member.worker, host=member.host)
            self._ended.add(member.boot)
            del self.others[member.worker]
            self._misses.pop(member.worker, None)
            self._gone.append(member)
            self._has_gone.set()

    async def next_ended(self) -> Member:
        """Wait for the next worker that ends, and return it; it no longer `serves` if it stopped in order."""
        while not self._gone:
            self._has_gone = Event()
            await self._has_gone.wait()
        return self._gone.popleft()

    async def leave(self) -> None:
        """Remove the record, and tell the other workers, which take this one's sessions at once."""
        if not self._is_joined:
            return
        self._is_joined = False
        self.me = structs.replace(self.me, serves=False)
        with move_on_after(TTL_S):
            with suppress(APIError, nats.errors.Error, OSError):  # else it expires, or a renewal replaced it
                await self._js.delete_msg(self.stream, self._seq)
            for member in list(self.others.values()):
                with suppress(nats.errors.Error, OSError):
                    leaving = msgspec.json.encode(self.me)
                    await self._nc.request(self.address(member, "bye"), leaving, timeout=_RENEW_S)

    async def keep(self) -> None:
        """Renew the record, until cancelled, or until another worker has this one's name."""
        while True:
            await sleep(_RENEW_S)
            if not self._is_joined:
                continue
            try:
                other = await self._renew()
            except NoStreamResponseError as error:  # the server has restarted and lost its memory
                self.refusal = write_refusal(error)
                with suppress(BrokerError):
                    await ensure_records(self._js, self._subjects, self._replicas)
            except (APIError, nats.errors.Error, OSError) as error:
                # A server out of reach gives the name to no other worker.
                self.refusal = write_refusal(error)
                log.debug("the record is not renewed yet", error=reason(error))
            else:
                self.refusal = ""
                if other is not None:
                    self._lost(
                        f"{other} has taken this worker's name on the prefix {self._subjects.prefix!r}, as it"
                        f" was not renewed for {TTL_S} s; unanswered requests are in the log for that worker"
                    )
                    return

    async def watch(self) -> None:
        """Keep `others` up to date with workers that join or end, until cancelled; see `next_ended`."""
        while True:
            await sleep(_CONFIRM_S if any(self._misses.values()) else _WATCH_S)
            try:
                found = {one.worker: one for one in await self._look()}
            except (APIError, nats.errors.Error, OSError):
                continue
            if self._server != server_id(self._nc):  # a restarted server has lost the records
                self._server, self._trusted_s = server_id(self._nc), current_time() + _STALE_S
            self._recorded = frozenset(found)
            self._ended &= {one.boot for one in found.values()}
            for member in found.values():  # a dead worker's record stays for a while
                if member.boot not in self._ended or await self.runs(member.boot):
                    self._ended.discard(member.boot)
                    self._add(member)
            watched = self._watched()
            if await self._ping(watched):
                await self._ping(self.others.keys() - watched)
            if current_time() > self._trusted_s:
                await self._remove_silent()

    def _watched(self) -> set[str]:
        """Return the names of the neighbours, and of workers that may have ended."""
        names = sorted(self.others)
        at = bisect(names, self.me.worker)
        neighbours = (names[at:] + names[:at])[:_NUM_NEIGHBOURS]
        silent = {name for name in names if self._misses.get(name) or name not in self._recorded}
        return {*neighbours} | silent

    async def _ping(self, names: Iterable[str]) -> bool:
        """Ping workers, all at the same time, and count their misses; return whether one was silent."""

        async def ping(member: Member) -> None:
            is_seen = await self._answers(member)
            if self.knows(member):
                self._misses[member.worker] = 0 if is_seen else self._misses.get(member.worker, 0) + 1

        members = [self.others[name] for name in names]
        async with task_group() as tasks:
            for member in members:
                tasks.start_soon(ping, member)
        return any(self._misses.get(one.worker) for one in members)

    async def _remove_silent(self) -> None:
        """Remove the workers that have missed several pings, and tell the other workers."""
        for member in list(self.others.values()):
            if self._misses.get(member.worker, 0) >= _MISSES:
                self._remove(member, "another worker has ended")
                with suppress(nats.errors.Error, OSError):
                    await self._nc.publish(self.common_address("gone"), msgspec.json.encode(member))

    async def runs(self, boot: str) -> bool:
        """Whether the other worker process `boot` answers a ping, even if it is not known here yet."""
        is_other = boot.isalnum() and boot != self.me.boot
        return is_other and await self._answers(structs.replace(self.me, boot=boot), is_recorded=False)

    async def _answers(self, member: Member, *, is_recorded: bool | None = None) -> bool:
        """Whether a worker answers a ping; a slow worker counts as answering if it `is_recorded`.

        None: as the last look at the records says. An ending process does not answer, and the server reports
        that only once its connection is closed.
        """
        if is_recorded is None:
            is_recorded = member.worker in self._recorded
        try:
            timeout_s = _CONFIRM_S if is_recorded else _PING_S
            await self._nc.request(self.address(member, "ping"), timeout=timeout_s)
        except nats.errors.NoRespondersError:
            return False
        except (nats.errors.Error, OSError):
            return is_recorded
        return True

    async def _look(self) -> list[Member]:
        """Read the records of the other workers. Raises nats-py's errors."""
        found = await read_members(self._gets, self._subjects)
        return [one for one in found if one.worker != self.me.worker]

    async def _renew(self) -> Member | None:
        """Renew the record, even after it expired; return another worker that has taken its name, if any."""
        if await self._put(self._seq):
            return None
        holder, seq = await self._holder()
        if holder is not None and holder.boot != self.me.boot:
            return holder
        await self._put(seq)
        return None

    async def _put(self, after: int) -> bool:
        """Write this worker's record if the last one is at sequence `after`; return false if it is not."""
        asked_s = current_time(), time()
        try:
            ack = await self._js.publish(
                self._subject,
                msgspec.json.encode(structs.replace(self.me, load=self._load() if self._load else 0)),
                timeout=_TIMEOUT_S,
                headers={EXPECT_HEADER: str(after)},
                msg_ttl=TTL_S,
            )
        except APIError as error:
            if error.err_code in OVERTAKEN:
                return False
            raise
        self._seq, self._renewed_s = ack.seq, asked_s
        return True

    async def _holder(self) -> tuple[Member | None, int]:
        """Read who has this worker's name, and the sequence of the record.

        The holder is None if no worker wrote the message.
        """
        try:
            last = await self._js.get_last_msg(self.stream, self._subject)
        except NotFoundError:
            return None, 0
        try:
            return msgspec.json.decode(last.data or b"", type=Member), last.seq or 0
        except msgspec.MsgspecError:
            return None, last.seq or 0
