"""Drafts an answer's next tokens from the session's earlier tokens. Pure.

Prompt lookup: if the last few tokens occurred before, the tokens that followed them are the draft. The step
that draws the next token runs the draft with it, and accepts the draft tokens that would have been drawn
(Saxena, "Prompt Lookup Decoding", 2023; the rule of acceptance is that of Leviathan et al., "Fast Inference
from Transformers via Speculative Decoding", 2023, for draws that are a function of the seed). Speculation
never changes which tokens are drawn, only how many a step brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Number of last tokens that have to match an earlier run of tokens.
NGRAM: Final = 3
_FIRST_LENGTH: Final = 3
_MAX_PAUSE: Final = 32
#: Tokens of a long session that are indexed at a time: 2 ms. All 128,000 at once took 0.25 s, in which no
#: other answer got a token.
_INDEXED_AT_ONCE: Final = 1024


class Lookup:
    """The tokens of one session, with the last position of each run of `NGRAM` tokens.

    A long session is indexed as its answer grows, oldest tokens first; later runs are found only then.
    """

    def __init__(self, tokens: Iterable[int], *, most: int) -> None:
        """`most` bounds a draft's length, in tokens."""
        self._tokens = list(tokens)
        self._num_indexed = 0
        self._places: dict[tuple[int, ...], int] = {}  # of the token after a run
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
        """Index the next tokens, at most `_INDEXED_AT_ONCE`."""
        end = min(self._num_indexed + _INDEXED_AT_ONCE, len(self._tokens))
        for at in range(max(self._num_indexed, NGRAM - 1), end):
            # Index the run before this token, not the run that ends with it: `propose` looks that one up.
            if at >= NGRAM:
                self._places[tuple(self._tokens[at - NGRAM : at])] = at
            self._beginnings.add(tuple(self._tokens[at + 1 - NGRAM : at]))
        self._num_indexed = end

    @property
    def may_propose(self) -> bool:
        """Whether `propose` may return tokens once one more token, whichever, is known."""
        return self._pause <= 1 and tuple(self._tokens[1 - NGRAM :]) in self._beginnings

    def propose(self, most: int) -> list[int]:
        """Return a draft of up to `most` tokens; empty without a match, or while drafts keep failing."""
        place = self._places.get(tuple(self._tokens[-NGRAM:]))
        if place is None or self._pause > 0:
            return []
        proposed = self._tokens[place : place + min(self._length, most)]
        while len(proposed) < min(self._length, most):  # a repetition continues
            proposed.append(proposed[place - len(self._tokens)])
        return proposed

    def learn(self, num_proposed: int, num_right: int) -> None:
        """Adapt to a draft's acceptance: draft more tokens, fewer, or pause for longer each time."""
        if num_right == num_proposed:
            self._length = min(2 * self._length, self._most)
        else:
            self._length = max(num_right, 1)
        self._paused = 0 if num_right else min(2 * self._paused + 1, _MAX_PAUSE)
        self._pause = self._paused
