"""Which blocks of a directory can be computed again: those whose tokens are all known, and no images."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from made_kv import cut, identity, save_all

from cache.admin.stored_blocks import StoredBlocks
from cache.disk.codec import PLAIN
from cache.names.blocks import Span
from cache.names.images import ImageSpan
from cache.names.tokens import as_tokens
from cache.store import Store


async def test_blocks_are_listed_with_all_tokens_before_them_but_not_images_and_what_follows_a_missing_one(
    open_store: Callable[..., Awaitable[Store]], tmp_path: Path
) -> None:
    lost, forked, seen = [*range(10)], [*range(4), 77, 78], as_tokens(range(20, 32), [ImageSpan(5, 7, b"1")])
    store = await open_store()
    other = identity(weights="other")
    for tokens in (lost, forked, seen):
        save_all(store, "a", tokens)
    await store.close()
    store = await open_store(identity=other)
    save_all(store, "a", lost)
    await store.close()
    blocks = StoredBlocks(tmp_path / "cache", PLAIN)

    def listed() -> list[tuple[list[int], int, str]]:
        num, found = blocks.of(identity().digest())
        files = [([*tokens], span.start, file) for tokens, span, file in found]
        assert len(files) <= num
        return sorted(files)

    every = listed()
    assert [(tokens, start) for tokens, start, _ in every] == [
        ([0, 1, 2, 3], 0),
        ([0, 1, 2, 3, 4, 5, 6, 7], 4),
        ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], 8),
        ([0, 1, 2, 3, 77, 78], 4),
        ([20, 21, 22, 23], 0),
    ]
    for tokens, start, file in every:
        stored = blocks.read(file)
        assert stored is not None
        for one in cut(tokens, Span(start, len(tokens))):
            assert (stored[one.name].shape, bytes(stored[one.name].data)) == (one.shape, bytes(one.data))
    (tmp_path / "cache" / "snapshots" / every[1][2]).unlink()
    assert [file for _, _, file in listed()] == [every[i][2] for i in (0, 3, 4)]
    assert blocks.read(every[1][2]) is None
