"""On disk, sliding-window layers' KV from before the window is deleted; the KV of other layers stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_process import open_process
from tiny_models import BLOCK, key, prompt

from cache.index.nodes import Node
from cache.store import Store
from tests.matrices import first

KEEP = 4 * BLOCK
#: By kind: the share of a file that its layers without a window take.
SHARES = {"exaone4": 1 / 4, "gpt_oss": 1 / 2, "gemma3_text": 1 / 4}


async def _settle(store: Store) -> int:
    """Evict all KV from before the windows; return the bytes of KV left on disk, without file headers."""
    assert await store.queue.drained(5)
    while store.quota._window_eviction:
        store.quota._shrink()
        assert await store.queue.drained(5)
    assert await store.queue.drained(5)  # the store's own timer may have evicted the last ones meanwhile
    assert not any(_is_behind(store, node) for node in store._index)
    files = [store._folder.path(node.digest) for node in store._index]
    assert store.stats().stored_bytes == sum(path.stat().st_size for path in files)
    heads = [int.from_bytes(path.read_bytes()[:8], "little") + 8 for path in files]
    return store.stats().stored_bytes - sum(heads)


def _is_behind(store: Store, node: Node) -> bool:
    followed = store.quota._window_eviction._followed.get(node.first.parent)
    return followed is not None and store.quota._window_eviction._is_behind(node, followed[1])


async def _live(model: Any, directory: Path, keep_behind: int | None) -> tuple[list[Any], list[int]]:
    """Run a growing session in three processes, one after the other; rewind it at the start of the last.

    Return the answers with their numbers of prefilled tokens, and the bytes on disk after each process.
    """
    session: list[int] = []
    answers, sizes = [], []
    for part in range(3):
        async with open_process(model, directory, keep_behind=keep_behind) as process:
            session = session[:90] if part == 2 else session
            for turn in range(2):
                session = [*session, *prompt(100, 2 * part + turn)]
                outcome, got, _ = await process.generate(session, 20)
                session += got
                answers.append((got, outcome.num_prefilled))
            process.engine.forget(key())
            assert process.store.stats().rejected == 0
            sizes.append(await _settle(process.store))
    return answers, sizes


@pytest.mark.parametrize("kind", first([*SHARES], 2))
async def test_deleting_kv_from_before_sliding_windows_from_disk_changes_no_answer(
    make_model, tmp_path: Path, kind: str
) -> None:
    """This includes answers after restarts, and after a rewind to a part that must be prefilled again."""
    model, share = make_model(kind), SHARES[kind]
    kept, sizes = await _live(model, tmp_path / "kept", KEEP)
    everything, all_sizes = await _live(model, tmp_path / "all", None)
    assert [tokens for tokens, _ in kept] == [tokens for tokens, _ in everything]
    assert [num for _, num in kept[:4]] == [num for _, num in everything[:4]], "restarts read the end"
    assert (everything[4][1], kept[4][1]) == (100, 190)
    per_token = all_sizes[1] / 479
    near = (KEEP + 2 * BLOCK) * per_token
    assert sizes[1] <= share * all_sizes[1] + near < 0.8 * all_sizes[1]
    grown = share * (all_sizes[1] - all_sizes[0])
    assert sizes[1] - sizes[0] <= grown + 2 * BLOCK * per_token, "only the other layers' part grows"


async def test_a_model_without_windows_keeps_all_its_kv_on_disk(make_model, tmp_path: Path) -> None:
    async with open_process(make_model("llama"), tmp_path, keep_behind=0) as process:
        session = prompt(200)
        await process.generate(session, 5)
        process.engine.forget(key())
        await _settle(process.store)
        assert not any(node.is_hollow for node in process.store._index)
        outcome, _, _ = await process.generate(session[:100], 1)
        assert outcome.num_prefilled == 1
