"""The format of a snapshot file: it is read back bit by bit, and damaged files are rejected."""

from __future__ import annotations

import json
import os
import random
import struct

import mlx.core as mx
import pytest
import xxhash
from made_kv import BLOCK, HEADS, assert_is_kv_of, cut, flip, identity
from safetensors import safe_open
from safetensors.numpy import load_file

from cache.disk import format as snapshot_format
from cache.disk.header import read_name
from cache.kv import cuda
from cache.kv.arrays import BlankTensors
from cache.names import blocks
from cache.names.blocks import Span
from cache.names.errors import DoubtfulSnapshotError
from cache.names.snapshot import ModelLayout, Name, Tensor
from cache.names.tokens import pack

TOKENS = [5, 6, 7, 8]
IDENTITY = identity()
NAME = Name(blocks.root(IDENTITY.digest(), "a"), 0, pack(TOKENS))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / f"{NAME.digest.hex()}.safetensors"
    snapshot_format.write(snapshot_format.encode(NAME, IDENTITY, cut(TOKENS, Span(0, BLOCK))), path)
    return path


def load(path, layout=None, num_tokens=BLOCK, **changes):
    """Read a file with the functions of a restore; return its arrays."""
    wanted = {"digest": NAME.digest, "start": 0, "identity": IDENTITY.digest(), **changes}
    layout = layout or snapshot_format.peek(path, **wanted)[0]
    blank = BlankTensors(ModelLayout(layout), wanted["start"] + num_tokens)
    snapshot_format.read(path, **wanted, layout=layout, places=blank.places)
    return blank.arrays()


def test_writing_a_snapshot_a_few_bytes_per_system_call_gives_the_same_file_as_writing_it_in_one_call(
    path, tmp_path, monkeypatch
) -> None:
    at_a_time, writev = random.Random(7), os.writev

    def take(file, buffers):
        num_bytes, parts = at_a_time.randrange(1, 200), []
        for buffer in buffers:
            parts.append(buffer[:num_bytes])
            num_bytes -= parts[-1].nbytes
        return writev(file, parts)

    monkeypatch.setattr(os, "writev", take)
    other = tmp_path / "other"
    snapshot_format.write(snapshot_format.encode(NAME, IDENTITY, cut(TOKENS, Span(0, BLOCK))), other)
    assert other.read_bytes() == path.read_bytes()


def test_the_safetensors_library_reads_the_tensors_of_a_snapshot_file(path) -> None:
    assert_is_kv_of(load_file(path), TOKENS)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    assert json.loads(metadata["model"]) == json.loads(IDENTITY.to_json())
    assert metadata["tokens"] == NAME.tokens.hex()


def test_bfloat16_tensors_of_a_snapshot_file_are_read_back_bit_for_bit(tmp_path) -> None:
    """numpy has no bfloat16, so the bytes must be passed to MLX unchanged."""
    whole = mx.random.normal((1, HEADS, BLOCK, 8)).astype(mx.bfloat16)
    mx.eval(whole)
    data = memoryview(whole).cast("B")
    tensors = tuple(Tensor(f"0.{part}", "BF16", whole.shape, data) for part in ("keys", "values"))
    path = tmp_path / "x.safetensors"
    snapshot_format.write(snapshot_format.encode(NAME, IDENTITY, tensors), path)
    arrays = load(path)
    keys = arrays["0.keys"]
    assert keys.dtype == mx.bfloat16
    assert mx.array_equal(keys[:, :, :BLOCK].view(mx.uint16), whole.view(mx.uint16))


def test_a_snapshot_file_with_any_single_bit_flipped_is_rejected(path) -> None:
    whole = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    chance = random.Random(1)
    flips = [(at, chance.randrange(8)) for at in range(header_end)]
    flips += [(chance.randrange(header_end, len(whole)), chance.randrange(8)) for _ in range(200)]
    for at, bit in flips:
        bad = bytearray(whole)
        bad[at] ^= 1 << bit
        path.write_bytes(bad)
        with pytest.raises(DoubtfulSnapshotError):
            load(path)


def test_a_snapshot_file_with_an_extra_byte_is_rejected(path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DoubtfulSnapshotError, match="do not cover"):
        load(path)


