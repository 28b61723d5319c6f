"""Fixtures: stores on real directories, and a gate for their writer thread."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_kv import LAYOUT, assert_sum_rule, identity

from cache.disk import format as snapshot_format
from cache.store import Store


@pytest.fixture
async def open_store(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Store]]]:
    """Open stores, by default all on the same directory; close them after the test."""
    opened: list[Store] = []

    async def open_(directory: Path = tmp_path / "cache", **changes: Any) -> Store:
        settings = {"identity": identity(), "layout": LAYOUT, "min_free_bytes": 0}
        settings |= {"max_bytes": 1 << 30, "queue_bytes": 1 << 30}
        store = await Store.open(directory, **{**settings, **changes})
        opened.append(store)
        return store

    yield open_
    for store in opened:
        assert_sum_rule(store)
        await store.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Block the writer thread at the beginning of each write until the returned event is set."""
    gate, write = threading.Event(), snapshot_format.write

    def held(draft: Any, path: Path, *more: Any) -> None:
        assert gate.wait(10)
        write(draft, path, *more)

    monkeypatch.setattr(snapshot_format, "write", held)
    yield gate
    gate.set()
