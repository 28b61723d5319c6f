"""Stores an exported session in a log: all of it, or nothing. Knows nothing of files or KV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import msgspec

from turnkeep_client.checkpoints import CheckpointMessage, Link, digest
from turnkeep_client.errors import LastSequenceError, TurnkeepError
from turnkeep_client.log import BEGAN_HEADER, PARTS_HEADER, SEED_HEADER, STORED_HEADER
from turnkeep_client.messages import Asked, Close, Closed, decode_request, decode_result
from turnkeep_client.stream import UnsentMessage

from .session_file import HEADERS, CopyError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.subjects import SessionKey

    from .session_file import ExchangeLine

#: Most messages of one atomic batch; JetStream takes at most 1,000.
_TOGETHER: Final = 900
#: Attempts to store a batch while others write to the log; the batch is halved after every few attempts.
_ATTEMPTS: Final = 60
#: Most bytes of a result's extra data in one message.
_PART_BYTES: Final = 128 * 2**10


class Import:
    """Stores a session in a log, each request together with its result: so no worker answers it again."""

    def __init__(self, client: Client, key: SessionKey) -> None:
        self._stream, self._subjects, self._key = client.stored, client.subjects, key
        self._new_seqs: dict[int, int] = {}
        self._first: tuple[int, UnsentMessage] | None = None

    async def check(self) -> None:
        """Raise `CopyError` if the log has a session of this name already."""
        if await self._stream.subjects(self._key.tenant, self._key.session):
            raise CopyError(
                f"the log has a session {self._key} already; import it under another name, with --as"
            )

    async def run(self, lines: Sequence[ExchangeLine], progress: Callable[[int, int, str], None]) -> None:
        """Store all exchanges, or none; call `progress` with the numbers of stored and of all, and a word.

        Raises `CopyError`, which says if a stored part cannot be removed, and `TurnkeepError`.
        """
        await self.check()
        await self._stream.allow_batches()
        done = 0
        try:
            while done < len(lines):
                done += await self._store(_together(lines[done:]), first=done == 0)
                progress(done, len(lines), "importing")
            for line in lines:  # last: they alone would be a session of this name
                for digest, body in line.images.items():
                    await self._stream.put_image_entry(self._key, digest, body)
        except BaseException as error:
            await self._remove(error, is_begun=done > 0)
            raise

    async def _remove(self, error: BaseException, *, is_begun: bool) -> None:
        """After `error`, remove the stored part of the session. Raises `CopyError` if that fails."""
        try:
            if is_begun or self._first is not None:
                await self._stream.settle(self._key)  # the server may still be storing a batch
            if is_begun or await self._is_stored():
                await self._stream.purge(self._key)
        except TurnkeepError as why:
            raise CopyError(
                f"{str(error) or type(error).__name__}; a part of {self._key} may be in the log, since it"
                f" could not be removed ({why}); close that session with forget before you import it again"
            ) from None

    async def _is_stored(self) -> bool:
        """Whether the log has stored the import's first request, although the reply was lost.

        If not, the session of this name is another client's, begun meanwhile.
        """
        if self._first is None:
            return False
        seq, sent = self._first
        stored = await self._stream.get(self._key, "in", seq)
        return stored is not None and stored.body == sent.body and BEGAN_HEADER in stored.headers

    async def _store(self, lines: Sequence[ExchangeLine], *, first: bool) -> int:
        """Store these exchanges in one batch, fewer after failed attempts; return how many were stored."""
        for attempt in range(_ATTEMPTS):
            some = lines[: max(1, len(lines) >> (attempt // 6))]
            last = await self._stream.last_seq()
            if first:  # after `last_seq`: any entry stored since then makes `store` fail
                await self.check()
            messages = list(self._messages(some, last + 1, first=first))
            if first:
                self._first = last + 1, messages[0]
            try:
                await self._stream.store(messages, last)
            except LastSequenceError:  # somebody else has written, perhaps the same import
                self._first = None
                continue
            return len(some)
        raise CopyError("others write to the log all the time; import the session when it is less busy")

    def _messages(self, lines: Sequence[ExchangeLine], seq: int, *, first: bool) -> Iterator[UnsentMessage]:
        """Yield the messages to store, from sequence `seq` on; results refer to the new log's sequences."""
        for line in lines:
            copied = {BEGAN_HEADER: line.stored.isoformat()} if first else {}
            first = False
            if line.seed is not None:
                copied[SEED_HEADER] = str(line.seed)
            self._new_seqs[line.seq] = seq
            yield UnsentMessage(self._subjects.of(self._key, "in"), bytes(line.request), copied)
            seq += 1
            result = msgspec.json.decode(line.result, type=dict[str, msgspec.Raw])
            result["seq"] = msgspec.Raw(str(self._new_seqs[line.seq]).encode())
            if (of := result.get("repeat_of")) is not None:
                new = self._new_seqs.get(json.loads(bytes(of)), 1)
                result["repeat_of"] = msgspec.Raw(str(new).encode())
            answer = decode_result(bytes(line.result))
            is_close = isinstance(decode_request(bytes(line.request)), Close) and isinstance(answer, Closed)
            if is_close and answer.repeat_of is None:  # by this note workers remove the session later
                yield UnsentMessage(self._subjects.of(self._key, "closed"), b"", {})
                seq += 1
            headers: dict[str, str] = {name: line.headers[name] for name in HEADERS if name in line.headers}
            headers[STORED_HEADER] = line.answered.isoformat()
            if line.parts is not None:
                seq, headers[PARTS_HEADER] = yield from self._parts(line.parts, seq)
            result.pop("asked", None)  # its link, if it has one, is of the other log
            asked = Asked(stored=line.stored, request=line.request, headers=copied)
            if len(line.request) > _PART_BYTES:
                seq, link = yield from self._parts(msgspec.json.encode(asked), seq)
                asked = Asked(stored=line.stored, link=link)
            result["asked"] = msgspec.Raw(msgspec.json.encode(asked))
            yield UnsentMessage(self._subjects.of(self._key, "commit"), msgspec.json.encode(result), headers)
            seq += 1

    def _parts(self, value: bytes, seq: int) -> Generator[UnsentMessage, None, tuple[int, str]]:
        """Yield the messages of a long value, from sequence `seq` on; return the next sequence and a link."""
        link: Link | None = None
        for start in range(0, len(value), _PART_BYTES):
            part, before = value[start : start + _PART_BYTES], str(link) if link else ""
            message = CheckpointMessage(part, before=before).pack()
            yield UnsentMessage(self._subjects.of(self._key, "checkpoint"), message, {})
            link, seq = Link(seq, digest(message)), seq + 1
        return seq, str(link)


def _together(lines: Sequence[ExchangeLine]) -> Sequence[ExchangeLine]:
    """Return the first lines, at least one, whose messages fit into one batch."""
    num = 0
    for index, line in enumerate(lines):
        num += 5 + (len(line.parts or b"") + len(line.request)) // _PART_BYTES
        if index and num > _TOGETHER:
            return lines[:index]
    return lines
