"""Stores on real directories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from made_kv import LAYOUT, identity

from cache.store import Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


@pytest.fixture
async def open_store(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Store]]]:
    """Open stores on one directory, and close what a test leaves open."""
    opened: list[Store] = []

    async def open_(directory: Path = tmp_path / "cache", **changes: Any) -> Store:
        settings = {"identity": identity(), "layout": LAYOUT, "min_free_bytes": 0}
        settings |= {"max_bytes": 1 << 30, "queue_bytes": 1 << 30}
        store = await Store.open(directory, **{**settings, **changes})
        opened.append(store)
        return store

    yield open_
    for store in opened:
        await store.close()
