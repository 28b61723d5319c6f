"""Stores that share a remote tier: what one stored another restores, and what was forgotten is nowhere."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_kv import BLOCK, assert_is_kv_of, assert_sum_rule, cut, identity, save_all

from cache.disk import tier as tier_module
from cache.disk.access import PLAIN
from cache.disk.objects import ObjectStore
from cache.disk.tier import Key, SharedDirectory, Tier
from cache.index import remote
from cache.names.errors import SealedError
from cache.names.policy import Policy
from cache.names.tokens import as_tokens
from cache.store import Store

TOKENS = list(range(10))


@pytest.fixture(params=["directory", "objects"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    """A directory; or an object store, by the library's own store in a directory."""
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
    """Save KV, and wait until the tier has it."""
    save_all(store, tenant, tokens)
    await store.barrier(5)
    assert await store.barrier_remote(5)


async def fetched(store: Store, tokens: list[int], tenant: str = "a") -> int:
    """Fetch what there is of some tokens; return how many are restored."""
    found = await store.find_remote(store.chain(tenant), tokens)
    if found is not None:
        await store.fetch(found)
    restored = await store.load(store.match(tenant, tokens))
    assert_sum_rule(store)
    if restored is None:
        return 0
    assert_is_kv_of(restored.tensors, tokens[: restored.num_tokens])
    return restored.num_tokens


def in_tier(tmp_path: Path) -> list[Path]:
    files = (path for path in (tmp_path / "tier").rglob("*") if path.is_file())
    return [path for path in files if "identities" not in str(path)]


async def test_another_store_restores_blocks_and_tail(open_two: Any) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    assert two.match("a", TOKENS).num_tokens == 0
    assert await fetched(two, TOKENS) == 10
    assert two.stats().stored == 3
    assert (await two.find_remote(two.chain("a"), TOKENS)) is None, "it has all of it now"


async def test_only_what_is_missing_is_fetched(open_two: Any) -> None:
    one, two = await open_two()
    await put(two, TOKENS[:4])
    await put(one, TOKENS)
    found = await two.find_remote(two.chain("a"), TOKENS)
    assert found is not None
    assert (len(found.links), found.num_tokens) == (2, 10)


async def test_a_tail_that_grew_is_fetched_in_pieces(open_two: Any) -> None:
    one, two = await open_two()
    await put(one, TOKENS[:9])
    await put(one, TOKENS)
    assert await fetched(two, [*TOKENS, 77]) == 10


async def test_a_block_replaces_the_pieces_in_the_tier_that_it_contains(
    open_two: Any, tmp_path: Path
) -> None:
    one, _ = await open_two()
    await put(one, TOKENS[:9])
    await put(one, TOKENS[:11])
    await put(one, [*TOKENS, 10, 11])
    assert len(in_tier(tmp_path)) == 12 // BLOCK


@pytest.mark.parametrize("changes", [{"tenant": "b"}, {"identity": identity(block_tokens=8)}])
async def test_another_tenant_or_model_fetches_nothing(
    open_store: Any, tmp_path: Path, tier: Tier, changes: dict[str, Any]
) -> None:
    one = await open_store(tmp_path / "one", tier=tier)
    await put(one, TOKENS)
    changes = dict(changes)
    tenant = changes.pop("tenant", "a")
    two = await open_store(tmp_path / "two", tier=tier, **changes)
    assert await fetched(two, TOKENS, tenant) == 0


async def test_what_was_forgotten_is_in_no_store_and_not_in_the_tier(open_two: Any, tmp_path: Path) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    assert (await two.erase("a", TOKENS)).settled
    assert in_tier(tmp_path) == []
    assert await fetched(two, TOKENS) == 0


