"""A model's identity depends on its contents: equal models have the same identity, others do not."""

from __future__ import annotations

import json
import os

import pytest

from cache.names import identity
from cache.names.identity import Identity, files_digest, folder_identity, hash_weights


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


def test_a_model_moved_elsewhere_keeps_its_identity(folder, tmp_path) -> None:
    before = take(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    (moved / "config.json").write_text(json.dumps({"_name_or_path": "there", "hidden_size": 8}))
    (moved / "README.md").write_text("says nothing")
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
    ],
)
def test_any_change_of_weights_config_or_tokenizer_gives_another_identity(folder, name, text) -> None:
    before = take(folder).digest()
    (folder / name).write_text(text)
    assert take(folder).digest() != before


def test_a_chat_template_in_any_file_does_not_change_the_identity(folder) -> None:
    """A template determines only the tokens, which are in the blocks' names. Other settings do change it."""
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "</s>"}))
    before = take(folder)
    config.write_text(json.dumps({"eos_token": "</s>", "chat_template": "{{ messages }}"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert take(folder) == before
    config.write_text(json.dumps({"eos_token": "<end>", "chat_template": "{{ messages }}"}))
    assert take(folder) != before


@pytest.mark.parametrize("content", [b"not JSON", b"[]", b"\xff"])
def test_an_invalid_tokenizer_config_changes_the_identity(folder, content) -> None:
    before = take(folder)
    (folder / "tokenizer_config.json").write_bytes(content)
    assert take(folder) != before


def test_code_dtype_block_size_policy_and_cache_classes_each_change_the_identity(folder) -> None:
    variants = [
        take(folder),
        take(folder, code="other"),
        take(folder, kv_dtype="bfloat16"),
        take(folder, block_tokens=128),
        take(folder, policy="sink_window"),
        take(folder, caches="2*QuantizedKVCache(64,8)"),
    ]
    assert len({identity.digest() for identity in variants}) == 6


def test_weight_files_that_swap_their_contents_give_another_identity(folder) -> None:
    one, two = folder / "model-1.safetensors", folder / "model-2.safetensors"
    before = take(folder).weights
    content = one.read_bytes(), two.read_bytes()
    one.write_bytes(content[1])
    two.write_bytes(content[0])
    assert take(folder).weights != before


def test_cached_weight_digests_are_used_while_the_files_are_unchanged(folder, tmp_path) -> None:
    memo = tmp_path / "state" / "digests.json"
    before = take(folder, memo=memo)
    known = json.loads(memo.read_text())
    assert take(folder, memo=memo) == before
    for entry in known.values():
        entry[3] = "f" * 64
    memo.write_text(json.dumps(known))
    assert take(folder, memo=memo).weights != before.weights, "it was hashed again, the memo saved nothing"


def test_a_cached_weight_digest_is_not_used_after_a_change_that_keeps_size_and_mtime(
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
def test_a_damaged_file_of_cached_weight_digests_does_not_change_the_result(
    folder, tmp_path, content
) -> None:
    memo = tmp_path / "digests.json"
    weights = folder / "model-1.safetensors"
    memo.write_bytes(content.replace(b"PATH", str(weights).encode()))
    assert files_digest([weights], memo=memo) == files_digest([weights])
    assert files_digest([weights], memo=memo) == files_digest([weights])


def test_a_file_of_cached_weight_digests_that_cannot_be_written_does_not_change_the_result(
    folder, tmp_path
) -> None:
    (tmp_path / "file").write_text("")
    weights = [folder / "model-1.safetensors"]
    assert files_digest(weights, memo=tmp_path / "file" / "digests.json") == files_digest(weights)


def test_weights_hashed_in_advance_are_not_read_again(folder, tmp_path, monkeypatch) -> None:
    memo, read = tmp_path / "digests.json", []
    hash_weights(folder, memo)
    digest = identity._file_digest
    monkeypatch.setattr(identity, "_file_digest", lambda path: read.append(path.name) or digest(path))
    assert take(folder, memo=memo) == take(folder)
    assert sum(name.endswith(".safetensors") for name in read) == 2, "only those of the call without a memo"
    hash_weights(tmp_path / "nowhere", memo)


def test_a_model_folder_without_weights_is_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors"):
        take(tmp_path)
