"""The store on a real directory: saved snapshots are found and restored, and limits are kept."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import weakref

import pytest
from made_kv import assert_sum_rule, cut, extended, identity, num_restored, save_all

from cache.disk import format as snapshot_format
from cache.disk.chain_reader import num_shared
from cache.disk.folder import Folder
from cache.index import stored_kv
from cache.names.blocks import Span
from cache.names.errors import DirectoryLockedError
from cache.names.marks import ErasureProgress, Marks
from cache.names.tokens import pack

TOKENS = list(range(10))


def files(tmp_path) -> int:
    return len(list((tmp_path / "cache" / "snapshots").iterdir()))


async def test_queued_snapshots_are_dropped_to_free_memory_while_the_disk_hangs(open_store, gate) -> None:
    store = await open_store()
    spans = store.kv.wanted(store.kv.chain("a"), TOKENS)
    tensors = [cut(TOKENS, span) for span in spans]
    held = [weakref.ref(part[0].data) for part in tensors]
    for span in spans:
        assert store.kv.save(store.kv.chain("a"), TOKENS, span, tensors.pop(0))
    await asyncio.sleep(0.1)
    store.queue.free_memory()
    await asyncio.sleep(0.1)
    assert [alive() is None for alive in held] == [False, True, True], "the first is being written"
    assert_sum_rule(store)
    gate.set()
    assert await store.queue.drained(10)
    assert_sum_rule(store)
    assert (store.stats().durable, store.stats().dropped) == (1, {"memory": 2})
    assert save_all(store, "a", TOKENS) == [True, True], "and are saved when they come again"
    assert await store.queue.drained(10)
    assert await num_restored(store, TOKENS) == 10


async def test_a_snapshot_forgotten_while_its_header_is_read_does_not_extend_a_match(
    open_store, monkeypatch
) -> None:
    store, begun, go_on = await open_store(), threading.Event(), threading.Event()
    save_all(store, "a", TOKENS[:4])
    await store.queue.drained(5)

    def reading(*args) -> list[int]:
        begun.set()
        assert go_on.wait(10)
        return num_shared(*args)

    monkeypatch.setattr(stored_kv, "num_shared", reading)
    extending = asyncio.create_task(extended(store, [0, 1, 2, 99]))
    await asyncio.to_thread(begun.wait, 10)
    assert store.eraser.forget("a", pack(TOKENS[:4])) == 1
    go_on.set()
    assert (await extending).num_tokens == 0
    await store.queue.drained(5)
    assert store.stats().stored == store.stats().held_bytes == 0


async def test_a_block_is_not_read_for_fewer_than_a_quarter_of_its_tokens(open_store) -> None:
    store = await open_store(identity=identity(block_tokens=16))
    save_all(store, "a", list(range(16)))
    await store.queue.drained(5)
    assert (await extended(store, [0, 1, 2, 99])).num_tokens == 0
    assert (await extended(store, [0, 1, 2, 3, 99])).num_tokens == 4


async def test_another_model_finds_no_snapshots_and_leaves_the_files_in_place(open_store) -> None:
    store = await open_store()
    save_all(store, "a", TOKENS)
    await store.close()
    other = await open_store(identity=identity(weights="other"))
    assert other.kv.match(other.kv.chain("a"), TOKENS).num_tokens == 0
    assert other.stats().stored == 3
    await other.close()
    assert await num_restored(await open_store(), TOKENS) == 10


async def test_a_block_is_saved_without_those_before_it_and_used_once_they_are_there(open_store) -> None:
    store = await open_store()
    for span, found in ((Span(4, 8), 0), (Span(0, 4), 8)):
        assert store.kv.save(store.kv.chain("a"), TOKENS, span, cut(TOKENS, span))
        await store.queue.drained(5)
        assert await num_restored(store, TOKENS) == found
    assert_sum_rule(store)


async def test_saving_the_same_block_again_writes_it_once(open_store) -> None:
    store = await open_store()
    for _ in range(2):
        assert store.kv.save(store.kv.chain("a"), TOKENS, Span(0, 4), cut(TOKENS, Span(0, 4)))
    await store.queue.drained(5)
    assert store.kv.save(store.kv.chain("a"), TOKENS, Span(0, 4), cut(TOKENS, Span(0, 4)))
    assert store.stats().accepted == store.stats().durable == 1


async def test_the_files_on_disk_never_exceed_the_disk_limit_at_any_step(
    open_store, tmp_path, monkeypatch
) -> None:
    """The sizes are measured each time a new file is complete; evicted files must be removed by then."""
    store = await open_store()
    save_all(store, "a", list(range(4)))
    await store.queue.drained(5)
    limit = 5 * store.stats().stored_bytes + 100
    await store.close()
    used: list[int] = []
    write = snapshot_format.write

    def measured(draft, path, *more) -> None:
        write(draft, path, *more)
        used.append(sum(file.stat().st_size for file in (tmp_path / "cache").glob("[st]*/*")))

    monkeypatch.setattr(snapshot_format, "write", measured)
    store = await open_store(max_bytes=limit)
    for session in range(12):
        save_all(store, "a", [session, *range(11)])
        stats = store.stats()
        assert stats.stored_bytes + stats.in_flight_bytes <= limit
        await store.queue.drained(5)
        assert await num_restored(store, [session, *range(11)]) == 12, "the newest is there"
    assert len(used) == 36
    assert limit // 2 < max(used) <= limit
    assert store.stats().evicted >= 12


async def test_a_snapshot_for_which_only_its_own_prefix_could_be_evicted_is_dropped(open_store) -> None:
    store = await open_store()
    save_all(store, "a", TOKENS[:4])
    await store.queue.drained(5)
    size = store.stats().stored_bytes
    await store.close()
    store = await open_store(max_bytes=size + 100)
    assert not store.kv.save(store.kv.chain("a"), TOKENS, Span(4, 8), cut(TOKENS, Span(4, 8)))
    assert store.stats().dropped == {"disk_limit": 1}
    assert await num_restored(store, TOKENS) == 4


async def test_a_snapshot_too_large_for_the_disk_limit_or_the_queue_is_not_saved(open_store) -> None:
    store = await open_store(max_bytes=100)
    assert save_all(store, "a", [1, 2]) == [False]
    store = await open_store(directory=store._folder.directory.with_name("other"), queue_bytes=100)
    assert save_all(store, "a", [1, 2]) == [False]
    assert store.stats().dropped == {"too_large": 1}


async def test_a_full_queue_drops_new_snapshots(open_store, gate) -> None:
    """The queue's limit is in bytes, and `room` is what is left of it."""
    store = await open_store(queue_bytes=3000)
    sizes = []
    for session in range(3):
        before = store.queue.vacant_bytes()
        store.kv.save(store.kv.chain("a"), [session] * 4, Span(0, 4), cut([session] * 4, Span(0, 4)))
        sizes.append(before - store.queue.vacant_bytes())
    assert sizes[0] > 1000, "the test wants a queue of two"
    assert sizes[2] == 0
    assert store.queue.vacant_bytes() < sizes[0]
    assert save_all(store, "a", [2] * 10) == [False, False, False]
    assert store.stats().dropped == {"queue_full": 4}
    store.queue.skip(2)
    assert store.stats().dropped == {"queue_full": 6}
    assert_sum_rule(store)
    gate.set()
    assert await store.queue.drained(5)
    assert store.queue.vacant_bytes() == 3000
    assert_sum_rule(store)
    assert save_all(store, "a", [2] * 4) == [True]


