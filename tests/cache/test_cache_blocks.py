"""Names of token runs: equal prefixes have equal names, nothing else has."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.names import blocks

ROOT = blocks.root(b"identity", "tenant")
TOKENS = st.lists(st.integers(0, 2), max_size=24)
SIZES = st.integers(1, 5)


def chain(tokens: list[int], block: int, root: bytes = ROOT) -> list[bytes]:
    return list(blocks.Chain(root, block).names(blocks.pack(tokens)))[1:]


@given(TOKENS, TOKENS, SIZES)
def test_two_chains_share_as_many_names_as_their_tokens_share_full_blocks(a, b, block) -> None:
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    names = [x == y for x, y in zip(chain(a, block), chain(b, block), strict=False)]
    assert names.count(True) == shared // block
    assert names == sorted(names, reverse=True), "after the first difference no name may be equal again"


@given(TOKENS, SIZES)
def test_no_name_is_shared_across_tenants_or_identities(tokens, block) -> None:
    other_tenant = chain(tokens, block, blocks.root(b"identity", "tenant2"))
    other_identity = chain(tokens, block, blocks.root(b"identitx", "tenant"))
    names = [*chain(tokens, block), *other_tenant, *other_identity]
    assert len(names) == len(set(names))


@given(st.integers(0, 50), st.integers(0, 50), SIZES)
def test_spans_are_full_blocks_on_the_grid_and_at_most_one_tail(start, end, block) -> None:
    spans = blocks.spans(start, end, block)
    if start >= end:
        assert spans == []
        return
    assert spans[0].start == start // block * block
    assert spans[-1].end == end
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))
    assert all(span.start % block == 0 and span.num_tokens == block for span in spans[:-1])
    assert 1 <= spans[-1].num_tokens <= block


@given(TOKENS, TOKENS)
def test_common_tokens_are_counted(a, b) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert blocks.num_common(blocks.pack(a), blocks.pack(b)) == expected


def test_tokens_are_packed_as_little_endian_uint32() -> None:
    assert blocks.pack([1, 0x01020304]) == bytes([1, 0, 0, 0, 4, 3, 2, 1])
    assert blocks.pack(array("I", [1, 2])) == blocks.pack([1, 2])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_cannot_be_packed(token) -> None:
    with pytest.raises(OverflowError):
        blocks.pack([token])


def test_names_do_not_change_between_versions() -> None:
    """Files outlive the process: another digest here would orphan every stored snapshot."""
    assert (
        chain([1, 2, 3, 4], 2)[-1].hex() == "19f467dee241a6ed494c60118e638adde30465b61388351438c6019c03b4bc57"
    )
