"""Asks a worker to give its sessions away, for the command `drain`. Not used by a worker itself."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

import msgspec
import nats.errors
from anyio import current_time, sleep
from nats.js.errors import APIError

from turnkeep_client.direct import DirectGets
from worker.wire.connection import BrokerError, connect
from worker.wire.records import address, read_members
from worker.wire.streams import reason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Any

    from nats.aio.client import Client

    from turnkeep_client.subjects import Subjects
    from worker.wire.records import Member

_TIMEOUT_S: Final = 5.0
#: How long a record may be missing while its worker runs: a server that restarts loses the records.
_MISSING_S: Final = 10.0
_LOOK_S: Final = 0.2


class Workers:
    """Reads which workers serve a prefix from the records that they renew, and asks them to drain."""

    def __init__(self, nc: Client, subjects: Subjects) -> None:
        self._nc, self._subjects = nc, subjects
        self._gets = DirectGets(nc, timeout_s=_TIMEOUT_S)

    @classmethod
    @asynccontextmanager
    async def at(cls, url: str, subjects: Subjects, **options: Any) -> AsyncIterator[Workers]:
        """Connect, with `options` of nats-py. Every NATS error in the block is raised as `BrokerError`."""
        nc = await connect(url, name="turnkeep drain", **options)
        try:
            yield cls(nc, subjects)
        except (nats.errors.Error, APIError, OSError) as error:
            raise BrokerError(
                f"the workers cannot be asked ({reason(error)}); this user of the NATS server must be allowed"
                " what a worker is"
            ) from None
        finally:
            await nc.close()

    async def by_name(self) -> dict[str, Member]:
        """Read the records of all workers, by name; a killed worker's record stays for 2 s."""
        return {one.worker: one for one in await read_members(self._gets, self._subjects)}

    async def load(self, name: str) -> int:
        """Return the number of sessions at work at a worker. Raises `BrokerError` if it has ended."""
        until_s = current_time() + _MISSING_S
        while current_time() < until_s:
            with suppress(nats.errors.Error, APIError, OSError):
                if (found := (await self.by_name()).get(name)) is not None:
                    return found.load
            await sleep(_LOOK_S)
        raise BrokerError(f"the worker {name} has ended, or it or NATS cannot be reached")

    async def drain(self, member: Member, *, on: bool) -> list[str]:
        """Ask a worker to start or stop draining; return the names of workers that take its sessions.

        A worker refuses to start if no other one can take its sessions: then the list is empty. Raises
        `BrokerError` if it stops.
        """
        subject = address(self._subjects, member, "drain")
        reply = await self._nc.request(subject, msgspec.json.encode(on), timeout=_TIMEOUT_S)
        if not reply.data:
            raise BrokerError(f"the worker {member.worker} stops; its sessions go to the others")
        return msgspec.json.decode(reply.data, type=list[str])
