"""A session's log as far as it was read: the history it folds to, which ids were answered, what is open.

Pure: entries in, state out. Whoever holds a record sees to it that one caller at a time changes it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog
from anyio import Event

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import HISTORY_HEADER, MODEL_HEADER
from turnkeep_client.messages import (
    Append,
    Closed,
    Failed,
    Generate,
    Generated,
    decode_request,
    decode_result,
)

from .answered import AnsweredAt, AnsweredIds
from .checkpoint import Delta
from .history import DivergedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyio import TaskHandle

    from turnkeep_client.messages import Chunk, Request, Result
    from worker.wire.journal import Entry

    from .checkpoint import Checkpoint
    from .history import Fold, History


log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Pending:
    """A request without a result.

    `request` is None where the body is no valid one; `error` says why, `named` is the id that it names.
    `stored` is when the log took it. `held_text` is what an answer that was ended early still had to say;
    `published` are its chunks in the token stream, where they are being read already.
    """

    seq: int
    request: Request | None
    error: str
    stored: datetime
    received_s: float = field(default_factory=monotonic)
    cancelled: bool = False
    expired: bool = False
    held_text: str = ""
    published: TaskHandle[list[Chunk]] | None = None
    named: str | None = None
    done: Event = field(default_factory=Event)

    @property
    def id(self) -> str | None:
        """The request's id; None where the body names no valid one."""
        return self.request.id if self.request else self.named

    @property
    def stopped(self) -> bool:
        """Whether it is to end where it is."""
        return self.cancelled or self.expired

    @property
    def deadline_s(self) -> float | None:
        """When it is to end, in seconds since 1970; None where it has the time that it takes.

        Counted from the log's own time, so that a restart gives it no more.
        """
        request = self.request
        if not isinstance(request, Append | Generate) or request.deadline_s is None:
            return None
        return self.stored.timestamp() + request.deadline_s

    @property
    def priority(self) -> int:
        """How much it is to be preferred to others that wait."""
        return self.request.priority if isinstance(self.request, Append | Generate) else 0

    @property
    def type(self) -> str:
        """The request's type, for counting."""
        return str(self.request.__struct_config__.tag) if self.request else "invalid"


#: So many results later the next checkpoint is due: opening a session folds no more, but for long turns.
_CHECKPOINT_EVERY: Final = 64


@dataclass(frozen=True, slots=True)
class _EarlyResult:
    """A result of a request that has not been read yet, or is being folded."""

    result: Result
    entry: Entry


