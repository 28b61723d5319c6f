"""The workers' records: messages in an in-memory stream, in the layout of a KV bucket.

`cluster.liveness` writes and watches them; the command `drain` reads them too.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import msgspec
import nats.errors
from nats.js import api
from nats.js.errors import APIError

from turnkeep_client.messages import VERSION as PROTOCOL

from .streams import DEDUPE_S, ensure_stream

if TYPE_CHECKING:
    from nats.js import JetStreamContext

    from turnkeep_client.direct import DirectGets
    from turnkeep_client.subjects import Subjects

#: Limit of the stream: records have some 400 bytes each.
_MAX_BYTES: Final = 2**20


class Member(msgspec.Struct, frozen=True):
    """A worker of the prefix."""

    worker: str
    host: str
    pid: int
    #: Identifies its data directory.
    directory: str
    #: Identifies its process.
    boot: str
    #: When it started, in seconds since 1970.
    since: float = 0.0
    #: A digest of its model, once loaded.
    model: str = ""
    #: The number of sessions with requests that wait or run there, at the last renewal.
    load: int = 0
    #: False while it loads its model: then it owns no sessions.
    serves: bool = False
    #: Whether it gives its sessions away, and takes none.
    drains: bool = False
    #: How often it has lost its connection to NATS and reconnected.
    num_reconnects: int = 0
    #: The version of the messages that it writes.
    protocol: int = PROTOCOL

    def __str__(self) -> str:
        return f"worker {self.worker!r} (pid {self.pid} on {self.host})"


def records_stream(subjects: Subjects) -> str:
    """Return the name of the stream of the workers' records."""
    return f"KV_{subjects.workers_bucket}"


def record_subject(subjects: Subjects, worker: str) -> str:
    """Return the subject of a worker's record."""
    return f"$KV.{subjects.workers_bucket}.live.{worker}"


async def ensure_records(js: JetStreamContext, subjects: Subjects, replicas: int | None) -> None:
    """Create or update the stream of records, with `replicas` copies; None: as many as the log.

    Raises `BrokerError`.
    """
    with contextlib.suppress(APIError, nats.errors.Error):
        replicas = replicas or (await js.stream_info(subjects.log_stream)).config.num_replicas
    await ensure_stream(
        js,
        api.StreamConfig(
            name=records_stream(subjects),
            subjects=[f"$KV.{subjects.workers_bucket}.live.>"],
            retention=api.RetentionPolicy.LIMITS,
            storage=api.StorageType.MEMORY,  # renewed twice a second: not worth disk writes
            discard=api.DiscardPolicy.NEW,
            max_msgs_per_subject=1,
            max_bytes=_MAX_BYTES,
            duplicate_window=DEDUPE_S,
            num_replicas=replicas,
            allow_direct=True,
            allow_msg_ttl=True,
        ),
    )


def address(subjects: Subjects, member: Member, verb: str) -> str:
    """Return the subject on which a worker receives `verb` requests from other workers and commands."""
    return f"$KV.{subjects.workers_bucket}.peer.{member.boot}.{verb}"


async def read_members(gets: DirectGets, subjects: Subjects) -> list[Member]:
    """Read the records of a prefix's workers; a killed worker's record stays for 2 s.

    Raises nats-py's errors.
    """
    asked = {"multi_last": [f"$KV.{subjects.workers_bucket}.live.*"], "batch": 1024}
    found: list[Member] = []
    for message in (await gets.read(records_stream(subjects), asked))[0]:
        with contextlib.suppress(msgspec.MsgspecError):
            if message.headers:
                found.append(msgspec.json.decode(message.data, type=Member))
    return found
