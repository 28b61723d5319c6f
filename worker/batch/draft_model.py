"""Drafts answers' next tokens with a smaller model that uses the same token ids. Device thread only.

The draft model samples from its own logits with the row's noise, penalties and grammar: so a sampled draft is
right as often as the two models agree, and no draft has a token that the grammar forbids.

Its KV (a *shadow*) covers only a session's last tokens, as if the session began there: a long session costs
no more than a short one. A shadow is trimmed to the tokens that still equal the row's.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np

from cache.kv import layers

from .drafter import Drafter
from .rows import PrefillPiece
from .sampling import draw_all

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from .rows import Pass, Row

#: Number of last tokens that a new shadow covers, and the most that one holds before a new one replaces it.
BEGUN: Final = 1024
MOST_HELD: Final = 4096
#: The most sessions with a shadow; the least recently used shadow without a row is dropped first.
MOST_SHADOWS: Final = 8
#: If a shadow lacks at most this many tokens, they run with its next draft.
_FEW: Final = 8


@dataclass(slots=True)
class _Shadow:
    """The draft model's KV of a session's `tokens`, which begin at the session's position `start`.

    The first `num_sure` of them are known to equal the row's tokens.
    """

    caches: list[Any]
    start: int
    tokens: array[int] = field(default_factory=lambda: array("I"))
    num_sure: int = 0

    @property
    def end(self) -> int:
        """The position in the session of the first token without KV."""
        return self.start + len(self.tokens)


class DraftModel(Drafter):
    """Drafts with a draft model, and keeps its KV (a shadow) for some sessions; see `drafter.Drafter`."""

    hope = 0.7

    def __init__(
        self, run: Pass, make: Callable[[], list[Any]], pass_share: float, vocabularies: tuple[int, int]
    ) -> None:
        """`make` makes empty caches, from which the last tokens can be removed again.

        `vocabularies` are the numbers of logits of the target model and of the draft model. They may differ:
        ids that only one of the models has stand for no token.
        """
        self.pass_share = pass_share
        self._run = run
        self._make = make
        self._wanted, self._own = vocabularies
        self._shadows: dict[Hashable, _Shadow] = {}  # least recently used first
        self._rows: set[Hashable] = set()  # the keys of shadows whose session has a row

    def num_missing(self, row: Row) -> int | None:
        """Return how many tokens `prepare` must run before a draft.

        For a row with a usable shadow, up to `_FEW` missing tokens count as 0: they run in the draft's first
        pass. For a row that needs a new shadow at least 1; None if no shadow can be dropped for it.
        """
        shadow = self._aligned(row)
        if shadow is None:
            others = self._shadows.keys() - {_key(row)}
            has_room = len(others) < MOST_SHADOWS or not others <= self._rows
            return max(row.num_cached - self._start(row), 1) if has_room else None
        missing = row.num_cached - shadow.end
        return missing if missing > _FEW else 0

    def prepare(self, row: Row, num_tokens: int) -> None:
        """Run the first `num_tokens` of the row's tokens that have no KV in its shadow, or all if fewer."""
        shadow = self._shadow(row)
        tokens = _ids(row, shadow.end, min(shadow.end + num_tokens, row.num_cached))
        if tokens:
            piece = PrefillPiece(shadow.caches, len(shadow.tokens), self._known(tokens))
            self._run([], (), [piece])
            mx.eval(piece.states)
            shadow.tokens.extend(tokens)
            shadow.num_sure = len(shadow.tokens)

    def propose(self, wanted: Mapping[Row, int]) -> dict[Row, list[int]]:
        """Draft one token per pass for each row, until the row has `wanted[row]` tokens or an end token."""
        shadows = {row: self._shadow(row) for row in wanted}
        drafts: dict[Row, list[int]] = {row: [] for row in wanted}
        running = [row for row, most in wanted.items() if most > 0]
        while running:
            pieces = []
            for row in running:
                shadow, draft = shadows[row], drafts[row]
                tokens = draft[-1:] or _ids(row, shadow.end, row.num_cached + 1)
                pieces.append(PrefillPiece(shadow.caches, len(shadow.tokens), self._known(tokens), row))
                shadow.tokens.extend(tokens)
            draws = [row.sampler.draws(drafts[row])[-1] for row in running]
            drawn = draw_all(self._fitted(self._run([], (), pieces)), draws).tokens
            mx.eval(drawn, [piece.states for piece in pieces])
            listed: Any = drawn.tolist()
            for row, token in zip(running, listed, strict=True):
                drafts[row].append(token)
            running = [row for row in running if len(drafts[row]) < wanted[row] and not _ends(row, drafts)]
        return drafts

    def leave(self, row: Row) -> None:
        """Keep a row's shadow for its session's next row; drop it if the row has no session."""
        key = _key(row)
        self._rows.discard(key)
        shadow = self._shadows.get(key)
        if row.session is None:
            self._shadows.pop(key, None)
        elif shadow is not None:
            shadow.num_sure = 0  # the next row may have other tokens

    def forget(self, session: Hashable) -> None:
        """Drop the shadow of a session, which has no row now; without a shadow nothing happens."""
        self._shadows.pop(session, None)

    def clear(self) -> None:
        """Drop all shadows."""
        self._shadows.clear()
        self._rows.clear()

    def _known(self, tokens: list[int]) -> list[int]:
        """Clamp ids to the draft model's vocabulary: MLX would read beyond the embedding table."""
        return [min(token, self._own - 1) for token in tokens]

    def _fitted(self, logits: mx.array) -> mx.array:
        """Cut or pad logits to the target model's vocabulary, on whose size the noise of a draw depends."""
        logits = logits[:, : self._wanted]
        num_more = self._wanted - logits.shape[-1]
        return mx.pad(logits, [(0, 0), (0, num_more)], constant_values=-mx.inf) if num_more else logits

    def _start(self, row: Row) -> int:
        """Return the position in its session at which a row's new shadow begins."""
        return max(row.num_cached - BEGUN, row.num_cached + 1 - len(row.known))

    def _shadow(self, row: Row) -> _Shadow:
        """Return a row's shadow, trimmed to the tokens that equal the row's, or a new empty shadow."""
        shadow = self._aligned(row)
        key = _key(row)
        if shadow is None:
            others = [one for one in self._shadows if one not in self._rows]
            while others and len(self._shadows) >= MOST_SHADOWS:
                self._shadows.pop(others.pop(0))
            shadow = _Shadow(self._make(), self._start(row))
        self._shadows.pop(key, None)
        self._shadows[key] = shadow
        self._rows.add(key)
        return shadow

    def _aligned(self, row: Row) -> _Shadow | None:
        """Trim a row's shadow to the tokens that equal the row's; return None if a new one must be made."""
        shadow = self._shadows.get(_key(row))
        if shadow is None or shadow.start > row.num_cached:  # the session was rewound
            return None
        start = max(shadow.num_sure, row.num_cached + 1 - len(row.known) - shadow.start, 0)
        mine = np.frombuffer(shadow.tokens, np.uint32)[start:]
        theirs = np.array(_ids(row, shadow.start + start, row.num_cached), np.uint32)[: len(mine)]
        differ = np.flatnonzero(mine[: len(theirs)] != theirs)
        num = start + (int(differ[0]) if len(differ) else len(theirs))
        del mine
        if num < len(shadow.tokens):
            earliest = layers.earliest(shadow.caches)
            if earliest is None or num < earliest:
                return None
            layers.trim(shadow.caches, num)
            del shadow.tokens[num:]
        shadow.num_sure = num
        missing = row.num_cached - shadow.end
        if missing > BEGUN or num + missing + _FEW > MOST_HELD:
            return None
        return shadow


def _key(row: Row) -> Hashable:
    return row if row.session is None else row.session


def _ids(row: Row, start: int, end: int) -> list[int]:
    """Return a row's tokens at the positions `[start, end)` of its session."""
    first = row.num_cached + 1 - len(row.known)
    return [*row.known[max(start - first, 0) : max(end - first, 0)]]


def _ends(row: Row, drafts: Mapping[Row, list[int]]) -> bool:
    return drafts[row][-1] in row.sampler.end_tokens
