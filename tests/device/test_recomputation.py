"""All stored KV of a directory is computed again without a worker; KV of other weights is found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine_process import IDENTITY, open_process
from mlx.utils import tree_map
from tiny_models import BLOCK, loaded

from cache.admin.stored_blocks import StoredBlocks
from cache.disk.codec import PLAIN
from worker.device.device import Device
from worker.recomputation import ComputedBlocks, Recomputation, compare

PROMPT = [1 + i % 90 for i in range(4 * BLOCK + 3)]
#: Continues the first two blocks in another way, and ends in two pieces of a block.
OTHER = [*PROMPT[: 2 * BLOCK], *range(5, 5 + BLOCK + 3)]


async def recomputed(model: Any, directory: Path, trials: Path) -> tuple[Recomputation, int]:
    """Compute all blocks in a directory again; return the result, and how many files there are."""
    computed = ComputedBlocks()
    device = Device(
        lambda: loaded(model),
        computed.reports.put,
        block_tokens=BLOCK,
        max_batch=1,
        stall_s=0.25,
        trials=trials,
    )
    with closing(_Running(device)):
        await asyncio.to_thread(device.start)
        computed.take(device)
        stored = StoredBlocks(directory, PLAIN)
        num, blocks = stored.of(replace(IDENTITY, caches=device.caches, block_tokens=BLOCK).digest())
        return await compare(computed, blocks, stored.read), num


class _Running:
    def __init__(self, device: Device) -> None:
        self.device = device

    def close(self) -> None:
        assert self.device.stop()


async def stored(model: Any, directory: Path, trials: Path) -> None:
    """Store the KV of two sessions that share two blocks; the second one grows in two turns."""
    async with open_process(model, directory, trials=trials) as process:
        for name, tokens in (("a", PROMPT), ("b", OTHER[:-2]), ("b", OTHER)):
            await process.generate(tokens, 2, name=name)
            assert await process.store.queue.drained(5)


@pytest.mark.parametrize(
    ("kind", "kv_bits"), [("llama", None), ("llama", 4), ("exaone4", None), ("qwen3_next", None)]
)
async def test_all_blocks_and_pieces_of_a_right_directory_are_computed_again_and_found_right(
    kind: str, kv_bits: int | None, make_model: Callable[..., Any], tmp_path: Path, trials: Path
) -> None:
    model = make_model(kind, kv_bits)
    await stored(model, tmp_path, trials)
    found, num = await recomputed(model, tmp_path, trials)
    assert (found.num_blocks, found.wrong) == (num, [])
    assert num == len(list((tmp_path / "snapshots").iterdir())) >= 7


@pytest.mark.parametrize("kv_bits", [None, 4])
async def test_each_file_that_other_weights_have_written_under_the_same_identity_is_named(
    kv_bits: int | None,
    make_model: Callable[..., Any],
    tmp_path: Path,
    trials: Path,
) -> None:
    model = make_model("llama", kv_bits)
    await stored(model, tmp_path, trials)
    right = model.parameters()
    model.update(tree_map(lambda w: w + mx.random.normal(w.shape) * 0.1, right))
    mx.eval(model.parameters())
    try:
        found, num = await recomputed(model, tmp_path, trials)
    finally:
        model.update(right)
    assert {file for file, _ in found.wrong} == {path.name for path in (tmp_path / "snapshots").iterdir()}
    assert found.num_blocks == num