def test_a_symbolic_link_to_a_valid_snapshot_file_is_rejected(path, tmp_path) -> None:
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DoubtfulSnapshotError, match="unreadable"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": b"x" * 32}, "other tokens"),
        ({"start": BLOCK}, "other tokens"),
        ({"identity": identity(weights="w2").digest()}, "another model"),
        ({"layout": (("0.keys", "F32", (HEADS, 99)),)}, "unlike"),
    ],
)
def test_an_intact_snapshot_file_of_other_tokens_another_model_or_another_layout_is_rejected(
    path, changes, reason
) -> None:
    with pytest.raises(DoubtfulSnapshotError, match=reason):
        load(path, **changes)


def forge(path, change) -> None:
    """Change the header and compute its checksum again, so that only other checks can detect the change."""
    whole = path.read_bytes()
    header_end = 8 + struct.unpack("<Q", whole[:8])[0]
    fields = json.loads(whole[8:header_end])
    fields["__metadata__"]["checksum"] = "0" * 32
    fields = change(fields) or fields
    text = json.dumps(fields, separators=(",", ":")).encode()
    blank = struct.pack("<Q", len(text)) + text
    signed = blank.replace(b"0" * 32, xxhash.xxh3_128(blank).hexdigest().encode(), 1)
    path.write_bytes(signed + whole[header_end:])


def at(*keys, value):
    def change(fields) -> None:
        inner = fields
        for key in keys[:-1]:
            inner = inner[key]
        if value is None:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value

    change.__name__ = f"{'.'.join(keys)} = {str(value)[:40]}"  # the test's id
    return change


def rename_tensor(fields):
    return {("9.keys" if key == "0.keys" else key): value for key, value in fields.items()}


@pytest.mark.parametrize(
    "change",
    [
        at("0.keys", "data_offsets", value=[1 << 40, (1 << 40) + 96]),
        at("0.keys", "data_offsets", value=[-96, 0]),
        at("0.keys", "data_offsets", value=[0, 95]),
        at("0.keys", "data_offsets", value=[0, 1e2]),
        at("0.keys", "data_offsets", value=[0]),
        at("0.keys", "data_offsets", value=None),
        at("0.values", "data_offsets", value=[0, 96]),
        at("0.keys", "shape", value=[1, HEADS, BLOCK + 1, 3]),
        at("0.keys", "shape", value=[1 << 32, 1 << 32, BLOCK, 3]),
        at("0.keys", "shape", value=[HEADS, BLOCK, 3]),
        at("0.keys", "shape", value=[1, HEADS, BLOCK, 3, 1]),
        at("0.keys", "shape", value=[]),
        at("0.keys", "shape", value=""),
        at("0.keys", "shape", value=["1", HEADS, BLOCK, 3]),
        at("0.keys", "shape", value=7),
        at("0.keys", "dtype", value="F64"),
        at("0.keys", "dtype", value="BF16"),
        at("0.keys", "dtype", value=["F32"]),
        at("0.keys", value=None),
        at("0.keys", value=[]),
        at("1.values", value=None),
        at("__metadata__", "version", value="1"),
        at("__metadata__", "format", value="pt"),
        at("__metadata__", "tokens", value="05000000"),
        at("__metadata__", "tokens", value=""),
        at("__metadata__", "tokens", value="050"),
        at("__metadata__", "tokens", value=["05"]),
        at("__metadata__", "start", value="-4"),
        at("__metadata__", "start", value="9" * 5000),
        at("__metadata__", "end", value="8"),
        at("__metadata__", "parent", value="00" * 32),
        at("__metadata__", "digest", value="00" * 32),
        at("__metadata__", "identity", value=None),
        rename_tensor,
        pytest.param(lambda fields: {"0.keys 0.values": fields["0.keys"], **fields}, id="a name of two"),
        pytest.param(lambda fields: {"__metadata__": fields["__metadata__"]}, id="no tensors"),
    ],
)
def test_a_snapshot_file_whose_header_contradicts_its_content_is_rejected_despite_a_valid_checksum(
    path, change
) -> None:
    forge(path, change)
    with pytest.raises(DoubtfulSnapshotError):
        load(path)


def test_a_snapshot_file_renamed_to_another_digest_is_rejected(path, tmp_path) -> None:
    assert read_name(path) == NAME
    moved = path.rename(tmp_path / f"{'00' * 32}.safetensors")
    with pytest.raises(DoubtfulSnapshotError, match="another snapshot"):
        read_name(moved)


