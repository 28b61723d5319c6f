"""The lease on a prefix: one worker at a time serves it, and a second one refuses to start.

A message in a stream of its own, in memory and laid out as a KV bucket, that the server removes where it was
not renewed in time. No result rests on it: of two committers the fence lets one win. It is there for what two
workers would do badly: clean one disk of two, answer `info` for each other's sessions, publish tokens twice.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import msgspec
import nats.errors
import structlog
from anyio import current_time, move_on_after, sleep
from nats.js import api
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from .connection import BrokerError
from .streams import DEDUPE_S, ensure_stream, reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.js import JetStreamContext

    from turnkeep_client.subjects import Subjects

#: How long a lease outlives its last renewal; servers take whole seconds.
TTL_S: Final = 2
_RENEW_S: Final = 0.5
_LOOK_S: Final = 0.1
#: A lease that did not change for so long is nobody's, whatever the server makes of its end.
_STALE_S: Final = 2.0 * TTL_S
_TIMEOUT_S: Final = 5.0

_WRONG_LAST_SEQUENCE: Final = (10071, 10164)  # another was faster; another is about to be
_EXPECT_HEADER: Final = "Nats-Expected-Last-Subject-Sequence"

log = structlog.get_logger()


class Holder(msgspec.Struct, frozen=True):
    """Who has the lease. `directory` names a data directory, `boot` one life of a worker."""

    worker: str
    host: str
    pid: int
    directory: str
    boot: str

    def __str__(self) -> str:
        return f"worker {self.worker!r} (pid {self.pid} on {self.host})"


class Lease:
    """One worker's hold on its prefix; `keep` runs between `acquire` and `release`. Event loop only."""

    def __init__(
        self,
        js: JetStreamContext,
        subjects: Subjects,
        *,
        worker: str,
        directory: str,
        lost: Callable[[str], None],
    ) -> None:
        """`lost(why)` is called once if another worker takes the lease while this one does not renew it."""
        self._js = js
        self._subjects = subjects
        self._stream = f"KV_{subjects.lease_bucket}"
        self._subject = f"$KV.{subjects.lease_bucket}.worker"
        self._me = Holder(worker, socket.gethostname(), os.getpid(), directory, uuid4().hex)
        self._lost = lost
        self._seq = 0
        self._is_acquired = False

    async def acquire(self) -> None:
        """Take the lease. Raises `BrokerError` where a living worker has it.

        The lease of a worker that was killed is taken once it has run out, or at once with the same data
        directory, whose lock says that nobody else lives on it.
        """
        await self._make_stream()
        try:
            while not await self._put(await self._free()):
                pass  # somebody else was faster: it renews its lease, or dies
        except (APIError, nats.errors.Error, OSError) as error:
            raise BrokerError(
                f"the lease of the prefix cannot be taken ({reason(error)}); let the user publish to"
                f" {self._subject}, and read the stream {self._stream}"
            ) from None
        self._is_acquired = True

    async def _free(self) -> int:
        """Wait until nobody has the lease; returns the sequence of what is to be replaced, 0 for nothing."""
        deadline_s = current_time() + _STALE_S
        seen = 0
        while True:
            holder, seq = await self._holder()
            if holder is None or holder.directory == self._me.directory or current_time() > deadline_s:
                return seq
            if seen and seq != seen:
                raise BrokerError(
                    f"{holder} serves the prefix {self._subjects.prefix!r} on this NATS server; stop it, or"
                    " choose another --prefix"
                )
            seen = seq
            await sleep(_LOOK_S)

    async def release(self) -> None:
        """Let the next worker have the lease at once; nobody may `keep` it any more."""
        if not self._is_acquired:
            return
        with suppress(APIError, nats.errors.Error, OSError), move_on_after(TTL_S):  # then it runs out
            await self._js.delete_msg(self._stream, self._seq)

    async def keep(self) -> None:
        """Renew the lease, until cancelled or lost."""
        while True:
            await sleep(_RENEW_S)
            try:
                other = await self._renew()
            except NoStreamResponseError:  # it was in the memory of a server that is a new one now
                with suppress(BrokerError):
                    await self._make_stream()
            except (APIError, nats.errors.Error, OSError) as error:
                # A server out of reach gives the lease to nobody else.
                log.debug("the lease is not renewed yet", error=reason(error))
            else:
                if other is not None:
                    self._lost(
                        f"{other} has taken over the prefix {self._subjects.prefix!r}, as this worker did not"
                        f" renew its lease for {TTL_S} s; what is not answered yet is in the log for that one"
                    )
                    return

    async def _renew(self) -> Holder | None:
        """Renew the lease, or take it again where it ran out; returns who else has it by now."""
        if await self._put(self._seq):
            return None
        holder, seq = await self._holder()
        if holder is not None and holder.boot != self._me.boot:
            return holder
        await self._put(seq)  # it ran out, or the answer to a renewal was lost
        return None

    async def _put(self, after: int) -> bool:
        """Write the lease in the place of sequence `after`; False where that is not the last one."""
        try:
            ack = await self._js.publish(
                self._subject,
                msgspec.json.encode(self._me),
                timeout=_TIMEOUT_S,
                headers={_EXPECT_HEADER: str(after)},
                msg_ttl=TTL_S,
            )
        except APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                return False
            raise
        self._seq = ack.seq
        return True

    async def _holder(self) -> tuple[Holder | None, int]:
        """Read who has the lease, and its sequence; nobody has what no worker has written."""
        try:
            last = await self._js.get_last_msg(self._stream, self._subject)
        except NotFoundError:
            return None, 0
        try:
            return msgspec.json.decode(last.data or b"", type=Holder), last.seq or 0
        except msgspec.MsgspecError:
            return None, last.seq or 0

    async def _make_stream(self) -> None:
        """Make the stream, as safe as the log is. Raises `BrokerError`."""
        replicas = None
        with suppress(APIError, nats.errors.Error):
            replicas = (await self._js.stream_info(self._subjects.log_stream)).config.num_replicas
        await ensure_stream(
            self._js,
            api.StreamConfig(
                name=self._stream,
                subjects=[f"$KV.{self._subjects.lease_bucket}.>"],
                retention=api.RetentionPolicy.LIMITS,
                storage=api.StorageType.MEMORY,  # renewed twice a second: no disk is to be woken for it
                discard=api.DiscardPolicy.NEW,
                max_msgs_per_subject=1,
                max_bytes=2**16,
                duplicate_window=DEDUPE_S,
                num_replicas=replicas,
                allow_msg_ttl=True,
            ),
        )
