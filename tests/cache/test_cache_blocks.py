"""Names of blocks: two sessions' blocks have equal names if and only if all tokens up to them are equal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.names import blocks
from cache.names.tokens import (
    Chain,
    as_tokens,
    from_compact,
    pack,
    to_compact,
)

ROOT = blocks.root(b"identity", "tenant")
TOKENS = st.lists(st.integers(0, 2), max_size=24)
SIZES = st.integers(1, 5)


def chain(tokens: list[int], block: int, root: bytes = ROOT) -> list[bytes]:
    return list(Chain(root, block).names(as_tokens(tokens)))[1:]


def common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Count the leading numbers that two lists share, by comparing them one by one."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(ids), len(others)))


@given(TOKENS, SIZES)
def test_different_tenants_or_models_share_no_block_name(tokens, block) -> None:
    other_tenant = chain(tokens, block, blocks.root(b"identity", "tenant2"))
    other_identity = chain(tokens, block, blocks.root(b"identitx", "tenant"))
    names = [*chain(tokens, block), *other_tenant, *other_identity]
    assert len(names) == len(set(names))


@given(TOKENS, TOKENS, SIZES)
def test_two_sessions_share_the_names_of_the_blocks_before_their_first_different_token(
    ids, others, block
) -> None:
    assert len({*chain(ids, block)} & {*chain(others, block)}) == common(ids, others) // block


@given(st.integers(0, 50), st.integers(0, 50), SIZES)
def test_spans_are_aligned_full_blocks_and_at_most_one_tail(start, end, block) -> None:
    spans = blocks.spans(start, end, block)
    if start >= end:
        assert spans == []
        return
    assert spans[0].start == start // block * block
    assert spans[-1].end == end
    assert all(a.end == b.start for a, b in itertools.pairwise(spans))
    assert all(span.start % block == 0 and span.num_tokens == block for span in spans[:-1])
    assert 1 <= spans[-1].num_tokens <= block


@given(st.data())
def test_tokens_behave_like_a_plain_list_after_any_slices_and_appends(data) -> None:
    """Sequences that were made from one another share memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cache.names.tokens._PART", 4)
        made, digests = [(as_tokens(), list[int]())], {}
        chains = {ROOT: Chain(ROOT, 3)}
        for _ in range(data.draw(st.integers(1, 8))):
            tokens, ids = data.draw(st.sampled_from(made))
            cut = slice(*sorted((data.draw(st.integers(0, len(ids))), data.draw(st.integers(0, len(ids))))))
            cut = data.draw(st.sampled_from((cut, slice(cut.stop), slice(cut.start, None))))
            more = data.draw(st.lists(st.integers(0, 2), max_size=11))
            made.append((tokens[cut] + more, ids[cut] + more))
            tokens, ids = made[-1]
            assert list(tokens) == ids == [tokens[i] for i in range(len(ids))]
            assert list(tokens.ids(2, 9)) == ids[2:9]
            assert tokens.packed() == pack(ids)
            assert digests.setdefault(tokens.digest(), ids) == ids
            assert list(from_compact(to_compact(ids))) == ids
            assert list(tokens.chains.setdefault(ROOT, chains[ROOT]).names(tokens))[1:] == chain(ids, 3)
            for other, theirs in made:
                assert (tokens == other) == (ids == theirs)
                assert tokens.num_common(other) == common(ids, theirs)


def test_a_turn_does_not_pack_or_hash_a_session_of_a_million_tokens_again(monkeypatch) -> None:
    """A turn copies, compares and hashes only its own tokens."""
    session = as_tokens(range(1_000_000))
    names = session.chains.setdefault(ROOT, Chain(ROOT, 128))
    names.names(session)
    session.digest()
    packed, linked = [], []
    link = blocks.link
    monkeypatch.setattr("cache.names.tokens.pack", lambda tokens: packed.append(len(tokens)) or pack(tokens))
    monkeypatch.setattr(blocks, "link", lambda *name: linked.append(name) or link(*name))
    on_device = session + range(200)
    after = (session[:999_000] + range(1000)) + range(200)
    assert on_device.num_common(session) == 1_000_000
    assert after.num_common(on_device) == 999_000
    assert (len(after.digest()), len(after.chains[ROOT].names(after))) == (32, 1 + 1_000_200 // 128)
    assert sum(packed) < 50_000
    assert len(linked) < 20


@pytest.mark.parametrize("token", [-1, 2**32])
def test_packing_a_number_outside_uint32_raises_an_error(token) -> None:
    with pytest.raises(OverflowError):
        pack([token])


def test_block_names_do_not_change_between_versions() -> None:
    """With another digest here, a new version would find none of the snapshots stored before."""
    assert (
        chain([1, 2, 3, 4], 2)[-1].hex() == "19f467dee241a6ed494c60118e638adde30465b61388351438c6019c03b4bc57"
    )
