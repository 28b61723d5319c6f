"""One session's log: reads it forward into a `Record`, and stores results directly after the last known one.

Belongs to a `ServedSession`, which says when to read and what to store. Knows nothing of how requests are
carried out, nor of other sessions.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from anyio import Lock
from msgspec import UNSET
from msgspec.structs import replace

from turnkeep_client.checkpoints import Link
from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import BUILD_HEADER, CHECKPOINT_HEADER, HISTORY_HEADER, MODEL_HEADER, PARTS_HEADER
from turnkeep_client.messages import (
    Appended,
    Asked,
    Close,
    Failed,
    Generate,
    Generated,
    Opened,
    decode_asked,
    decode_linked,
    decode_request,
    decode_result,
    encode,
    encode_answer,
    encode_repeat,
)
from turnkeep_client.session_log import changes_session
from worker.process.concurrency import in_thread
from worker.wire.chunks import PublishedChunks
from worker.wire.consistent_reads import StoredMessage
from worker.wire.fence import FencedError
from worker.wire.journal import TooLargeError

from .attachments import SessionAttachments
from .earlier_tokens import EarlierTokens
from .history import RefusedError
from .images import SessionImages
from .pending import pending_at
from .record import Record, ResultParts
from .results import Outcome, failed, is_close, withdrawn_result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.names.tokens import Tokens
    from turnkeep_client.messages import Request, Result
    from turnkeep_client.subjects import SessionKey
    from worker.wire.intake import Delivery

    from .pending import PendingRequest
    from .services import Services


class AnsweredRequest(NamedTuple):
    """An answered request with its result and the result's body; `request` is None if the log has lost it."""

    request: Request | None
    result: Result
    body: bytes


