"""Maps the boundaries of conversations to a tenant's sessions and positions in them. In memory, no I/O.

A boundary is a digest of a conversation up to a message (see `boundaries`).

`recovery` can rebuild this from the log after a restart: a request's id begins with the digest of its prompt,
and the tags of a fork's `open` contain the digest of the conversation up to the fork point.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from turnkeep_client.messages import STOPPED

from . import boundaries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnkeep_client.generation import Generation
    from turnkeep_client.messages import Appended, Generated

#: The prefix of the names of gateways' sessions, and the tag of their forks.
PREFIX: Final = "gw-"
TAG: Final = "gateway"
_BEGINS: Final = "at-"

#: Most sessions of one tenant; beyond it, the least recently used ones are closed.
MOST_SESSIONS: Final = 10_000
#: Most boundaries of one session; beyond it, the earliest are dropped.
_MOST_MARKS: Final = 2_000


class BoundaryPosition(NamedTuple):
    """A boundary's position in a session: after a prompt with the assistant's header, or after an answer.

    `is_answer` is also set after appended messages: these have no such header, so more messages may follow.
    """

    position: int
    is_answer: bool


@dataclass(eq=False, slots=True)
class IndexedSession:
    """A session that the gateway has made: where it ends, its last use, its boundaries and its requests.

    Only this module writes the fields.
    """

    name: str
    position: int | None  # None if unknown
    used_s: float  # by this process's monotonic clock
    num_running: int = 0  # requests without a result
    marks: dict[bytes, BoundaryPosition] = field(default_factory=dict)
    prompt: bytes | None = None  # the boundary of the last prompt
    asked: set[tuple[bytes, bytes]] = field(default_factory=set)  # the keys of its requests


class RequestName(NamedTuple):
    """A request's id in parts: digests of prompt and options, and `nonce`, which counts equal requests."""

    prompt: bytes
    options: bytes
    nonce: int

    @property
    def key(self) -> tuple[bytes, bytes]:
        """The digests of prompt and options, which equal requests share."""
        return self.prompt, self.options

    def __str__(self) -> str:
        return f"{self.prompt.hex()}-{self.options.hex()}-{self.nonce}"

    @classmethod
    def parse(cls, request_id: str) -> RequestName | None:
        """Parse a request id that a gateway made; return None for any other."""
        try:
            prompt, options, nonce = request_id.split("-")
            found = cls(bytes.fromhex(prompt), bytes.fromhex(options), int(nonce))
        except ValueError:
            return None
        return found if str(found) == request_id else None


@dataclass(eq=False, slots=True)
class IndexedRequest:
    """The last of several requests with equal prompt and options. Only this module writes the fields."""

    session: IndexedSession
    name: RequestName
    #: The digests of the boundary that the session had, and its position; the request has what follows.
    bases: set[bytes]
    expected: int
    #: The beginning of the answer, given by the client.
    prefix: str = ""
    state: Literal["running", "answered", "failed"] = "running"
    is_certain: bool = False  # whether the answer is the same each time
    #: Until then, a request that was found in the log after a restart may be repeated once.
    claim_until_s: float = 0.0
    num_users: int = 0
    opening: asyncio.Event | None = None  # None once the session is in the log
    append: str | None = None  # the id of the append that runs before it
    #: How this gateway has sent it: once for each client.
    sent: list[Generation] = field(default_factory=list)
    is_joined: bool = False  # whether another gateway, or this one before its start, has sent it first

    def claim(self, now_s: float) -> bool:
        """Let the caller's request have this answer, of a request from before the restart; only one may.

        Return False if this is no such answer, or another request has claimed it.
        """
        is_claimed, self.claim_until_s = self.claim_until_s > now_s, 0.0
        self.is_joined = self.is_joined or is_claimed
        return is_claimed

    def join(self) -> None:
        """Add one to the clients that wait for the answer."""
        self.num_users += 1

    def send(self, generation: Generation) -> None:
        """Note that the request is sent, perhaps once more."""
        self.sent.append(generation)

    def end(self) -> None:
        """Note that a client's request has a result, or failed; another one's may still run."""
        self.end_opening()
        if self.state != "running":
            self.sent.clear()

    @property
    def own_seqs(self) -> set[int]:
        """The sequences at which the log is known to have this request from this gateway."""
        return {one.seq for one in self.sent if one.seq}

    def leave(self) -> bool:
        """Subtract one from the clients that wait; return whether the answer runs and none waits now."""
        self.num_users -= 1
        return self.num_users == 0 and self.state == "running"

    def begin_append(self, append_id: str) -> None:
        """Note that the append with this id runs, which precedes the request."""
        self.append = append_id

    def end_append(self, boundary: bytes, position: int) -> None:
        """Note that the session has the messages up to a boundary now, and that no append runs."""
        self.bases, self.expected, self.append = {boundary}, position, None

    def end_opening(self) -> None:
        """Wake requests that wait until the session is in the log."""
        if self.opening is not None:
            self.opening.set()
            self.opening = None

    def fail(self, *, may_still_run: bool = False) -> None:
        """Let no later request reuse this answer, and mark it failed.

        With `may_still_run` its state stays as it is: only a repeat of the request failed, and the first one
        may still be running.
        """
        self.is_certain, self.claim_until_s = False, 0.0
        if not may_still_run:
            self.state = "failed"


