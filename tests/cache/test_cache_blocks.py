"""Names of token runs: equal prefixes have equal names, nothing else has."""

from __future__ import annotations

import hashlib
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
    return list(blocks.Chain(root, block).names(blocks.as_tokens(tokens)))[1:]


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


@given(st.data())
def test_tokens_are_what_the_same_steps_make_of_a_list(data) -> None:
    """Parts are shared by tokens that grew from one another in any way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_PART", 4)
        made = [(blocks.as_tokens(), list[int]())]
        chains = {ROOT: blocks.Chain(ROOT, 3)}
        for _ in range(data.draw(st.integers(1, 8))):
            tokens, ids = data.draw(st.sampled_from(made))
            cut = slice(*sorted((data.draw(st.integers(0, len(ids))), data.draw(st.integers(0, len(ids))))))
            cut = data.draw(st.sampled_from((cut, slice(cut.stop), slice(cut.start, None))))
            more = data.draw(st.lists(st.integers(0, 2), max_size=11))
            made.append((tokens[cut] + more, ids[cut] + more))
            tokens, ids = made[-1]
            assert list(tokens) == ids == [tokens[i] for i in range(len(ids))]
            assert list(tokens.ids(2, 9)) == ids[2:9]
            assert tokens.packed() == blocks.pack(ids)
            assert tokens.digest() == hashlib.blake2b(blocks.pack(ids), digest_size=16).hexdigest()
            assert list(tokens.chains.setdefault(ROOT, chains[ROOT]).names(tokens))[1:] == chain(ids, 3)
            for other, theirs in made:
                assert (tokens == other) == (ids == theirs)
                common = next((i for i, (a, b) in enumerate(zip(ids, theirs, strict=False)) if a != b), None)
                assert tokens.num_common(other) == (min(len(ids), len(theirs)) if common is None else common)


def test_a_turn_looks_at_its_own_tokens_alone_in_a_session_of_a_million(monkeypatch) -> None:
    """What was said before is neither copied, nor compared, nor hashed again."""
    session = blocks.as_tokens(range(1_000_000))
    names = session.chains.setdefault(ROOT, blocks.Chain(ROOT, 128))
    names.names(session)
    session.digest()
    packed, linked = [], []
    pack, link = blocks.pack, blocks.link
    monkeypatch.setattr(blocks, "pack", lambda tokens: packed.append(len(tokens)) or pack(tokens))
    monkeypatch.setattr(blocks, "link", lambda *name: linked.append(name) or link(*name))
    on_device = session + range(200)
    after = (session[:999_000] + range(1000)) + range(200)
    assert on_device.num_common(session) == 1_000_000
    assert after.num_common(on_device) == 999_000
    assert (len(after.digest()), len(after.chains[ROOT].names(after))) == (32, 1 + 1_000_200 // 128)
    assert sum(packed) < 50_000
    assert len(linked) < 20


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_cannot_be_packed(token) -> None:
    with pytest.raises(OverflowError):
        blocks.pack([token])


def test_names_do_not_change_between_versions() -> None:
    """Files outlive the process: another digest here would orphan every stored snapshot."""
    assert (
        chain([1, 2, 3, 4], 2)[-1].hex() == "19f467dee241a6ed494c60118e638adde30465b61388351438c6019c03b4bc57"
    )