async def test_what_is_said_to_be_forgotten_is_synced_and_else_it_is_not_said(
    open_store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=1 << 30, min_free_bytes=0)
    one = await open_store(tmp_path / "one", tier=tier)
    await put(one, TOKENS)
    synced: list[Path] = []
    monkeypatch.setattr(tier_module, "sync", lambda path, **_: synced.append(path))
    folders = {path.parent for path in in_tier(tmp_path)}
    assert (await one.erase("a", TOKENS)).settled
    assert folders <= {*synced}
    await put(one, TOKENS)
    monkeypatch.setattr(tier_module, "sync", lambda *_, **__: os.fsync(-1))
    assert not (await one.erase("a", TOKENS)).settled


async def test_forgetting_leaves_what_other_sessions_continue_in_the_tier(
    open_two: Any, tmp_path: Path
) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    other = [*TOKENS[:8], 77, 78]
    await put(two, other)
    assert (await one.erase("a", TOKENS)).settled
    assert len(in_tier(tmp_path)) == 3, "two blocks and the other tail"
    assert await fetched(one, other) == 10


async def test_forgetting_leaves_the_shared_beginning(open_two: Any, tmp_path: Path) -> None:
    one, _ = await open_two()
    await put(one, TOKENS)
    assert (await one.erase("a", TOKENS, shared=4)).settled
    assert len(in_tier(tmp_path)) == 1


async def test_of_another_model_s_snapshots_none_is_left_after_forgetting(
    open_store: Any, tmp_path: Path, tier: Tier
) -> None:
    one = await open_store(tmp_path / "one", tier=tier)
    await put(one, TOKENS)
    two = await open_store(tmp_path / "two", tier=tier, identity=identity(block_tokens=8))
    assert (await two.erase("a", TOKENS)).settled
    assert in_tier(tmp_path) == []


