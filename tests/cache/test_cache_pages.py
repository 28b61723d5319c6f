"""Large pages under memory that is about to be filled: only there, and never at the cost of what is in it."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from cache import pages

MIB = 1 << 20


def large_bytes() -> int:
    """Count the large pages of this process."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.partition("AnonHugePages:")[2].split()[0]) << 10


def mapped() -> memoryview:
    """Map 10 MiB that nobody has written to."""
    return memoryview(mmap.mmap(-1, 10 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


@pytest.fixture
def memory():
    """Memory that could have large pages; skips where the system has none."""
    if pages._libc() is None:
        pytest.skip("this system has no large pages")
    probe, before = mapped(), large_bytes()
    pages.enlarge([probe])
    if large_bytes() == before:
        pytest.skip("this system gives no large pages now")
    return mapped()


def test_memory_that_nobody_has_written_to_gets_large_pages(memory) -> None:
    before = large_bytes()
    memory[5 * MIB] = 7  # an allocator has noted something
    pages.enlarge([memory])
    assert large_bytes() - before >= 8 * MIB
    assert bytes(memory) == bytes(5 * MIB) + b"\7" + bytes(5 * MIB - 1)


def test_neighbours_count_as_one_and_what_lies_between_others_is_left_alone(memory) -> None:
    other, before = mapped(), large_bytes()
    pages.enlarge([other[i * MIB : i * MIB + 4096] for i in range(10)])
    assert large_bytes() == before
    pages.enlarge([memory[i * MIB + 16 : (i + 1) * MIB] for i in range(10)])
    assert large_bytes() - before >= 8 * MIB


def test_memory_in_use_is_not_moved(memory) -> None:
    filled = b"\5" * (10 * MIB)
    memory[:] = filled
    before = large_bytes()  # with all of it where the system gives them unasked
    pages.enlarge([memory])
    assert large_bytes() == before
    assert memory == filled


def test_nothing_is_asked_for_where_nobody_wants_large_pages(memory, monkeypatch, tmp_path) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    monkeypatch.setattr(pages, "_SETTING", tmp_path / "enabled")
    before = large_bytes()
    pages._libc.cache_clear()
    try:
        pages.enlarge([memory])
    finally:
        pages._libc.cache_clear()
    assert large_bytes() == before


def test_no_memory_and_little_memory_are_no_fault() -> None:
    pages.enlarge([])
    pages.enlarge([memoryview(bytearray()), memoryview(bytearray(100))])
