"""An encrypted cache directory: its files do not reveal tokens, and changed files are rejected."""

from __future__ import annotations

import base64
import os
import random
import subprocess
import sys

import pytest
from made_kv import cut, identity, num_restored, stored, traces

from cache.admin import archive, pruning, survey
from cache.disk import codec as codecs
from cache.disk import format as snapshot_format
from cache.names import blocks
from cache.names.errors import DoubtfulSnapshotError, KeyFileError, SealedError
from cache.names.marks import Marks
from cache.names.snapshot import Name
from cache.names.tokens import pack
from cache.store import codec_by

pytest.importorskip("cryptography")

from pathlib import Path

from cache.disk import encryption

#: Numbers that occur nowhere else, so that a search finds their bytes wherever they are.
TOKENS = [0x5A5A0000 + i for i in range(10)]
KEY, OTHER_KEY = encryption.EncryptedCodec(bytes(range(32))), encryption.EncryptedCodec(bytes(32))


def snapshots(directory: Path) -> list[Path]:
    return sorted((directory / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("codec", [codecs.PLAIN, KEY], ids=["plain", "sealed"])
async def test_files_of_an_encrypted_cache_contain_no_readable_tokens_or_digests_unlike_plain_files(
    open_store, tmp_path, codec
) -> None:
    store = await stored(open_store, TOKENS, codec=codec)
    shown = [] if codec is KEY else ["index.sqlite-wal", "snapshots"]
    assert traces(tmp_path / "cache", TOKENS) == shown
    await store.close()
    mark = Marks.of("a", b"").digests
    assert (mark in (tmp_path / "cache" / "index.sqlite").read_bytes()) == (codec is not KEY)
    shown = [] if codec is KEY else ["index.sqlite", "snapshots"]
    assert traces(tmp_path / "cache", TOKENS) == shown


async def test_an_encrypted_snapshot_file_with_one_changed_bit_is_rejected_and_quarantined(
    open_store, tmp_path
) -> None:
    store = await stored(open_store, TOKENS, codec=KEY)
    first = snapshots(tmp_path / "cache")[0]
    whole = first.read_bytes()
    chance = random.Random(5)
    for at in {0, 20, 50, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(40))}:
        first.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(DoubtfulSnapshotError):
            snapshot_format.prove(first, KEY)
    assert await num_restored(store, TOKENS) == 0
    assert store.stats().rejected == 1
    assert [path.name for path in (tmp_path / "cache" / "quarantine").iterdir()] == [first.name]


async def test_an_encrypted_snapshot_file_under_the_name_of_another_snapshot_is_rejected(
    open_store, tmp_path
) -> None:
    other = [TOKENS[1], *TOKENS[1:]]
    store = await stored(open_store, TOKENS[:4], other[:4], codec=KEY)
    one, two = snapshots(tmp_path / "cache")
    assert one.stat().st_size == two.stat().st_size
    two.write_bytes(one.read_bytes())
    assert (await num_restored(store, TOKENS[:4]), await num_restored(store, other[:4])) == (4, 0)
    await store.close()
    stranger = one.with_name(codecs.PLAIN.file_name(bytes(32)))
    one.rename(stranger)
    store = await open_store(codec=KEY)
    assert store.stats().stored == 0
    assert stranger.exists(), "what has no name of this key is none of the cache's"


def test_an_encrypted_snapshot_file_with_a_chunk_missing_moved_or_added_is_rejected(
    tmp_path, monkeypatch
) -> None:
    """With chunks of 64 bytes, the tensors of a file are in several chunks."""
    monkeypatch.setattr(encryption, "_CHUNK", 64)
    tensors = cut(TOKENS, blocks.Span(0, 4))
    name = Name(blocks.root(identity().digest(), "a"), 0, pack(TOKENS[:4]))
    encoded = snapshot_format.encode(name, identity(), tensors)
    path = tmp_path / KEY.file_name(name.digest)
    snapshot_format.write(encoded, path, KEY)
    whole = path.read_bytes()
    assert len(whole) == KEY.size_bytes(encoded.size_bytes)
    assert snapshot_format.prove(path, KEY) == name
    before, size = encryption._BEFORE, 64 + encryption._TAG
    chunks = [whole[at : at + size] for at in range(before, len(whole), size)]
    assert len(chunks) > 20
    for wrong in (chunks[:-1], chunks[:-2], chunks[1:], [chunks[0], *chunks], [*chunks, chunks[-1]]):
        path.write_bytes(whole[:before] + b"".join(wrong))
        with pytest.raises(DoubtfulSnapshotError):
            snapshot_format.prove(path, KEY)
    path.write_bytes(whole[:before] + b"".join([chunks[1], chunks[0], *chunks[2:]]))
    with pytest.raises(DoubtfulSnapshotError):
        snapshot_format.prove(path, KEY)


#: What this file's test of the format writes, as the first version did.
GOLDEN = (
    "dHVybmtlZXAgc2VhbGVkAQABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f0josgVfUK2ep31Qkct9IlH41eEfca1e5"
    "2vi6jG54gojhu5PizJNxX7oIpv8Eba8mo17QNEGfOQrJsLlb5FtkSI9jqXycWzOWjdZregpns00pt0cuBhg0hMQGy0rNY+9z"
    "heA6JNXzgznOtPQ75BJB5TSTkr9tv96791U11KbX6jk="
)


def test_a_recorded_example_of_an_encrypted_file_can_be_decrypted_but_not_without_its_last_chunk(
    tmp_path, monkeypatch
) -> None:
    """The file has a salt, two full chunks, and a partial chunk that is marked as the last."""
    monkeypatch.setattr(encryption, "_CHUNK", 32)
    monkeypatch.setattr(os, "urandom", lambda size: bytes(range(size)))
    path, contents = tmp_path / KEY.file_name(bytes(32)), bytes(range(80))
    with path.open("w+b", buffering=0) as file:
        writer = KEY.writer(file.fileno(), path)
        writer.write([memoryview(contents)])
        writer.finish()
        assert base64.b64encode(path.read_bytes()).decode() == GOLDEN
        assert KEY.reader(file.fileno(), path).read(80) == contents
        file.truncate(len(base64.b64decode(GOLDEN)) - 16 - encryption._TAG)
        with pytest.raises(DoubtfulSnapshotError, match="damaged"):
            KEY.reader(file.fileno(), path).read(64)


def test_every_write_of_the_same_snapshot_gives_a_different_ciphertext(tmp_path) -> None:
    name = Name(blocks.root(identity().digest(), "a"), 0, pack(TOKENS[:4]))
    encoded = snapshot_format.encode(name, identity(), cut(TOKENS, blocks.Span(0, 4)))
    path, written = tmp_path / KEY.file_name(name.digest), set()
    for _ in range(20):
        snapshot_format.write(encoded, path, KEY)
        written.add(path.read_bytes()[encryption._BEFORE :][:16])
    assert len(written) == 20


@pytest.mark.parametrize(
    ("before", "then", "told"),
    [
        (KEY, OTHER_KEY, "is encrypted with another key; name its file by cache_key_file"),
        (KEY, codecs.PLAIN, "is encrypted; name its key's file by cache_key_file"),
        (codecs.PLAIN, KEY, "was written without a key; leave out cache_key_file"),
    ],
    ids=["another key", "no key", "a first key"],
)
async def test_a_cache_directory_opens_only_with_the_encryption_key_of_its_first_use(
    open_store, tmp_path, before, then, told
) -> None:
    directory = tmp_path / "cache"
    await (await stored(open_store, TOKENS, codec=before)).close()
    files = {
        path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"
    }
    with pytest.raises(SealedError) as refused:
        await open_store(codec=then)
    assert f"cache directory {directory} {told}, or remove what is there:" in str(refused.value)
    for command in (
        lambda: survey.inspect(directory, then),
        lambda: survey.verify(directory, lambda *_: None, then),
        lambda: archive.export(directory, None, tmp_path / "all.tar", then),
    ):
        with pytest.raises(SealedError):
            command()
    assert {path: path.read_bytes() for path in files} == files
    store = await open_store(codec=before)
    assert await num_restored(store, TOKENS) == 10
    await store.close()
    assert pruning.prune_all(directory).num_files == 3
    store = await stored(open_store, TOKENS, codec=then)
    assert await num_restored(store, TOKENS) == 10


async def test_the_archive_of_an_encrypted_cache_is_plain_and_can_be_imported_with_another_key_or_none(
    open_store, tmp_path
) -> None:
    await (await stored(open_store, TOKENS, codec=KEY)).close()
    archive.export(tmp_path / "cache", None, tmp_path / "plain.tar", KEY)
    for codec, into in ((codecs.PLAIN, tmp_path / "without"), (OTHER_KEY, tmp_path / "other")):
        await (await open_store(into, codec=codec)).close()
        taken = archive.import_files(into, tmp_path / "plain.tar", codec, max_bytes=1 << 30, min_free_bytes=0)
        assert (taken.num_files, taken.skipped) == (3, [])
        found = survey.verify(into, lambda *_: None, codec)
        assert (found.num_files, found.doubtful) == (3, [])
        assert [chain.num_tokens for chain in survey.inspect(into, codec).chains] == [10]
        store = await open_store(into, codec=codec)
        assert await num_restored(store, TOKENS) == 10
        assert (traces(into, TOKENS) == []) == (codec is OTHER_KEY)


@pytest.mark.parametrize(
    "content",
    [
        bytes(range(32)),
        base64.b64encode(bytes(range(32))),
        base64.encodebytes(bytes(range(32))),
        b"\r\n" + base64.b64encode(bytes(range(32))) + b"\r\n",
    ],
)
def test_a_cache_key_file_is_read_if_it_holds_32_bytes_raw_or_in_base64(tmp_path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(0o600)
    assert encryption.read_key(file) == bytes(range(32))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(31),
        bytes(33),
        bytes(64),
        base64.b64encode(bytes(16)),
        base64.b64encode(bytes(48)),
        b"%" * 44,
    ],
)
def test_a_cache_key_file_without_32_raw_or_base64_bytes_is_refused(tmp_path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(KeyFileError, match="holds no key; it must be 32 bytes, raw or in base64, as openssl"):
        codec_by(file)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o602])