def append_id(boundary: bytes, position: int, attempt: int = 0) -> str:
    """Return the id of an append from `position` to this boundary (digest of the conversation up to it)."""
    return f"{boundary.hex()}-at-{position}" + (f"-{attempt}" if attempt else "")


def appended_to(request_id: str) -> bytes | None:
    """Return the boundary after an append, read from the append's id; None if no gateway made the id."""
    digest, at, _ = request_id.partition("-at-")
    try:
        return bytes.fromhex(digest) if at else None
    except ValueError:
        return None


def tags(base: bytes) -> list[str]:
    """Return the tags of a fork; `base` is the digest of the conversation up to the fork point."""
    return [TAG, _BEGINS + base.hex()]


def base_of(tags: tuple[str, ...]) -> bytes | None:
    """Return the boundary after which a fork begins, read from its `tags`; None if no gateway made them."""
    base = next((tag[len(_BEGINS) :] for tag in tags if tag.startswith(_BEGINS)), "")
    try:
        return bytes.fromhex(base) or None if TAG in tags else None
    except ValueError:
        return None


class SessionIndex:
    """The sessions, boundaries and last requests of one tenant. Event loop only."""

    def __init__(self) -> None:
        #: By name, the least recently used first.
        self.sessions: OrderedDict[str, IndexedSession] = OrderedDict()
        self.asked: dict[tuple[bytes, bytes], IndexedRequest] = {}
        #: Whether the chat template has ever changed earlier text of a session.
        self.rewrites = False
        self._by_boundary: dict[bytes, IndexedSession] = {}

    def add(self, session: IndexedSession) -> None:
        """Add a session as the most recently used, in place of one that was read before under its name."""
        if (before := self.sessions.get(session.name)) not in (None, session):
            self.drop(before)
        self.sessions[session.name] = session

    def begin(self, asked: IndexedRequest) -> None:
        """Record a request that is about to be sent, and count it as running in its session."""
        asked.opening = asyncio.Event()
        self.add(asked.session)
        self.enter(asked.session)
        self.ask(asked)

    def enter(self, session: IndexedSession) -> None:
        """Count one more running request of a session: no other request can continue the session now."""
        session.num_running += 1

    def leave(self, session: IndexedSession, now_s: float | None = None) -> None:
        """Count one running request of a session less; `now_s`, if given, is the time of its last use."""
        session.num_running -= 1
        if now_s is not None:
            self.use(session, now_s)

    def move(self, session: IndexedSession, position: int | None) -> None:
        """Set a session's position; None if unknown."""
        session.position = position

    def lose(self, session: IndexedSession, *, history: bool = False) -> None:
        """Note that a session's position is unknown; with `history`, drop its boundaries too.

        Without `history`, drop the session if the chat template has ever changed earlier text of one.
        """
        if history:
            self.cut(session, -1)
        elif self.rewrites:
            self.drop(session)
            return
        session.position = None

    def use(self, session: IndexedSession, now_s: float) -> None:
        """Mark a session as the most recently used, at `now_s`."""
        session.used_s = now_s
        if session.name in self.sessions:
            self.sessions.move_to_end(session.name)

    def drop(self, session: IndexedSession) -> None:
        """Remove a session with its boundaries and requests from the index."""
        self.sessions.pop(session.name, None)
        self.cut(session, -1)
        for key in session.asked:
            del self.asked[key]
        session.asked.clear()

    def find(self, boundary: bytes) -> tuple[IndexedSession, BoundaryPosition] | None:
        """Return the session that has the conversation up to `boundary`, and its end; None without one."""
        session = self._by_boundary.get(boundary)
        return None if session is None else (session, session.marks[boundary])

    def ask(self, asked: IndexedRequest) -> None:
        """Record a request as the last one with its prompt and options, in place of an earlier one.

        Does not count it as running: `begin` does.
        """
        if (before := self.asked.get(asked.name.key)) is not None:
            before.session.asked.discard(asked.name.key)
        self.asked[asked.name.key] = asked
        asked.session.asked.add(asked.name.key)

    def answer(self, asked: IndexedRequest, result: Generated) -> None:
        """Record a request's result: the session's position, and the boundaries before and after the answer.

        Forgets the request unless an equal request can get the same answer.
        """
        session, prompt = asked.session, asked.name.prompt
        # A client that repeats a request whose answer was stopped wants a whole answer.
        asked.state = "failed" if result.finish_reason in STOPPED else "answered"
        is_over = asked.state == "answered" and not asked.is_certain and not asked.claim_until_s
        if is_over and self.asked.get(asked.name.key) is asked:  # no equal request may get this answer
            del self.asked[asked.name.key]
            session.asked.discard(asked.name.key)
        if session.name not in self.sessions:
            return
        if result.rewritten_from is not None:
            self.rewrites = True
            self.cut(session, result.rewritten_from)
        session.position = result.position
        if not result.tokens:  # cancelled before its first token: the session is unchanged
            return
        if session.prompt in session.marks:  # clients mostly ask again for the last answer only
            self._unmark(session, session.prompt)
        session.prompt = prompt
        before = result.position - len(result.tokens) - result.prefix_tokens
        self._mark(session, prompt, BoundaryPosition(before, is_answer=False))
        for boundary in boundaries.after_answer(prompt, result, asked.prefix):
            self._mark(session, boundary, BoundaryPosition(result.position, is_answer=True))

    def append(self, session: IndexedSession, boundary: bytes, result: Appended) -> None:
        """Record an append's result: the session's position, and the boundary after the appended messages."""
        if session.name not in self.sessions or result.repeat_of is not None:
            return
        if result.rewritten_from is not None:
            self.rewrites = True
            self.cut(session, result.rewritten_from)
        session.position = result.position
        self._mark(session, boundary, BoundaryPosition(result.position, is_answer=True))

    def old(self, before_s: float) -> Iterator[IndexedSession]:
        """Yield sessions without running requests: unused since `before_s`, or the oldest of too many."""
        beyond = len(self.sessions) - MOST_SESSIONS
        for number, session in enumerate([*self.sessions.values()]):
            if session.used_s >= before_s and number >= beyond:
                return
            if not session.num_running:
                yield session

    def _mark(self, session: IndexedSession, boundary: bytes, mark: BoundaryPosition) -> None:
        other = self._by_boundary.get(boundary)
        if other not in (None, session):
            if other.position == other.marks[boundary].position:
                return  # the other session can continue from there without a fork
            del other.marks[boundary]
        session.marks[boundary] = mark
        self._by_boundary[boundary] = session
        if len(session.marks) > _MOST_MARKS:
            self._unmark(session, next(iter(session.marks)))

    def cut(self, session: IndexedSession, position: int) -> None:
        """Drop a session's boundaries after `position`, because its tokens there have changed."""
        for boundary in [one for one, mark in session.marks.items() if mark.position > position]:
            self._unmark(session, boundary)

    def _unmark(self, session: IndexedSession, boundary: bytes) -> None:
        del session.marks[boundary], self._by_boundary[boundary]
