"""A program that times a store from inside: `python -m cache.measure FOLDER restore|index ...`.

`turnkeep bench store` runs it and makes a report of what it prints: a JSON object per line, the moment that
it is known. Everything it stores is made up, and lies in FOLDER, which is its caller's to remove.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
import structlog

from . import blocks
from . import format as snapshot_format
from .catalog import Catalog
from .entries import Row
from .folder import Folder
from .identity import Identity
from .snapshot import ModelLayout, Name, Tensor
from .store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .blocks import Span

TENANT: Final = "bench"
NUM_IDS: Final = 50_000
#: What a worker on a CPU lets MLX keep of freed memory. With more, reading again needs no fresh pages.
MLX_CACHE_BYTES: Final = 16 << 20
#: A worker's: a thread that waits for another one's Python waits no longer than this.
SWITCH_INTERVAL_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV of a model: float32, as on a CPU."""

    layers: int
    heads: int
    dim: int

    @property
    def layout(self) -> ModelLayout:
        """What a store is told of that model."""
        names = (f"{layer}.{part}" for layer in range(self.layers) for part in ("keys", "values"))
        return ModelLayout(tuple((name, "F32", (self.heads, self.dim)) for name in names))

    def cut(self, span: Span, chance: np.random.Generator) -> tuple[Tensor, ...]:
        """Make up the KV of a span."""
        shape = (1, self.heads, span.num_tokens, self.dim)
        return tuple(
            Tensor(f"{layer}.{part}", "F32", shape, _bytes(chance.standard_normal(shape, np.float32)))
            for layer in range(self.layers)
            for part in ("keys", "values")
        )


async def restore(folder: Path, shape: Shape, block: int, num_tokens: int, rounds: int) -> None:
    """Store a session, then read it: MLX alone, and the store, in turns."""
    store = await _opened(folder, block, shape)
    tokens = _tokens(1, num_tokens)
    chance = np.random.default_rng(0)
    for span in store.wanted(TENANT, tokens, 0, num_tokens):
        if not store.save(TENANT, tokens, span, shape.cut(span, chance)):
            raise SystemExit("the store would not take what is to be read")
    if not await store.barrier(600):
        raise SystemExit("the disk did not take what is to be read within 10 minutes")
    held = store.match(TENANT, tokens)
    paths = [folder / "snapshots" / f"{entry.digest.hex()}{snapshot_format.SUFFIX}" for entry in held.entries]
    store.release(held)
    size_bytes = sum(path.stat().st_size for path in paths)
    mx.set_cache_limit(MLX_CACHE_BYTES)
    for i in range(rounds + 1):
        seconds: dict[str, float] = {}
        for side in ("load", "restore") if i % 2 else ("restore", "load"):
            _give_back_memory()
            if side == "load":
                seconds["load_s"] = _load(paths)
            else:
                seconds["restore_s"] = await _restore(store, tokens)
        if i:  # the first time that everything is read is not like the others
            _tell(kind="restore", tokens=num_tokens, size_bytes=size_bytes, **seconds)
    await store.close()


async def index(folder: Path, block: int, num_blocks: int, chain: int, rounds: int) -> None:
    """Fill a directory with so many blocks, in chains of equal length; then open it, and match a chain."""
    _fill(folder, block, num_blocks, chain)
    _tell(kind="filled", blocks=num_blocks)
    for _ in range(rounds):
        started_s = time.perf_counter()
        store = await _opened(folder, block, Shape(1, 1, 1))
        open_s = time.perf_counter() - started_s
        if store.stats().stored != num_blocks:
            raise SystemExit(f"{store.stats().stored} of {num_blocks} blocks were found again")
        tokens = blocks.as_tokens(_tokens(0, chain * block))  # as a session has them
        started_s = time.perf_counter()
        match = store.match(TENANT, tokens)
        match_s = time.perf_counter() - started_s
        if match.num_tokens != chain * block:
            raise SystemExit(f"{match.num_tokens} of {chain * block} tokens were matched")
        store.release(match)
        _tell(kind="index", blocks=num_blocks, chain=chain, open_s=open_s, match_s=match_s)
        await store.close()


