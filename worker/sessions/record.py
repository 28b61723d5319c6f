"""A session's log as far as it was read: the history it folds to, which ids were answered, what is open.

Pure: entries in, state out. Whoever holds a record sees to it that one caller at a time changes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from time import monotonic, time
from typing import TYPE_CHECKING

import structlog

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.log import HISTORY_HEADER, MODEL_HEADER
from turnkeep_client.messages import Append, Failed, Generate, decode_request, decode_result, encode
from worker.wire.journal import FencedError

from .history import DivergedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.messages import Chunk, Request, Result
    from worker.wire.journal import Entry

    from .history import Folder, History


log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Pending:
    """A request without a result.

    `request` is None where the body is no valid one; `error` says why, `named` is the id that it names.
    `stored_s` is when the log took it, in seconds since 1970. `held_text` is what an answer that was ended
    early still had to say; `published` are its chunks in the token stream, where they are being read already.
    """

    seq: int
    request: Request | None
    error: str
    received_s: float = field(default_factory=monotonic)
    stored_s: float = field(default_factory=time)
    cancelled: bool = False
    expired: bool = False
    held_text: str = ""
    published: asyncio.Task[list[Chunk]] | None = None
    named: str | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

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
        return self.stored_s + request.deadline_s

    @property
    def priority(self) -> int:
        """How much it is to be preferred to others that wait."""
        return self.request.priority if isinstance(self.request, Append | Generate) else 0

    @property
    def type(self) -> str:
        """The request's type, for counting."""
        return str(self.request.__struct_config__.tag) if self.request else "invalid"


@dataclass(frozen=True, slots=True)
class Answered:
    """An id's first request and result: the request's digest, and both sequences."""

    digest: bytes
    in_seq: int
    out_seq: int


class Record:
    """One session's state as its log tells it. Starts empty, at sequence 0."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.history: History = folder.begin(datetime.fromtimestamp(0, UTC))
        self.answered: dict[str, Answered] = {}
        self.pending: deque[Pending] = deque()
        self.read_seq = 0
        self.out_seq = 0
        #: Why the log cannot be continued by this worker, if so.
        self.diverged: str | None = None

    def take(self, entries: Sequence[Entry]) -> None:
        """Read on: apply what has a result, queue what has none.

        The first time it folds, which tokenises and is for another thread; after that it does no more than
        decode. Raises `FencedError` where another worker has committed
        a result since this record was begun: it must then be folded anew.
        """
        fresh = self.read_seq == 0
        if fresh and entries:
            self.history = self._folder.begin(entries[0].stored)
        outs = [entry for entry in entries if entry.kind == "out" and entry.seq > self.out_seq]
        if outs and not fresh:
            raise FencedError(f"a result at sequence {outs[0].seq} is not this worker's")
        results: dict[int, tuple[Result, Entry]] = {}
        for entry in outs:
            if (result := _result(entry)) and result.seq:
                results.setdefault(result.seq, (result, entry))  # the first one is what clients have seen
        for entry in entries:
            if entry.kind == "in":
                self._take_request(entry, results.get(entry.seq))
            self.read_seq = max(self.read_seq, entry.seq)
        if outs:
            self.out_seq = outs[-1].seq
            self._check_digest(results)

    def committed(self, pending: Pending, out_seq: int, history: History) -> None:
        """Note that a request's result is in the log, and what the session is after it."""
        self.pending.remove(pending)
        self.out_seq = out_seq
        self.history = history
        if pending.request is not None:
            self._note(pending.request, pending.seq, out_seq)

    def _take_request(self, entry: Entry, answer: tuple[Result, Entry] | None) -> None:
        request, error, named = _decode(entry.body)
        if answer is None:
            stored_s = entry.stored.timestamp()
            self.pending.append(Pending(entry.seq, request, error, stored_s=stored_s, named=named))
            return
        result, out = answer
        if request is None:
            return
        self._note(request, entry.seq, out.seq)
        if result.repeat_of is not None or self.diverged is not None:
            return
        try:
            self.history = self._folder.replay(self.history, request, result)
        except DivergedError as error:
            self._diverge(str(error), out)

    def _note(self, request: Request, in_seq: int, out_seq: int) -> None:
        # The first record stands: repeats point to it, and a conflicting body does not replace it.
        self.answered.setdefault(request.id, Answered(request_digest(request), in_seq, out_seq))

    def _check_digest(self, results: dict[int, tuple[Result, Entry]]) -> None:
        """Hold the fold against the digest of the last result that changed the history."""
        for result, entry in sorted(results.values(), key=lambda pair: -pair[1].seq):
            digest = entry.headers.get(HISTORY_HEADER)
            if digest is not None and not isinstance(result, Failed):
                if digest != self.history.digest() and self.diverged is None:
                    self._diverge("this model makes other tokens of the same log", entry)
                return

    def _diverge(self, why: str, entry: Entry) -> None:
        model = entry.headers.get(MODEL_HEADER, "an unknown model")
        self.diverged = f"{why}; it was written with {model}: serve that one, or go on in a new session"


def request_digest(request: Request) -> bytes:
    """Name what a request says, whatever the spacing and order of its JSON."""
    return blake2b(encode(request), digest_size=16).digest()


def _result(entry: Entry) -> Result | None:
    try:
        return decode_result(entry.body)
    except InvalidMessageError as error:  # somebody else's: no reason to lose the session
        log.warning("ignoring what is no result", seq=entry.seq, error=str(error))
        return None


def _decode(body: bytes) -> tuple[Request | None, str, str | None]:
    try:
        return decode_request(body), "", None
    except InvalidMessageError as error:
        return None, str(error), error.request_id
