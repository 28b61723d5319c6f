"""Mounted file systems that become read-only while the cache uses them, or have a quota."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
from made_kv import assert_sum_rule, num_restored, save_all
from structlog.testing import capture_logs

from cache.names.tokens import pack

ONE, TWO, THREE = ([session, *range(9)] for session in (1, 2, 3))


async def command(*words) -> str:
    """Run a command; return its output."""
    done = await asyncio.to_thread(subprocess.run, words, check=True, capture_output=True, text=True)
    return done.stdout.strip()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fill(path) -> None:
    with path.open("wb", buffering=0) as file:
        for size_bytes in [1 << 16] * 100 + [1 << 12] * 100:
            file.write(bytes(size_bytes))


def trigger_error(device) -> None:
    """Make ext4 report an error, after which it writes no more changes."""
    trigger = Path("/sys/fs/ext4", device, "trigger_fs_error")
    if not trigger.exists():
        pytest.skip("this kernel lets nobody trigger an error of a file system")
    trigger.write_text("a test")


async def saved(store, tokens) -> None:
    save_all(store, "a", tokens)
    assert await store.queue.drained(5)
    assert_sum_rule(store)


async def failing(store, tokens) -> list[str]:
    """Try to save tokens, which must fail; return the codes of the logged faults."""
    with capture_logs() as logs:
        await saved(store, tokens)
    assert await num_restored(store, tokens) < len(tokens)
    assert store.queue.vacant_bytes() == 0, "it pauses"
    return [log["code"] for log in logs if log["event"] == "snapshot_writes_failing"]


async def test_a_read_only_remount_stops_writes_but_not_reads_until_it_is_writable_again(
    open_store, mounted, read_only
) -> None:
    clock = Clock()
    directory = mounted("size=4m") / "cache"
    store = await open_store(directory=directory, monotonic=clock)
    await saved(store, ONE)
    first = min((directory / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime_ns)

    read_only(directory, True)
    with pytest.raises(OSError, match="Read-only"):
        (directory / "tmp" / "x").touch()
    assert await failing(store, TWO) == ["EROFS"]
    assert await num_restored(store, ONE) == 10, "what is stored is still served"
    assert not (await store.eraser.erase("a", pack(ONE[:4]))).num_snapshots, "others continue it"
    clock.now += 1.1
    assert await failing(store, TWO) == [], "one line for an episode"

    read_only(directory, False)
    clock.now += 1.1
    assert store.queue.vacant_bytes() == 0, "the second pause is longer"
    clock.now += 1.0
    with capture_logs() as logs:
        await saved(store, TWO)
    assert "snapshot_writes_recovered" in [log["event"] for log in logs]
    assert await num_restored(store, TWO) == 10

    whole = bytearray(first.read_bytes())
    whole[-1] ^= 1
    first.write_bytes(whole)
    read_only(directory, True)
    with capture_logs() as logs:
        assert await num_restored(store, ONE) == 0, "in doubt, though it can be moved nowhere"
    assert "snapshot_not_quarantined" in [log["event"] for log in logs]
    read_only(directory, False)
    await saved(store, ONE)
    assert await store.close()

    store = await open_store(directory=directory)
    assert [await num_restored(store, tokens) for tokens in (ONE, TWO)] == [10, 10]


async def test_snapshots_that_an_erase_could_not_remove_from_a_read_only_disk_are_found_at_restart(
    open_store, mounted, read_only
) -> None:
    directory = mounted("size=4m") / "cache"
    store = await open_store(directory=directory)
    await saved(store, ONE)
    read_only(directory, True)
    with capture_logs() as logs:
        await store.eraser.erase("a", pack(ONE))
    assert [log["event"] for log in logs].count("snapshot_not_removed") == 3
    assert store.kv.match(store.kv.chain("a"), ONE).num_tokens == 0, "here it is gone"
    assert_sum_rule(store)
    await store.close()
    read_only(directory, False)
    store = await open_store(directory=directory)
    assert await num_restored(store, ONE) == 10


async def test_a_file_system_that_becomes_read_only_after_an_error_loses_no_durable_snapshot(
    open_store, disk_image
) -> None:
    """It is ext4 with `errors=remount-ro`, where files that are already open cannot be written either."""
    folder = disk_image(16 << 20, "errors=remount-ro", "mkfs.ext4", "-q")
    device = Path(await command("findmnt", "-no", "SOURCE", folder)).name
    clock = Clock()
    store = await open_store(directory=folder / "cache", monotonic=clock)
    await saved(store, ONE)
    trigger_error(device)
    assert await failing(store, TWO) == ["EROFS"]
    clock.now += 1.1
    assert await failing(store, THREE) == []
    assert await num_restored(store, ONE) == 10, "what is stored is still served"
    assert await store.close()

    await command("umount", folder)
    folder = disk_image(16 << 20, "errors=remount-ro", "e2fsck", "-fy")
    store = await open_store(directory=folder / "cache", monotonic=clock)
    assert store.stats().rejected == 0
    assert [await num_restored(store, tokens) for tokens in (ONE, TWO)] == [10, 0]
    await saved(store, TWO)
    assert await num_restored(store, TWO) == 10


async def test_a_used_up_disk_quota_pauses_the_writer_until_space_is_free_again(
    open_store, disk_image
) -> None:
    """The error is EDQUOT from a btrfs quota group, which applies to root too; `statvfs` does not show it."""
    if shutil.which("btrfs") is None:
        pytest.skip("there is no btrfs here")
    folder = disk_image(128 << 20, "rw", "mkfs.btrfs", "-q", "--mixed")
    await command("btrfs", "quota", "enable", folder)
    await command("btrfs", "qgroup", "limit", "4M", "0/5", folder)
    clock = Clock()
    store = await open_store(directory=folder / "cache", monotonic=clock)
    await saved(store, ONE)
    filler = folder / "of another program"
    with pytest.raises(OSError, match="quota"):
        fill(filler)
    assert await failing(store, TWO) == ["EDQUOT"]
    assert store.stats().free_bytes > 64 << 20, "as far as the disk says"
    assert await num_restored(store, ONE) == 10, "what is stored is still served"

    filler.unlink()
    await command("btrfs", "filesystem", "sync", folder)  # until then it counts
    clock.now += 1.1
    with capture_logs() as logs:
        await saved(store, TWO)
    assert "snapshot_writes_recovered" in [log["event"] for log in logs]
    assert await store.close()
    store = await open_store(directory=folder / "cache")
    assert [await num_restored(store, tokens) for tokens in (ONE, TWO)] == [10, 10]
