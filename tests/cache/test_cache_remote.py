"""Stores that share a remote tier: one restores snapshots of another, and an erase covers the tier."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_kv import BLOCK, LAYOUT, assert_is_kv_of, assert_sum_rule, cut, identity, save_all, uploaded
from test_cache_windows import assert_restored, save

from cache.disk import tier as tier_module
from cache.disk.codec import PLAIN
from cache.disk.objects import ObjectStore
from cache.disk.tier import FileKey, SharedDirectory, Tier
from cache.index import remote
from cache.names.errors import SealedError
from cache.names.marks import ErasureProgress, Marks
from cache.names.policy import Policy
from cache.names.tokens import as_tokens, pack
from cache.store import Store
from tests.parts import until

TOKENS = list(range(10))
#: A long session, and the sinks and the window that it sees.
LONG = [at * 7 % 50 for at in range(120)]
WINDOW = Policy(2, 8)
#: A session that is forgotten, and one with its first 132 tokens, so with its first mark (of 128 tokens).
GONE = [at * 7 % 50 for at in range(140)]
KEPT = [*GONE[:132], *(at * 7 % 50 for at in reversed(range(132, 264)))]


@pytest.fixture(params=["directory", "objects"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    """A remote tier: a shared directory, or an object store that its library keeps in a directory."""
    if request.param == "directory":
        return SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=1 << 30, min_free_bytes=0)
    (tmp_path / "tier").mkdir()
    return ObjectStore((tmp_path / "tier").as_uri())


@pytest.fixture
def open_two(
    open_store: Callable[..., Awaitable[Store]], tmp_path: Path, tier: Tier
) -> Callable[..., Awaitable[tuple[Store, Store]]]:
    async def open_(**changes: Any) -> tuple[Store, Store]:
        options = {"tier": tier, **changes}
        return await open_store(tmp_path / "one", **options), await open_store(tmp_path / "two", **options)

    return open_


async def put(store: Store, tokens: list[int], tenant: str = "a") -> None:
    """Save the KV of some tokens, and wait until it is uploaded to the tier."""
    save_all(store, tenant, tokens)
    await store.queue.drained(5)
    await uploaded(store)


async def fetched(store: Store, tokens: list[int], tenant: str = "a") -> int:
    """Fetch the snapshots of some tokens from the tier; return how many tokens a restore then gives."""
    found = await store.kv.find_remote(store.kv.chain(tenant), tokens)
    if found is not None:
        await store.remote.fetch(found)
    restored = await store.kv.load(store.kv.match(store.kv.chain(tenant), tokens))
    assert_sum_rule(store)
    if restored is None:
        return 0
    assert_is_kv_of(restored.tensors, tokens[: restored.num_tokens])
    return restored.num_tokens


def in_tier(tmp_path: Path) -> list[Path]:
    files = (path for path in (tmp_path / "tier").rglob("*") if path.is_file())
    names = ((path, f"{path.parent.name}/{path.name}") for path in files)
    return [path for path, name in names if "identities" not in name and "erased" not in name]


async def test_a_store_restores_full_and_partial_blocks_that_another_store_uploaded_to_the_remote_tier(
    open_two: Any,
) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    assert two.kv.match(two.kv.chain("a"), TOKENS).num_tokens == 0
    assert await fetched(two, TOKENS) == 10
    assert two.stats().stored == 3
    assert (await two.kv.find_remote(two.kv.chain("a"), TOKENS)) is None, "it has all of it now"


async def test_a_store_fetches_from_the_remote_tier_only_the_blocks_that_it_lacks_locally(
    open_two: Any,
) -> None:
    one, two = await open_two()
    await put(two, TOKENS[:4])
    await put(one, TOKENS)
    found = await two.kv.find_remote(two.kv.chain("a"), TOKENS)
    assert found is not None
    assert (len(found.links), found.num_tokens) == (2, 10)


async def test_uploading_a_full_block_removes_its_partial_blocks_from_the_remote_tier(
    open_two: Any, tmp_path: Path
) -> None:
    one, _ = await open_two()
    await put(one, TOKENS[:9])
    await put(one, TOKENS[:11])
    await put(one, [*TOKENS, 10, 11])
    assert len(in_tier(tmp_path)) == 12 // BLOCK


async def test_an_erase_is_confirmed_only_if_the_directories_of_the_remote_tier_could_be_synced(
    open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=1 << 30, min_free_bytes=0)
    one = await open_store(tmp_path / "one", tier=tier)
    await put(one, TOKENS)
    synced: list[Path] = []
    monkeypatch.setattr(tier_module, "sync", lambda path, **_: synced.append(path))
    folders = {path.parent for path in in_tier(tmp_path)}
    assert (await one.eraser.erase("a", pack(TOKENS))).settled
    assert folders <= {*synced}
    await put(one, TOKENS)
    monkeypatch.setattr(tier_module, "sync", lambda *_, **__: os.fsync(-1))
    assert not (await one.eraser.erase("a", pack(TOKENS))).settled


async def test_an_erase_keeps_blocks_of_the_remote_tier_that_another_session_shares(
    open_two: Any, tmp_path: Path
) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    other = [*TOKENS[:8], 77, 78]
    await put(two, other)
    assert (await one.eraser.erase("a", pack(TOKENS))).settled
    assert len(in_tier(tmp_path)) == 3, "two blocks and the other tail"
    assert await fetched(one, other) == 10


async def test_an_erase_by_logged_hashes_keeps_blocks_of_the_remote_tier_that_another_session_shares(
    open_two: Any,
) -> None:
    one, two = await open_two()
    for tokens in (GONE, KEPT):
        await put(one, tokens)
    assert await one.eraser.erase_marked("a", Marks.of("a", pack(GONE)))
    assert await fetched(two, KEPT) == 264
    assert await fetched(two, GONE) == 132


@pytest.mark.parametrize("by_note", [True, False], ids=["erased by logged hashes", "erased by tokens"])
async def test_snapshots_saved_again_after_their_erasure_are_uploaded_to_the_remote_tier_again(
    open_two: Any, by_note: bool
) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    if by_note:
        assert await one.eraser.erase_marked("a", Marks.of("a", pack(TOKENS)))
    else:
        assert (await one.eraser.erase("a", pack(TOKENS))).settled
    await put(one, TOKENS)
    assert await fetched(two, TOKENS) == 10


async def test_two_concurrent_fetches_of_the_same_snapshots_from_the_remote_tier_leave_no_temporary_file(
    open_two: Any, tmp_path: Path
) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    found = await two.kv.find_remote(two.kv.chain("a"), TOKENS)
    await asyncio.gather(two.remote.fetch(found), two.remote.fetch(found))
    await uploaded(two)
    assert not list((tmp_path / "two" / "tmp").iterdir())
    assert await fetched(two, TOKENS) == 10


async def test_an_erase_keeps_the_remote_block_of_the_first_tokens_if_its_caller_declares_them_as_shared(
    open_two: Any, tmp_path: Path
) -> None:
    one, _ = await open_two()
    await put(one, TOKENS)
    assert (await one.eraser.erase("a", pack(TOKENS), shared=4)).settled
    assert len(in_tier(tmp_path)) == 1


async def test_an_erase_removes_the_snapshots_of_all_models_from_the_remote_tier(
    open_store: Any, tmp_path: Path, tier: Tier
) -> None:
    one = await open_store(tmp_path / "one", tier=tier)
    await put(one, TOKENS)
    two = await open_store(tmp_path / "two", tier=tier, identity=identity(block_tokens=8))
    assert (await two.eraser.erase("a", pack(TOKENS))).settled
    assert in_tier(tmp_path) == []


async def test_a_damaged_file_of_the_remote_tier_is_removed_and_uploaded_again_when_its_block_is_saved(
    open_two: Any, tmp_path: Path
) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    for path in in_tier(tmp_path):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.unlink()
        path.write_bytes(content)
    assert await fetched(two, TOKENS) == 0
    assert two.stats().rejected == 1
    await uploaded(two)
    assert len(in_tier(tmp_path)) == 2, "the first block; what continues it ages"
    await put(two, TOKENS[:4])
    assert len(in_tier(tmp_path)) == 3


async def test_blocks_stored_before_a_remote_tier_was_configured_are_uploaded_together_with_later_blocks(
    open_store: Any, tmp_path: Path, tier: Tier
) -> None:
    one = await open_store(tmp_path / "one")
    save_all(one, "a", TOKENS[:8])
    await one.close()
    one = await open_store(tmp_path / "one", tier=tier)
    await put(one, TOKENS)
    assert await fetched(await open_store(tmp_path / "two", tier=tier), TOKENS) == 10


async def test_blocks_whose_upload_to_the_remote_tier_failed_are_uploaded_later(
    open_two: Any, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await open_two()

    def fail(*_: object) -> None:
        raise OSError(None, "no route to it")

    with monkeypatch.context() as away:
        away.setattr(tier, "put", fail)
        away.setattr(remote, "_FIRST_PAUSE_S", 0.0)
        away.setattr(remote, "_LONGEST_PAUSE_S", 0.0)
        await put(one, TOKENS[:8])
    await put(one, TOKENS)
    assert await fetched(two, TOKENS) == 10


async def test_a_fetch_from_the_remote_tier_ends_before_the_first_block_that_the_tier_lacks(
    open_two: Any, tmp_path: Path, tier: Tier
) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    names = one.kv.chain("a").names(as_tokens(TOKENS))
    tier.remove([FileKey(names[1].hex(), PLAIN.file_name(names[2]))])
    assert await fetched(two, TOKENS) == 4


async def test_local_saves_and_restores_succeed_after_the_remote_tiers_directory_is_removed(
    open_two: Any, tmp_path: Path
) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    for path in (tmp_path / "tier").iterdir():
        shutil.rmtree(path)
    (tmp_path / "tier").rmdir()
    (tmp_path / "tier").write_text("no directory any more")
    save_all(two, "a", [5, 6, 7, 8])
    await two.queue.drained(5)
    await uploaded(two)
    assert two.stats().remote_failed == 1
    assert await fetched(two, TOKENS) == 0
    assert await fetched(two, [5, 6, 7, 8]) == 4


async def test_a_remote_tier_stays_within_its_size_limit_by_evicting_the_last_blocks_of_sessions_first(
    open_store: Any, tmp_path: Path
) -> None:
    plenty = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=1 << 30, min_free_bytes=0)
    one = await open_store(tmp_path / "one", tier=plenty)
    await put(one, TOKENS)
    files = in_tier(tmp_path)
    for path in files:
        os.utime(path, (1, 1))
    size_bytes = max(path.stat().st_size for path in files)
    tight = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=int(3.5 * size_bytes), min_free_bytes=0)
    two = await open_store(tmp_path / "two", tier=tight)
    await put(two, [9, 9, 9, 9])
    assert len(in_tier(tmp_path)) == 3
    assert await fetched(two, TOKENS) == 8, "the tail went first"


def test_uploading_or_fetching_a_file_of_the_remote_tier_updates_its_last_use_time(tmp_path: Path) -> None:
    tier = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=1 << 30, min_free_bytes=0)
    key, path = FileKey("0" * 64, "file"), tmp_path / "file"
    path.write_bytes(b"KV")
    tier.put(key, path)
    for use, to in ((tier.put, path), (tier.get, tmp_path / "copy")):
        os.utime(tier.local(key, path), (1, 1))
        use(key, to)
        assert tier.local(key, path).stat().st_mtime > 1


@pytest.mark.parametrize("url", ["nosuch://bucket", "file:///no/such/directory", "s3://"])
def test_an_object_store_url_of_unknown_scheme_or_without_bucket_raises_a_one_line_error(url: str) -> None:
    with pytest.raises(OSError, match=r"^[^\n]+$"):
        ObjectStore(url)


async def test_an_erase_in_a_full_remote_tier_still_removes_the_snapshots_of_other_models(
    open_store: Any, tmp_path: Path
) -> None:
    """The tier's files with the models' identities are the oldest, but must not be evicted."""
    tight = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=3000, min_free_bytes=0)
    one = await open_store(tmp_path / "one", tier=tight)
    for tenant in "abcd":
        await put(one, TOKENS, tenant)
    two = await open_store(tmp_path / "two", tier=tight, identity=identity(block_tokens=8))
    assert in_tier(tmp_path)
    for tenant in "abcd":
        assert (await two.eraser.erase(tenant, pack(TOKENS))).settled
    assert in_tier(tmp_path) == []


async def test_an_erase_removes_files_that_another_model_uploaded_after_the_remote_tier_was_emptied_by_hand(
    open_store: Any, tmp_path: Path, tier: Tier
) -> None:
    """As by an operator, for room."""
    one = await open_store(tmp_path / "one", tier=tier)
    two = await open_store(tmp_path / "two", tier=tier, identity=identity(block_tokens=8))
    await put(one, TOKENS[:4])
    for path in (tmp_path / "tier").iterdir():
        shutil.rmtree(path)
    await put(one, GONE)
    assert in_tier(tmp_path)
    assert (await two.eraser.erase("a", pack(GONE))).settled
    assert in_tier(tmp_path) == []


async def test_an_erase_removes_snapshots_from_a_remote_tier_that_has_lost_its_list_of_models(
    open_store: Any, tmp_path: Path, tier: Tier
) -> None:
    """As in a bucket whose rules remove the oldest objects."""
    one = await open_store(tmp_path / "one", tier=tier)
    await put(one, TOKENS)
    for path in (tmp_path / "tier").rglob("*identities*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert (await one.eraser.erase("a", pack(TOKENS))).settled
    assert in_tier(tmp_path) == []


async def test_a_remote_tier_whose_disk_was_unmounted_takes_no_snapshots(
    open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would fill another disk, and once the tier is mounted again no erase would find them."""
    tier = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=1 << 30, min_free_bytes=0)
    one = await open_store(tmp_path / "one", tier=tier)
    await put(one, TOKENS)
    shutil.rmtree(tmp_path / "tier")
    (tmp_path / "tier").mkdir()
    monkeypatch.setattr(tier, "_device", -1)
    await put(one, GONE)
    assert one.stats().remote_failed
    assert [*(tmp_path / "tier").iterdir()] == []


