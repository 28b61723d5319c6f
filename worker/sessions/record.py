"""The state of one session as read from its log: history, answered ids and pending requests.

Pure: entries in, state out. Not thread-safe: only one caller at a time may change it, which
`session_log` ensures.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
from msgspec import UNSET

from turnkeep_client.log import BUILD_HEADER, EXPECT_HEADER, HISTORY_HEADER, PARTS_HEADER, words
from turnkeep_client.messages import (
    Append,
    Close,
    Closed,
    Failed,
    Generate,
    Open,
    UnknownResult,
    decode_asked,
)
from turnkeep_client.session_log import changes_session
from worker.wire.written import worker_result

from .answered_ids import AnsweredAt, AnsweredIds
from .attachments import Checkpoint
from .history import DivergedError
from .pending import asked_at, pending_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.messages import Asked, Request, Result
    from worker.wire.consistent_reads import StoredMessage

    from .fold import Fold
    from .history import TokenHistory
    from .pending import PendingRequest


log = structlog.get_logger()


#: Approximate bytes of a session, of each token (its id, and its text twice), and of each prompt or answer.
_SIZE_BYTES: Final = 12_000
_TOKEN_BYTES: Final = 16
_SEGMENT_BYTES: Final = 1_000
#: Number of results between two checkpoints; opening a session replays about as many.
_CHECKPOINT_EVERY: Final = 256


class ResultParts(NamedTuple):
    """The values that belong to a result; each is None if there is none, or the log has lost it."""

    #: The history that a fork starts with, or the encoded tokens of an input.
    value: TokenHistory | str | None = None
    #: The request that the result answers.
    asked: Asked | None = None


class Record:
    """One session's state, computed by applying its results in the order of the log. Starts empty.

    Each result has the request that it answers. Of the requests on `in`, only those without a result matter:
    they are read in pages behind the last result, so a long queue takes no memory.
    """

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self.history: TokenHistory = fold.begin(datetime.fromtimestamp(0, UTC))
        self.answered_ids = AnsweredIds()
        self.pending: deque[PendingRequest] = deque()
        #: Whether all results were read; until then the log may have results after `out_seq`.
        self.folded = False
        #: Whether another worker has stored a result after the first reading: then this record is stale.
        self.overtaken = False
        self.has_more = False  # whether the log has more requests after `in_seq`
        #: Sequence of the first result that counts: the first one read, or a checkpoint's, or a close's.
        self.first_out = 0
        self.in_seq = 0  # requests up to this sequence were read, or have a result
        self.out_seq = 0
        #: Number of entries of `out` that answer no request: no worker publishes such entries.
        self.num_foreign = 0
        self.diverged: str | None = None  # why this worker cannot continue the log; None if it can
        self.is_unreadable = False  # whether `mark_diverged` was called before the first reading
        #: Sequence of the last applied request whose result has a digest of the history; 0 if there is none.
        self.proven_seq = 0
        self._last: tuple[PendingRequest, Result] | None = None  # the last result, and what it answers
        self._last_out = 0  # sequence of the entry of `out` that was read or stored last; 0 if unknown
        self._is_begun = False  # whether a result was read that changed the session
        self._lost_out = 0  # the first result that the log has lost
        self._cancelled_before = 0  # a close at this sequence cancels the requests before it
        self._answered: set[int] = set()  # requests behind `in_seq` that have a result
        self._last_position = 0  # from the last result that changed the history
        self._checkpoint_seq = 0  # the request of the checkpoint that the record started from
        self._num_since_checkpoint = 0  # results since the last checkpoint

    def resume(self, checkpoint: Checkpoint) -> None:
        """Fill an empty record from a checkpoint; then only later results need to be added."""
        self.history, self.answered_ids = checkpoint.history, checkpoint.answered
        if not self.history.exists:  # the default policy may have changed since
            self.history = replace(self.history, policy=self._fold.policy)
        self._last_position = 0 if self.history.closed else self.history.position
        # Not the sequence of the checkpoint's result: results of later requests may lie before it.
        self.in_seq = self.out_seq = self._checkpoint_seq = checkpoint.in_seq
        self._is_begun = not self.history.closed  # a closing result may have left the log

    @property
    def size_bytes(self) -> int:
        """The memory that the session takes, approximately."""
        history = self.history
        num_bytes = _TOKEN_BYTES * history.position + _SEGMENT_BYTES * history.conversation.num_segments
        return _SIZE_BYTES + num_bytes + self.answered_ids.size_bytes

    @property
    def position(self) -> int:
        """The session's position; 0 while the session is closed.

        If this worker cannot continue the log, this is the last position that the log states.
        """
        if self.diverged is not None:
            return self._last_position
        return 0 if self.history.closed else self.history.position

    def next_checkpoint(self, in_seq: int) -> Checkpoint | None:
        """Return a checkpoint of the session after the request at `in_seq`; None if none is due yet.

        The result of that request must contain a digest of the history. No checkpoint is due while an earlier
        request is pending. If it returns one, the next is due only after as many results again.
        """
        waits = self.pending[0].seq < in_seq if self.pending else False
        is_due = self._num_since_checkpoint >= _CHECKPOINT_EVERY
        if not is_due or self.diverged or waits or in_seq > self.in_seq:
            return None
        self._num_since_checkpoint = 0
        return Checkpoint(in_seq, self.history, self.answered_ids.copy())

    def history_before(self, pending: PendingRequest) -> TokenHistory:
        """Return the history that a request is added to; an empty one if the session begins with it."""
        history = self.history
        return history if history.exists or history.closed else self._fold.begin(pending.began)

    def take_last(self) -> tuple[PendingRequest, Result] | None:
        """Return the last result read, after its request; None if that is gone, or when called again."""
        last, self._last = self._last, None
        return last

    def has_result(self, seq: int) -> bool:
        """Whether the request at `seq`, which was not read yet, is known to have a result."""
        return seq in self._answered

    def add_result(self, entry: StoredMessage, parts: ResultParts) -> None:
        """Apply the next result; `parts` has what is stored besides it.

        Skips results that the checkpoint includes, and ignores entries that no worker can have written (see
        `worker_result`) or whose request already has a result. Once `folded`, any other result is another
        worker's: it is not applied, and marks the record as `overtaken`.
        """
        self.out_seq = max(self.out_seq, entry.seq)
        result = worker_result(entry)
        self._note_hole(entry, result)
        seq = (result.seq or 0) if result else 0
        if 0 < seq <= self._checkpoint_seq:  # the checkpoint includes it, and what is before it
            self._lost_out = 0
            self.first_out = self.first_out or (entry.seq if seq == self._checkpoint_seq else 0)
        elif result is None or self._is_answered(seq):
            self._ignore(entry)
        elif self.folded:
            self.overtaken = True
        else:
            self.first_out = self.first_out or entry.seq
            self._add_result(entry, result, parts)

    def _is_answered(self, seq: int) -> bool:
        waits = seq > self.in_seq or any(one.seq == seq for one in self.pending)
        return seq in self._answered or not waits

    def _note_hole(self, entry: StoredMessage, result: Result | None) -> None:
        """Note which result is missing from the log; each result names the one before it."""
        before, self._last_out = self._last_out, entry.seq
        fence = entry.headers.get(EXPECT_HEADER, "")
        if self._is_begun and before and fence.isdecimal() and int(fence) > before:
            self._lost_out = self._lost_out or int(fence)
        self._is_begun = self._is_begun or (result is not None and changes_session(result))

    def is_next(self, pending: PendingRequest) -> bool:
        """Whether no earlier request waits for a result; the request itself may not be read yet."""
        return all(pending.seq <= one.seq for one in self.pending)

    def lacks_result(self, pending: PendingRequest) -> bool:
        """Whether a request still has no result, as far as the log was read."""
        return pending in self.pending or (pending.seq > self.in_seq and not self.has_result(pending.seq))

    def add_requests(self, entries: Sequence[StoredMessage], num_more: int) -> None:
        """Queue the next requests, except those with a result; the log has `num_more` after them.

        All results that were stored before the requests were read must have been added.
        """
        self.has_more = num_more > 0
        for entry in entries:
            if entry.seq <= self.in_seq:
                continue
            self.in_seq = entry.seq
            if entry.seq in self._answered:
                self._answered.remove(entry.seq)
                continue
            self.pending.append(waiting := pending_at(entry))
            self._cancel_early(waiting)
            if isinstance(waiting.request, Close) and waiting.request.cancel:
                self.cancel_before(entry.seq)

    def end_fold(self) -> None:
        """End the first reading of the log; mark the record as diverged if a result is lost."""
        self.folded = True
        if self._lost_out and self.diverged is None:
            self.mark_diverged(f"the log has lost the result at sequence {self._lost_out}")

    def mark_diverged(self, why: str) -> None:
        """Stop reading the log; from now on requests fail with `history_diverged`."""
        self.diverged = f"{why}: go on in a new session"
        self.is_unreadable = not self.folded

    def note_committed(
        self, pending: PendingRequest, result: Result, out_seq: int, history: TokenHistory
    ) -> None:
        """Update the record: the request's result is in the log, and `history` is the session after it."""
        if pending in self.pending:
            self.pending.remove(pending)
        else:
            self._answered.add(pending.seq)
        self.out_seq = self._last_out = out_seq
        self.history = history
        if isinstance(result, Closed) and result.repeat_of is None:
            self.diverged = None  # the next session of this name begins anew
            if isinstance(pending.request, Close) and pending.request.forget:
                self.answered_ids = self.answered_ids.behind(pending.seq)
        self._num_since_checkpoint += 1
        if pending.request is not None and _is_first(result):
            self.answered_ids.add(pending.request.id, AnsweredAt(pending.seq, out_seq))

    def cancel_before(self, seq: int) -> None:
        """Cancel the pending appends and generates that were stored before the close at `seq`."""
        self._cancelled_before = max(self._cancelled_before, seq)
        for pending in self.pending:
            self._cancel_early(pending)

    def _cancel_early(self, pending: PendingRequest) -> None:
        if pending.seq < self._cancelled_before and isinstance(pending.request, Append | Generate):
            pending.cancelled = True

    def _add_result(self, entry: StoredMessage, result: Result, parts: ResultParts) -> None:
        """Apply a result, and note that its request is answered."""
        seq, pending = result.seq or 0, None
        asked = parts.asked or decode_asked(entry.body)
        if asked is not None and asked.request is not UNSET:
            pending = asked_at(seq, asked, bytes(asked.request))
        request = pending.request if pending else None
        self._num_since_checkpoint += 1
        self._last = (pending, result) if pending else None
        changes = changes_session(result)
        if changes and isinstance(request, Close):
            self._begin_behind(seq, entry, forgets=request.forget)
        if request is not None and _is_first(result):
            self.answered_ids.add(request.id, AnsweredAt(seq, entry.seq))
        if pending is not None:
            self.history = self.history_before(pending)
        if changes:
            # A close of a session that does not exist belongs to a forgotten session, whose entries are gone:
            # its digest proves nothing here. Neither does the digest of a repeat, or of a request that was
            # cancelled behind an unanswered close.
            proves = self.history.exists or not isinstance(result, Closed)
            self.proven_seq = seq if proves else self.proven_seq
            self._last_position = 0 if isinstance(result, Closed) else result.position or 0
            may_follow = self.diverged is None and not self._lost_out
            if may_follow and pending is None:
                self._stop(entry, "the request of a result is gone from the log")
            elif may_follow:
                self._replay(entry, request, result, parts.value, proves=proves)
            # A worker answers out of order only to cancel or expire a request.
            self.in_seq = max(self.in_seq, seq)
            self._answered = {one for one in self._answered if one > seq}
        else:
            self._answered.add(seq)

    def _begin_behind(self, seq: int, closed: StoredMessage, *, forgets: bool) -> None:
        """Ignore what is before a close if it cannot be continued: its removal may have been interrupted.

        Ignore it always if the close `forgets` the session. Then only the ids of requests behind the close
        stay, which may have been cancelled before it was answered.
        """
        if forgets:
            self.answered_ids = self.answered_ids.behind(seq)
        elif self.diverged is None and not self._lost_out:
            return
        self.history, self.first_out = self._fold.begin(closed.stored), closed.seq
        self.proven_seq = self._lost_out = 0
        if not self.is_unreadable:
            self.diverged = None

    def _replay(
        self,
        out: StoredMessage,
        request: Request | None,
        result: Result,
        parts: TokenHistory | str | None,
        *,
        proves: bool,
    ) -> None:
        """Extend the history by an answered request; if `proves`, compare it with the result's digest."""
        if request is None or isinstance(result, UnknownResult):
            what = f"with a {result.type}" if isinstance(result, UnknownResult) else "in a form"
            version = words(out.headers.get(BUILD_HEADER, "")).get("version", "unknown")
            self.diverged = (
                f"a newer version ({version}) has answered the request at sequence {result.seq}, {what} that"
                " this version does not know: serve the session with that version, or go on in a new session"
            )
            return
        base, packed = (None, parts) if isinstance(parts, str) else (parts, None)
        why = ""
        if parts is None and PARTS_HEADER in out.headers and not isinstance(request, Open):
            why = "the tokens of a result's input are gone from the log"
        else:
            try:
                self.history = self._fold.replay(self.history, request, result, base, packed)
            except DivergedError as error:
                why = str(error)
        if not why and proves and self.history.digest() != out.headers[HISTORY_HEADER]:
            why = "the entries up to a result come to other tokens than it states"
        if why:
            self._stop(out, why)

    def _stop(self, out: StoredMessage, why: str) -> None:
        where = f"the log cannot be continued from sequence {out.seq} on"
        self.diverged = f"{where}: {why}; go on in a new session"

    def _ignore(self, entry: StoredMessage) -> None:
        self.num_foreign += 1
        if self.num_foreign == 1:
            log.warning("ignoring this and further entries that are no results here", seq=entry.seq)


def _is_first(result: Result) -> bool:
    """Whether a result is the first of its request id: no repeat, and no failure for a reused id."""
    return result.repeat_of is None and not (isinstance(result, Failed) and result.code == "id_conflict")
