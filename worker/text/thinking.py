"""Constrains an answer with reasoning: ends the reasoning after a budget, then applies a grammar. Pure.

Implements the `Constraint` of `worker.batch.row_sampler`; a mask of None allows any token.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    from worker.batch.row_sampler import Constraint, ConstraintState

    Mask: TypeAlias = np.ndarray[Any, Any]

_SPACE: Final = b" \t\r\n"
#: How many of the last bytes are searched for what ends the reasoning.
_MOST_TAIL: Final = 256


@dataclass(frozen=True, slots=True)
class Thinking:
    """The constraints of an answer with reasoning. Immutable, so thread-safe."""

    #: Returns the bytes of a token.
    spell: Callable[[int], bytes]
    #: Begins the reasoning, as bytes.
    opens: bytes
    #: Matches the bytes that end the reasoning.
    closes: re.Pattern[bytes]
    #: The same two markers as tokens.
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    #: White-space tokens, one of which can precede the text that the grammar constrains.
    spaces: tuple[int, ...]
    #: Whether the prompt has opened the reasoning.
    is_begun: bool
    #: The number of tokens after which the reasoning must end; None for no limit.
    budget: int | None = None
    #: Constrains the text outside of the reasoning.
    grammar: Constraint | None = None
    #: The mask of tokens allowed in the reasoning; None allows all.
    inside: Mask | None = None

    def follow(self, answered: Sequence[int]) -> ConstraintState:
        """Return a matcher for an answer that has these tokens so far."""
        found = _Follower(self)
        found.push(answered)
        return found


class _Follower:
    """Tracks whether one answer is before, inside or behind its reasoning, and masks its next tokens."""

    def __init__(self, of: Thinking) -> None:
        self._of = of
        self.place: Literal["before", "inside", "behind"] = "inside" if of.is_begun else "before"
        self.begun: list[int] = []  # tokens until it is known whether the answer reasons
        self.tail = b""
        self.num_inside = self.num_closing = 0
        self.inner: ConstraintState | None = None
        self.may_space = True

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        if self._of.grammar is None:
            return True
        if self.place == "before":  # whatever the answer has would be the grammar's text
            return self._of.grammar.follow(self._begun_text).is_complete
        return self.place == "behind" and self.inner is not None and self.inner.is_complete

    @property
    def _begun_text(self) -> list[int]:
        """The tokens drawn before it was known whether the answer reasons, without white-space tokens."""
        return [token for token in self.begun if token not in self._of.spaces]

    def push(self, tokens: Iterable[int]) -> None:
        """Add tokens to the answer."""
        for token in tokens:
            self.add(token)

    def masks(self, draft: Sequence[int]) -> list[Mask | None]:
        """Return a mask of the tokens allowed next, and one after each token of `draft`; None allows all."""
        if self.place == "behind" and self.inner is not None and not self.may_space:
            return list(self.inner.masks(draft))
        found, ahead = [self.mask()], copy.copy(self)
        ahead.begun = [*self.begun]
        if draft and ahead.place == "behind" and self._of.grammar is not None:
            ahead.inner = self._of.grammar.follow(())  # a fresh copy: `inner` has no tokens yet
        for token in draft:
            ahead.add(token)
            found.append(ahead.mask())
        return found

    def add(self, token: int) -> None:
        """Add one token to the answer."""
        match self.place:
            case "before":
                self._push_before(token)
            case "inside":
                self._push_inside(token)
            case "behind":
                self._push_behind(token)

    def _push_before(self, token: int) -> None:
        self.begun.append(token)
        self.tail = (self.tail + self._of.spell(token)).lstrip(_SPACE)
        if self.tail.startswith(self._of.opens):
            self.place, self.tail = "inside", self.tail[len(self._of.opens) :]
        elif not self._of.opens.startswith(self.tail):
            self._go_behind()
            for one in self.begun:
                self._push_behind(one)

    def _push_inside(self, token: int) -> None:
        self.num_inside += 1
        closing = self._of.closing
        is_next = self.num_closing < len(closing) and token == closing[self.num_closing]
        self.num_closing = self.num_closing + 1 if self._is_over and is_next else 0
        self.tail = (self.tail + self._of.spell(token))[-_MOST_TAIL:]
        if self._of.closes.search(self.tail):
            self._go_behind()

    def _push_behind(self, token: int) -> None:
        if self.may_space and token in self._of.spaces:
            self.may_space = False
            return
        self.may_space = False
        if self.inner is not None:
            self.inner.push((token,))
            return
        self.tail = (self.tail + self._of.spell(token))[-len(self._of.opens) - 64 :]
        if self._of.opens and self._of.opens in self.tail:
            self.place, self.tail = "inside", b""  # it reasons again, within the same budget

    def _go_behind(self) -> None:
        self.place, self.tail, self.num_closing = "behind", b"", 0
        self.inner = self._of.grammar.follow(()) if self._of.grammar is not None else None

    @property
    def _is_over(self) -> bool:
        """Whether the reasoning has as many tokens as its budget."""
        return self._of.budget is not None and self.num_inside >= self._of.budget

    def mask(self) -> Mask | None:
        """Return the mask of the tokens allowed next; None allows all."""
        if self.place == "inside":
            return _only(self._of.closing[self.num_closing]) if self._is_over else self._of.inside
        if self._of.grammar is None:
            return None
        if self.place == "before" and self.begun:
            return self._mask_within_opening(self._of.grammar)
        inner = self.inner or self._of.grammar.follow(())
        (mask,) = inner.masks(())
        if mask is None or not self.may_space:
            return mask
        more = [*self._of.spaces] if self.place == "behind" else [*self._of.opening[:1], *self._of.spaces]
        return _with(mask, more)

    def _mask_within_opening(self, grammar: Constraint) -> Mask | None:
        """Return the mask while the tokens may still begin either the reasoning or the grammar's text."""
        begun = self._begun_text
        *masks, mask = grammar.follow(()).masks(begun)
        size = len(begun)
        if mask is None or size == len(self._of.opening) or tuple(begun) != self._of.opening[:size]:
            return mask
        more = self._of.opening[size]
        follows = all(one is None or _allows(one, token) for one, token in zip(masks, begun, strict=True))
        return _with(mask, [more]) if follows else _only(more)


def mask_without(tokens: Iterable[int], num_tokens: int) -> Mask:
    """Return a mask that allows all of a vocabulary's `num_tokens` tokens except `tokens`."""
    allowed = np.ones(num_tokens, np.uint8)
    allowed[[token for token in tokens if token < num_tokens]] = 0
    return np.packbits(allowed, bitorder="little")


def _only(token: int) -> Mask:
    return _with(np.zeros(0, np.uint8), [token])


def _allows(mask: Mask, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def _with(mask: Mask, tokens: Sequence[int]) -> Mask:
    """Return a copy of a mask that also allows `tokens`."""
    found = np.zeros(max(len(mask), max(tokens, default=0) // 8 + 1), np.uint8)
    found[: len(mask)] = mask
    for token in tokens:
        found[token // 8] |= 1 << token % 8
    return found
