"""Crafted snapshot files: whatever is in their headers, they are rejected, and stop no worker or command."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import xxhash
from click.testing import CliRunner
from made_kv import BLOCK, assert_is_kv_of, cut, identity, put, stored

from cache.disk import format as snapshot_format
from cache.disk.catalog import Catalog
from cache.disk.folder import Folder
from cache.disk.header import read_header
from cache.disk.rows import SnapshotRow
from cache.names import blocks
from cache.names.blocks import Span
from cache.names.errors import DoubtfulSnapshotError
from cache.names.snapshot import Name, Tensor
from cache.names.tokens import pack
from commands.cli import main

TOKENS = [5, 6, 7, 8]
#: More tokens than a block may have.
MANY = [5] * 16_385
#: A character that is not ASCII, but that Python accepts as a digit.
ZERO = "\N{ARABIC-INDIC DIGIT ZERO}"
ROOT = blocks.root(identity().digest(), "a")
NAME = Name(ROOT, 0, pack(TOKENS))


def sound(tmp_path: Path) -> bytes:
    path = tmp_path / "sound"
    snapshot_format.write(snapshot_format.encode(NAME, identity(), cut(TOKENS, Span(0, BLOCK))), path)
    return path.read_bytes()


def signed(text: bytes, payload: bytes) -> bytes:
    """Return a file of this header and payload, with the right checksum in the header."""
    blank = struct.pack("<Q", len(text)) + text
    at = 8 + len(b'{"__metadata__":{"checksum":"')
    blank = blank[:at] + b"0" * 32 + blank[at + 32 :]
    return blank[:at] + xxhash.xxh3_128(blank).hexdigest().encode() + blank[at + 32 :] + payload


def crafted(whole: bytes, changes: dict[str, Any]) -> tuple[bytes, str]:
    """Change fields of a file's header; return the file, and the name that it must then have."""
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    fields = json.loads(whole[8:end])
    metadata = fields["__metadata__"]
    metadata |= changes
    try:
        named = blocks.link(bytes.fromhex(metadata["parent"]), bytes.fromhex(metadata["tokens"]))
        metadata["digest"] = named.hex()
    except (TypeError, ValueError):
        named = bytes(32)
    text = json.dumps(fields, separators=(",", ":")).encode()
    return signed(text, whole[end:]), f"{named.hex()}.safetensors"


def imported(tmp_path: Path, *files: tuple[bytes, str]) -> Any:
    """Import files by the command, as a user imports an archive from somebody else; return its JSON."""
    Folder(tmp_path / "cache").close()
    with tarfile.open(tmp_path / "given.tar", "w") as tar:
        for content, name in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    arguments = ["cache", "import", tmp_path / "given.tar", "--json", "--dir", tmp_path / "cache"]
    found = CliRunner().invoke(main, [*map(str, arguments), "--min-free-disk", "0"])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


CRAFTED: list[dict[str, Any]] = [
    {"parent": ""},
    {"parent": "ab"},
    {"parent": "ab" * 31},
    {"parent": "ab" * 4096},
    {"parent": 7},
    {"start": float("inf")},
    {"start": float("-inf")},
    {"start": float("nan")},
    {"start": 0},
    {"start": True},
    {"start": "0.0"},
    {"start": " 0"},
    {"start": ZERO},
    {"start": str(1 << 70), "end": str((1 << 70) + BLOCK)},
    {"end": float("inf")},
    {"end": None},
    {"tokens": "0500 000005500000"},
    {"tokens": "05" * 3},
    {"resumable": []},
    {"resumable": 1},
    {"identity": None},
    {"identity": "zz" * 32},
    {"identity": "\ud800"},
    {"identity": "ab"},
    {"model": 7},
    {"model": []},
    {"version": float("inf")},
    {"version": [["2"]]},
    {"version": "\ud800"},
    {"checksum": None},
    {"sections": "0" * 31},
    {"sections": "0" * 32 + "-000000000000001"},
    {"sections": "0" * 32 + "   0x0          "},
    {"sections": ""},
    {"sections": "0" * 32 + f"{1 << 60:016x}"},
    {"sections": "0" * 32 + f"{191:016x}" + "0" * 32 + f"{193:016x}"},
    {"sections": ["0" * 48]},
    {"state": "0" * 48},
    {"more": 1},
]


async def test_snapshot_files_with_forged_headers_are_not_imported_and_do_not_stop_a_store_from_opening(
    tmp_path, open_store
) -> None:
    files = [crafted(sound(tmp_path), changes) for changes in CRAFTED]
    found = imported(tmp_path, *files)
    assert (found["files"], len(found["skipped"])) == (0, len(CRAFTED)), "none is ours"
    snapshots = tmp_path / "cache" / "snapshots"
    for number, (content, name) in enumerate(files):
        # Most changes leave the file the name of the sound one, or none: give each a name of its own.
        taken = (snapshots / name).exists() or name == f"{NAME.digest.hex()}.safetensors"
        (snapshots / (f"{number:064x}.safetensors" if taken else name)).write_bytes(content)
    for _ in range(2):  # first without an index row of the files, then with the index written meanwhile
        store = await stored(open_store, TOKENS)
        assert_is_kv_of((await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS))).tensors, TOKENS)
        assert await store.close()
        for command in (["list"], ["verify"]):
            found = CliRunner().invoke(main, ["cache", *command, "--dir", str(tmp_path / "cache")])
            assert isinstance(found.exception, SystemExit | None), command


