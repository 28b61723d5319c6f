"""What a run of `bench pressure` sends: sizes around the memory limit, drawn from a seed. Pure.

Prompts are random token ids: only so does the bench know, to the token, what a request is going to hold.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Final, Literal

#: By the share of the limit that a session comes to hold: two of `long` may fit at a time, of `alone` one.
Kind = Literal["short", "long", "alone", "never"]
Verb = Literal["append", "generate", "rewind", "close"]

KINDS: Final[tuple[Kind, ...]] = ("short", "long", "alone", "never")
_WEIGHTS: Final = (60, 22, 10, 8)
#: Shares of the limit from which a turn is no longer of the kind before.
LONG: Final = 0.2
ALONE: Final = 0.8
_MOST: Final = 1.4
#: Of the turns that fit alone, and of those that never fit, so many are at the limit to the token.
_EDGE: Final = 0.25
_CANCELLED: Final = 0.12
_SHORT_ANSWER: Final = 32
#: Ids that are neither special nor beyond the smallest vocabulary.
_FIRST_ID, _LAST_ID = 32, 240
#: Above this share a session is more often rewound or closed than asked again.
_FULL: Final = 0.6


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `room` is the memory limit in tokens of KV, `clients` send requests at a time.

    `rows` is the worker's `max_batch`: for each row it keeps memory free, and much of that is never used.
    """

    duration_s: float
    room: int
    clients: int
    rows: int
    sample: int
    turn_timeout_s: float
    seed: int

    def settings(self) -> dict[str, str | int | float | bool | None]:
        """Return the settings as a report holds them."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request. `position` is a rewind's, `cancel_after_s` None for one that is left alone."""

    verb: Verb
    tokens: tuple[int, ...] = ()
    max_tokens: int = 0
    position: int = 0
    cancel_after_s: float | None = None

    def holds(self, held: int) -> int:
        """Count the tokens that a session of `held` has to hold: the prompt, and one of an answer to it.

        The answer gets as many more as there is room for.
        """
        return held + len(self.tokens) + min(self.max_tokens, 1)


def kind_of(size: int, room: int) -> Kind:
    """Say what a turn is that brings its session to `size` tokens, where `room` are the limit."""
    if size > room:
        return "never"
    return "alone" if size > ALONE * room else "long" if size > LONG * room else "short"


class Dice:
    """The requests of one client, one after another; a seed gives the same ones to the same calls."""

    def __init__(self, plan: Plan, client: int) -> None:
        self._room = plan.room
        self._random = random.Random(f"{plan.seed}-{client}")  # noqa: S311  # no secret depends on it

    def begins_anew(self, num_idle: int, num_clients: int) -> bool:
        """Say whether the next request is a new session's, rather than one's of so many idle ones."""
        return num_idle == 0 or self._random.random() < (0.6 if num_idle < 2 * num_clients else 0.15)

    def choose(self, number: int) -> int:
        """Choose one of so many."""
        return self._random.randrange(number)

    def next(self, held: int) -> Wanted:
        """Draw the next request of a session that holds so many tokens."""
        if held > _FULL * self._room and self._random.random() < 0.5:
            if self._random.random() < 0.5:
                return Wanted("close")
            return Wanted("rewind", position=self._random.randrange(held // 2))
        size = self._size(held)
        verb: Verb = "append" if self._random.random() < 0.3 else "generate"
        num_added = size - held
        answer = 0
        cancel = self._random.uniform(0, 3) if self._random.random() < _CANCELLED else None
        if verb == "generate":
            answer = self._random.randint(1, min(_SHORT_ANSWER, num_added - 1))
            if num_added > _SHORT_ANSWER and self._random.random() < 0.15:
                # A long answer instead of a long prompt: it takes its room as it grows.
                answer = num_added - self._random.randint(1, _SHORT_ANSWER)
                cancel = self._random.uniform(0.2, 3)
        tokens = (self._random.randint(_FIRST_ID, _LAST_ID) for _ in range(num_added - answer))
        return Wanted(verb, tuple(tokens), answer, cancel_after_s=cancel)

    def _size(self, held: int) -> int:
        """Draw what the session is to hold after the turn; it grows by two tokens at the least."""
        room = self._room
        kind = self._random.choices(KINDS, _WEIGHTS)[0]
        low, high = {
            "short": (held + 4, held + max(8, room // 20)),
            "long": (round(LONG * room), round(_FULL * room)),
            "alone": (round(ALONE * room) + 1, room),
            "never": (room + 1, round(_MOST * room)),
        }[kind]
        edge = {"alone": room, "never": room + 1}.get(kind)
        if edge is not None and self._random.random() < _EDGE:
            return max(edge, held + 2)
        return max(self._random.randint(low, high), held + 2)