def test_a_cache_key_file_that_is_missing_or_accessible_to_other_users_is_refused(
    tmp_path, mode: int
) -> None:
    file = tmp_path / "key"
    file.write_bytes(os.urandom(32))
    file.chmod(mode)
    with pytest.raises(KeyFileError) as refused:
        codec_by(file)
    assert str(refused.value) == f"{file} can be read by others; chmod 600 {file}"
    with pytest.raises(KeyFileError, match="cannot be read: No such file or directory; name a file of yours"):
        codec_by(tmp_path / "none")


def test_only_an_encrypted_cache_needs_the_library_cryptography_and_names_its_extra_if_the_library_is_missing(
    tmp_path, monkeypatch
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, cache.store as s; s.codec_by(None); print('cryptography' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    monkeypatch.delitem(sys.modules, "cache.disk.encryption")
    with pytest.raises(KeyFileError, match=r"cryptography is missing; pip install 'turnkeep\[encryption\]'"):
        codec_by(tmp_path / "key")


async def test_a_cache_directory_can_be_opened_after_a_crash_before_its_key_was_recorded(
    open_store, tmp_path
) -> None:
    """The record of the key is only a temporary file then."""
    (tmp_path / "cache" / "tmp").mkdir(parents=True)
    (tmp_path / "cache" / "tmp" / codecs.SEAL).write_text("AES")
    store = await stored(open_store, TOKENS, codec=KEY)
    assert await num_restored(store, TOKENS) == 10
