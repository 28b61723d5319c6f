"""The lease on a prefix: only one worker at a time serves the prefix; a second worker refuses to start.

The lease is a message in its own in-memory stream, in the layout of a KV bucket; the server removes the
message if it is not renewed in time. Results do not depend on the lease, since only one of two workers can
commit a result (see `journal`). The lease prevents other faults of two workers on one prefix: `forget` erases
only one of two caches, the wrong worker answers `info`, chunks are published twice.
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

from turnkeep_client.log import EXPECT_HEADER

from .connection import BrokerError
from .streams import DEDUPE_S, ensure_stream, reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from nats.js import JetStreamContext

    from turnkeep_client.subjects import Subjects

#: Time from the last renewal to the end of the lease; the server wants whole seconds.
TTL_S: Final = 2
_RENEW_S: Final = 0.5
_LOOK_S: Final = 0.1
#: A lease that did not change for this time is free, even if the server has not removed it.
_STALE_S: Final = 2.0 * TTL_S
_TIMEOUT_S: Final = 5.0

_WRONG_LAST_SEQUENCE: Final = (10071, 10164)  # another worker's write was faster; is in progress

log = structlog.get_logger()


class Holder(msgspec.Struct, frozen=True):
    """The holder of a lease. `directory` identifies its data directory, `boot` this run of the worker."""

    worker: str
    host: str
    pid: int
    directory: str
    boot: str

    def __str__(self) -> str:
        return f"worker {self.worker!r} (pid {self.pid} on {self.host})"


class Lease:
    """One worker's lease on its prefix; run `keep` between `acquire` and `release`. Event loop only."""

    def __init__(
        self,
        js: JetStreamContext,
        subjects: Subjects,
        *,
        worker: str,
        directory: str,
        replicas: int | None = None,
        lost: Callable[[str], None],
    ) -> None:
        """`lost(why)` is called once if another worker takes the lease while this one does not renew it.

        The stream has `replicas` copies, by default as many as the log's stream.
        """
        self._js = js
        self._subjects = subjects
        self._stream = f"KV_{subjects.lease_bucket}"
        self._subject = f"$KV.{subjects.lease_bucket}.worker"
        self._me = Holder(worker, socket.gethostname(), os.getpid(), directory, uuid4().hex)
        self._replicas = replicas
        self._lost = lost
        self._seq = 0
        self._is_acquired = False
        self._ran_out = False
        self._renewed_s = 0.0

    @property
    def is_held(self) -> bool:
        """Whether no other worker can have the lease now: it is acquired, and renewed in time."""
        return self._is_acquired and current_time() - self._renewed_s < TTL_S

    @property
    def is_unbroken(self) -> bool:
        """Whether no other worker can have had the lease since this one acquired it."""
        return self.is_held and not self._ran_out

    async def acquire(self) -> None:
        """Acquire the lease. Raises `BrokerError` if a running worker has it.

        Waits until the lease of a killed worker has expired. Takes the lease at once if its holder had the
        same data directory, whose lock proves that the holder no longer runs.
        """
        await self._make_stream()
        try:
            while not await self._put(await self._free()):
                pass  # another worker was faster: `_free` raises, or waits for its end
        except (APIError, nats.errors.Error, OSError) as error:
            raise BrokerError(
                f"the lease of the prefix cannot be taken ({reason(error)}); let the user publish to"
                f" {self._subject}, and read the stream {self._stream}"
            ) from None
        self._is_acquired = True

    async def _free(self) -> int:
        """Wait until the lease is free; return the sequence of the message to replace, 0 if there is none."""
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
        """Release the lease for the next worker. Cancel `keep` before."""
        if not self._is_acquired:
            return
        with suppress(APIError, nats.errors.Error, OSError), move_on_after(TTL_S):  # else it runs out
            await self._js.delete_msg(self._stream, self._seq)

    async def keep(self) -> None:
        """Renew the lease, until cancelled or lost."""
        while True:
            await sleep(_RENEW_S)
            try:
                other = await self._renew()
            except NoStreamResponseError:  # the server has restarted and lost its memory
                with suppress(BrokerError):
                    await self._make_stream()
            except (APIError, nats.errors.Error, OSError) as error:
                # A server out of reach gives the lease to no other worker.
                log.debug("the lease is not renewed yet", error=reason(error))
            else:
                if other is not None:
                    self._lost(
                        f"{other} has taken over the prefix {self._subjects.prefix!r}, as this worker did not"
                        f" renew its lease for {TTL_S} s; unanswered requests are in the log for that worker"
                    )
                    return

    async def _renew(self) -> Holder | None:
        """Renew the lease, even after it has expired; return its holder if another worker has it now."""
        if await self._put(self._seq):
            return None
        holder, seq = await self._holder()
        if holder is not None and holder.boot != self._me.boot:
            return holder
        self._ran_out |= holder is None  # else the ack of a renewal was lost
        await self._put(seq)
        return None

    async def _put(self, after: int) -> bool:
        """Write the lease if the last message has the sequence `after`; return whether it was written."""
        asked_s = current_time()
        try:
            ack = await self._js.publish(
                self._subject,
                msgspec.json.encode(self._me),
                timeout=_TIMEOUT_S,
                headers={EXPECT_HEADER: str(after)},
                msg_ttl=TTL_S,
            )
        except APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                return False
            raise
        self._seq, self._renewed_s = ack.seq, asked_s
        return True

    async def _holder(self) -> tuple[Holder | None, int]:
        """Read the holder and the sequence of the lease.

        The holder is None if no worker wrote the message.
        """
        try:
            last = await self._js.get_last_msg(self._stream, self._subject)
        except NotFoundError:
            return None, 0
        try:
            return msgspec.json.decode(last.data or b"", type=Holder), last.seq or 0
        except msgspec.MsgspecError:
            return None, last.seq or 0

    async def _make_stream(self) -> None:
        """Make the stream. Raises `BrokerError`."""
        replicas = self._replicas
        with suppress(APIError, nats.errors.Error):
            replicas = replicas or (await self._js.stream_info(self._subjects.log_stream)).config.num_replicas
        await ensure_stream(
            self._js,
            api.StreamConfig(
                name=self._stream,
                subjects=[f"$KV.{self._subjects.lease_bucket}.>"],
                retention=api.RetentionPolicy.LIMITS,
                storage=api.StorageType.MEMORY,  # renewed twice a second: not worth disk writes
                discard=api.DiscardPolicy.NEW,
                max_msgs_per_subject=1,
                max_bytes=2**16,
                duplicate_window=DEDUPE_S,
                num_replicas=replicas,
                allow_msg_ttl=True,
            ),
        )
