"""A program whose disk calls pass through the preloaded `faulty_disk.c`. Its argument names a scenario.

`killed DIR`: repeats one run, each in its own directory, killed at the n-th change of the disk or in the
middle of it. `failing DIR`: the same, but the n-th change fails, or all changes from there on. `touched DIR`:
counts the disk calls of the event loop's thread. `hanging DIR`: reads hang for a while, later until the
process exits. `powerless DIR`: leaves only files that would survive a power failure.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import shutil
import sqlite3
import sys
from pathlib import Path

import structlog
from made_kv import BLOCK, LAYOUT, Clock, assert_sum_rule, identity, num_restored, save_all
from test_cache_windows import POLICY, save

import cache.kv.arrays  # noqa: F401  # else the first restore imports it, for longer than a load may take
from cache.index import stored_kv
from cache.names.errors import CacheError
from cache.names.tokens import pack
from cache.store import Store

COUNT, KILL, TEAR, FAIL, SLOW, HANG = range(6)
FOREVER = 1 << 40
ONE, TWO = [1, *range(9)], [2, *range(4)]

LIBC = ctypes.CDLL(None)
LIBC.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, *[ctypes.c_long] * 2, ctypes.c_int, ctypes.c_long]
for count in (LIBC.faults_disarm, LIBC.faults_seen_here, LIBC.faults_synced):
    count.restype = ctypes.c_long


def arm(directory: Path, mode: int, first: int = 0, end: int = 0, code: int = 0, delay_us: int = 0) -> None:
    LIBC.faults_arm(str(directory).encode(), mode, first, end, code, delay_us)


async def opened(directory: Path, clock: Clock) -> Store:
    return await Store.open(
        directory,
        identity=identity(),
        layout=LAYOUT,
        max_bytes=1 << 20,
        queue_bytes=1 << 20,
        min_free_bytes=0,
        monotonic=clock,
    )


async def live(directory: Path, said) -> None:
    """Save and forget as a worker does; call `said` with a word after each confirmed operation."""
    store = await opened(directory, Clock())
    save_all(store, "a", ONE[:6])
    await store.queue.drained(10)
    said("one")
    save_all(store, "a", ONE)
    save_all(store, "a", TWO)
    await store.queue.drained(10)
    said("two")
    store.eraser.forget("a", pack(TWO))
    await store.queue.drained(10)
    said("forgotten")
    await store.close()


def killed(base: Path) -> None:
    """Run `live` once for each moment of a kill; leave its directory, and a file of the confirmed words."""
    found = []
    for mode in (KILL, TEAR):
        n = 0
        while True:
            n += 1
            directory = base / f"{mode}-{n}"
            child = os.fork()
            if not child:
                with (base / f"{mode}-{n}.said").open("w", buffering=1) as said:
                    arm(directory, mode, n, n + 1)
                    asyncio.run(live(directory, lambda word: print(word, file=said)))
                    os._exit(0)
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):  # the run has ended without a kill
                assert os.WEXITSTATUS(status) == 0
                break
            found.append(directory.name)
    print(json.dumps(found))


async def survive(directory: Path, n: int, end: int, code: int) -> None:
    """Use a store while disk changes fail: restores are right, losses are counted, and it recovers."""
    clock = Clock()
    arm(directory, FAIL, n, end, code)
    try:
        store = await opened(directory, clock)
    except (OSError, sqlite3.Error, CacheError):
        LIBC.faults_disarm()  # a worker would then run without snapshots
        store = await opened(directory, clock)
    for tokens in (ONE[:6], ONE, TWO):
        save_all(store, "a", tokens)
        assert await store.queue.drained(10)
        assert_sum_rule(store)
        await num_restored(store, tokens)
        clock.now += 100
    store.eraser.forget("a", pack(TWO))
    assert store.kv.match(store.kv.chain("a"), TWO[:4]).num_tokens == 0
    assert_sum_rule(store)
    LIBC.faults_disarm()
    clock.now += 100
    save_all(store, "a", ONE)
    assert await store.queue.drained(10)
    assert await num_restored(store, ONE) == len(ONE)
    assert_sum_rule(store)
    assert await store.close()
    store = await opened(directory, clock)
    assert await num_restored(store, ONE) == len(ONE), "it is there after a restart"
    await store.close()


async def failing(base: Path) -> None:
    arm(base / "counted", COUNT)
    await live(base / "counted", lambda word: None)
    total = LIBC.faults_disarm()
    codes = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS]
    for n in range(1, total + 1):
        await survive(base / f"once-{n}", n, n + 1, codes[n % 3])
    for n in range(1, total + 1, 5):
        await survive(base / f"from-{n}", n, FOREVER, codes[n % 4])
    print(json.dumps({"changes": total}))


async def touched(base: Path) -> None:
    """Call all methods of a store whose disk takes 50 ms per change; print the disk calls by thread."""
    store = await opened(base / "cache", Clock())
    save_all(store, "a", ONE)
    await store.queue.drained(10)
    arm(base / "cache", SLOW, 1, FOREVER, delay_us=50_000)
    save_all(store, "a", TWO)
    store.quota.set_limits(max_bytes=8_000, min_free_bytes=0)
    for session in range(3, 9):
        save_all(store, "a", [session, *range(9)])
    await store.kv.load(store.kv.match(store.kv.chain("a"), ONE))
    store.kv.release(store.kv.match(store.kv.chain("a"), TWO))
    store.queue.skip(1)
    store.eraser.forget("a", pack(TWO))
    await store.eraser.erase("a", pack(ONE), 0.01)
    assert_sum_rule(store)
    await store.eraser.clear(0.01)
    assert await store.queue.drained(60)
    here, everywhere = LIBC.faults_seen_here(), LIBC.faults_disarm()
    await store.close()
    print(json.dumps({"here": here, "everywhere": everywhere, "evicted": store.stats().evicted}))


async def hanging(base: Path) -> None:
    """Check that loads on a hanging disk time out as misses, and work again once the disk does.

    At the end the disk hangs again, and the process must still exit.
    """
    sessions = [[session, *range(9)] for session in range(8)]
    store = await opened(base / "cache", Clock())
    for tokens in sessions[:-1]:
        save_all(store, "a", tokens)
    assert await store.queue.drained(10)
    assert await num_restored(store, sessions[0]) == 10
    stored_kv.LOAD_S = 1.0
    arm(base / "cache" / "snapshots", HANG)
    found = await asyncio.gather(*(num_restored(store, tokens) for tokens in sessions[:5]))
    assert found == [0] * 5
    assert store.stats().timed_out == 5
    for _ in range(100):
        assert await num_restored(store, sessions[0]) == 0
    stuck = LIBC.faults_disarm()
    async with asyncio.timeout(30):
        while not await num_restored(store, sessions[0]):
            pass
    assert [await num_restored(store, tokens) for tokens in sessions[:5]] == [10] * 5
    assert (store.stats().rejected, store.stats().stored) == (0, 21), "no file is in doubt for it"

    arm(base / "cache" / "snapshots", HANG)
    assert await num_restored(store, sessions[1]) == 0
    save_all(store, "a", sessions[-1])
    assert await store.queue.drained(10), "it is no reason to write nothing"
    assert not await store.close(1.0), "in time, and it says that a thread hangs"
    assert_sum_rule(store)
    print(json.dumps({"stuck": stuck}))


async def powerless(base: Path) -> None:
    """Leave a directory whose SQLite log ends at its last sync, as after a power failure.

    It fails after evictions of middle blocks. Then print how much of the log an erasure leaves.
    """
    log = base / "cache" / "index.sqlite-wal"

    async def reopened() -> Store:
        """Open the store, so that SQLite begins a new log, to which it only appends."""
        store = await opened(base / "cache", Clock())
        LIBC.faults_watch(str(log).encode())
        arm(base / "cache", COUNT)
        return store

    store = await reopened()
    chain, tokens = store.kv.chain("a", POLICY), ONE * 10
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        save(store, LAYOUT.under(POLICY), chain, tokens[:end])
    save_all(store, "a", ONE)
    save_all(store, "a", TWO)
    await store.close()

    store = await reopened()
    chain = store.kv.chain("a", POLICY)
    store.quota.set_limits(max_bytes=20_000, min_free_bytes=0)
    while store.stats().free_bytes < 0:
        await store.queue.drained(10)
    await store.queue.drained(10)
    assert store.stats().evicted
    assert store.kv.match(chain, tokens).num_tokens == 100
    shutil.copytree(base / "cache", base / "gaps")
    os.truncate(base / "gaps" / log.name, LIBC.faults_synced())
    assert (await store.eraser.erase("a", pack(TWO))).settled
    print(json.dumps({"kept": LIBC.faults_synced(), "erased": log.stat().st_size}))
    await store.close()


structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
scenario, place = sys.argv[1], Path(sys.argv[2])
if scenario == "killed":
    killed(place)
else:
    scenarios = {"failing": failing, "touched": touched, "hanging": hanging, "powerless": powerless}
    asyncio.run(scenarios[scenario](place))
