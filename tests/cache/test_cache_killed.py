"""A process is killed with SIGKILL while it writes: files are complete, confirmed snapshots restorable."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest
from made_kv import assert_is_kv_of

from cache.disk import format as snapshot_format


@pytest.mark.process
async def test_a_process_killed_while_it_writes_leaves_only_valid_files(open_store, tmp_path) -> None:
    chance, first = random.Random(3), 0
    for _ in range(4):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("killed_writer.py")),
            str(tmp_path / "cache"),
            str(first),
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env={"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for _ in range(3):
            last = int(await process.stdout.readline())
        await asyncio.sleep(chance.uniform(0, 0.05))
        process.kill()
        rest, _ = await process.communicate()
        last = int(rest.split()[-1]) if rest.strip() else last
        first = last + 1

        for path in (tmp_path / "cache" / "snapshots").iterdir():
            snapshot_format.prove(path)
        store = await open_store()
        assert store.stats().rejected == 0
        assert list((tmp_path / "cache" / "tmp").iterdir()) == []
        survivor = last if last % 3 else last - 1
        tokens = [survivor, *range(15)]
        restored = await store.kv.load(store.kv.match(store.kv.chain("a"), tokens))
        assert restored.num_tokens == 16, "what a barrier has confirmed is there"
        assert_is_kv_of(restored.tensors, tokens)
        await store.close()
