"""Measures the store's speed: `python tests/cache/store_speed.py [--rounds N] [--blocks N] [--dir FOLDER]`.

Compares restores of float32 KV of the packaged model's shape with MLX loading the same files, and with
reading them into plain memory, alternately, from the page cache: all into new memory, or with `--spare` into
memory that the process has used before, as in a worker. Then times opening and matching a large index, and
writing and restoring with and without encryption. Prints the median, minimum and maximum of all rounds. Aims:
0.8 of MLX's own speed, half of plain reading; with 1,000,000 blocks 3 s to open, 500 bytes for each, 2 ms to
match a prefix of 1,000 blocks, 5 ms for a step of an eviction.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import structlog

sys.path.insert(0, str(Path(__file__).parents[2]))

from collections.abc import Sequence

import cache.kv.arrays  # noqa: F401  # else the first restore imports it, which takes seconds
from cache.disk.catalog import Catalog
from cache.disk.encryption import EncryptedCodec
from cache.disk.folder import Folder
from cache.disk.rows import SnapshotRow
from cache.disk.unencrypted import PLAIN, Codec
from cache.names import blocks
from cache.names.identity import Identity
from cache.names.marks import MARK_BYTES
from cache.names.snapshot import ModelLayout, Name, Tensor
from cache.names.tokens import TOKEN_BYTES, as_tokens, pack
from cache.store import Store
from worker.process.heap import SpareMemory

LENGTHS = (300, 1500, 6000)
LAYERS, HEADS, DIM, BLOCK, CHAIN, EVICTED = 30, 3, 64, 128, 1_000, 10_000
NAMES = tuple(f"{layer}.{part}" for layer in range(LAYERS) for part in ("keys", "values"))
LAYOUT = ModelLayout(tuple((name, "F32", (HEADS, DIM)) for name in NAMES))
IDENTITY = Identity(weights="", config="", tokenizer="", kv_dtype="float32", block_tokens=BLOCK)
TENANT = "bench"


async def restore(folder: Path, num_tokens: int, rounds: int, *, keeps_memory: bool) -> None:
    """Store a session, then read its files alternately in three ways; print the speeds of the store."""
    store = await opened(folder, LAYOUT)
    tokens = tokens_of(1, num_tokens)
    await save(store, tokens)
    held = store.kv.match(store.kv.chain(TENANT), tokens)
    paths = [folder / "snapshots" / PLAIN.file_name(entry.digest) for entry in held.nodes]
    store.kv.release(held)
    gib = sum(path.stat().st_size for path in paths) / 2**30
    mx.set_cache_limit(16 << 20)  # as in a worker on a CPU; a larger cache would spare reads new pages
    times: dict[str, list[float]] = {"read": [], "load": [], "restore": []}
    for i in range(rounds + 1):
        for side in sorted(times, reverse=bool(i % 2)):
            if not keeps_memory:
                give_back_memory()
            began_s = time.perf_counter()
            if side == "read":
                kept: list[Any] = [path.read_bytes() for path in paths]
            elif side == "load":
                kept = [mx.load(str(path), stream=mx.cpu) for path in paths]
                mx.eval(kept)
            else:
                restored = await store.kv.load(store.kv.match(store.kv.chain(TENANT), tokens))
                assert restored is not None
                assert restored.num_tokens == num_tokens
            times[side].append(time.perf_counter() - began_s)
            kept, restored = [], None
    reads, loads, restores = (some[1:] for some in times.values())  # the first round is a warm-up
    tell(f"restore {num_tokens:,} tokens, GiB/s", [gib / one for one in restores])
    tell("  of MLX's own speed", [load / one for load, one in zip(loads, restores, strict=True)])
    tell("  of plain reading", [read / one for read, one in zip(reads, restores, strict=True)])
    await store.close()


async def save(store: Store, tokens: list[int]) -> float:
    """Store a session; return the seconds from the first save until all snapshots are durable."""
    chance = np.random.default_rng(0)
    cuts = []
    for span in store.kv.wanted(store.kv.chain(TENANT), tokens):
        shape = (1, HEADS, span.num_tokens, DIM)
        arrays = [memoryview(chance.standard_normal(shape, np.float32)).cast("B") for _ in NAMES]
        cut = tuple(Tensor(name, "F32", shape, data) for name, data in zip(NAMES, arrays, strict=True))
        cuts.append((span, cut))
    began_s = time.perf_counter()
    for span, cut in cuts:
        assert store.kv.save(store.kv.chain(TENANT), tokens, span, cut)
    assert await store.queue.drained(600)
    return time.perf_counter() - began_s


async def seal(folder: Path, rounds: int, num_tokens: int = 2_000) -> None:
    """Write and restore sessions, alternately without and with encryption; print the speeds."""
    stores = {
        name: await opened(folder / name, LAYOUT, codec)
        for name, codec in (("plain", PLAIN), ("sealed", EncryptedCodec(bytes(32))))
    }
    figures: dict[str, list[float]] = {
        f"{name} {deed}": [] for name in stores for deed in ("write", "restore")
    }
    for i in range(rounds + 1):
        for name in sorted(stores, reverse=bool(i % 2)):
            tokens, store = tokens_of(i, num_tokens), stores[name]
            figures[f"{name} write"].append(await save(store, tokens))
            give_back_memory()
            began_s = time.perf_counter()
            restored = await store.kv.load(store.kv.match(store.kv.chain(TENANT), tokens))
            figures[f"{name} restore"].append(time.perf_counter() - began_s)
            assert restored is not None
            assert restored.num_tokens == num_tokens
            gib, restored = restored.size_bytes / 2**30, None
    for name, seconds in figures.items():
        tell(f"{name} {num_tokens:,} tokens, GiB/s", [gib / one for one in seconds[1:]])
    for deed in ("write", "restore"):
        pairs = zip(figures[f"plain {deed}"][1:], figures[f"sealed {deed}"][1:], strict=True)
        tell(f"  {deed} with a key, of without", [plain / sealed for plain, sealed in pairs])
    for store in stores.values():
        await store.close()


async def index(folder: Path, num_blocks: int, rounds: int) -> None:
    """Time opening a directory of `num_blocks` blocks, matching a session, and the steps of an eviction."""
    fill(folder, num_blocks)
    figures: dict[str, list[float]] = {
        f"open {num_blocks:,} blocks, s": [],
        "  memory of a block, bytes": [],
        f"match {CHAIN:,} blocks, ms": [],
        "  whose names are known, ms": [],
        f"longest step of evicting {EVICTED:,}, ms": [],
    }
    opening, memory, match, again, step = figures.values()
    process = psutil.Process()
    for _ in range(rounds):
        before, began_s = process.memory_info().rss, time.perf_counter()
        store = await opened(folder, ModelLayout((("0.keys", "F32", (1, 1)), ("0.values", "F32", (1, 1)))))
        opening.append(time.perf_counter() - began_s)
        memory.append((process.memory_info().rss - before) / num_blocks)
        assert store.stats().stored == num_blocks
        tokens = as_tokens(tokens_of(0, CHAIN * BLOCK))  # as a session has them
        chain = store.kv.chain(TENANT)
        for times in (match, again):
            began_s = time.perf_counter()
            found = store.kv.match(chain, tokens)
            times.append(1000 * (time.perf_counter() - began_s))
            assert found.num_tokens == min(CHAIN, num_blocks) * BLOCK
            store.kv.release(found)
        await store.close()
    store = await opened(folder, ModelLayout((("0.keys", "F32", (1, 1)), ("0.values", "F32", (1, 1)))))
    store.quota.max_bytes = store.stats().stored_bytes - EVICTED
    while store.quota.evicted < min(EVICTED, num_blocks):
        began_s = time.perf_counter()
        store.quota._shrink()
        step[:] = [max([*step, 1000 * (time.perf_counter() - began_s)])]
    assert await store.queue.drained(600)
    await store.close()
    for name, values in figures.items():
        tell(name, values)


def fill(folder: Path, num_blocks: int) -> None:
    """List blocks of sessions of `CHAIN` blocks in a directory's index. Their files are empty."""
    files = Folder(folder)
    catalog = Catalog(files)
    for first in range(0, num_blocks, CHAIN):
        parent = blocks.root(IDENTITY.digest(), TENANT)
        packed = pack(tokens_of(first, CHAIN * BLOCK))
        rows: list[SnapshotRow] = []
        for i in range(min(CHAIN, num_blocks - first)):
            start = i * BLOCK
            own = packed[start * TOKEN_BYTES : (start + BLOCK) * TOKEN_BYTES]
            name = Name(parent, start, own, mark=random.randbytes(MARK_BYTES))
            parent = name.digest
            files.path(parent).touch()
            rows.append(SnapshotRow.of(parent, name, 1, first + 1))
        catalog.put(rows)
    catalog.note_erased(())  # as a worker does, so that no opening takes the directory for a copy
    catalog.close()
    files.close()


