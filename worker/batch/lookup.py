"""Guess an answer's next tokens from what was said before. Pure.

Prompt lookup: where the last few tokens stood before, what followed them there is proposed. The step that
draws the next token then runs the proposed ones with it, and those that are what would have been drawn are
kept (Saxena, "Prompt Lookup Decoding", 2023; the rule of acceptance is that of Leviathan et al.,
"Fast Inference from Transformers via Speculative Decoding", 2023, for draws that are a function of the seed).
Guessing never changes what is drawn, only how many tokens a step brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Tokens that have to be the same as before for what followed them to be proposed.
NGRAM: Final = 3
_FIRST_LENGTH: Final = 3
_MAX_PAUSE: Final = 32
#: Tokens of a long session that are entered at a time. All at once took 0.25 s for 128,000, in which no
#: other answer got a token; this many take 2 ms.
_INDEXED_AT_ONCE: Final = 1024


class Lookup:
    """The tokens of one session, and where each run of three of them last stood.

    The runs of a long session are entered as its answer grows, the oldest first: what stands behind those is
    not found before.
    """

    def __init__(self, tokens: Iterable[int], *, most: int) -> None:
        """`most` bounds what is proposed at a time."""
        self._tokens = list(tokens)
        self._num_indexed = 0
        self._places: dict[tuple[int, ...], int] = {}  # where the token after such a run stands
        self._beginnings: set[tuple[int, ...]] = set()
        self._most = most
        self._length = min(_FIRST_LENGTH, most)
        self._pause = 0
        self._paused = 0
        self._index()

    def push(self, token: int) -> None:
        """Add the session's next token."""
        self._pause = max(self._pause - 1, 0)
        self._tokens.append(token)
        self._index()

    def _index(self) -> None:
        """Enter some of the tokens that are not yet."""
        end = min(self._num_indexed + _INDEXED_AT_ONCE, len(self._tokens))
        for at in range(max(self._num_indexed, NGRAM - 1), end):
            # The run before this token is remembered now: the one that ends with it is what is looked up.
            if at >= NGRAM:
                self._places[tuple(self._tokens[at - NGRAM : at])] = at
            self._beginnings.add(tuple(self._tokens[at + 1 - NGRAM : at]))
        self._num_indexed = end

    @property
    def may_propose(self) -> bool:
        """Whether `propose` may have something to say once one more token is known, whatever that is."""
        return self._pause <= 1 and tuple(self._tokens[1 - NGRAM :]) in self._beginnings

    def propose(self, most: int) -> list[int]:
        """Return up to `most` tokens that may come next; none where nothing is known, or guesses fail."""
        place = self._places.get(tuple(self._tokens[-NGRAM:]))
        if place is None or self._pause > 0:
            return []
        proposed = self._tokens[place : place + min(self._length, most)]
        while len(proposed) < min(self._length, most):  # what repeats itself goes on doing so
            proposed.append(proposed[place - len(self._tokens)])
        return proposed

    def learn(self, num_proposed: int, num_right: int) -> None:
        """Take in how a proposal did: guess more, less, or pause for ever longer."""
        if num_right == num_proposed:
            self._length = min(2 * self._length, self._most)
        else:
            self._length = max(num_right, 1)
        self._paused = 0 if num_right else min(2 * self._paused + 1, _MAX_PAUSE)
        self._pause = self._paused
