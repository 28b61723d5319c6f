"""On a slow disk, what the full queue dropped is stored later, and a worker that stops says what is left."""

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cache.disk import format as snapshot_format
from cache.index.write_queue import WriteQueue
from tests.parts import LocalWorker
from turnkeep_client.client import Client
from worker import app as app_module

pytestmark = pytest.mark.process

BLOCK = 128
#: Seconds for each sync. A block of this model is small; a large model's takes as long at 5 MB/s.
SLOW_S = 0.02
TEXTS = {name: f"{name}: all work and no play. " * 60 for name in ("first", "second", "third")}
NEWS = "What now? "
SAYS = "some sessions will be prefilled again: their KV is not on disk"


async def appended(client: Client) -> None:
    for name, text in TEXTS.items():
        await client.session(name).append(text=text)


async def prefilled(client: Client) -> list[int]:
    """Run a turn of each session; return how many tokens of earlier turns it prefilled."""
    results = [await client.session(name).generate(text=NEWS, max_tokens=1) for name in TEXTS]
    return [result.usage.prefilled_tokens - len(NEWS) for result in results]


async def quiet(client: Client) -> None:
    """Wait until the worker has written nothing for a while."""
    num_quiet = 0
    while num_quiet < 4:
        snapshots = (await client.session("first").info()).worker.snapshots
        num_quiet = 0 if snapshots.in_flight else num_quiet + 1
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("end", ["after a quiet time", "stopped at once"])
async def test_after_a_restart_with_a_full_write_queue_on_a_slow_disk_at_most_one_block_is_prefilled_again(
    local_worker: Callable[..., Awaitable[LocalWorker]],
    endless_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    """After a quiet time, the next worker has the files that a kill would leave."""
    sizes = {"model": str(endless_model), "block_tokens": BLOCK, "writer_queue": 2**20}
    sync, may_sync = os.fsync, threading.Event()  # it waits for the appends, however long they take
    may_sync.set()

    def slow(descriptor: int) -> None:
        may_sync.wait(10)
        time.sleep(SLOW_S)
        sync(descriptor)

    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(os, "fsync", slow)
        worker = await local_worker(**sizes)
        may_sync.clear()
        await appended(worker.client)
        may_sync.set()
        snapshots = (await worker.client.worker_metrics()).snapshots
        assert snapshots.dropped.get("queue_full"), "the disk was not too slow"
        if end == "after a quiet time":
            await quiet(worker.client)
            shutil.copytree(worker.settings.data_dir, tmp_path / "killed")
        await worker.stop()
    if end == "after a quiet time":
        sizes["data_dir"] = tmp_path / "killed"
    worker = await local_worker(**sizes)
    assert max(await prefilled(worker.client)) <= BLOCK
    assert SAYS not in [one["event"] for one in logs]


async def test_a_stopping_worker_logs_how_many_tokens_of_kv_it_could_not_write_to_disk(
    local_worker: Callable[..., Awaitable[LocalWorker]],
    endless_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time to write the queue is short; the time to end the one write that runs is as it always is."""
    write, drained = snapshot_format.write, WriteQueue.drained
    stops = threading.Event()  # until then nothing is written, however long the appends take

    def slow(*args: Any) -> None:
        stops.wait(10)
        time.sleep(0.1)
        write(*args)

    worker = await local_worker(model=str(endless_model), block_tokens=BLOCK)
    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(app_module, "_STORE_S", 0.2)
        patched.setattr(WriteQueue, "drained", lambda queue, _: drained(queue, 0.2))
        patched.setattr(snapshot_format, "write", slow)
        await appended(worker.client)
        stops.set()
        await worker.stop()
    (said,) = [log for log in logs if log["event"] == SAYS]
    worker = await local_worker(model=str(endless_model), block_tokens=BLOCK)
    found = await prefilled(worker.client)
    assert said["sessions"] == len(TEXTS)
    assert said["tokens"] == sum(found) - len(TEXTS)  # an append does not compute its last token's KV
    assert said["tokens"] > BLOCK