def _give_back_memory() -> None:
    """Let both sides find what a restore finds: memory that it has to get from the system page by page.

    Left alone, MLX's small arrays would come from the heap that the round before has left, and only those.
    """
    mx.clear_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _load(paths: Sequence[Path]) -> float:
    """Read files as plainly as MLX can, and keep them as a restore does: all at once."""
    started_s = time.perf_counter()
    found = []
    for path in paths:
        arrays: Any = mx.load(str(path), stream=mx.cpu)
        mx.eval(arrays)
        found.append(arrays)
    return time.perf_counter() - started_s


async def _restore(store: Store, tokens: Sequence[int]) -> float:
    started_s = time.perf_counter()
    restored = await store.load(store.match(TENANT, tokens))
    seconds = time.perf_counter() - started_s
    if restored is None or restored.num_tokens != len(tokens):
        raise SystemExit("not all of it was restored")
    return seconds


def _fill(folder: Path, block: int, num_blocks: int, chain: int) -> None:
    """Write real snapshots of the smallest KV there is, without waiting for the disk after each."""
    identity = _identity(block)
    opened = Folder(folder)
    catalog = Catalog(opened)
    data = memoryview(bytes(4 * block))
    tensors = tuple(Tensor(f"0.{part}", "F32", (1, 1, block, 1), data) for part in ("keys", "values"))
    rows: list[Row] = []
    for i in range(num_blocks):
        if i % chain == 0:
            parent = blocks.root(identity.digest(), TENANT)
            packed = blocks.pack(_tokens(i // chain, chain * block))
        start = i % chain * block
        held = packed[start * blocks.TOKEN_BYTES : (start + block) * blocks.TOKEN_BYTES]
        name = Name(parent, start, held)
        draft = snapshot_format.draft(name, identity, tensors)
        parent = name.digest
        opened.path(parent).write_bytes(draft.header + bytes(2 * data.nbytes))
        rows.append(Row(parent, name.parent, start, held, draft.size_bytes, i + 1))
    catalog.put(rows)
    catalog.close()
    opened.close()


async def _opened(folder: Path, block: int, shape: Shape) -> Store:
    return await Store.open(
        folder,
        identity=_identity(block),
        layout=shape.layout,
        max_bytes=1 << 50,
        queue_bytes=1 << 50,
        min_free_bytes=0,
    )


def _identity(block: int) -> Identity:
    return Identity(weights="", config="", tokenizer="", kv_dtype="float32", block_tokens=block)


def _tokens(seed: int, number: int) -> list[int]:
    return random.Random(seed).choices(range(NUM_IDS), k=number)  # noqa: S311  # tokens, not secrets


def _bytes(array: Any) -> memoryview:
    return memoryview(array).cast("B")


def _tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)  # noqa: T201  # what it says is what it is for


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the two measurements."""
    parser = argparse.ArgumentParser(prog="python -m cache.measure")
    parser.add_argument("folder", type=Path)
    kinds = parser.add_subparsers(dest="kind", required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--block", type=int, required=True)
    both.add_argument("--rounds", type=int, required=True)
    one = kinds.add_parser("restore", parents=[both])
    for name in ("--tokens", "--layers", "--heads", "--dim"):
        one.add_argument(name, type=int, required=True)
    other = kinds.add_parser("index", parents=[both])
    for name in ("--blocks", "--chain"):
        other.add_argument(name, type=int, required=True)
    given = parser.parse_args(arguments)
    # What is measured goes to stdout, alone.
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if given.kind == "restore":
        shape = Shape(given.layers, given.heads, given.dim)
        asyncio.run(restore(given.folder, shape, given.block, given.tokens, given.rounds))
    else:
        asyncio.run(index(given.folder, given.block, given.blocks, given.chain, given.rounds))
    mx.clear_streams()


if __name__ == "__main__":
    main()
