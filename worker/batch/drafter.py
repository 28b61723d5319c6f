"""Drafts an answer's next tokens from the session's earlier tokens. Pure.

Prompt lookup: if the last few tokens occurred before, the tokens that followed them are the draft. The step
that samples the next token runs the draft with it, and accepts the draft tokens that equal the sampled ones
(Saxena, "Prompt Lookup Decoding", 2023; acceptance as in Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding", 2023, for samples that are a function of the seed). Speculation changes only the
number of tokens a step, never the tokens.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Number of last tokens that have to match an earlier run of tokens.
NGRAM: Final = 3
#: A session's last tokens, in which drafts are looked for. They are compared for each token of an answer, in
#: 20 us: a table of them would have to be made when the answer begins.
MOST_SEEN: Final = 65_536
_FIRST_LENGTH: Final = 3
_MAX_PAUSE: Final = 32


class Drafter:
    """The last tokens of one session, indexed to find the latest earlier copy of a run of tokens."""

    def __init__(self, tokens: Iterable[int], *, most: int) -> None:
        """`most` limits the length of a draft, in tokens."""
        self._tokens = array("I", tokens)
        self._most = most
        self._length = min(_FIRST_LENGTH, most)
        self._pause = 0
        self._paused = 0

    def push(self, token: int) -> None:
        """Add the session's next token."""
        self._pause = max(self._pause - 1, 0)
        self._tokens.append(token)

    @property
    def may_propose(self) -> bool:
        """Whether `propose` may return a draft once one more, still unknown token is pushed."""
        return self._pause <= 1 and self._place(NGRAM - 1) is not None

    def propose(self, most: int) -> list[int]:
        """Return a draft of up to `most` tokens; empty if nothing matches or `learn` has paused drafting."""
        place = self._place(NGRAM) if self._pause == 0 else None
        if place is None:
            return []
        proposed = self._tokens[place : place + min(self._length, most)].tolist()
        while len(proposed) < min(self._length, most):  # a repetition continues
            proposed.append(proposed[place - len(self._tokens)])
        return proposed

    def learn(self, num_proposed: int, num_right: int, *, pays: bool = True) -> None:
        """Adapt to how much of a draft was accepted, and to whether the step took less time with it (`pays`).

        Later drafts get longer or shorter. If drafts keep failing, drafting pauses, for longer each time.
        """
        if num_right == num_proposed:
            self._length = min(2 * self._length, self._most)
        else:
            self._length = max(num_right, 1)
        self._paused = 0 if num_right and pays else min(2 * self._paused + 1, _MAX_PAUSE)
        self._pause = self._paused

    def _place(self, num: int) -> int | None:
        """Return the position after the latest earlier run of tokens that equals the last `num` tokens."""
        last = self._tokens[-num:]
        if len(last) < num:
            return None
        tokens = np.frombuffer(self._tokens, np.uint32)[-MOST_SEEN:]
        places = np.flatnonzero(tokens[num - 1 : -1] == last[-1]) + num
        for back in range(2, num + 1):
            places = places[tokens[places - back] == last[-back]]
        return int(places[-1]) + len(self._tokens) - len(tokens) if len(places) else None
