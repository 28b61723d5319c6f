"""A process that saves snapshots until it is killed. Prints a line after each turn."""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

from made_kv import LAYOUT, identity, save_all

from cache.names.tokens import pack
from cache.store import Store


async def main(directory: Path, first: int) -> None:
    store = await Store.open(
        directory, identity=identity(), layout=LAYOUT, max_bytes=120_000, queue_bytes=50_000, min_free_bytes=0
    )
    for session in itertools.count(first):
        for end in range(3, 16, 3):
            save_all(store, "a", [session, *range(end)])
            await asyncio.sleep(0)
        await store.queue.drained(5)
        if session % 3 == 0:
            store.eraser.forget("a", pack([session, *range(15)]))
        print(session, flush=True)


asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