def give_back_memory() -> None:
    """Return free memory to the system, so that reads must get new pages."""
    mx.clear_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


async def opened(folder: Path, layout: ModelLayout, codec: Codec = PLAIN) -> Store:
    limits = {"max_bytes": 1 << 50, "queue_bytes": 1 << 50, "min_free_bytes": 0}
    return await Store.open(folder, identity=IDENTITY, layout=layout, codec=codec, **limits)


def tokens_of(seed: int, number: int) -> list[int]:
    return random.Random(seed).choices(range(50_000), k=number)


def tell(what: str, values: Sequence[float]) -> None:
    print(
        f"{what:34} {statistics.median(values):8.2f}   ({min(values):.2f} to {max(values):.2f})", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument(
        "--dir", type=Path, help="where files are written and removed again, to choose the disk"
    )
    parser.add_argument("--spare", action="store_true", help="keep used memory, as a worker does")
    given = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    sys.setswitchinterval(0.001)  # a worker's
    if given.spare:
        spare = SpareMemory(256 << 20)
        spare.fill()
        spare.release()
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        for num_tokens in LENGTHS:
            path = Path(folder) / f"{num_tokens}"
            asyncio.run(restore(path, num_tokens, given.rounds, keeps_memory=given.spare))
        asyncio.run(index(Path(folder) / "index", given.blocks, given.rounds))
        asyncio.run(seal(Path(folder) / "seal", given.rounds))
    mx.clear_streams()


if __name__ == "__main__":
    main()
