"""Which conversations lie in which sessions of one tenant, at which position. In memory, and no I/O.

The log has the same facts: `recovery` reads them after a restart. A request's id begins with the digest of
its prompt, and the tags of a fork's `open` have the digest that it begins with.
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

#: Sessions of the gateway have names that begin so, and forks this tag.
PREFIX: Final = "gw-"
TAG: Final = "gateway"
_BEGINS: Final = "at-"

#: Conversations of one tenant; the longest unused ones beyond are closed.
MOST_SESSIONS: Final = 10_000
#: Boundaries of one session; beyond that the earliest are dropped.
_MOST_MARKS: Final = 2_000


class Mark(NamedTuple):
    """A boundary in a session: after a prompt with the assistant's header, or after an answer.

    Messages that were appended alone have no header: they are as an answer, since others may follow.
    """

    position: int
    is_answer: bool


@dataclass(eq=False, slots=True)
class Held:
    """A session of the gateway. A `position` of None is unknown; `num_running` requests have no result."""

    name: str
    position: int | None
    used_s: float
    num_running: int = 0
    marks: dict[bytes, Mark] = field(default_factory=dict)
    prompt: bytes | None = None  # the last one
    asked: set[tuple[bytes, bytes]] = field(default_factory=set)


class RequestName(NamedTuple):
    """A request's id in parts; `nonce` counts the requests for one prompt with the same options."""

    prompt: bytes
    options: bytes
    nonce: int

    @property
    def key(self) -> tuple[bytes, bytes]:
        """What equal requests have in common."""
        return self.prompt, self.options

    def __str__(self) -> str:
        return f"{self.prompt.hex()}-{self.options.hex()}-{self.nonce}"

    @classmethod
    def parse(cls, request_id: str) -> RequestName | None:
        """Return the parts of an id that a gateway made, None for others."""
        try:
            prompt, options, nonce = request_id.split("-")
            found = cls(bytes.fromhex(prompt), bytes.fromhex(options), int(nonce))
        except ValueError:
            return None
        return found if str(found) == request_id else None


@dataclass(eq=False, slots=True)
class Asked:
    """The last request for one prompt with the same options: enough to send it again unchanged.

    It sent the messages after a boundary that has the names `bases`, which was at `expected`. `opening` is
    there until its session is in the log. An answer that `is_certain` is the same each time. A request that
    was found in the log after a restart may be claimed once, until `claim_until_s`. Its answer begins with
    the `prefix`, which was given. `appending` is the id of the append before it that is at work.
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
    """Name an append after which a session has this boundary; it begins at `position`."""
    return f"{boundary.hex()}-at-{position}" + (f"-{attempt}" if attempt else "")


def appended_to(request_id: str) -> bytes | None:
    """Return the boundary that an append has added; None if it is not a gateway's."""
    digest, at, _ = request_id.partition("-at-")
    try:
        return bytes.fromhex(digest) if at else None
    except ValueError:
        return None


def tags(base: bytes) -> list[str]:
    """Return the tags of a fork that begins after the boundary `base`."""
    return [TAG, _BEGINS + base.hex()]


def base_of(tags: tuple[str, ...]) -> bytes | None:
    """Return the boundary after which a fork begins; None if it is not a gateway's."""
    base = next((tag[len(_BEGINS) :] for tag in tags if tag.startswith(_BEGINS)), "")
    try:
        return bytes.fromhex(base) or None if TAG in tags else None
    except ValueError:
        return None


class Index:
    """The conversations of one tenant. Event loop only."""

    def __init__(self) -> None:
        #: In the order of their last use.
        self.sessions: OrderedDict[str, Held] = OrderedDict()
        self.asked: dict[tuple[bytes, bytes], Asked] = {}
        #: Whether the chat template has ever changed earlier text of a session.
        self.rewrites = False
        self._held: dict[bytes, Held] = {}

    def add(self, held: Held) -> None:
        """Add a session, as the one used last."""
        self.sessions[held.name] = held

    def use(self, held: Held, now_s: float) -> None:
        """Note that a session is used."""
        held.used_s = now_s
        if held.name in self.sessions:
            self.sessions.move_to_end(held.name)

    def drop(self, held: Held) -> None:
        """Forget a session and what is known of it."""
        self.sessions.pop(held.name, None)
        self.cut(held, -1)
        for key in held.asked:
            del self.asked[key]
        held.asked.clear()

    def find(self, boundary: bytes) -> tuple[Held, Mark] | None:
        """Return a session that has this boundary, and where."""
        held = self._held.get(boundary)
        return None if held is None else (held, held.marks[boundary])

    def ask(self, asked: Asked) -> None:
        """Note a request that is about to be sent."""
        if (before := self.asked.get(asked.name.key)) is not None:
            before.held.asked.discard(asked.name.key)
        self.asked[asked.name.key] = asked
        asked.held.asked.add(asked.name.key)

    def answer(self, asked: Asked, result: Generated) -> None:
        """Add the boundaries before and after an answer."""
        held, prompt = asked.held, asked.name.prompt
        # Who asks for such an answer again wants a whole one.
        asked.state = "failed" if result.finish_reason in STOPPED else "answered"
        is_over = asked.state == "answered" and not asked.is_certain and not asked.claim_until_s
        if is_over and self.asked.get(asked.name.key) is asked:  # nobody gets it again
            del self.asked[asked.name.key]
            held.asked.discard(asked.name.key)
        if held.name not in self.sessions:
            return
        if result.rewritten_from is not None:
            self.rewrites = True
            self.cut(held, result.rewritten_from)
        held.position = result.position
        if not result.tokens:  # cancelled before its first token: the session is as it was
            return
        if held.prompt in held.marks:  # another answer is mostly wanted to the last prompt
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
        """Yield sessions that were not used since `before_s`, and those beyond `MOST_SESSIONS`."""
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
                return  # that one can go on from there without a fork
            del other.marks[boundary]
        held.marks[boundary] = mark
        self._held[boundary] = held
        if len(held.marks) > _MOST_MARKS:
            self._unmark(held, next(iter(held.marks)))

    def cut(self, held: Held, position: int) -> None:
        """Forget the boundaries after `position`: the session has other tokens there."""
        for boundary in [one for one, mark in held.marks.items() if mark.position > position]:
            self._unmark(held, boundary)

    def _unmark(self, held: Held, boundary: bytes) -> None:
        del held.marks[boundary], self._held[boundary]
