"""KV of a paged session on the device: a ring for its first and last tokens, and slots for other chunks.

All of the session's KV is on SSD. A `PagedCache` has the slots of one layer, whose tokens keep their true
positions. `Pages` chooses the chunks for all layers together: it compares queries with sketches, which are
copies of all keys with two bits per channel. Device thread only.

When a question asks for a fact, only a few heads attend to the fact, and only from one of the question's
tokens. So a chunk's score is the largest share of attention that any head gives it. Two alternatives do not
find facts (ADR 0041): the mean over heads, and bounds over pages of keys as in "Quest" (arXiv 2406.10774),
which take as many bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import mlx.core as mx
import numpy as np

from cache.names.policy import CHUNK, PART, SLACK, Policy

from . import states
from .ring import RingCache
from .sketches import ASKED, page_shares, sketch_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from cache.names.blocks import Span

#: Queries are compared once in this many tokens: of an answer, and of a long prompt's middle.
_EVERY: Final = 4
_SELDOM: Final = 512
#: Scores are computed per page of tokens. A chunk's score is the highest of its pages and of the page before,
#: since the text after a match is needed next. The page after the chunk counts less (`_BEHIND`): if two
#: chunks share a sentence, the chunk with the match ranks first.
PAGE: Final = 16
_BEHIND: Final = 0.7
#: The share of a chunk's previous score that is kept.
_MEMORY: Final = 0.5
#: The share of a chunk's usual score that is subtracted, and how slowly the usual score changes.
_EXPECTED: Final = 0.5
_INERTIA: Final = 0.8
#: A chunk on SSD takes another chunk's slot only if its score is this many times as high.
_GAIN: Final = 1.05


class Past(Protocol):
    """A reader of the KV of a session's first `end` tokens on SSD, such as `StoredPast`."""

    @property
    def end(self) -> int:
        """The number of the session's first tokens whose KV can be read."""

    def parts(self, layer: str, then: str | None) -> Iterator[tuple[list[mx.array], list[mx.array]]]:
        """Yield a layer's keys and values, part by part, as the cache stores them; `then` is read next."""


