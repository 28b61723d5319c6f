"""A session that is opened with `snapshots` `none` leaves no KV on disk, and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from parts import BLOCK

from cache.names.tokens import as_tokens
from turnkeep_client.errors import InvalidMessageError, RequestFailedError
from turnkeep_client.messages import CachePolicy, ForkPoint, SessionCache

UNSAVED = {"snapshots": "none"}
SAID = SessionCache(policy="full", snapshots="none")
SECRET = [20 + (7 * number) % 41 for number in range(3 * BLOCK + 5)]
#: Any 16 tokens of it in a row, as files of snapshots have them.
WINDOWS = [as_tokens(SECRET).packed(at, at + 16).hex().encode() for at in range(len(SECRET) - 15)]


def holds_secret(*folders: Path) -> bool:
    """Whether any file of the folders has tokens of the session."""
    files = [one.read_bytes() for folder in folders for one in folder.rglob("*") if one.is_file()]
    return any(window in file for window in WINDOWS for file in files)


def num_snapshots(*folders: Path) -> int:
    """Count the files of KV, complete or not."""
    places = {"tmp", "quarantine"}
    return sum(
        one.is_file() and (one.parent.name in places or one.suffix == ".safetensors")
        for folder in folders
        for one in folder.rglob("*")
    )


@pytest.mark.parametrize("tail", [0, 5])
async def test_neither_disk_nor_tier_gets_kv_of_a_session_without_snapshots(
    local_worker: Callable, tmp_path: Path, tail: int
) -> None:
    """Neither while it runs, idle, as a fork or at a stop; a session with snapshots has some."""
    data, tier = tmp_path / "data", tmp_path / "tier"
    worker = await local_worker(remote_tier=str(tier))
    session = worker.client.session("unsaved", cache=UNSAVED)
    await session.append(tokens=SECRET[: 3 * BLOCK + tail])
    answer = await session.generate(tokens=[5], max_tokens=BLOCK + 3)
    assert answer.cache == SAID
    fork = worker.client.session("fork")
    opened = await fork.open(fork_of=ForkPoint("unsaved"))
    assert opened.cache == SAID
    await fork.generate(tokens=[6], max_tokens=BLOCK)
    await worker.stop()
    assert num_snapshots(data / "snapshots", tier) == 0
    assert not holds_secret(data / "snapshots", tier)

    worker = await local_worker(remote_tier=str(tier))
    info = await worker.client.session("unsaved").info(snapshot=True)
    assert (info.cache, info.snapshot or None) == (SAID, None)
    again = await worker.client.session("unsaved").generate(tokens=[5], max_tokens=2)
    assert (again.cache, again.usage.cached_tokens) == (SAID, 0)
    await worker.client.session("saved").append(tokens=SECRET)
    await worker.stop()
    assert num_snapshots(data / "snapshots", tier) > 0
    assert holds_secret(data / "snapshots", tier)


async def test_a_session_without_snapshots_reuses_those_of_other_sessions(local_worker: Callable) -> None:
    """Reading leaves nothing on disk, and a shared system prompt needs no second prefill."""
    worker = await local_worker()
    await worker.client.session("saved").append(tokens=SECRET)
    await worker.stop()
    worker = await local_worker()
    unsaved = worker.client.session("unsaved", cache=UNSAVED)
    appended = await unsaved.append(tokens=[*SECRET, 5, 6])
    assert appended.cached_tokens >= 3 * BLOCK
    saved = await worker.client.session("also-saved").append(tokens=[*SECRET, 5, 7])
    assert saved.cached_tokens >= 3 * BLOCK


async def test_a_session_that_keeps_its_kv_on_ssd_cannot_be_without_snapshots(
    local_worker: Callable,
) -> None:
    worker = await local_worker()
    with pytest.raises(InvalidMessageError, match="keeps the KV of a paged session on SSD"):
        await worker.client.session("s").open({"policy": "paged", "snapshots": "none"})
    with pytest.raises(InvalidMessageError, match="a fork keeps its parent's policy"):
        await worker.client.session("s").open(CachePolicy(snapshots="none"), fork_of=ForkPoint("t"))


async def test_a_session_object_refuses_a_session_that_has_snapshots_if_it_shall_have_none(
    local_worker: Callable,
) -> None:
    worker = await local_worker()
    await worker.client.session("s").append(tokens=[5])
    with pytest.raises(RequestFailedError, match="open under full, not under full, no snapshots"):
        await worker.client.session("s", cache=UNSAVED).append(tokens=[5])
    window = {"policy": "sink_window", "sink": 2, "window": 32, "snapshots": "none"}
    found = await worker.client.session("w", cache=window).append(tokens=[5])
    assert found.cache == SessionCache(**window)
    assert (await worker.client.session("w", cache=UNSAVED).append(tokens=[5])).cache == found.cache