async def test_a_snapshot_file_with_more_tokens_than_a_block_is_not_imported_and_not_kept_by_a_store(
    tmp_path, open_store
) -> None:
    """`forget` finds only files with a worker's number of tokens, so others must not exist."""
    store = await open_store()
    name, kv = Name(blocks.root(identity().digest(), "a"), 0, pack(MANY)), cut(MANY, Span(0, len(MANY)))
    assert await store.close()
    layout = b"".join(bytes(tensor.data) for tensor in kv)
    fields = {"tokens": pack(MANY).hex(), "end": str(len(MANY)), "parent": name.parent.hex()}
    content, file = grown(sound(tmp_path), fields, len(MANY), layout)
    assert [one["reason"] for one in imported(tmp_path, (content, file))["skipped"]] == [
        "more tokens than a snapshot has"
    ]
    (tmp_path / "cache" / "snapshots" / file).write_bytes(content)
    store = await open_store()
    assert (await store.eraser.erase("a", pack(MANY))).settled
    assert await store.close()
    assert not [path for path in (tmp_path / "cache").rglob("*.safetensors") if path.name == file]


def grown(whole: bytes, changes: dict[str, Any], num_tokens: int, payload: bytes) -> tuple[bytes, str]:
    """Change a valid file into a consistent file of `num_tokens` tokens, which no worker would write."""
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    fields = json.loads(whole[8:end])
    at = 0
    for name, tensor in fields.items():
        if name != "__metadata__":
            tensor["shape"][2] = num_tokens
            size = len(payload) // (len(fields) - 1)
            tensor["data_offsets"] = [at, at + size]
            at += size
    sections = xxhash.xxh3_128(payload).hexdigest() + f"{len(payload):016x}"
    text = json.dumps(fields, separators=(",", ":")).encode()
    padded = text + b" " * (-len(text) % 8)
    return crafted(struct.pack("<Q", len(padded)) + padded + payload, changes | {"sections": sections})


@pytest.mark.parametrize(
    "row",
    [
        SnapshotRow(b"d" * 32, b"p" * 3, 0, 4, 9, 1),
        SnapshotRow(b"d" * 32, b"", 0, 4, 9, 1),
        SnapshotRow(b"d" * 31, b"p" * 32, 0, 4, 9, 1),
        SnapshotRow(b"d" * 32, b"p" * 32, -4, 4, 9, 1),
        SnapshotRow(b"d" * 32, b"p" * 32, 0, -4, 9, 1),
        SnapshotRow(b"d" * 32, b"p" * 32, 0, 4, -9, 1),
    ],
    ids=lambda row: repr(row)[:200],
)
async def test_opening_a_store_repairs_index_rows_with_negative_numbers_or_digests_of_wrong_length(
    tmp_path, open_store, row
) -> None:
    """The rows' checksums are right, so the check of checksums alone would accept them."""
    folder = Folder(tmp_path / "cache")
    catalog = Catalog(folder)
    catalog.put([row])
    catalog.close()
    folder.close()
    (tmp_path / "cache" / "snapshots" / f"{row.digest.hex()}.safetensors").write_bytes(b"x" * 9)
    store = await stored(open_store, TOKENS)
    assert store.stats().stored == 1


def directory(path: Path) -> None:
    path.mkdir()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [directory, pipe, link])
async def test_a_store_opens_even_if_a_directory_pipe_or_link_has_the_name_of_a_snapshot_file(
    tmp_path, open_store, make
) -> None:
    """Opening a pipe blocks for ever if nobody writes to it."""
    snapshots = tmp_path / "cache" / "snapshots"
    snapshots.mkdir(parents=True)
    make(snapshots / f"{NAME.digest.hex()}.safetensors")
    store = await open_store()
    assert store.stats().stored == 0
    await put(store, TOKENS)
    assert_is_kv_of((await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS))).tensors, TOKENS)


def test_a_snapshot_file_with_an_oversized_header_is_rejected_before_the_header_is_parsed(tmp_path) -> None:
    """A parsed JSON list takes twenty times the memory of its text."""
    path = tmp_path / "x"
    text = sound(tmp_path)[8:37] + b'","x":[' + b"[]," * (1 << 20)
    path.write_bytes(signed(text, b""))
    with pytest.raises(DoubtfulSnapshotError, match="header length"):
        read_header(path)


async def test_a_snapshot_file_with_a_forged_huge_tensor_shape_is_rejected_without_allocating_its_memory(
    tmp_path, open_store
) -> None:
    """The file has some hundred bytes, and its header claims a million heads of size zero."""
    store = await stored(open_store, TOKENS)
    match = store.kv.match(store.kv.chain("a"), TOKENS)
    assert await store.kv.load(match) is not None, "all that it takes has been imported"
    tensors = tuple(
        Tensor(f"0.{part}", "F32", (1, 1 << 20, BLOCK, 0), memoryview(b"")) for part in ("keys", "values")
    )
    path = tmp_path / "cache" / "snapshots" / f"{NAME.digest.hex()}.safetensors"
    snapshot_format.write(snapshot_format.encode(NAME, identity(), tensors), path)
    tracemalloc.start()
    try:
        assert await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS)) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert store.stats().rejected == 1
    assert (tmp_path / "cache" / "quarantine" / path.name).exists()
