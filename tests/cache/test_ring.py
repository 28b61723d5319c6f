"""`RingCache` keeps the KV of sinks and a window, in slots that are computed from the positions."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.kv.ring import SLACK, RingCache


def _run(ring: RingCache, edges: list[int]) -> None:
    """Write tokens whose keys are their positions, and whose values are the positions plus 0.5."""
    for start, end in pairwise(edges):
        keys = mx.arange(start, end).astype(mx.float32).reshape(1, 1, -1, 1)
        ring.write([keys], [keys + 0.5])


def _edges(end: int, cuts: list[int]) -> list[int]:
    edges = sorted({0, end, *(cut % end for cut in cuts)})
    return sorted({*edges, *(at for a, b in pairwise(edges) for at in range(a, b, SLACK))})


@settings(max_examples=40, deadline=None)
@given(
    sink=st.integers(0, 9),
    window=st.integers(1, 700),
    end=st.integers(1, 3000),
    cuts=st.lists(st.integers(0, 3000), max_size=9),
)
def test_a_ring_cache_has_the_same_contents_however_its_tokens_are_split_into_writes(
    sink: int, window: int, end: int, cuts: list[int]
) -> None:
    whole, pieces, rebuilt = (RingCache(sink, window) for _ in range(3))
    _run(whole, _edges(end, []))
    _run(pieces, _edges(end, cuts))
    assert whole.offset == pieces.offset == end
    assert all(
        mx.array_equal(one, other).item() for one, other in zip(whole.state, pieces.state, strict=True)
    )
    num_sinks, first = min(sink, end), max(min(sink, end), end - window)
    spans = [span for span in ((0, num_sinks), (first, end)) if span[0] < span[1]]
    keys, values = (mx.concatenate([whole.tokens(*span)[i][0] for span in spans], axis=2) for i in (0, 1))
    assert keys.reshape(-1).tolist() == [*range(num_sinks), *range(first, end)]
    rebuilt.fill([keys], [values], end)
    for span in spans:
        one, other = rebuilt.tokens(*span), whole.tokens(*span)
        assert all(mx.array_equal(a[0], b[0]).item() for a, b in zip(one, other, strict=True))


def test_a_full_ring_cache_can_be_trimmed_at_most_by_its_spare_slots_and_a_short_one_to_0() -> None:
    ring = RingCache(4, 100)
    _run(ring, _edges(1000, []))
    assert ring.can_trim(1000 - SLACK)
    assert not ring.can_trim(1000 - SLACK - 1)
    assert not ring.can_trim(1001)
    young = RingCache(4, 100)
    _run(young, _edges(4 + 100 + SLACK, []))
    assert young.can_trim(0)


def test_a_ring_cache_refuses_a_trim_to_tokens_that_were_overwritten_or_never_written() -> None:
    """Attention must never read tokens that were overwritten or never written."""
    ring = RingCache(4, 100)
    _run(ring, _edges(1000, []))
    ring.trim(200)
    assert ring.offset == 800
    assert ring.can_trim(1000 - SLACK)
    assert not ring.can_trim(1000 - SLACK - 1)
    with pytest.raises(ValueError, match="not held"):
        ring.tokens(600, 650)
    with pytest.raises(ValueError, match="cannot go back to 740"):
        ring.trim(60)
    _run(ring, [800, 900])
    assert ring.can_trim(1000 - SLACK)
    filled = RingCache(4, 100)
    filled.fill([mx.ones((1, 1, 104, 1))], [mx.ones((1, 1, 104, 1))], 1000)
    assert filled.can_trim(1000)
    assert not filled.can_trim(999)
    _run(filled, [1000, 1200])
    assert filled.can_trim(1000)
    assert not filled.can_trim(999)
    young = RingCache(4, 100)
    young.fill([mx.ones((1, 1, 50, 1))], [mx.ones((1, 1, 50, 1))], 50)
    assert young.can_trim(0)


def test_a_copy_of_a_ring_cache_is_independent_of_the_original() -> None:
    ring = RingCache(4, 100)
    _run(ring, _edges(400, []))
    copy = RingCache(4, 100)
    copy.copy_from(ring)
    _run(ring, [400, 600])
    copy.trim(100)
    assert copy.tokens(200, 300)[0][0].reshape(-1).tolist() == list(range(200, 300))
    assert ring.tokens(500, 600)[0][0].reshape(-1).tolist() == list(range(500, 600))
    assert (ring.offset, copy.offset) == (600, 300)


def test_reading_overwritten_or_future_tokens_of_a_ring_cache_raises_an_error() -> None:
    ring = RingCache(4, 100)
    _run(ring, _edges(1000, []))
    with pytest.raises(ValueError, match="not held"):
        ring.tokens(600, 700)
    with pytest.raises(ValueError, match="not held"):
        ring.tokens(990, 1001)
    with pytest.raises(ValueError, match="not the keys and values of 104 tokens"):
        RingCache(4, 100).fill([mx.zeros((1, 1, 103, 1))], [mx.zeros((1, 1, 103, 1))], 1000)