def test_encoding_a_snapshot_whose_tensors_do_not_match_its_number_of_tokens_raises_an_error() -> None:
    with pytest.raises(ValueError, match="not a snapshot of 4 tokens"):
        snapshot_format.encode(NAME, IDENTITY, cut(TOKENS, Span(0, 3)))
    with pytest.raises(ValueError, match="not a snapshot"):
        snapshot_format.encode(NAME, IDENTITY, ())


def chain_of_two(folder, tokens):
    """Write two blocks; return the arguments with which `load` reads each."""
    wanted, parent = [], NAME.parent
    for span in (Span(0, 4), Span(4, 8)):
        name = Name(parent, span.start, pack(tokens[span.start : span.end]))
        path = folder / f"{span.start}.safetensors"
        snapshot_format.write(snapshot_format.encode(name, IDENTITY, cut(tokens, span)), path)
        wanted.append({"path": path, "digest": name.digest, "start": span.start})
        parent = name.digest
    return wanted


@pytest.mark.parametrize("num_read", [5, 8])
@pytest.mark.parametrize("own_memory", [False, True], ids=["in place", "copied to the device"])
def test_a_restore_reads_blocks_into_one_array_and_of_the_last_block_only_the_needed_tokens(
    tmp_path, monkeypatch, num_read, own_memory
) -> None:
    """Also on devices where the CPU cannot write into MLX's arrays."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: own_memory)
    monkeypatch.setattr(cuda, "to_device", lambda host, dtype: mx.array(host).view(dtype))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    identity_digest = IDENTITY.digest()
    one, two = chain_of_two(tmp_path, tokens)
    layout, _ = snapshot_format.peek(**one, identity=identity_digest)
    blank = BlankTensors(ModelLayout(layout), num_read)
    for wanted in (two, one):
        size_bytes = snapshot_format.read(
            **wanted, identity=identity_digest, layout=layout, places=blank.places
        )
        assert size_bytes == wanted["path"].stat().st_size
    arrays = blank.arrays()
    assert_is_kv_of(arrays, tokens[:num_read])
    assert all(array.shape[2] == 256 for array in arrays.values())


@pytest.mark.parametrize("num_tokens", [1, 3, BLOCK])
def test_a_snapshot_file_is_read_completely_even_if_each_system_call_returns_only_a_few_bytes(
    path, monkeypatch, num_tokens
) -> None:
    readv = os.readv

    def slow(file, buffers):
        return readv(file, [buffers[0][: min(7, len(buffers[0]))]])

    monkeypatch.setattr(os, "readv", slow)
    monkeypatch.setattr(snapshot_format, "_READ_BYTES", 50)
    assert_is_kv_of(load(path, num_tokens=num_tokens), TOKENS[:num_tokens])
    assert snapshot_format.prove(path) == NAME


def test_a_snapshot_file_with_more_buffers_than_one_readv_call_accepts_is_read_whole(
    path, monkeypatch
) -> None:
    monkeypatch.setattr(snapshot_format, "_MAX_BUFFERS", 3)
    assert_is_kv_of(load(path), TOKENS)


def test_a_snapshot_file_is_rejected_even_if_only_a_part_that_the_restore_does_not_need_is_damaged(
    path,
) -> None:
    flip(path)
    with pytest.raises(DoubtfulSnapshotError, match="checksum"):
        load(path, num_tokens=1)


def test_a_snapshot_file_that_is_truncated_while_being_read_is_rejected(path, monkeypatch) -> None:
    readv = os.readv

    def late(file, buffers):
        os.truncate(path, size_bytes - 8)
        return readv(file, buffers)

    wanted = (NAME.digest, 0, IDENTITY.digest())
    (layout, _), size_bytes = snapshot_format.peek(path, *wanted), path.stat().st_size
    monkeypatch.setattr(os, "readv", late)
    blank = BlankTensors(ModelLayout(layout), BLOCK)
    with pytest.raises(DoubtfulSnapshotError, match="shorter than its header says"):
        snapshot_format.read(path, *wanted, layout=layout, places=blank.places)


def test_verifying_a_snapshot_file_detects_damage_in_its_last_byte(path) -> None:
    assert snapshot_format.prove(path) == NAME
    flip(path)
    with pytest.raises(DoubtfulSnapshotError, match="checksum"):
        snapshot_format.prove(path)