class Record:
    """One session's state as its log tells it. Starts empty, before its first request.

    Requests and results are read separately, a page at a time: first results, then the requests that they
    answer. What is not read yet stays in the log, so a session with a long queue takes no more memory.
    """

    def __init__(self, fold: Fold, *, whole: bool = False) -> None:
        """`whole` keeps the conversation whole until what waits for that has its answer."""
        self._fold = fold
        self.whole = whole
        self.history: History = fold.begin(datetime.fromtimestamp(0, UTC))
        self.answered_ids = AnsweredIds()
        self.pending: deque[Pending] = deque()
        #: Whether the results up to now have been read; until then there may be more than `out_seq` tells.
        self.folded = False
        #: Whether another worker has stored a result since then: this is not the session any more.
        self.overtaken = False
        #: Whether the log has requests behind `in_seq`.
        self.has_more = False
        self.in_seq = 0
        self.out_seq = 0
        #: Entries of `out` that answer nothing: only somebody who may not publish there makes these.
        self.num_foreign = 0
        #: Why the log cannot be continued by this worker, if so.
        self.diverged: str | None = None
        #: The last request that was folded, if its result says what it made of the history.
        self.proven_seq = 0
        #: The last result, and before it its sequence and its request.
        self.last: tuple[int, Pending, Result] | None = None
        self._early: dict[int, _EarlyResult] = {}
        self._answered_unread: set[int] = (
            set()
        )  # requests that were not read yet, and have a result of this worker
        self._proof: Entry | None = None  # the last result that changed the history
        self._checkpoint_seq = 0  # the request of the checkpoint that this began with
        self._last_checkpointed = self.history.conversation  # as it was at the last checkpoint
        self._num_since_checkpoint = 0  # results since then

    def resume(self, checkpoint: Checkpoint) -> None:
        """Begin with a checkpoint, instead of the beginning of the log."""
        self.history, self.answered_ids = checkpoint.history, checkpoint.answered
        self._last_checkpointed = self.history.conversation
        # Results of later requests may have been stored before that of the checkpoint's own.
        self.in_seq = self.out_seq = self._checkpoint_seq = checkpoint.in_seq

    def next_delta(self, in_seq: int) -> Delta | None:
        """Return what the next checkpoint is to say, where one is due; of the history after this request.

        It is one whose result says what it made of the history, and with no request before it waiting.
        """
        waits = self.pending[0].seq < in_seq if self.pending else False
        if self._num_since_checkpoint < _CHECKPOINT_EVERY or self.diverged or waits or in_seq > self.in_seq:
            return None
        delta = Delta.of(in_seq, self.history, self._last_checkpointed, self.answered_ids.drain_added())
        if self.folded or not self.whole:
            self.history = replace(self.history, conversation=self.history.conversation.shortened())
        self._last_checkpointed, self._num_since_checkpoint = self.history.conversation, 0
        return delta

    def has_result(self, seq: int) -> bool:
        """Whether the result of a request that was not read yet is known."""
        return seq in self._early or seq in self._answered_unread

    def add_results(self, entries: Sequence[Entry]) -> bool:
        """Note results; says whether there was any for a request that had none.

        What does not fit is passed over: what is no result, one for a request that came later or has been
        answered, and one that does not say what it made of the history, as every worker's does.
        """
        found = False
        waiting = {pending.seq for pending in self.pending}
        for entry in entries:
            self.out_seq = max(self.out_seq, entry.seq)
            recorded = _early_result(entry)
            seq = recorded.result.seq if recorded else None
            if seq and seq <= self._checkpoint_seq:
                continue  # the checkpoint has it
            if recorded and seq and seq not in self._early and (seq > self.in_seq or seq in waiting):
                self._early[seq] = recorded
                found = True
            else:
                self._ignore(entry)
        self.overtaken = self.overtaken or (found and self.folded)
        return found

    def lacks_result(self, pending: Pending) -> bool:
        """Whether a request waits, or is still to be read and has no result."""
        return pending in self.pending or (pending.seq > self.in_seq and not self.has_result(pending.seq))

    def add_requests(self, entries: Sequence[Entry]) -> None:
        """Read on: apply what has a result, queue what has none.

        A fold tokenises, and is for another thread; requests without results are no more than decoded.
        """
        if self.in_seq == 0 and entries:
            self.history = self._fold.begin(entries[0].stored)
        for entry in entries:
            if entry.seq in self._answered_unread:
                self._answered_unread.remove(entry.seq)  # its id was noted then
            else:
                self._add_request(entry, self._early.pop(entry.seq, None))
            self.in_seq = max(self.in_seq, entry.seq)

    def end_fold(self) -> None:
        """Hold the fold, whose results have all been read, against the last one's digest of the history."""
        self.folded = True
        proof = self._proof
        if self.diverged is None and proof and proof.headers[HISTORY_HEADER] != self.history.digest():
            self._diverge("this model makes other tokens of the same log", proof)

    def mark_diverged(self, why: str) -> None:
        """Take the history for lost: nothing is folded any more, and requests are answered with that."""
        self.diverged = f"{why}: go on in a new session"

    def committed(self, pending: Pending, out_seq: int, history: History) -> None:
        """Note that a request's result is in the log, and what the session is after it."""
        if pending in self.pending:
            self.pending.remove(pending)
        else:
            self._answered_unread.add(pending.seq)
        self.out_seq = out_seq
        self.history = history
        self._num_since_checkpoint += 1
        if pending.request is not None:
            self.answered_ids.add(pending.request.id, AnsweredAt(pending.seq, out_seq))

    def _add_request(self, entry: Entry, recorded: _EarlyResult | None) -> None:
        pending = pending_at(entry)
        request = pending.request
        if recorded is not None and self.pending and not _changes_nothing(recorded.result):
            self._ignore(recorded.entry)  # nobody answers out of turn but to call a request off
            recorded = None
        if recorded is None:
            self.pending.append(pending)
            return
        result, out = recorded.result, recorded.entry
        # A close with nothing before it is of a session that was forgotten: it tells of what is gone. So may
        # what was called off behind a close, before that was answered.
        is_of_old = isinstance(result, Closed) and not self.history.exists
        tells = HISTORY_HEADER in out.headers and not is_of_old and not _changes_nothing(result)
        self.proven_seq = entry.seq if tells else 0
        self._num_since_checkpoint += 1
        if self.last is None or self.last[0] < out.seq:
            self.last = (out.seq, pending, result)
        if request is not None:
            self.answered_ids.add(request.id, AnsweredAt(entry.seq, out.seq))
        if tells and (self._proof is None or self._proof.seq < out.seq):
            self._proof = out
        if request is None or result.repeat_of is not None or self.diverged is not None:
            return
        try:
            self.history = self._fold.replay(self.history, request, result)
        except DivergedError as error:
            self._diverge(str(error), out)

    def _ignore(self, entry: Entry) -> None:
        self.num_foreign += 1
        if self.num_foreign == 1:
            log.warning("ignoring what is no result of this session, here and from now on", seq=entry.seq)

    def _diverge(self, why: str, entry: Entry) -> None:
        model = entry.headers.get(MODEL_HEADER, "an unknown model")
        self.diverged = f"{why}; it was written with {model}: serve that one, or go on in a new session"


def pending_at(entry: Entry) -> Pending:
    """Read a request."""
    try:
        return Pending(entry.seq, decode_request(entry.body), "", entry.stored)
    except InvalidMessageError as error:
        return Pending(entry.seq, None, str(error), entry.stored, named=error.request_id)


def _early_result(entry: Entry) -> _EarlyResult | None:
    """Read an entry of `out`; None where no worker has made it."""
    try:
        result = decode_result(entry.body)
    except InvalidMessageError:
        return None
    seq = result.seq
    if seq is None or not 0 < seq < entry.seq:
        return None
    return (
        _EarlyResult(result, entry) if isinstance(result, Failed) or HISTORY_HEADER in entry.headers else None
    )


def _changes_nothing(result: Result) -> bool:
    return isinstance(result, Failed) or (isinstance(result, Generated) and not result.tokens)