async def test_a_file_that_is_not_what_its_name_says_is_removed_from_the_tier(
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
    await two.barrier_remote(5)
    assert len(in_tier(tmp_path)) == 2, "the first block; what continues it ages"


async def test_what_was_stored_before_there_was_a_tier_is_put_with_what_continues_it(
    open_store: Any, tmp_path: Path, tier: Tier
) -> None:
    one = await open_store(tmp_path / "one")
    save_all(one, "a", TOKENS[:8])
    await one.close()
    one = await open_store(tmp_path / "one", tier=tier)
    await put(one, TOKENS)
    assert await fetched(await open_store(tmp_path / "two", tier=tier), TOKENS) == 10


async def test_what_a_failing_tier_did_not_take_is_put_later(
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


async def test_a_hole_ends_what_is_fetched(open_two: Any, tmp_path: Path, tier: Tier) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    names = one.chain("a").names(as_tokens(TOKENS))
    tier.remove([Key(names[1].hex(), PLAIN.file_name(names[2]))])
    assert await fetched(two, TOKENS) == 4


async def test_a_tier_that_is_gone_costs_nothing_but_warmth(open_two: Any, tmp_path: Path) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    for path in (tmp_path / "tier").iterdir():
        shutil.rmtree(path)
    (tmp_path / "tier").rmdir()
    (tmp_path / "tier").write_text("no directory any more")
    save_all(two, "a", [5, 6, 7, 8])
    await two.barrier(5)
    assert await two.barrier_remote(5)
    assert two.stats().remote_failed == 1
    assert await fetched(two, TOKENS) == 0
    assert await fetched(two, [5, 6, 7, 8]) == 4


async def test_a_tier_keeps_within_its_limit_and_evicts_chains_from_their_ends(
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


@pytest.mark.parametrize("url", ["nosuch://bucket", "file:///no/such/directory", "s3://"])
def test_what_is_no_object_store_is_an_error_of_one_line(url: str) -> None:
    with pytest.raises(OSError, match=r"^[^\n]+$"):
        ObjectStore(url)


async def test_a_full_tier_still_forgets_the_snapshots_of_other_models(
    open_store: Any, tmp_path: Path
) -> None:
    """The files that name the identities are the oldest, and never used again."""
    tight = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=3000, min_free_bytes=0)
    one = await open_store(tmp_path / "one", tier=tight)
    for tenant in "abcd":
        await put(one, TOKENS, tenant)
    two = await open_store(tmp_path / "two", tier=tight, identity=identity(block_tokens=8))
    assert in_tier(tmp_path)
    for tenant in "abcd":
        assert (await two.erase(tenant, TOKENS)).settled
    assert in_tier(tmp_path) == []


async def test_a_full_file_system_takes_no_more(open_store: Any, tmp_path: Path) -> None:
    full = SharedDirectory(tmp_path / "tier", PLAIN, max_bytes=1 << 30, min_free_bytes=1 << 60)
    one = await open_store(tmp_path / "one", tier=full)
    await put(one, TOKENS)
    assert in_tier(tmp_path) == []
    assert one.stats().remote_failed


async def test_a_worker_s_own_directory_is_no_tier(open_store: Any, tmp_path: Path) -> None:
    await open_store(tmp_path / "one")
    with pytest.raises(FileExistsError, match="a worker's own directory"):
        SharedDirectory(tmp_path / "one", PLAIN, max_bytes=1 << 30, min_free_bytes=0)


async def test_an_encrypted_tier_is_for_those_with_its_key(open_store: Any, tmp_path: Path) -> None:
    from cache.disk.sealing import Sealed

    key = Sealed(b"k" * 32)
    tier = SharedDirectory(tmp_path / "tier", key, max_bytes=1 << 30, min_free_bytes=0)
    one = await open_store(tmp_path / "one", tier=tier, access=key)
    await put(one, TOKENS)
    names = one.chain("a").names(as_tokens(TOKENS))
    assert not any(name.hex() in str(path) for name in names for path in in_tier(tmp_path))
    two = await open_store(tmp_path / "two", tier=tier, access=key)
    assert await fetched(two, TOKENS) == 10
    for other in (PLAIN, Sealed(b"o" * 32)):
        with pytest.raises(SealedError):
            SharedDirectory(tmp_path / "tier", other, max_bytes=1 << 30, min_free_bytes=0)


async def test_a_policy_s_snapshots_are_forgotten_at_a_store_that_has_not_used_it(
    open_two: Any, tmp_path: Path
) -> None:
    one, two = await open_two()
    chain = one.chain("a", Policy(4, 8))
    for span in one.wanted(chain, TOKENS, 0, 10):
        tensors = tuple(replace(tensor, reach=chain.policy) for tensor in cut(TOKENS, span))
        assert one.save(chain, TOKENS, span, tensors)
    await one.barrier(5)
    await one.barrier_remote(5)
    assert in_tier(tmp_path)
    assert (await two.erase("a", TOKENS)).settled
    assert in_tier(tmp_path) == []


async def test_a_fetch_that_is_cancelled_leaves_no_file(open_two: Any, tmp_path: Path) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    found = await two.find_remote(two.chain("a"), TOKENS)
    fetch = asyncio.create_task(two.fetch(found))
    await asyncio.sleep(0)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    await asyncio.sleep(0.2)
    await two.barrier_remote(5)
    assert not list((tmp_path / "two" / "tmp").iterdir())
    assert await fetched(two, TOKENS) == 10


async def test_a_fetch_adopts_nothing_of_what_is_forgotten_meanwhile(open_two: Any) -> None:
    one, two = await open_two()
    await put(one, TOKENS)
    found = await two.find_remote(two.chain("a"), TOKENS)
    remote = two._remote
    got = remote._got

    async def forget_then(*links: Any) -> Any:
        arrived = await got(*links)
        two.forget("a", TOKENS)
        return arrived

    remote._got = forget_then
    await two.fetch(found)
    assert two.match("a", TOKENS).num_tokens == 0


async def test_an_erasure_that_nobody_waits_for_is_done_all_the_same(open_two: Any, tmp_path: Path) -> None:
    one, _ = await open_two()
    await put(one, TOKENS)
    assert not (await one.erase("a", TOKENS, timeout_s=0.0)).settled
    await one.barrier_remote(5)
    assert in_tier(tmp_path) == []