class Pages:
    """Which chunks are in a session's slots, the same for all layers, and the score of every chunk."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        #: Whether the tokens being run attend to all earlier tokens, also to those only on SSD.
        self.sees_all = False
        #: Reads the KV that is only on SSD.
        self.past: Past | None = None
        #: By slot: the chunk's number, -1 for none. Pinned chunks have the first slots, for ever.
        self.slots: list[int] = [-1] * (policy.recall // CHUNK)
        self._pinned = policy.pinned
        self._noted: list[mx.array] = []  # each page's score, by layer and pass
        self._mattered = np.zeros(0)
        self._usual = np.zeros(0)  # a running average of each chunk's score
        #: Passes that reach this position, near a prompt's end, compare their queries; earlier ones rarely.
        self.asks_from = 0

    def assign(self, chunk: int) -> int | None:
        """Return a chunk's slot. A chunk without a slot gets a free one; None if no slot is free."""
        if chunk in self.slots:
            return self.slots.index(chunk)
        if chunk in self._pinned:
            slot = self._pinned.index(chunk)
        elif -1 in self.slots[len(self._pinned) :]:
            slot = self.slots.index(-1, len(self._pinned))
        else:
            return None
        self.slots[slot] = chunk
        return slot

    def asks(self, start: int, num: int) -> bool:
        """Whether to compare the queries of the tokens `[start, start + num)` with the sketches."""
        if num == 1:
            return start % _EVERY == 0
        return start + num >= self.asks_from or start % _SELDOM < num

    def note(self, mattering: mx.array) -> None:
        """Record a layer's page scores from one pass, for `settle`. The array is not evaluated yet."""
        self._noted.append(mattering)

    def settle(self) -> None:
        """Update the chunks' scores from all scores recorded since the last call."""
        if not self._noted:
            return
        mx.eval(self._noted)
        num_pages = max(noted.shape[0] for noted in self._noted)
        found = np.zeros(num_pages)
        for noted in self._noted:
            np.maximum(found[: noted.shape[0]], np.array(noted), out=found[: noted.shape[0]])
        self._noted = []
        pages = found.reshape(-1, CHUNK // PAGE)
        now = pages.max(axis=1)
        now[1:] = np.maximum(now[1:], pages[:-1, -1])
        now[:-1] = np.maximum(now[:-1], _BEHIND * pages[1:, 0])
        before, usual = np.zeros(len(now)), now.copy()
        before[: len(self._mattered)] = self._mattered[: len(now)]
        usual[: len(self._usual)] = self._usual[: len(now)]
        # Some chunks, and all recent ones, attract some head whatever the query is.
        self._mattered = np.maximum(_MEMORY * before, now - _EXPECTED * usual)
        self._usual = _INERTIA * usual + (1 - _INERTIA) * now

    def choose(self, position: int) -> list[int]:
        """Return the chunks to recall from SSD: not in slots, but worth a slot; highest score first."""
        self.settle()
        last = -(-self.policy.visible_from(position) // CHUNK)  # later chunks are in the window
        numbers = [chunk for chunk in range(min(last, len(self._mattered))) if chunk not in self._pinned]
        here = [chunk for chunk in self.slots if chunk in numbers]
        free = len(self.slots) - len(self._pinned) - len(here)
        away = sorted((one for one in numbers if one not in here), key=lambda one: -self._mattered[one])
        wanted, away = away[:free], away[free:]
        for leaving, chunk in zip(sorted(here, key=lambda one: self._mattered[one]), away, strict=False):
            if self._mattered[chunk] <= _GAIN * self._mattered[leaving]:
                break
            wanted.append(chunk)
        return wanted

    def take(self, chunk: int) -> int | None:
        """Return a slot for a recalled chunk: its own, a free one, or the slot of the lowest-scoring chunk.

        None if no chunk in a slot scores lower than this chunk.
        """
        slot = self.assign(chunk)
        if slot is None:
            movable = range(len(self._pinned), len(self.slots))
            slot = min(movable, key=lambda one: self._value(self.slots[one]))
            if self._value(self.slots[slot]) >= self._value(chunk):
                return None
            self.slots[slot] = chunk
        return slot

    def _value(self, chunk: int) -> float:
        return float(self._mattered[chunk]) if chunk < len(self._mattered) else 0.0

    def trim(self, num_tokens: int) -> None:
        """Empty the slots of chunks that end after position `num_tokens`."""
        self.slots = [-1 if (chunk + 1) * CHUNK > num_tokens else chunk for chunk in self.slots]
        self._mattered = self._mattered[: num_tokens // CHUNK]
        self._usual = self._usual[: num_tokens // CHUNK]
        self._noted = []

    def copy_from(self, other: Pages) -> None:
        """Copy the slots and the scores of `other`."""
        self.slots, self._mattered, self._usual = [*other.slots], other._mattered.copy(), other._usual.copy()


class PagedCache(RingCache):
    """The first `sink` tokens and the last `window` of one layer, and the chunks in the slots of `pages`.

    In the arrays the slots follow the ring, and are allocated as chunks leave the window. `sketch` has the
    keys of all tokens, quantised to two bits: codes, scales and biases, (1, KV heads, tokens, size) each. The
    sketch is empty unless the layer `is_sketched`.
    """

    def __init__(self, pages: Pages, group_size: int = 0, bits: int = 0, *, is_sketched: bool = True) -> None:
        super().__init__(pages.policy.sink, pages.policy.window or 0, group_size, bits, grid=0)
        self.policy = pages.policy
        self.pages = pages
        self.is_sketched = is_sketched
        self._num_passed = 0  # chunks that have begun to leave the window

    @property
    def state(self) -> tuple[mx.array, ...]:
        """All arrays, for `mx.eval`."""
        return (*super().state, *self.sketch)

    @property
    def sees_all(self) -> bool:
        """Whether the tokens being run attend to all earlier tokens."""
        return self.pages.sees_all

    @property
    def num_slots(self) -> int:
        """The number of allocated slots."""
        held = self.keys[0].shape[2] if self.keys else 0
        return max(0, held - self.capacity) // CHUNK

    def places_for(self, end: int) -> int:
        """Return how many places, slots included, the arrays need for a session of `end` tokens."""
        if end <= self.window:
            return super().places_for(end)
        passed = min(-(-(end - self.window) // CHUNK), len(self.pages.slots))
        return self.capacity + max(passed, self.num_slots) * CHUNK

    def slot_positions(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return, for each place in the allocated slots, its token's position; -1 for an empty place."""
        chunks = np.array(self.pages.slots[: self.num_slots], np.int64)[:, None]
        return np.where(chunks < 0, -1, chunks * CHUNK + np.arange(CHUNK)).reshape(-1)

    def trim(self, num_tokens: int) -> None:
        """Drop the last `num_tokens` tokens; see `RingCache.trim`."""
        super().trim(num_tokens)
        self.pages.trim(self.offset)
        self._num_passed = min(self._num_passed, -(-max(self.offset - self.window, 0) // CHUNK))

    def copy_from(self, other: RingCache) -> None:
        """Replace this cache's contents by a copy of `other`, unevaluated. Both have the same parameters."""
        super().copy_from(other)
        if isinstance(other, PagedCache):
            self.pages.copy_from(other.pages)
            self.sketch = tuple(map(mx.array, other.sketch))
            self._num_passed = other._num_passed  # noqa: SLF001  # of the same class

    def shrink(self) -> None:
        """Free the unused places after the last token, unevaluated; no effect once slots are allocated."""
        if not self.num_slots:
            super().shrink()

    def write(self, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        """Add the KV of the next tokens, at most `SLACK`; chunks that leave the window go to free slots.

        `keys` and `values` have the form that `packed` returns: one array, or codes, scales and biases if KV
        is quantised; (1, KV heads, tokens, size) each. If the layer `is_sketched`, its sketch grows too.
        """
        at = slice(self.offset, self.offset + keys[0].shape[2])
        super().write(keys, values)
        if self.is_sketched:
            self._add_sketch(keys, at)
        self._keep_passed()

    def _add_sketch(self, keys: Sequence[mx.array], at: slice) -> None:
        sketched = sketch_of(self._unpacked(tuple(keys), at.stop - at.start))
        held = self.sketch[0].shape[2] if self.sketch else 0
        if held < at.stop:
            size = -(-at.stop // SLACK) * SLACK - held
            blank = [mx.zeros((*part.shape[:2], size, part.shape[3]), part.dtype) for part in sketched]
            pairs = zip(self.sketch, blank, strict=True)
            self.sketch = tuple(mx.concatenate([*pair], axis=2) for pair in pairs) if held else tuple(blank)
        for array, part in zip(self.sketch, sketched, strict=True):
            array[..., at, :] = part

    def put(self, slot: int, keys: Sequence[mx.array], values: Sequence[mx.array]) -> None:
        """Write a chunk's keys and values, (1, KV heads, `CHUNK`, size), to a slot."""
        missing = slot + 1 - self.num_slots
        if missing > 0:
            self._allocate(keys, values, self.capacity)
            self._extend(keys, values, self.capacity + (slot + 1) * CHUNK)
        place = slice(self.capacity + slot * CHUNK, self.capacity + (slot + 1) * CHUNK)
        for side, new in ((self.keys, keys), (self.values, values)):
            for array, part in zip(side or (), new, strict=True):
                array[..., place, :] = part

    def fill(
        self,
        keys: Sequence[mx.array],
        values: Sequence[mx.array],
        num_tokens: int,
        sketch: Sequence[mx.array] = (),
    ) -> None:
        """Fill an empty cache with the tokens of `policy.seen(num_tokens)`, in order.

        `sketch` has the sketches of `num_tokens` or more tokens. Raises `ValueError` if the number of tokens
        does not fit.
        """
        spans = self.pages.policy.seen(num_tokens)
        num_held = sum(end - start for start, end in spans)
        if any(array.shape[2] != num_held for array in (*keys, *values)):
            raise ValueError(f"not the keys and values of {num_held} tokens")
        if len(sketch) != 3 * self.is_sketched or any(array.shape[2] < num_tokens for array in sketch):
            raise ValueError(f"not the sketch of {num_tokens} keys")

        def part(at: int, num: int) -> tuple[list[mx.array], list[mx.array]]:
            held = slice(at, at + num)
            return [array[..., held, :] for array in keys], [array[..., held, :] for array in values]

        first, end = spans[-1]
        if first:
            RingCache.write(self, *part(0, self.sink))
            at = 0
            for start, stop in spans[:-1]:
                # A pinned chunk may end within the window: then the window's tokens follow.
                for chunk in range(start // CHUNK, -(-stop // CHUNK)):
                    if chunk in self.pages.policy.pinned and (slot := self.pages.assign(chunk)) is not None:
                        self.put(slot, *part(at + chunk * CHUNK - start, CHUNK))
                at += stop - start
            self.sketch, self._num_passed = tuple(sketch), -(-first // CHUNK)
        self.offset, self.first_held = first, max(first, self.sink)
        for begin in range(first, end, CHUNK):
            self.write(*part(num_held - (end - begin), min(CHUNK, end - begin)))

    @property
    def num_passed(self) -> int:
        """The position before which the cache no longer has all tokens; 0 if it has all of them."""
        return self.first_held if self.first_held > self.sink else 0

    def before(self, layer: str, then: str | None) -> Iterator[tuple[mx.array, mx.array]]:
        """Yield the keys and values of all tokens before `offset`, in order, dequantised, in parts.

        Tokens of `pages.past` come first, then the tokens in the cache. Raises `ValueError` if tokens between
        the two are missing. `layer` is this layer's path in snapshots. Meanwhile `pages.past` begins to read
        the layer `then`, which the model runs next; None after the last layer.
        """
        past, start = self.pages.past, self.num_passed
        if start and (past is None or past.end != start):
            raise ValueError(f"not the past of a layer that holds the tokens from {start} on")
        for part in past.parts(layer, then) if past is not None and start else ():
            keys, values = (self._unpacked(tuple(side), side[0].shape[2]) for side in part)
            yield keys, values
        for at in range(start, self.offset, PART):
            end = min(at + PART, self.offset)
            keys, values = (self._unpacked(side, end - at) for side in self.tokens(at, end))
            yield keys, values

    def weigh(self, at: int, queries: mx.array, scale: float) -> None:
        """Score the pages of whole chunks by the last `ASKED` of `queries`, (tokens, heads, 1, head_dim).

        The queries are of the tokens from position `at` on. A page's score is the largest share of attention
        that any of these queries, in any head, gives to one token of the page.
        """
        num_tokens = self.offset // CHUNK * CHUNK
        is_asked = self.is_sketched and self.pages.asks(at, len(queries))
        if not is_asked or self.offset <= self.sink + self.window:
            return
        kv_heads, size = self.sketch[0].shape[1], queries.shape[-1]
        asked = queries[-ASKED:, :, 0].reshape(-1, kv_heads, queries.shape[1] // kv_heads, size)
        asked = asked.transpose(1, 0, 2, 3).reshape(1, kv_heads, -1, size) * scale
        keys = tuple(array[..., :num_tokens, :] for array in self.sketch)
        self.pages.note(page_shares(asked, keys, PAGE))

    def _keep_passed(self) -> None:
        """Copy chunks whose first tokens have left the window to slots, as long as slots are free."""
        while self._num_passed * CHUNK < self.offset - self.window:
            chunk, self._num_passed = self._num_passed, self._num_passed + 1
            slot = self.pages.assign(chunk)
            if slot is not None:
                self.put(slot, *self.tokens(chunk * CHUNK, (chunk + 1) * CHUNK))


def maker(policy: Policy, sketched: Collection[int] | None) -> Callable[..., RingCache]:
    """Return a function that makes the ring of a layer (a number), under a policy with a window.

    Its other arguments are the group size and the bits of quantised KV. `sketched`: see `layers.make`.
    """
    if not policy.recall:
        return lambda _layer, *packing: RingCache(policy.sink, policy.window or 0, *packing)
    pages = Pages(policy)
    return lambda layer, *packing: PagedCache(
        pages, *packing, is_sketched=sketched is None or layer in sketched
    )


def first(caches: Sequence[Any]) -> PagedCache | None:
    """Return the first layer's cache in a paged session; all of them have the same `pages`. Else None."""
    return next((cache for _, cache in states.leaves(caches) if isinstance(cache, PagedCache)), None)


def recall(caches: Sequence[Any], tensors: Mapping[str, mx.array], spans: Sequence[Span]) -> None:
    """Write chunks read from SSD to slots on the device, unevaluated.

    `spans` are whole chunks, and `tensors` have their tokens, in order. A chunk that scores lower than all
    chunks in slots is dropped.
    """
    slots: list[int | None] = []
    for path, cache in states.leaves(caches):
        if not isinstance(cache, PagedCache):
            continue
        slots = slots or [cache.pages.take(span.start // CHUNK) for span in spans]  # the same in all layers
        arrays = [tensors[f"{path}.{part}"] for part in states.parts(cache)]
        for i, slot in enumerate(slots):
            if slot is not None:
                held = [array[..., i * CHUNK : (i + 1) * CHUNK, :] for array in arrays]
                cache.put(slot, held[: len(held) // 2], held[len(held) // 2 :])
