"""Names of blocks and models: equal names mean equal tokens, pictures, weights and settings."""

from __future__ import annotations

import itertools
import json
import os
import random
from array import array
from collections.abc import Sequence
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.names import blocks, identity
from cache.names.identity import Identity, files_digest, folder_identity, hash_weights
from cache.names.images import ImageSpan
from cache.names.policy import Policy
from cache.names.tokens import Chain, Tokens, as_tokens, from_compact, pack, to_compact

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
def test_blocks_of_different_tenants_or_models_never_have_the_same_name(tokens, block) -> None:
    other_tenant = chain(tokens, block, blocks.root(b"identity", "tenant2"))
    other_identity = chain(tokens, block, blocks.root(b"identitx", "tenant"))
    names = [*chain(tokens, block), *other_tenant, *other_identity]
    assert len(names) == len(set(names))


@given(TOKENS, TOKENS, SIZES)
def test_two_sessions_share_exactly_the_names_of_the_full_blocks_before_their_first_different_token(
    ids, others, block
) -> None:
    assert len({*chain(ids, block)} & {*chain(others, block)}) == common(ids, others) // block


@given(st.integers(0, 50), st.integers(0, 50), SIZES)
def test_a_token_range_is_divided_into_aligned_full_blocks_and_at_most_one_partial_block_at_its_end(
    start, end, block
) -> None:
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
def test_a_token_sequence_equals_a_plain_list_after_any_slices_and_appends(data) -> None:
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


def test_copying_a_token_sequence_for_a_fork_copies_its_images_and_block_names() -> None:
    tokens = as_tokens(range(9), [ImageSpan(2, 6, b"picture")])
    tokens.chains[ROOT] = Chain(ROOT, 3, Policy(4, 64), "tenant")
    fork = tokens.apart()
    assert fork.spans == tokens.alone().spans == tokens.spans
    copied = fork.chains[ROOT]
    assert (copied.block, copied.policy, copied.tenant) == (3, Policy(4, 64), "tenant")
    names = [*copied.names(fork)]
    tokens.chains[ROOT].names(as_tokens([5] * 9))
    assert [*copied.names(fork)] == names, "each has names of its own"


def test_a_turn_in_a_session_of_a_million_tokens_packs_and_hashes_only_its_own_tokens(monkeypatch) -> None:
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
def test_packing_a_token_id_outside_uint32_raises_an_error(token) -> None:
    with pytest.raises(OverflowError):
        pack([token])


def test_block_names_of_fixed_tokens_equal_the_values_recorded_for_all_versions() -> None:
    """With another digest here, a new version would find none of the snapshots stored before."""
    assert (
        chain([1, 2, 3, 4], 2)[-1].hex() == "19f467dee241a6ed494c60118e638adde30465b61388351438c6019c03b4bc57"
    )


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model-1.safetensors").write_bytes(b"weights one")
    (folder / "model-2.safetensors").write_bytes(b"weights two")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "_name_or_path": "here"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def take(folder, **changes) -> Identity:
    return folder_identity(folder, **{"kv_dtype": "float32", "block_tokens": 64, **changes})


def test_a_model_keeps_its_identity_after_its_folder_is_moved_and_its_readme_changes(
    folder, tmp_path
) -> None:
    before = take(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    (moved / "config.json").write_text(json.dumps({"_name_or_path": "there", "hidden_size": 8}))
    (moved / "README.md").write_text("says nothing")
    (moved / "._model-1.safetensors").write_bytes(b"macOS writes such files on disks of other systems")
    assert take(moved) == before
    assert take(moved).digest() == before.digest()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model-2.safetensors", "weights too"),
        ("model-3.safetensors", "more"),
        ("config.json", '{"hidden_size": 16}'),
        ("tokenizer.json", '{"a": 1}'),
        ("merges.txt", "a b"),
        ("tokenizer_config.json", "not JSON"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "\udcff"),
    ],
)
def test_any_change_of_weights_config_or_tokenizer_gives_a_model_another_identity(folder, name, text) -> None:
    before = take(folder).digest()
    (folder / name).write_text(text, errors="surrogateescape")
    assert take(folder).digest() != before


