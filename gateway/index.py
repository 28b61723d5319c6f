"""Maps the boundaries of conversations to a tenant's sessions and positions in them. In memory, no I/O.

A boundary is a digest of a conversation up to a message (see `boundaries`).

`recovery` can rebuild this from the log after a restart: a request's id begins with the digest of its prompt,
and the tags of a fork's `open` contain the digest of the conversation up to the fork point.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from turnkeep_client.messages import STOPPED

from . import boundaries

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

    from turnkeep_client.messages import Appended, Generated

#: The prefix of the names of gateways' sessions, and the tag of their forks.
PREFIX: Final = "gw-"
TAG: Final = "gateway"
_BEGINS: Final = "at-"

#: Most sessions of one tenant; beyond it, the least recently used ones are closed.
MOST_SESSIONS: Final = 10_000
#: Most boundaries of one session; beyond it, the earliest are dropped.
_MOST_MARKS: Final = 2_000


class Mark(NamedTuple):
    """A boundary's position in a session: after a prompt with the assistant's header, or after an answer.

    `is_answer` is also set after appended messages: these have no such header, so more messages may follow.
    """

    position: int
    is_answer: bool


@dataclass(eq=False, slots=True)
class Held:
    """A gateway's session. `position` is None if unknown; `num_running` counts requests without a result."""

    name: str
    position: int | None
    used_s: float
    num_running: int = 0
    marks: dict[bytes, Mark] = field(default_factory=dict)
    prompt: bytes | None = None  # the boundary of the last prompt
    asked: set[tuple[bytes, bytes]] = field(default_factory=set)


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
class Asked:
    """The last of several requests with equal prompt and options, with all that is needed to repeat it.

    The request sent the messages after the boundary with the digests `bases`, at the position `expected`.
    `opening` is None once the session is in the log. If `is_certain`, the answer is the same each time. A
    request that was found in the log after a restart may be repeated once, until `claim_until_s`. `prefix` is
    the beginning of the answer that the client gave. `appending` is the id of the append that runs before it.
    """

    held: Held
    name: RequestName
    bases: set[bytes]
    expected: int
    state: Literal["running", "answered", "failed"] = "running"
    is_certain: bool = False
    claim_until_s: float = 0.0
    num_users: int = 0
    opening: asyncio.Event | None = None
    prefix: str = ""
    appending: str | None = None


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


class Index:
    """The sessions, boundaries and last requests of one tenant. Event loop only."""

    def __init__(self) -> None:
        #: By name, the least recently used first.
        self.sessions: OrderedDict[str, Held] = OrderedDict()
        self.asked: dict[tuple[bytes, bytes], Asked] = {}
        #: Whether the chat template has ever changed earlier text of a session.
        self.rewrites = False
        self._held: dict[bytes, Held] = {}

    def add(self, held: Held) -> None:
        """Add a session as the most recently used."""
        self.sessions[held.name] = held

    def use(self, held: Held, now_s: float) -> None:
        """Mark a session as the most recently used, at `now_s`."""
        held.used_s = now_s
        if held.name in self.sessions:
            self.sessions.move_to_end(held.name)

    def drop(self, held: Held) -> None:
        """Remove a session with its boundaries and requests."""
        self.sessions.pop(held.name, None)
        self.cut(held, -1)
        for key in held.asked:
            del self.asked[key]
        held.asked.clear()

    def find(self, boundary: bytes) -> tuple[Held, Mark] | None:
        """Return the session with the conversation of this digest, and its `Mark` there; None without one."""
        held = self._held.get(boundary)
        return None if held is None else (held, held.marks[boundary])

    def ask(self, asked: Asked) -> None:
        """Record a request that is about to be sent."""
        if (before := self.asked.get(asked.name.key)) is not None:
            before.held.asked.discard(asked.name.key)
        self.asked[asked.name.key] = asked
        asked.held.asked.add(asked.name.key)

    def answer(self, asked: Asked, result: Generated) -> None:
        """Record a request's result: add the boundaries before and after the answer."""
        held, prompt = asked.held, asked.name.prompt
        # A client that repeats a request whose answer was stopped wants a whole answer.
        asked.state = "failed" if result.finish_reason in STOPPED else "answered"
        is_over = asked.state == "answered" and not asked.is_certain and not asked.claim_until_s
        if is_over and self.asked.get(asked.name.key) is asked:  # no equal request may get this answer
            del self.asked[asked.name.key]
            held.asked.discard(asked.name.key)
        if held.name not in self.sessions:
            return
        if result.rewritten_from is not None:
            self.rewrites = True
            self.cut(held, result.rewritten_from)
        held.position = result.position
        if not result.tokens:  # cancelled before its first token: the session is unchanged
            return
        if held.prompt in held.marks:  # clients mostly ask again for the last answer only
            self._unmark(held, held.prompt)
        held.prompt = prompt
        before = result.position - len(result.tokens) - result.prefix_tokens
        self._mark(held, prompt, Mark(before, is_answer=False))
        for boundary in boundaries.answered(prompt, result, asked.prefix):
            self._mark(held, boundary, Mark(result.position, is_answer=True))

    def append(self, held: Held, boundary: bytes, result: Appended) -> None:
        """Add the boundary after appended messages."""
        if held.name not in self.sessions or result.repeat_of is not None:
            return
        if result.rewritten_from is not None:
            self.rewrites = True
            self.cut(held, result.rewritten_from)
        held.position = result.position
        self._mark(held, boundary, Mark(result.position, is_answer=True))

    def old(self, before_s: float) -> Iterator[Held]:
        """Yield sessions without running requests: unused since `before_s`, or the oldest of too many."""
        beyond = len(self.sessions) - MOST_SESSIONS
        for number, held in enumerate([*self.sessions.values()]):
            if held.used_s >= before_s and number >= beyond:
                return
            if not held.num_running:
                yield held

    def _mark(self, held: Held, boundary: bytes, mark: Mark) -> None:
        other = self._held.get(boundary)
        if other not in (None, held):
            if other.position == other.marks[boundary].position:
                return  # the other session can continue from there without a fork
            del other.marks[boundary]
        held.marks[boundary] = mark
        self._held[boundary] = held
        if len(held.marks) > _MOST_MARKS:
            self._unmark(held, next(iter(held.marks)))

    def cut(self, held: Held, position: int) -> None:
        """Drop a session's boundaries after `position`, because its tokens there have changed."""
        for boundary in [one for one, mark in held.marks.items() if mark.position > position]:
            self._unmark(held, boundary)

    def _unmark(self, held: Held, boundary: bytes) -> None:
        del held.marks[boundary], self._held[boundary]