async def test_a_remote_tier_on_a_full_file_system_accepts_no_snapshots(
    open_store: Any, tmp_path: Path
) -> None:
    full = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=1 << 30, min_free_bytes=1 << 60)
    one = await open_store(tmp_path / "one", tier=full)
    await put(one, TOKENS)
    assert in_tier(tmp_path) == []
    assert one.stats().remote_failed


def test_a_full_remote_tier_stops_evicting_once_a_removal_has_freed_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_bytes(b"x" * 1000)
    tier = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=1 << 30, min_free_bytes=1 << 20)
    for number in range(10):
        tier.put(FileKey(f"{number:064x}", "file"), own)
    monkeypatch.setattr(tier, "_free_bytes", lambda: (1 << 20) + 1)
    for number in range(10, 20):
        with pytest.raises(OSError, match="space"):
            tier.put(FileKey(f"{number:064x}", "file"), own)
    assert len(in_tier(tmp_path)) == 9
    monkeypatch.setattr(tier, "_free_bytes", lambda: 1 << 21)
    tier.put(FileKey("a" * 64, "file"), own)
    assert len(in_tier(tmp_path)) == 10


async def test_a_workers_own_cache_directory_is_refused_as_a_remote_tier(
    open_store: Any, tmp_path: Path
) -> None:
    await open_store(tmp_path / "one")
    with pytest.raises(FileExistsError, match="a worker's own directory"):
        SharedDirectory(tmp_path / "one", PLAIN, max_bytes=1 << 30, min_free_bytes=0)


