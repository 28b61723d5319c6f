"""The log's stream as its operator sees it: whose sessions it has, their last entries, and single entries.

Get it from `Client.stored`. Most of it needs rights on JetStream's API that a tenant's client may lack; which
ones, each method says.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Final, Protocol

from .errors import InvalidMessageError, TurnkeepError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable

    from .calls import Stored
    from .subjects import SessionKey, SessionKind, Subjects

#: The server answers for at most 1,024 subjects at a time.
_SUBJECTS_AT_ONCE: Final = 1000
#: A batch when everything is read: for each one the server counts what is left of the subject.
_MANY: Final = 8192
_MANY_BYTES: Final = 32 * 2**20
_NO_STREAM: Final = 10059


class StreamError(TurnkeepError):
    """JetStream refuses what was asked of the log; the message says why. `code` is JetStream's."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Api(Protocol):
    """What the stream needs of a connection. Both raise `NoWorkerError` and `NotPermittedError`."""

    async def api(self, subject: str, body: bytes) -> dict[str, Any]:
        """Ask JetStream's API and return its answer. Raises `StreamError`."""

    def batches(self, stream: str, request: dict[str, Any]) -> AsyncGenerator[list[Stored], None]:
        """Yield the messages that a batched direct get finds, in pieces."""


class LogStream:
    """The log of one prefix."""

    def __init__(self, api: Api, subjects: Subjects) -> None:
        self._api = api
        self._subjects = subjects
        self.name = subjects.log_stream

    async def subjects(self, tenant: str = "*", session: str = "*") -> dict[SessionKey, dict[str, int]]:
        """Count each session's entries by kind. Needs `$JS.API.STREAM.INFO.<log>`."""
        found: dict[SessionKey, dict[str, int]] = {}
        pattern, offset, total = f"{self._subjects.prefix}.{tenant}.{session}.*", 0, 1
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
                except InvalidMessageError:  # a refused request under a name that is none
                    continue
                found.setdefault(key, {})[kind] = count
            offset, total = offset + len(page), reply.get("total", 0) if page else 0
        return found

    async def last(
        self, keys: Iterable[SessionKey], kind: SessionKind
    ) -> AsyncIterator[tuple[SessionKey, Stored]]:
        """Yield the last entry of a kind of each session that has one. Needs `$JS.API.DIRECT.GET.<log>`."""
        wanted = {self._subjects.of(key, kind): key for key in keys}
        subjects = list(wanted)
        for start in range(0, len(subjects), _SUBJECTS_AT_ONCE):
            some = subjects[start : start + _SUBJECTS_AT_ONCE]
            async for batch in self._api.batches(self.name, {"multi_last": some, "batch": len(some)}):
                for one in batch:
                    yield wanted[one.headers["Nats-Subject"]], one

    async def every(self, key: SessionKey, kind: str = "*") -> AsyncIterator[tuple[SessionKey, Stored]]:
        """Yield all entries of a session, in order; names may be `*`. Needs `$JS.API.DIRECT.GET.<log>`."""
        subject = f"{self._subjects.prefix}.{key.tenant}.{key.session}.{kind}"
        request = {"seq": 1, "next_by_subj": subject, "batch": _MANY, "max_bytes": _MANY_BYTES}
        async for batch in self._api.batches(self.name, request):
            for one in batch:
                yield self._subjects.parse(one.headers["Nats-Subject"])[0], one

    async def get(self, key: SessionKey, kind: SessionKind, seq: int) -> Stored | None:
        """Read one entry of a session; None if it is gone. Needs `$JS.API.DIRECT.GET.<log>`."""
        request = {"seq": seq, "next_by_subj": self._subjects.of(key, kind), "batch": 1}
        async with contextlib.aclosing(self._api.batches(self.name, request)) as batches:
            async for (one,) in batches:
                return one if one.seq == seq else None
        return None

    async def delete(self, seq: int) -> None:
        """Remove one entry. Needs `$JS.API.STREAM.MSG.DELETE.<log>`."""
        await self._api.api(
            f"$JS.API.STREAM.MSG.DELETE.{self.name}", json.dumps({"seq": seq, "no_erase": True}).encode()
        )
