"""Encrypted snapshots are used only with their key; `cache verify --recompute` finds files with wrong KV."""

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from cache.disk import format as snapshot_format
from cache.disk.codec import Codec
from cache.disk.format import EncodedSnapshot
from cache.disk.header import BLANK, CHECKSUM_AT, CHECKSUM_END, open_file
from cache.store import codec_by
from tests.commands.command_runs import command, turnkeep
from tests.parts import LocalWorker, WorkerProcess, make_tiny_model

pytest.importorskip("cryptography")
TEXT = "xylophone-7431 is said in the prompt, again and again; " * 4
Start = Callable[..., Awaitable[LocalWorker]]
PAGE = Path(__file__).parents[2] / "docs" / "operating.md"


def key_file(folder: Path, name: str) -> Path:
    made = folder / name
    made.write_bytes(base64.b64encode(os.urandom(32)) + b"\n")
    made.chmod(0o600)
    return made


async def said(worker: LocalWorker) -> tuple[tuple[int, ...], int]:
    """Send the same prompt in a new session; return the answer's tokens and the number of cached tokens."""
    result = await worker.client.session(os.urandom(4).hex()).generate(text=TEXT, max_tokens=8)
    return result.tokens, result.usage.cached_tokens


async def test_a_worker_with_a_wrong_or_missing_cache_key_answers_without_snapshots_and_logs_a_remedy(
    local_worker: Start, tmp_path: Path
) -> None:
    key, other = (key_file(tmp_path, name) for name in ("key", "other"))
    worker = await local_worker(cache_key_file=key)
    answer, _ = await said(worker)
    await worker.stop()
    snapshots = tmp_path / "data" / "snapshots"
    files = {path: path.read_bytes() for path in (snapshots / "snapshots").iterdir()}
    assert files
    for given, why in (
        (other, "is encrypted with another key; name its file by cache_key_file"),
        (None, "is encrypted; name its key's file by cache_key_file"),
    ):
        with capture_logs() as logged:
            worker = await local_worker(cache_key_file=given)
        assert await said(worker) == (answer, 0)
        await worker.stop()
        reasons = [line["reason"] for line in logged if "serving without snapshots" in line["event"]]
        assert reasons == [
            f"cache directory {snapshots} {why}, or remove what is there: turnkeep cache prune --all"
        ]
    assert {path: path.read_bytes() for path in (snapshots / "snapshots").iterdir()} == files
    again, cached = await said(await local_worker(cache_key_file=key))
    assert (again, cached > 0) == (answer, True)


def test_the_documented_openssl_command_makes_a_valid_cache_key(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    (line,) = re.findall(r"^.*openssl rand.*$", PAGE.read_text(), re.MULTILINE)
    subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
    assert codec_by(tmp_path / "cache.key").mark


@pytest.mark.process
@pytest.mark.parametrize("arguments", [("serve", "--check"), ("doctor",), ("cache", "list")])
def test_a_command_given_a_cache_key_file_without_a_valid_key_exits_with_a_one_line_error(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"a password")
    file.chmod(0o600)
    data_dir = tmp_path / "data"
    (data_dir / "snapshots" / "snapshots").mkdir(parents=True)
    done = turnkeep(*arguments, "--data-dir", data_dir, "--cache-key-file", file)
    assert done.returncode == 2
    assert done.stderr == (
        f"turnkeep: cache_key_file: {file} holds no key; it must be 32 bytes, raw or in base64, as"
        " openssl rand -base64 32 prints them\n"
    )


def forge(path: Path, codec: Codec) -> None:
    """Change the KV in a file, and make its checksums right again."""
    with open_file(path, codec) as (_, whole, _):
        head = whole[:CHECKSUM_AT] + BLANK + whole[CHECKSUM_END:]
    tensors = tuple(snapshot_format.tensors(path, codec).values())
    for one in tensors:
        if one.dtype == "F32":
            numbers = np.frombuffer(one.data, np.float32)
            numbers *= 1.5
    snapshot_format.write(EncodedSnapshot(head, tensors), path, codec)


@pytest.mark.process
@pytest.mark.parametrize(("kv_bits", "has_key"), [(None, True), (4, False)])
async def test_cache_verify_with_recompute_finds_and_on_request_quarantines_wrong_kv_with_a_valid_checksum(
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