async def test_an_encrypted_remote_tier_opens_only_with_its_key_and_its_file_names_reveal_no_digest(
    open_store: Any, tmp_path: Path
) -> None:
    from cache.disk.encryption import EncryptedCodec

    key = EncryptedCodec(b"k" * 32)
    tier = SharedDirectory(tmp_path / "tier", key, max_bytes=1 << 30, min_free_bytes=0)
    one = await open_store(tmp_path / "one", tier=tier, codec=key)
    await put(one, TOKENS)
    names = one.kv.chain("a").names(as_tokens(TOKENS))
    assert not any(name.hex() in str(path) for name in names for path in in_tier(tmp_path))
    two = await open_store(tmp_path / "two", tier=tier, codec=key)
    assert await fetched(two, TOKENS) == 10
    for other in (PLAIN, EncryptedCodec(b"o" * 32)):
        with pytest.raises(SealedError):
            SharedDirectory(tmp_path / "tier", other, max_bytes=1 << 30, min_free_bytes=0)


async def test_an_erase_removes_remote_snapshots_of_a_cache_policy_that_the_erasing_store_never_used(
    open_two: Any, tmp_path: Path
) -> None:
    one, two = await open_two()
    chain = one.kv.chain("a", Policy(4, 8))
    for span in one.kv.wanted(chain, TOKENS[:10]):
        tensors = tuple(replace(tensor, reach=chain.policy) for tensor in cut(TOKENS, span))
        assert one.kv.save(chain, TOKENS, span, tensors)
    await one.queue.drained(5)
    await uploaded(one)
    assert in_tier(tmp_path)
    assert (await two.eraser.erase("a", pack(TOKENS))).settled
    assert in_tier(tmp_path) == []