async def test_opening_a_directory_in_use_raises_an_error_that_names_the_other_process(
    open_store, tmp_path
) -> None:
    code = (
        "import sys, pathlib; from cache.disk.folder import Folder; "
        "folder = Folder(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path / "cache"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert await holder.stdout.readline() == b"held\n"
    with pytest.raises(DirectoryLockedError, match=f"in use by process {holder.pid};"):
        await open_store()
    holder.kill()
    await holder.communicate()
    assert await (await open_store()).queue.drained(5), "a lock does not outlive its process"


@pytest.mark.parametrize("shared", [0, 10, 128, 200])
@pytest.mark.parametrize("length", [300, 256])
async def test_erasing_by_hash_marks_removes_a_token_sequence_but_keeps_longer_and_branching_ones(
    open_store, length, shared
) -> None:
    tokens = list(range(1000, 1000 + length))
    branch, longer = [*tokens[:100], *range(100)], [*tokens, *range(200)]
    store = await open_store(identity=identity(block_tokens=16))
    for one in (tokens[: length - 5], tokens, branch, longer):
        save_all(store, "a", one)
    save_all(store, "b", tokens)
    assert await store.eraser.erase_marked("a", Marks.of("a", pack(tokens), shared))
    assert await num_restored(store, longer) == len(longer)
    assert await store.eraser.erase_marked("a", Marks.of("a", pack(longer), shared))
    assert await store.close()
    store = await open_store(identity=identity(block_tokens=16))
    assert await num_restored(store, tokens) == max(shared // 16 * 16, 100)
    assert await num_restored(store, branch) == len(branch)
    assert await num_restored(store, tokens, "b") == length


async def test_a_directory_remembers_the_log_position_up_to_which_it_has_erased(open_store) -> None:
    store = await open_store()
    assert store.eraser.erased_up_to("log") is None
    store.eraser.note_erased(ErasureProgress("log", 5, 1.5))
    store.eraser.note_erased(ErasureProgress("log", 7, 2.5))
    assert await store.close()
    assert (await open_store()).eraser.erased_up_to("log") == ErasureProgress("log", 7, 2.5)


async def test_a_directory_without_its_index_was_there_to_erase_until_its_last_use(
    open_store, tmp_path
) -> None:
    """Else a worker that was away while notes expired would keep what they were to erase."""
    store = await open_store()
    save_all(store, "a", TOKENS)
    store.eraser.note_erased(ErasureProgress("log", 7, 2e9))
    assert await store.close()
    (tmp_path / "cache" / "index.sqlite").unlink()
    for path in (tmp_path / "cache" / "snapshots").iterdir():
        os.utime(path, (1000, 1000))
    store = await open_store()
    assert store.eraser.erased_up_to("log") == ErasureProgress("log", 0, 1000.0)


async def test_forgetting_tokens_cancels_their_queued_snapshots(open_store, tmp_path, gate) -> None:
    store = await open_store()
    save_all(store, "a", TOKENS)
    assert store.eraser.forget("a", pack(TOKENS)) == 3
    assert_sum_rule(store)
    assert store.kv.wanted(store.kv.chain("a"), TOKENS[:10]) != []
    gate.set()
    await store.queue.drained(5)
    assert (files(tmp_path), store.stats().stored) == (0, 0)
    assert (store.stats().cancelled, store.stats().durable) == (3, 0)
    assert_sum_rule(store)


@pytest.mark.parametrize("save_again", [False, True])
async def test_a_file_forgotten_while_it_is_being_renamed_does_not_come_back(
    open_store, tmp_path, monkeypatch, save_again
) -> None:
    """The writer has already made its last check for a cancel, so the event loop must remove the file."""
    store = await open_store()
    renaming, go_on, place = threading.Event(), threading.Event(), Folder.place

    def held(folder, path, digest) -> None:
        renaming.set()
        assert go_on.wait(10)
        place(folder, path, digest)

    monkeypatch.setattr(Folder, "place", held)
    save_all(store, "a", [1, 2])
    await asyncio.to_thread(renaming.wait, 10)
    assert store.eraser.forget("a", pack([1, 2])) == 1
    if save_again:
        assert save_all(store, "a", [1, 2]) == [True]
    go_on.set()
    assert await store.queue.drained(5)
    assert store.stats().cancelled == 1
    assert files(tmp_path) == store.stats().stored == store.stats().durable == int(save_again)
    assert await num_restored(store, [1, 2]) == 2 * save_again
    assert_sum_rule(store)
    await store.close()
    assert (await open_store()).stats().stored == int(save_again)


async def test_snapshots_forgotten_during_a_load_are_removed_when_the_load_ends(open_store, tmp_path) -> None:
    store = await open_store()
    save_all(store, "a", TOKENS)
    await store.queue.drained(5)
    one, two = store.kv.match(store.kv.chain("a"), TOKENS), store.kv.match(store.kv.chain("a"), TOKENS[:8])
    assert store.eraser.forget("a", pack(TOKENS)) == 3
    assert store.kv.match(store.kv.chain("a"), TOKENS).num_tokens == 0, "nobody new may use it"
    assert (await store.kv.load(one)).num_tokens == 10
    await store.queue.drained(5)
    assert files(tmp_path) == 2
    store.kv.release(two)
    await store.queue.drained(5)
    assert files(tmp_path) == store.stats().stored == 0


async def test_a_forgotten_block_stays_if_a_snapshot_saved_while_a_turn_holds_it_continues_it(
    open_store,
) -> None:
    store = await open_store()
    save_all(store, "a", TOKENS[:4])
    await store.queue.drained(5)
    match = store.kv.match(store.kv.chain("a"), TOKENS[:4])
    store.eraser.forget("a", pack(TOKENS[:4]))
    assert store.kv.save(store.kv.chain("a"), TOKENS, Span(4, 8), cut(TOKENS, Span(4, 8)))
    store.kv.release(match)
    await store.queue.drained(5)
    assert await num_restored(store, TOKENS) == 8


async def test_a_barrier_returns_false_when_its_timeout_passes(open_store, gate) -> None:
    store = await open_store()
    save_all(store, "a", [1, 2])
    assert not await store.queue.drained(0.05)
    gate.set()
    assert await store.queue.drained(5)


async def test_closing_with_a_short_timeout_cancels_queued_snapshots(open_store, gate) -> None:
    store = await open_store()
    save_all(store, "a", TOKENS)
    assert not await store.close(timeout_s=0.2)
    gate.set()
    await asyncio.sleep(0.2)
    stats = store.stats()
    assert (stats.in_flight, stats.durable, stats.cancelled) == (0, 0, 3)
    assert_sum_rule(store)


async def test_a_snapshot_forgotten_then_saved_again_and_dropped_leaves_no_file(
    open_store, tmp_path, monkeypatch
) -> None:
    """The first write is cancelled after its last check; the second, dropped, would replace its file."""
    gate, entered, place = threading.Event(), threading.Event(), Folder.place

    def held(folder, path, digest) -> None:
        place(folder, path, digest)
        entered.set()
        assert gate.wait(10)

    monkeypatch.setattr(Folder, "place", held)
    store = await open_store()
    save_all(store, "a", [1, 2])
    assert await asyncio.to_thread(entered.wait, 10)
    assert store.eraser.forget("a", pack([1, 2])) == 1
    save_all(store, "a", [1, 2])
    store.queue.free_memory()
    gate.set()
    assert await store.queue.drained(10)
    assert store.stats().stored == 0
    assert list((tmp_path / "cache" / "snapshots").iterdir()) == []
    assert_sum_rule(store)


async def test_a_closed_store_counts_saves_as_dropped_and_restores_nothing(open_store) -> None:
    store = await open_store()
    save_all(store, "a", [3, 4])
    assert await store.close()
    assert await store.close()
    assert save_all(store, "a", [1, 2]) == [False]
    assert store.stats().dropped == {"closing": 1}
    assert await asyncio.wait_for(store.kv.load(store.kv.match(store.kv.chain("a"), [3, 4])), 10) is None


async def test_a_cancelled_load_releases_its_snapshots(open_store) -> None:
    store = await open_store()
    save_all(store, "a", [1, 2])
    await store.queue.drained(5)
    loading = asyncio.ensure_future(store.kv.load(store.kv.match(store.kv.chain("a"), [1, 2])))
    await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert store.eraser.forget("a", pack([1, 2])) == 1
    assert store.stats().stored == 0
