"""Determines how a row's next tokens are sampled: which tokens are penalised, and which are forbidden. Pure.

This depends on the request's settings and the answer's tokens. `sampling` draws the tokens from the logits.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: A lower temperature counts as 0: logits of 1e5, divided by less, overflow float32.
_LEAST_TEMPERATURE: Final = 1e-20


class ConstraintState(Protocol):
    """The position of one answer in a grammar; implemented by `worker.text.grammar.Matcher`."""

    def push(self, tokens: Iterable[int]) -> None:
        """Add tokens to the answer."""

    def masks(self, draft: Sequence[int]) -> Sequence[np.ndarray[Any, Any] | None]:
        """Return masks of the allowed tokens, for the next token and after each token of `draft`.

        A mask has a bit per id, a byte's lowest bit first, and allows at least one token; None allows all.
        """

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""


class Constraint(Protocol):
    """A grammar that an answer must match; implemented by `worker.text.grammar.Grammar`."""

    def follow(self, answered: Sequence[int]) -> ConstraintState:
        """Return a matcher for an answer that has the tokens `answered` so far, without its end token."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one request samples tokens: by default the likeliest one, without penalties or limits."""

    #: 0 draws the likeliest token (greedy).
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: Pairs of a token id and a number that is added to its logit.
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: Before the answer has so many tokens, no end token is drawn, unless the grammar allows nothing else.
    min_tokens: int = 0
    #: Each token gets its log probability, and so many likeliest tokens with theirs; None for neither.
    top_logprobs: int | None = None
    #: Only tokens that the grammar allows are drawn.
    grammar: Constraint | None = None
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the token with the highest logit, after bias and penalties, is chosen."""
        return self.temperature < _LEAST_TEMPERATURE

    @property
    def counts_tokens(self) -> bool:
        """Whether a token's logit depends on the number of its occurrences in the answer."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def takes_likeliest(self) -> bool:
        """Whether the token with the model's highest logit is chosen, without bias or penalties."""
        changes = self.repetition_penalty != 1.0 or self.counts_tokens or self.logit_bias
        return self.is_greedy and not changes


class DrawnToken(NamedTuple):
    """One token of an answer, with its log probability if the request wants it."""

    token: int
    logprob: float | None = None
    #: The likeliest tokens and their log probabilities, the likeliest first, as many as the request wants.
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw one token of an answer."""

    sampling: RowSampling
    #: The token's number in the answer, from 0.
    index: int
    #: The distinct tokens to which the repetition penalty applies.
    seen: Sequence[int] | np.ndarray[Any, Any] = ()
    #: How often tokens occur in the answer, for presence and frequency penalties; None without these.
    counts: Counter[int] | None = None
    #: Tokens that are not drawn.
    banned: Sequence[int] = ()
    #: Only tokens whose bit is set are drawn: see `ConstraintState.masks`.
    mask: np.ndarray[Any, Any] | None = None

    @property
    def takes_likeliest(self) -> bool:
        """Whether the model's likeliest token is drawn: greedy, without bias, penalties, bans or mask."""
        return self.sampling.takes_likeliest and not self.banned and self.mask is None


class RowSampler:
    """The state on which the sampling of one row depends; device thread only.

    The choice of a token may depend on all tokens before it (`needs_last`): then a step cannot be launched
    before the last token is known, and a draft's tokens count as the answer's for later draws.
    """

    def __init__(
        self,
        sampling: RowSampling,
        *,
        answered: Sequence[int] = (),
        prompt: Iterable[int] = (),
        end_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """`answered` are the answer's tokens so far, `prompt` the prompt's tokens that are penalised."""
        self.sampling = sampling
        #: The number of the answer's tokens.
        self.num_drawn = len(answered)
        self.end_tokens = sorted(end_tokens)
        self._seen: set[int] = set()
        self._seen_ids = array("I")  # the same ids, in the order of first occurrence
        self._counts = Counter[int](answered) if sampling.counts_tokens else None
        self._see((*prompt, *answered))
        self._matcher = sampling.grammar.follow(answered) if sampling.grammar is not None else None

    @property
    def needs_last(self) -> bool:
        """Whether the next draw needs the answer's last token itself, not only the logits after it."""
        follows = self._counts is not None or self._matcher is not None
        return follows or self.sampling.repetition_penalty != 1.0

    def draws(self, draft: Sequence[int] = (), *, num_ahead: int = 0) -> list[Draw]:
        """Return how to draw the next token, and the token after each token of `draft`.

        `num_ahead` tokens of the answer come before these and are not known yet: a step in flight draws them.
        """
        masks = self._matcher.masks(draft) if self._matcher is not None else [None] * (len(draft) + 1)
        beginnings = zip(_beginnings(draft), masks, strict=True)
        return [self._draw(len(before) + num_ahead, before, mask) for before, mask in beginnings]

    def push(self, tokens: Iterable[int]) -> None:
        """Add tokens to the answer."""
        tokens = list(tokens)
        if self._matcher is not None:
            self._matcher.push(tokens)
        for token in tokens:
            self.num_drawn += 1
            self._see((token,))
            if self._counts is not None:
                self._counts[token] += 1

    def _see(self, tokens: Iterable[int]) -> None:
        if self.sampling.repetition_penalty != 1.0:
            new = [token for token in dict.fromkeys(tokens) if token not in self._seen]
            self._seen.update(new)
            self._seen_ids.extend(new)

    def _draw(self, num_ahead: int, before: Sequence[int], mask: np.ndarray[Any, Any] | None) -> Draw:
        index = self.num_drawn + num_ahead
        banned = self.end_tokens if index < self.sampling.min_tokens else ()
        if banned and mask is not None and not _has_others(mask, banned):
            banned = ()  # the grammar allows only the end
        counts = self._counts + Counter(before) if self._counts is not None else None
        seen = np.array(self._seen_ids)  # a copy: tokens are added while a step is in flight
        if before and self.sampling.repetition_penalty != 1.0:
            seen = np.append(seen, [token for token in dict.fromkeys(before) if token not in self._seen])
        return Draw(self.sampling, index, seen, counts, banned, mask)


def _has_others(mask: np.ndarray[Any, Any], tokens: Sequence[int]) -> bool:
    """Say whether a mask allows a token that is not one of `tokens`."""
    allowed = np.unpackbits(mask, bitorder="little")
    allowed[[token for token in tokens if token < len(allowed)]] = 0
    return bool(allowed.any())


def _beginnings(draft: Sequence[int]) -> list[Sequence[int]]:
    return [draft[:num] for num in range(len(draft) + 1)]