class Watched:
    """A tier that records which files are read from it."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.gotten: list[FileKey] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def get(self, key: FileKey, path: Path) -> bool:
        self.gotten.append(key)
        return self._tier.get(key, path)


def starts(store: Store) -> list[int]:
    """Return the start positions of the snapshots with a file."""
    return sorted(node.start for node in store._index)


async def windowed(open_store: Any, tmp_path: Path, tier: Tier, num_tokens: int = 101) -> tuple[Store, Store]:
    """Return two stores; the first has uploaded a sink-window session of `num_tokens` tokens to the tier."""
    tokens, sees = LONG[:num_tokens], LAYOUT.under(WINDOW)
    one = await open_store(tmp_path / "one", tier=tier)
    save(one, sees, one.kv.chain("a", WINDOW), tokens)
    await one.queue.drained(5)
    await uploaded(one)
    return one, await open_store(tmp_path / "two", tier=tier)


async def taken_over(store: Store, tokens: list[int]) -> None:
    """Fetch the blocks that a sink-window session needs, restore the session, and check its KV."""
    chain = store.kv.chain("a", WINDOW)
    found = await store.kv.find_remote(chain, tokens)
    assert found is not None
    await store.remote.fetch(found)
    assert_restored(await store.kv.load(store.kv.match(chain, tokens)), LAYOUT.under(WINDOW), tokens)


async def test_only_the_visible_blocks_of_a_sink_window_session_are_fetched_from_the_remote_tier(
    open_store: Any, tmp_path: Path, tier: Tier
) -> None:
    watched: Any = Watched(tier)
    _, two = await windowed(open_store, tmp_path, watched)
    await taken_over(two, LONG[:101])
    assert starts(two) == [0, 92, 96, 100], "of 26: sinks, window and tail"
    assert len(watched.gotten) == 4
    assert two.stats().stored == 4
    assert await two.kv.find_remote(two.kv.chain("a", WINDOW), LONG[:101]) is None
    for _ in range(2):
        await two.close()
        two = await open_store(tmp_path / "two")
        chain = two.kv.chain("a", WINDOW)
        assert two.kv.match(chain, LONG[:101]).num_tokens == 101
    save(two, LAYOUT.under(WINDOW), chain, LONG[:120])
    await two.queue.drained(5)
    assert two.kv.match(chain, LONG[:120]).num_tokens == 120


async def test_an_erase_removes_remote_blocks_that_an_earlier_fetch_left_out_as_not_visible(
    open_store: Any, tmp_path: Path, tier: Tier
) -> None:
    _, two = await windowed(open_store, tmp_path, tier)
    await taken_over(two, LONG[:101])
    await taken_over(two, LONG[:48])
    assert starts(two) == [0, 40, 44, 92, 96, 100], "a rewound session fetches what it sees again"
    assert (await two.eraser.erase("a", pack(LONG[:101]))).settled
    assert in_tier(tmp_path) == []
    assert len(two._index) == 0


async def test_an_erase_while_a_sink_window_session_is_fetched_leaves_none_of_its_blocks_in_the_index(
    open_store: Any, tmp_path: Path, tier: Tier
) -> None:
    _, two = await windowed(open_store, tmp_path, tier)
    found = await two.kv.find_remote(two.kv.chain("a", WINDOW), LONG[:101])
    fetch = asyncio.create_task(two.remote.fetch(found))
    await asyncio.sleep(0)
    assert (await two.eraser.erase("a", pack(LONG[:101]))).settled
    await fetch
    assert len(two._index) == 0


async def test_a_cancelled_fetch_from_the_remote_tier_leaves_no_temporary_file(
    open_two: Any, tmp_path: Path
) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    found = await two.kv.find_remote(two.kv.chain("a"), TOKENS)
    fetch = asyncio.create_task(two.remote.fetch(found))
    await asyncio.sleep(0)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    await asyncio.sleep(0.2)
    await uploaded(two)
    assert not list((tmp_path / "two" / "tmp").iterdir())
    assert await fetched(two, TOKENS) == 10


async def test_a_file_that_arrives_from_the_remote_tier_after_its_fetch_was_cancelled_is_removed(
    open_two: Any, tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    found = await two.kv.find_remote(two.kv.chain("a"), TOKENS)
    get, gate, arrived = tier.get, threading.Event(), list[Path]()

    def late(key: FileKey, path: Path) -> bool:
        assert gate.wait(10)
        there = get(key, path)
        arrived.append(path)
        return there

    monkeypatch.setattr(tier, "get", late)
    fetch = asyncio.create_task(two.remote.fetch(found))
    await asyncio.sleep(0.1)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    await uploaded(two)
    gate.set()
    await until(lambda: bool(arrived) and not list((tmp_path / "two" / "tmp").iterdir()))


async def test_a_snapshot_evicted_before_its_upload_is_uploaded_after_its_next_save(open_two: Any) -> None:
    one, two = await open_two()
    gate = threading.Event()
    one.remote._uploading.submit(lambda: gate.wait(10))
    save_all(one, "a", TOKENS)
    await one.queue.drained(5)
    one.quota.set_limits(max_bytes=0, min_free_bytes=0)
    while one.stats().stored:
        await one.queue.drained(5)
    gate.set()
    await uploaded(one)
    one.quota.set_limits(max_bytes=1 << 30, min_free_bytes=0)
    await put(one, TOKENS)
    assert await fetched(two, TOKENS) == 10


async def test_an_erase_during_a_fetch_of_other_tokens_is_not_counted_as_a_failure_of_the_remote_tier(
    open_two: Any, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes all temporary files; the tier would get no snapshots for a while."""
    one, two = await open_two()
    await put(one, TOKENS)
    found, get = await two.kv.find_remote(two.kv.chain("a"), TOKENS), tier.get

    def get_then_erase(key: FileKey, path: Path) -> bool:
        there = get(key, path)
        two._folder.clear_tmp()
        return there

    with monkeypatch.context() as patch:
        patch.setattr(tier, "get", get_then_erase)
        await two.remote.fetch(found)
    assert two.stats().remote_failed == 0
    assert await fetched(two, TOKENS) == 10


