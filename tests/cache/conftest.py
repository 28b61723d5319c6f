"""Stores on real directories."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_kv import LAYOUT, identity

from cache.disk import format as snapshot_format
from cache.store import Store


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


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold the writer at the beginning of a write until the gate is opened."""
    gate, write = threading.Event(), snapshot_format.write

    def held(draft: Any, path: Path, *more: Any) -> None:
        assert gate.wait(10)
        write(draft, path, *more)

    monkeypatch.setattr(snapshot_format, "write", held)
    yield gate
    gate.set()
