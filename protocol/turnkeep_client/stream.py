"""The log's JetStream stream, for operators: list sessions, and read, remove and store entries.

`Client.stored` returns a `LogStream`. Most of its methods need rights on JetStream's API that a tenant's
client may lack; each method names the rights that it needs. They raise `NoWorkerError`,
`NotPermittedError` and `StreamError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import uuid4

from .errors import (
    TOO_MANY,
    InvalidMessageError,
    LastSequenceError,
    NoAnswerError,
    StreamError,
)
from .images import assemble
from .log import entry
from .subjects import SessionKey, check_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from .log import Entry, Stored
    from .subjects import SessionKind
    from .wire import NatsWire

#: The server answers for at most 1,024 subjects at a time.
_SUBJECTS_AT_ONCE: Final = 1000
#: Batch size for reading everything: per batch the server counts the subject's remaining messages.
_MANY: Final = 8192
_MANY_BYTES: Final = 32 * 2**20
#: Limit of a batch of one session, as callers read many sessions at once: a server disconnects a client that
#: has more than `max_pending` (64 MB) to read.
_SOME_BYTES: Final = 2 * 2**20
#: Pauses between two reads of a replica that lags behind the leader.
_LAGS_S: Final = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0)
_NO_STREAM: Final = 10059
_WRONG_LAST_SEQUENCE: Final = 10071
#: A sequence that no entry will ever have.
_NEVER: Final = 2**62


class UnsentMessage(NamedTuple):
    """A message to be stored in the log."""

    subject: str
    body: bytes
    headers: Mapping[str, str]


class LogStream:
    """Reads and changes the log of one prefix."""

    def __init__(self, api: NatsWire) -> None:
        self._api = api
        self._subjects = api.subjects
        self.name = self._subjects.log_stream

    async def subjects(self, tenant: str = "*", session: str = "*") -> dict[SessionKey, dict[str, int]]:
        """Count each session's entries by kind. Needs `$JS.API.STREAM.INFO.<log>`."""
        found: dict[SessionKey, dict[str, int]] = {}
        pattern, offset, total = self._subjects.whole(_pattern(tenant, session)), 0, 1
        while offset < total:
            body = json.dumps({"subjects_filter": pattern, "offset": offset}).encode()
            try:
                reply = await self._api.api(f"$JS.API.STREAM.INFO.{self.name}", body)
            except StreamError as error:
                if error.code == _NO_STREAM:
                    return {}
                raise
            page = reply["state"].get("subjects") or {}
            for subject, count in page.items():
                try:
                    key, kind, _ = self._subjects.parse(subject)
                except InvalidMessageError:  # a refused request under an invalid name
                    continue
                counts = found.setdefault(key, {})
                counts[kind] = counts.get(kind, 0) + count
            offset, total = offset + len(page), reply.get("total", 0) if page else 0
        return found

    async def last(
        self, keys: Iterable[SessionKey], kind: SessionKind
    ) -> AsyncIterator[tuple[SessionKey, Stored]]:
        """Yield each session's last entry of this kind, if it has one. Needs `$JS.API.DIRECT.GET.<log>`."""
        wanted = {self._subjects.of(key, kind): key for key in keys}
        subjects = list(wanted)
        for start in range(0, len(subjects), _SUBJECTS_AT_ONCE):
            some = subjects[start : start + _SUBJECTS_AT_ONCE]
            async for batch in self._api.batches(self.name, {"multi_last": some, "batch": len(some)}):
                for one in batch:
                    yield wanted[one.headers["Nats-Subject"]], one

    async def latest(self, tenant: str, kind: SessionKind) -> dict[SessionKey, Stored]:
        """Return the last entry of this kind of each session of a tenant. Needs `$JS.API.DIRECT.GET.<log>`.

        With more than 1,024 sessions this needs `$JS.API.STREAM.INFO.<log>` too.
        """
        found: dict[SessionKey, Stored] = {}
        pattern = self._subjects.of(SessionKey(check_id("tenant", tenant), "*"), kind)
        try:
            async for batch in self._api.batches(
                self.name, {"multi_last": [pattern], "batch": _SUBJECTS_AT_ONCE}
            ):
                for one in batch:
                    with contextlib.suppress(InvalidMessageError):  # a refused request under an invalid name
                        found[self._subjects.parse(one.headers["Nats-Subject"])[0]] = one
        except StreamError as error:
            if error.code != TOO_MANY:
                raise
            return {key: one async for key, one in self.last(await self.subjects(tenant), kind)}
        return found

    def entry(self, stored: Stored) -> Entry | None:
        """Parse a message of the log; return None if it is neither a request nor a result."""
        return entry(self._subjects, stored)

    async def every(
        self, key: SessionKey, kind: str = "*", start: int = 1, end: float = inf
    ) -> AsyncIterator[tuple[SessionKey, Stored]]:
        """Yield a session's entries, without images, from the sequence `start` to before `end`.

        With a `kind` yield only entries of that kind, such as `in`. The key's tenant and session may be `*`
        (all). Needs `$JS.API.DIRECT.GET.<log>`. Replicas that lag behind may lack the newest entries; for one
        session, a client with `$JS.API.STREAM.MSG.GET.<log>` waits until it has yielded all that were stored
        before the call. Raises `NoWorkerError`, also if that takes more than about two seconds.
        """
        subject = f"{self._subjects.log(_pattern(key.tenant, key.session))[:-1]}{kind}"
        is_one = "*" not in (key.tenant, key.session)
        until = await self._api.leader_seq(self.name, subject) if is_one else 0
        most_bytes = _SOME_BYTES if is_one else _MANY_BYTES
        request = {"next_by_subj": subject, "batch": max(1, min(_MANY, end - start)), "max_bytes": most_bytes}
        for pause_s in (*_LAGS_S, None):
            async with contextlib.aclosing(self._api.batches(self.name, request | {"seq": start})) as batches:
                async for batch in batches:
                    for one in batch:
                        if one.seq >= end:
                            return
                        start = one.seq + 1
                        yield self._subjects.parse(one.headers["Nats-Subject"])[0], one
            if start > until:
                return
            if pause_s is None:
                raise NoAnswerError(f"{self.name} could not be read: a replica lags behind its leader")
            await asyncio.sleep(pause_s)
            until = min(until, await self._api.leader_seq(self.name, subject))  # it may have been removed

    async def remains(self, key: SessionKey) -> AsyncIterator[Stored]:
        """Yield all that the log and the stream of tokens have of a session, images and chunks too.

        Needs `$JS.API.DIRECT.GET` of both streams.
        """
        for stream in (self.name, self._subjects.token_stream):
            async for one in self._all(stream, self._subjects.whole(key)):
                yield one

    async def erasures(self, tenant: str) -> AsyncIterator[Stored]:
        """Yield the notes of a tenant's forgotten tokens. Needs `$JS.API.DIRECT.GET.<log>`."""
        async for one in self._all(self.name, self._subjects.erased(tenant)):
            yield one

    async def _all(self, stream: str, subject: str) -> AsyncIterator[Stored]:
        request = {"next_by_subj": subject, "batch": _MANY, "max_bytes": _MANY_BYTES, "seq": 1}
        async with contextlib.aclosing(self._api.batches(stream, request)) as batches:
            async for batch in batches:
                for one in batch:
                    yield one

    async def get(self, key: SessionKey, kind: SessionKind, seq: int) -> Stored | None:
        """Read the entry of a session at the sequence `seq`; None if it was removed, or is of another kind.

        Needs and raises what `every` does.
        """
        async for _, one in self.every(key, kind, seq, seq + 1):
            return one
        return None

    async def first(self, key: SessionKey, kind: SessionKind, num: int, start: int = 1) -> list[Stored]:
        """Read the first `num` entries of a session and kind, from the sequence `start` on.

        Needs `$JS.API.DIRECT.GET.<log>`.
        """
        request = {"seq": start, "next_by_subj": self._subjects.of(key, kind), "batch": num}
        async with contextlib.aclosing(self._api.batches(self.name, request)) as batches:
            return await anext(batches, [])

    async def image(self, key: SessionKey, digest: str) -> bytes | None:
        """Read an image; None if the log lacks it or a part of it. Needs `$JS.API.DIRECT.GET.<log>`."""

        async def read(name: str) -> bytes | None:
            found = await self._api.last(self.name, self._subjects.image(key, name))
            return found.body if found else None

        return await assemble(digest, read)

    async def image_entries(self, key: SessionKey) -> dict[str, bytes]:
        """Read the bodies of all entries of a session's images, by digest; of several the last one.

        Needs and raises what `every` does.
        """
        found = {}
        async for _, one in self.every(key, "image.*"):
            found[one.headers["Nats-Subject"].rpartition(".")[2]] = one.body
        return found

    async def put_image_entry(self, key: SessionKey, digest: str, body: bytes) -> None:
        """Store an entry of a session's images. Needs the right to publish on its subject."""
        await self._api.publish(self._subjects.image(key, digest), body)

    async def delete(self, seq: int) -> None:
        """Remove one entry, and overwrite it in the server's files.

        Needs `$JS.API.STREAM.MSG.DELETE.<log>`.
        """
        await self._api.api(f"$JS.API.STREAM.MSG.DELETE.{self.name}", json.dumps({"seq": seq}).encode())

    async def purge(self, key: SessionKey) -> None:
        """Remove all entries of a session. Needs `$JS.API.STREAM.PURGE.<log>`."""
        body = json.dumps({"filter": self._subjects.whole(key)}).encode()
        await self._api.api(f"$JS.API.STREAM.PURGE.{self.name}", body)

    async def last_seq(self) -> int:
        """Return the sequence of the last entry. Needs `$JS.API.STREAM.INFO.<log>`."""
        reply = await self._api.api(f"$JS.API.STREAM.INFO.{self.name}", b"")
        return int(reply["state"]["last_seq"])

    async def now(self) -> datetime:
        """Return the time by the clock that dates the log's entries. Needs `$JS.API.STREAM.INFO.<log>`."""
        reply = await self._api.api(f"$JS.API.STREAM.INFO.{self.name}", b"")
        return datetime.fromisoformat(reply["ts"])

    async def allow_batches(self) -> None:
        """Enable atomic batches, for `store`. Needs `$JS.API.STREAM.INFO.<log>` and `.UPDATE.<log>`."""
        try:
            config = (await self._api.api(f"$JS.API.STREAM.INFO.{self.name}", b""))["config"]
        except StreamError as error:
            if error.code == _NO_STREAM:
                raise NoAnswerError(f"there is no log of the prefix {self._subjects.prefix!r}") from None
            raise
        if not config.get("allow_atomic"):
            body = json.dumps(config | {"allow_atomic": True}).encode()
            changed = await self._api.api(f"$JS.API.STREAM.UPDATE.{self.name}", body)
            if not changed["config"].get("allow_atomic"):
                raise StreamError("the NATS server cannot store batches at once; it must be 2.12 or newer")

    async def store(self, messages: Sequence[UnsentMessage], after: int) -> None:
        """Store up to 1,000 messages atomically, directly after the log's entry with the sequence `after`.

        Raises `LastSequenceError` if that is not the log's last entry. Needs the right to publish on the
        messages' subjects.
        """
        batch = uuid4().hex
        for number, (subject, body, given) in enumerate(messages, 1):
            headers = {**given, "Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(number)}
            if number == 1:
                headers["Nats-Expected-Last-Sequence"] = str(after)
            if number == len(messages):
                headers["Nats-Batch-Commit"] = "1"
            try:
                if number in (1, len(messages)):
                    await self._api.api(subject, body, headers)
                else:
                    await self._api.send(subject, body, headers)
            except StreamError as error:
                if error.code == _WRONG_LAST_SEQUENCE:
                    raise LastSequenceError(str(error), error.code) from None
                raise

    async def settle(self, key: SessionKey) -> None:
        """Wait until the server has stored or refused all messages of `store`, even if that was cancelled.

        The server stores messages in turn, but reads and purges beside that. So this sends one more, which
        the server must refuse. Needs the right to publish on the session's `closed`.
        """
        try:
            headers = {"Nats-Expected-Last-Sequence": str(_NEVER)}
            await self._api.api(self._subjects.of(key, "closed"), b"", headers)
        except StreamError as error:
            if error.code != _WRONG_LAST_SEQUENCE:
                raise


def _pattern(tenant: str, session: str) -> SessionKey:
    """Build a key from names that may be `*`, which matches all names. Raises `InvalidMessageError`."""
    for what, name in (("tenant", tenant), ("session", session)):
        if name != "*":
            check_id(what, name)
    return SessionKey(tenant, session)