async def test_a_fetch_from_the_remote_tier_stores_no_blocks_of_tokens_that_were_erased_meanwhile(
    open_two: Any, tmp_path: Path
) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    found = await two.kv.find_remote(two.kv.chain("a"), TOKENS)
    remote = two.remote
    got = remote._got

    async def forget_then(*links: Any) -> Any:
        arrived = await got(*links)
        two.eraser.forget("a", pack(TOKENS))
        return arrived

    remote._got = forget_then
    await two.remote.fetch(found)
    assert two.kv.match(two.kv.chain("a"), TOKENS).num_tokens == 0
    await uploaded(two)
    assert not list((tmp_path / "two" / "tmp").iterdir())


async def test_an_erase_that_times_out_is_still_completed_in_the_remote_tier_afterwards(
    open_two: Any, tmp_path: Path
) -> None:
    one, _ = await open_two()
    await put(one, TOKENS)
    assert not (await one.eraser.erase("a", pack(TOKENS), timeout_s=0.0)).settled
    await uploaded(one)
    assert in_tier(tmp_path) == []


async def test_an_erase_by_logged_hashes_repeats_an_erase_that_the_remote_tier_did_not_answer(
    open_two: Any, tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every worker could still fetch the files."""
    one, _ = await open_two()
    await put(one, TOKENS)

    def fails(*_: Any) -> Any:
        raise OSError(errno.EIO, "the tier does not answer")

    monkeypatch.setattr(tier, "contains", fails)
    marks = Marks.of("a", pack(TOKENS))
    assert not (await one.eraser.erase("a", pack(TOKENS))).settled
    assert not await one.eraser.erase_marked("a", marks)
    monkeypatch.undo()
    assert in_tier(tmp_path)
    assert await one.eraser.erase_marked("a", marks)
    assert in_tier(tmp_path) == []


async def test_a_remote_tier_restored_from_a_backup_reports_the_older_log_position_of_its_last_erasures(
    open_two: Any, tmp_path: Path
) -> None:
    """It says how far they are; nothing is fetched before. What another session continues stays."""
    one, two = await open_two()
    for tokens in (GONE, KEPT):
        await put(one, tokens)
    await one.remote.eraser.note_erased(ErasureProgress("log", 3, 100.0, 99.125))
    shutil.copytree(tmp_path / "tier", tmp_path / "backup")
    assert (await one.eraser.erase("a", pack(GONE))).settled
    left = {path.name for path in in_tier(tmp_path)}
    await one.remote.eraser.note_erased(ErasureProgress("log", 5, 101.0))
    await one.remote.eraser.note_erased(ErasureProgress("other", 1, 90.0))
    assert await two.remote.eraser.erased_up_to("log") == ErasureProgress("log", 5, 101.0)
    shutil.copytree(tmp_path / "backup", tmp_path / "tier", dirs_exist_ok=True)
    assert len(in_tier(tmp_path)) == len(left) + 2
    for _ in range(2):
        assert await two.remote.eraser.erased_up_to("log") == ErasureProgress("log", 3, 100.0, 99.125)
        assert await two.remote.eraser.erase_marked("a", Marks.of("a", pack(GONE)))
        assert await two.kv.find_remote(two.kv.chain("a"), GONE) is None
    await two.remote.eraser.note_erased(ErasureProgress("log", 5, 102.0))
    assert await two.remote.eraser.erased_up_to("log") == ErasureProgress("log", 5, 102.0)
    assert await two.remote.eraser.erased_up_to("other") == ErasureProgress("other", 1, 90.0)
    assert {path.name for path in in_tier(tmp_path)} == left
    assert await fetched(two, KEPT) == 264
    assert await fetched(two, GONE) == 132


async def test_an_erase_removes_unfinished_uploads_of_a_dead_process_from_the_remote_tier(
    open_two: Any, tmp_path: Path, tier: Tier
) -> None:
    one, _ = await open_two()
    if isinstance(tier, SharedDirectory):
        for name, age_s in (("dead", 3600), ("running", 0)):
            copy = tmp_path / "tier" / "tmp" / name
            copy.write_bytes(b"KV")
            os.utime(copy, (time.time() - age_s,) * 2)
        assert (await one.eraser.erase("a", pack(TOKENS))).settled
        assert [path.name for path in (tmp_path / "tier" / "tmp").iterdir()] == ["running"]
