"""`turnkeep cache verify --recompute` on the directory of a worker: right, wrong and encrypted files."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cache.disk import format as snapshot_format
from cache.disk.codec import Codec
from cache.disk.format import EncodedSnapshot
from cache.disk.header import BLANK, CHECKSUM_AT, CHECKSUM_END, opened
from cache.store import codec_by
from tests.commands.command_runs import command
from tests.parts import WorkerProcess, make_tiny_model

pytestmark = pytest.mark.process


def forge(path: Path, codec: Codec) -> None:
    """Change the KV in a file, and make its checksums right again."""
    with opened(path, codec) as (_, whole, _):
        head = whole[:CHECKSUM_AT] + BLANK + whole[CHECKSUM_END:]
    tensors = tuple(snapshot_format.tensors(path, codec).values())
    for one in tensors:
        if one.dtype == "F32":
            numbers = np.frombuffer(one.data, np.float32)
            numbers *= 1.5
    snapshot_format.write(EncodedSnapshot(head, tensors), path, codec)


@pytest.mark.parametrize(("kv_bits", "has_key"), [(None, True), (4, False)])
async def test_recompute_finds_a_file_whose_kv_was_changed_under_a_right_checksum_and_moves_it_if_asked(
    worker_process: Callable[..., WorkerProcess], tmp_path: Path, kv_bits: int | None, has_key: bool
) -> None:
    model, key = make_tiny_model(tmp_path / "model", hidden_size=256), None
    options: tuple[str, ...] = ("--dtype", "float32")
    if has_key:
        pytest.importorskip("cryptography")
        key = tmp_path / "key"
        key.write_bytes(base64.b64encode(os.urandom(32)) + b"\n")
        key.chmod(0o600)
        options += ("--cache-key-file", str(key))
    if kv_bits is not None:
        options += ("--kv-bits", str(kv_bits))
    worker = worker_process(*options, model=model)
    worker.start()
    client = await worker.client()
    async with asyncio.timeout(60):
        await client.session("garden").generate(text="some words of a question, " * 20, max_tokens=8)
    await client.close()
    worker.stop()
    files = sorted((worker.data_dir / "snapshots" / "snapshots").iterdir())
    assert len(files) > 3
    verify = ("cache", "verify", "--data-dir", str(worker.data_dir), "--model", str(model), *options)

    right = await command(*verify, "--recompute")
    assert right.returncode == 0, right.stderr
    assert f"{len(files)} blocks recomputed, 0 wrong, 0 skipped" in right.stdout

    forge(files[1], codec_by(key))
    assert (await command(*verify)).returncode == 0, "its checksum is right"
    wrong = await command(*verify, "--recompute", "--quarantine", "--json")
    assert wrong.returncode == 1
    found = json.loads(wrong.stdout)
    assert (found["recomputed"], found["wrong"], found["skipped"]) == (len(files), 1, 0)
    assert [one["file"] for one in found["doubtful"]] == found["quarantined"] == [files[1].name]
    assert not files[1].exists()

    other = make_tiny_model(tmp_path / "other", hidden_size=256, rope_theta=500.0)
    skipped = await command(*verify, "--model", str(other), "--recompute")
    assert skipped.returncode == 0, skipped.stderr
    assert f"0 blocks recomputed, 0 wrong, {len(files) - 1} skipped" in skipped.stdout