class FencedLog:
    """Reads and extends one session's log. Event loop only; reads and commits exclude each other.

    `record` is the state read so far. After a `FencedError` it is stale: `drop_record`, then read again.
    """

    def __init__(self, key: SessionKey, services: Services) -> None:
        self.key = key
        self.record = Record(services.fold)
        self.server = services.journal.server  # the server process that the record was read from
        self.is_doubted = False  # whether the session may have crashed a worker
        self.first_seq = 0  # all requests below this sequence were delivered before
        self.num_failures = 0  # consecutive failures to read the log or answer, for unknown reasons
        self._delivered: Delivery | None = None  # the first delivery since the log was read
        self._services = services
        self._attachments = SessionAttachments(key, services)
        self._rung_seq = 0  # the newest request that is known to be in the log
        self._rung_server = self.server  # the server process that has that request
        self._lock = Lock(fast_acquire=True)

    @property
    def has_work(self) -> bool:
        """Whether there are requests without a result, or entries to read."""
        record = self.record
        behind = self._delivered is not None or self._rung_seq > record.in_seq
        return bool(record.pending) or record.has_more or behind

    @property
    def first_waiting(self) -> int | None:
        """The sequence of the first request without a result; None if there is none.

        None too if the session may have crashed a worker.
        """
        if self.is_doubted or self.record.pending:
            return None if self.is_doubted else self.record.pending[0].seq
        known = (self._delivered.seq if self._delivered else 0, self._rung_seq)
        return next((seq for seq in known if seq > self.record.in_seq), None)

    @property
    def next_request(self) -> PendingRequest | None:
        """The first request without a result that was read, else the delivered one; None without any."""
        if self.record.pending or self._delivered is None:
            return next(iter(self.record.pending), None)
        one = self._delivered
        return pending_at(StoredMessage(one.seq, one.stored, one.body, {}))

    @property
    def is_stale(self) -> bool:
        """Whether `record` may be out of date: another worker stored a result, or the server restarted."""
        return self.record.overtaken or self.server != self._services.journal.server

    def check_fresh(self) -> None:
        """Raise `FencedError` if the log may differ from the record."""
        if self.is_stale:
            raise FencedError("a result is not this worker's, or the server has restarted")

    def ring(self, delivery: Delivery) -> None:
        """Note that the log has a request, and whether its earlier delivery may have crashed a worker."""
        self._note_rung(delivery.seq)
        self._delivered = self._delivered or delivery
        self.first_seq = delivery.first_seq
        self.is_doubted = self.is_doubted or delivery.again

    def unring(self) -> None:
        """Forget the deliveries, since another worker has the session now."""
        self._delivered, self._rung_seq = None, 0

    def _note_rung(self, seq: int) -> None:
        server = self._services.journal.server
        if self._rung_server != server:
            self._rung_server, self._rung_seq = server, 0  # another request may be there now
        self._rung_seq = max(self._rung_seq, seq)

    async def catch_up(self, *, beyond_bell: bool = False) -> None:
        """Read the log up to the next request without a result, or to the last delivered request.

        With `beyond_bell`, or if the log was not read before, also read requests that were not delivered yet.
        Raises `FencedError` if another worker has continued the session.
        """
        if not beyond_bell:
            self._delivered = None
        async with self._lock:
            record = self.record  # the pages read belong to this record, not to its replacement
            self.check_fresh()
            if not record.folded:
                await self._fold(record)
            elif beyond_bell or (not record.pending and self.has_work):
                await self._read_page(record)
                if record.overtaken:
                    raise FencedError(f"a result up to sequence {record.out_seq} is not this worker's")

    async def _fold(self, record: Record) -> None:
        """Read requests with their results, page by page, up to the first request without a result."""
        services, key = self._services, self.key
        async with services.reading.enter(key.tenant), services.retention.lock(key):
            try:
                await self._read_log(record)
            except BaseException:
                self.drop_record()  # in a half-read record, answered requests would seem pending
                raise
        if record.pending and record.pending[0].seq < self.first_seq:
            self.is_doubted = True  # a new request came before the redelivery of one that may end workers
        elif not self.is_doubted:
            record.take_last()

    async def _read_log(self, record: Record) -> None:
        """Read the log into an empty record: from a checkpoint, else from the beginning of the log."""
        if record.diverged is None and (found := await self._attachments.find()):
            record.resume(found.checkpoint)
            await self._add_results(record, found.results)
        record.has_more = True
        while record.has_more and not record.pending:
            await self._read_page(record)
        await self._end_fold(record)

    async def _read_page(self, record: Record) -> None:
        """Read the next requests, unless some are pending, and the results that were stored until then."""
        rung_seq, journal, more = self._rung_seq, self._services.journal, 1
        # The results last: each request that had left the queue by then has one.
        queue = None if record.pending else await journal.page(self.key, "in", record.in_seq)
        while more:
            results, more = await journal.page(self.key, "out", record.out_seq)
            await self._add_results(record, results)
        if queue is None:
            return
        record.add_requests(*queue)
        if not record.has_more:
            record.in_seq = max(record.in_seq, rung_seq)  # also if the entry was removed by now

    async def _add_results(self, record: Record, results: Sequence[StoredMessage]) -> None:
        """Add results, with what is stored besides them: of one result at a time, as it may be long."""
        num_foreign = record.num_foreign
        for entry in results:
            record.add_result(entry, await self._parts(entry))
        self._services.telemetry.ignored["result"] += record.num_foreign - num_foreign

    async def _end_fold(self, record: Record) -> None:
        # Another worker may have removed the session meanwhile: removals begin with the first results.
        for seq in (record.first_out, record.pending[0].seq if record.pending else 0):
            if seq and await self._services.journal.entry(seq) is None:
                raise FencedError(f"the entry at sequence {seq} has left the log")
        record.end_fold()
        if record.proven_seq and (checkpoint := record.next_checkpoint(record.proven_seq)):
            self._attachments.add(checkpoint)
            # The next result must name it: a session that is evicted after each result would read ever more.
            await self._attachments.stored()

    async def _parts(self, entry: StoredMessage) -> ResultParts:
        """Read what is stored besides a result."""
        value, asked = None, decode_asked(entry.body)
        if (link := entry.headers.get(PARTS_HEADER)) is not None:
            packed = await self._attachments.read(Link.parse(link))
            if packed is not None:
                value = await self._attachments.base(packed) if _opens(entry) else packed.decode()
        return ResultParts(value, await self._whole(asked))

    async def _whole(self, asked: Asked | None) -> Asked | None:
        """Return a request as its result has it, read from the log if it is long; None if it is gone."""
        if asked is None or not asked.link:
            return asked
        return decode_linked(await self._attachments.read(Link.parse(asked.link)))

    def drop_record(self) -> None:
        """Forget what was read: the next `catch_up` reads the log again. Sets `done` of pending requests.

        After `max_attempts` failures, that reading finds out no more than answered ids and positions.
        """
        record, self.record = self.record, Record(self._services.fold)
        if self.num_failures >= self._services.max_attempts:
            self.record.mark_diverged("its log cannot be read, this worker's log says why")
        self._attachments.end()
        self._attachments = SessionAttachments(self.key, self._services)
        server = self._services.journal.server
        self._note_rung(record.in_seq if self.server == server else 0)
        self.server = server
        for pending in record.pending:
            pending.done.set()

    async def all_tokens(self) -> list[Tokens]:
        """Return every token sequence of the session that may have KV, to erase it; the present one is last.

        A rewind, or a template that changes earlier text, leaves tokens that do not begin the present ones:
        so the log is read from its beginning. Requests that changed nothing may have KV too, so they are
        tokenised again, except if the session may have crashed a worker.
        """
        services, present = self._services, self.record.history.tokens
        earlier = EarlierTokens(services.fold)
        if not self.record.is_unreadable:
            last_out = self.record.out_seq
            async with services.retention.lock(self.key):
                async for entry in services.journal.every(self.key, "out", 0):
                    if entry.seq > last_out:
                        break
                    earlier.add_result(entry, await self._parts(entry))
        for history, request in earlier.unknown if not self.is_doubted else ():
            with suppress(RefusedError):
                grids = await SessionImages(self.key, services).grids(history, request, stores=False)
                extended = await in_thread(services.fold.extend, history, request, grids)
                earlier.known.append(extended.history.tokens)
        return [*earlier.known, present]

    async def find_waiting(self, request_id: str) -> PendingRequest | None:
        """Find a request without a result: first among the pending ones, then in the rest of the log.

        Of requests with the same id only the first counts: if it has a result, the others will repeat it.
        """
        for pending in self.record.pending:
            if pending.id == request_id:
                return pending
        async for entry in self._services.journal.every(self.key, "in", self.record.in_seq):
            pending = pending_at(entry)
            if pending.id == request_id:
                return None if self.record.has_result(entry.seq) else pending
        return None

    async def check_unchanged(self) -> None:
        """Raise `FencedError` if another worker has stored a result since the log was read.

        The other worker may even have closed and removed the session. Call this before the first chunk is
        published, as chunks cannot be withdrawn. Skips entries that are not results.
        """
        record, journal = self.record, self._services.journal
        async with self._lock:
            while await journal.last_seq(self.key, "out") != record.out_seq:
                if not await self._skips(record):
                    raise FencedError("its last result is not that which was read")

    async def _skips(self, record: Record) -> bool:
        """Read on in `out`; return whether there are entries, none of which is a result of the session."""
        entries, _ = await self._services.journal.page(self.key, "out", record.out_seq)
        await self._add_results(record, entries)
        return bool(entries) and not record.overtaken

    async def find_answered(self, request_id: str) -> AnsweredRequest | None:
        """Read an id's first request and its result from the log; None if the log has no such result."""
        answered = self.record.answered_ids
        while (found := answered.find(request_id)) is not None:
            entry = await self._services.journal.entry(found.out_seq)
            if entry is not None:
                return await self._answered(request_id, found.in_seq, entry.body)
            if answered.find(request_id) == found:
                answered.drop(request_id)  # its session was removed
        return None

    async def _answered(self, request_id: str, in_seq: int, body: bytes) -> AnsweredRequest | None:
        """Return what a result's body says; None if it is not the first result of this id."""
        request, asked = None, decode_asked(body)
        with suppress(InvalidMessageError):
            result = decode_result(body)
            if asked is None or (result.id, result.seq) != (request_id, in_seq):
                return None
            whole = await self._whole(asked)
            sent = whole.request if whole else UNSET
            request = None if sent is UNSET else decode_request(bytes(sent))
            return AnsweredRequest(request, result, body)
        return None

    async def repeated(self, request: Request, pending: PendingRequest) -> Outcome | None:
        """Build the outcome of a request whose id was used before: that id's first result; None for a new id.

        Raises `RefusedError` if the id is of another request, or of one that is gone from the log.
        """
        known = await self.find_answered(request.id)
        if known is None:
            return None
        if known.request is None:
            why = "this id was used before, and its request is gone from the log"
            raise RefusedError("invalid_request", why)
        if request != known.request:
            raise RefusedError(
                "id_conflict",
                f"the id {request.id!r} was used before for another request (sequence"
                f" {known.result.seq}); a new request needs a new id",
            )
        result = replace(known.result, seq=pending.seq, repeat_of=known.result.seq)
        return Outcome(result, self.record.history, first=known.body)

    async def commit(
        self, pending: PendingRequest, outcome: Outcome | None, *, waits: bool = False
    ) -> Result | None:
        """Store a result and the history after it; return what was stored, a failure if it was too large.

        Without an `outcome`, the request was cancelled while it waited: its result changes nothing, and may
        be stored out of order. With `waits`, it is stored only if the request still waits behind another one,
        since the next request may have been begun. Returns None if nothing was stored: because of `waits`, or
        because the request already has a result, or the log was read again meanwhile. Raises `FencedError` if
        the log has a result that this worker did not know.
        """
        record = self.record
        closes = outcome is not None and is_close(outcome.result)
        if closes:
            await self._attachments.finish()  # no checkpoint may be stored after the session was removed
        # If the ack of a close is late, the log must still have its result to show that it was stored.
        removal = self._services.retention.lock(self.key) if closes else nullcontext()
        async with self._lock, removal:
            # An empty record, of a log that is about to be read again, knows of no result.
            if record is not self.record or not record.folded or not record.lacks_result(pending):
                return None
            if waits and record.is_next(pending):
                return None
            if outcome is not None and pending not in record.pending:  # the record must have come to it
                return None
            self.check_fresh()
            if is_withdrawal := outcome is None:
                # Not built earlier, as the result of another request may just have been stored.
                outcome = Outcome(withdrawn_result(pending, record.history, record.position), record.history)
            outcome, out_seq = await self._store(pending, outcome)
            record.note_committed(pending, outcome.result, out_seq, outcome.history)
            pending.done.set()
            if not is_withdrawal and not isinstance(outcome.result, Failed):
                record.proven_seq = pending.seq
                if checkpoint := record.next_checkpoint(pending.seq):
                    self._attachments.add(checkpoint)
            return outcome.result

    async def survived(self) -> None:
        """Remove the session's attempt notes from the log, since this worker has survived the request."""
        if self.is_doubted:
            await self._services.journal.purge(self.key, "attempt")
            self.is_doubted = False

    async def published(self, pending: PendingRequest) -> PublishedChunks:
        """Read a request's published chunks, which clients may have seen; only a generate has any."""
        request = pending.request
        if not isinstance(request, Generate):
            return PublishedChunks([])
        return await self._services.journal.chunks.read(self.key, request.id, pending.seq, pending.stored)

    async def is_streamed(self, pending: PendingRequest) -> bool:
        """Return whether clients may have seen tokens of a request; if not, seal its token stream.

        After the seal no worker can publish any. Raises `FencedError` if one publishes some before it.
        """
        published, request = await self.published(pending), pending.request
        if isinstance(request, Generate) and not published.chunks:
            await self._services.journal.chunks.seal(
                self.key, request.id, pending.seq, published.last_seq, server=self.server
            )
        return bool(published.chunks)

    async def _store(self, pending: PendingRequest, outcome: Outcome) -> tuple[Outcome, int]:
        """Commit a result directly after the last known one; if it is too large, commit a failure.

        Returns what was committed, and its sequence. If the commit is refused only because of newer messages
        on `out` that are not valid results of this session, it skips them and tries again; otherwise it
        raises `FencedError`.
        """
        record, server = self.record, self.server
        body, headers = await self._message(pending, outcome)
        while True:
            try:
                seq = await self._services.journal.commit(
                    self.key, body, record.out_seq, headers, server=server
                )
            except TooLargeError as error:
                if isinstance(outcome.result, Failed):
                    raise
                why = f"the result is larger than the log takes ({error}); ask for fewer tokens at a time"
                result = failed(pending, record.position, "invalid_request", why)
                outcome = Outcome(result, self.record.history)
                body, headers = await self._message(pending, outcome)
            except FencedError:
                skips = await self._skips(record)
                # It may be reset by another task, perhaps for another server process.
                if not skips or self.is_stale or record is not self.record:
                    raise
            else:
                return outcome, seq

    async def _message(self, pending: PendingRequest, outcome: Outcome) -> tuple[bytes, dict[str, str]]:
        """Return the body and the headers of a result; first store what is too long for them."""
        result, history = outcome.result, outcome.history
        headers = {MODEL_HEADER: self._services.model, BUILD_HEADER: self._services.build}
        if not isinstance(result, Failed):
            headers[HISTORY_HEADER] = history.digest()
        if self._attachments.link is not None:
            headers[CHECKPOINT_HEADER] = str(self._attachments.link)
        if result.repeat_of is not None:
            asked = await self._asked(pending)
            repeat = encode_repeat(outcome.first, asked, seq=pending.seq, repeat_of=result.repeat_of)
            return repeat, headers
        if isinstance(result, Opened) and result.parent:
            headers[PARTS_HEADER] = str(await self._attachments.store_base(pending.seq, history))
        elif not changes_session(result) and pending.change is not None:  # so that any model can forget it
            change = msgspec.json.encode(pending.change)
            headers[PARTS_HEADER] = str(await self._attachments.store(change))
        elif isinstance(result, Appended | Generated) and result.change:
            packed = result.change.input
            if len(packed) > self._services.limits.most_input:
                headers[PARTS_HEADER] = str(await self._attachments.store(packed.encode()))
                result = replace(result, change=replace(result.change, input=""))
        return encode_answer(result, await self._asked(pending)), headers

    async def _asked(self, pending: PendingRequest) -> Asked:
        """Return a request as its result has it; store a long one first."""
        if pending.request is None:  # perhaps no JSON, or none that a reader could decode
            sent = msgspec.json.encode(pending.body.decode(errors="replace"))
            return Asked(stored=pending.stored, request=msgspec.Raw(sent))
        if isinstance(pending.request, Close):  # short, since whoever removes sessions reads no links
            return Asked(stored=pending.stored, request=msgspec.Raw(encode(pending.request)))
        headers = dict(pending.own_headers)
        entry = None if pending.body else await self._services.journal.entry(pending.seq)
        body = pending.body or (entry.body if entry else encode(pending.request))
        asked = Asked(stored=pending.stored, request=msgspec.Raw(body), headers=headers)
        if max(len(body), pending.size_bytes) <= self._services.limits.most_request:
            return asked
        link = await self._attachments.store(msgspec.json.encode(asked))
        return Asked(stored=pending.stored, link=str(link))


def _opens(entry: StoredMessage) -> bool:
    with suppress(InvalidMessageError):
        return isinstance(decode_result(entry.body), Opened)
    return False