def test_a_chat_template_in_any_file_does_not_change_the_identity_of_a_model(folder) -> None:
    """A template determines only the tokens, which are in the blocks' names. Other settings do change it."""
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "</s>"}))
    before = take(folder)
    config.write_text(json.dumps({"eos_token": "</s>", "chat_template": "{{ messages }}"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert take(folder) == before
    config.write_text(json.dumps({"eos_token": "<end>", "chat_template": "{{ messages }}"}))
    assert take(folder) != before


def test_changing_the_code_dtype_block_size_policy_or_cache_classes_changes_the_identity_of_a_model(
    folder,
) -> None:
    variants = [
        take(folder),
        take(folder, code="other"),
        take(folder, kv_dtype="bfloat16"),
        take(folder, block_tokens=128),
        take(folder, policy="sink_window"),
        take(folder, caches="2*QuantizedKVCache(64,8)"),
    ]
    assert len({identity.digest() for identity in variants}) == 6


def test_swapping_the_contents_of_two_weight_files_changes_the_identity_of_the_model(folder) -> None:
    one, two = folder / "model-1.safetensors", folder / "model-2.safetensors"
    before = take(folder).weights
    content = one.read_bytes(), two.read_bytes()
    one.write_bytes(content[1])
    two.write_bytes(content[0])
    assert take(folder).weights != before


def test_a_cached_weight_digest_is_not_used_for_a_changed_file_with_the_same_size_and_mtime(
    folder, tmp_path
) -> None:
    memo = tmp_path / "digests.json"
    weights = folder / "model-1.safetensors"
    before = files_digest([weights], memo=memo)
    stat = weights.stat()
    weights.write_bytes(b"weights 111")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights.stat().st_mtime_ns == stat.st_mtime_ns
    assert files_digest([weights], memo=memo) != before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"PATH": 3}', b'{"PATH": {"a": 1}}'])
def test_a_damaged_file_of_cached_weight_digests_does_not_change_the_digest_of_the_weights(
    folder, tmp_path, content
) -> None:
    memo = tmp_path / "digests.json"
    weights = folder / "model-1.safetensors"
    memo.write_bytes(content.replace(b"PATH", str(weights).encode()))
    assert files_digest([weights], memo=memo) == files_digest([weights])
    assert files_digest([weights], memo=memo) == files_digest([weights])


def test_the_digest_of_weights_is_the_same_if_the_file_of_cached_digests_cannot_be_written(
    folder, tmp_path
) -> None:
    (tmp_path / "file").write_text("")
    weights = [folder / "model-1.safetensors"]
    assert files_digest(weights, memo=tmp_path / "file" / "digests.json") == files_digest(weights)


def test_weight_files_hashed_in_advance_are_not_read_again_for_the_identity_of_the_model(
    folder, tmp_path, monkeypatch
) -> None:
    memo, read = tmp_path / "digests.json", []
    hash_weights(folder, memo)
    digest = identity._file_digest
    monkeypatch.setattr(identity, "_file_digest", lambda path: read.append(path.name) or digest(path))
    assert take(folder, memo=memo) == take(folder)
    assert sum(name.endswith(".safetensors") for name in read) == 2, "only those of the call without a memo"
    hash_weights(tmp_path / "nowhere", memo)


def test_computing_the_identity_of_a_model_folder_without_weights_raises_an_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors"):
        take(tmp_path)


IMAGE_BLOCK = 8
ONE, TWO = b"1" * 32, b"2" * 32
IMAGE_ROOT = blocks.root(b"an identity", "tenant")

#: A token as it is compared: an id, or an image and an offset in it.
Content: TypeAlias = "int | tuple[bytes, int]"


def made(*parts: list[int] | tuple[bytes, int]) -> tuple[Tokens, list[Content]]:
    """Return tokens of texts and images (fingerprint, length), and their contents one by one."""
    tokens, contents = as_tokens(), list[Content]()
    for part in parts:
        if isinstance(part, list):
            tokens, contents = tokens + part, contents + part
        else:
            name, num = part
            tokens += as_tokens([7] * num, [ImageSpan(0, num, name)])
            contents += [(name, i) for i in range(num)]
    return tokens, contents


def names(tokens: Tokens) -> list[bytes]:
    return [*Chain(IMAGE_ROOT, IMAGE_BLOCK).names(tokens)]


def test_an_image_changes_the_names_of_its_own_and_all_later_blocks_but_not_of_earlier_blocks() -> None:
    text = [*range(20, 40)]
    plain, one, two = (made(text, part, text)[0] for part in ([7] * 20, (ONE, 20), (TWO, 20)))
    assert plain.ids() == one.ids() == two.ids()
    found = [names(tokens) for tokens in (plain, one, two)]
    assert found[0][:3] == found[1][:3] == found[2][:3]
    assert all(len({each[i] for each in found}) == 3 for i in range(3, 8))
    assert names(made(text, (ONE, 20), text)[0]) == found[1]


def test_the_name_of_a_block_depends_on_which_part_of_an_image_the_block_contains() -> None:
    """The same picture one token earlier or later is another block, even where the ids are equal."""
    early, late = made([7] * 14, (ONE, 9), [7] * 9)[0], made([7] * 15, (ONE, 9), [7] * 8)[0]
    assert early.ids() == late.ids()
    assert names(early)[:2] == names(late)[:2]
    assert names(early)[2] != names(late)[2]


def test_two_token_sequences_share_exactly_the_prefix_with_equal_text_and_images() -> None:
    rng = random.Random(3)

    def some() -> list[list[int] | tuple[bytes, int]]:
        sizes = (1, 3, IMAGE_BLOCK, 40, 5000)
        return [
            (rng.choice((ONE, TWO)), rng.choice(sizes)) if rng.random() < 0.5 else [7] * rng.choice(sizes)
            for _ in range(rng.randrange(6))
        ]

    for _ in range(200):
        common = some()
        (one, first), (two, second) = made(*common, *some()), made(*common, *some())
        shared = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        shared = min(len(first), len(second)) if shared is None else shared
        assert one.num_common(two) == shared
        assert (one == two) is (first == second)
        assert (one.digest() == two.digest()) is (first == second)


def test_a_token_sequence_with_images_can_be_cut_and_continued_at_any_position() -> None:
    tokens, contents = made([1, 2, 3], (ONE, 6000), [4] * 10, (TWO, 30), [5])
    for at in (0, 2, 3, 4, 4096, 6002, 6003, 6020, len(tokens)):
        head = tokens[:at]
        assert head == made(*_parts(contents[:at]))[0]
        assert head.packed() == tokens.packed(0, at)
        assert tokens.packed(at, at + 9) == tokens.packed()[4 * at : 4 * at + 36]
        assert head.extended(array("I", [9])).num_common(tokens) == at
        if at not in (4, 4096, 6002, 6020):  # a tail does not know the image that begins before it
            assert head + tokens[at:] == tokens


def test_tokens_stored_in_a_result_contain_the_models_image_token_id_for_each_token_of_an_image() -> None:
    tokens, _ = made([1], (ONE, 5), [2])
    assert from_compact(to_compact(tokens)).ids() == tokens.ids()
    assert tokens.ids().tolist() == [1, 7, 7, 7, 7, 7, 2]
    assert tokens.packed() != as_tokens(tokens.ids()).packed()


def _parts(contents: list[Content]) -> list[list[int] | tuple[bytes, int]]:
    """Return the texts and images that have these contents."""
    found = list[list[int] | tuple[bytes, int]]()
    for one in contents:
        if isinstance(one, int):
            found.append([one])
        elif one[1] == 0:
            found.append((one[0], 1))
        else:
            found[-1] = one[0], one[1] + 1
    return found
