"""`forget` erases the KV of a session's tokens, also of earlier ones, except what others share."""

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parts import until
from structlog.testing import capture_logs
from test_forks import said, settled

from cache.disk.tier import SharedDirectory
from cache.names.tokens import as_tokens, pack
from turnkeep_client.client import Client
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import Closed
from turnkeep_client.session import Session
from turnkeep_client.subjects import SessionKey
from worker.engine.port import StoppingError
from worker.sessions import record
from worker.sessions.record import Record, ResultParts
from worker.sessions.session_log import FencedLog
from worker.wire import erasures
from worker.wire.consistent_reads import StoredMessage

Start = Any  # of `local_worker`
#: Tokens with which no other session begins.
SECRET = [50 + i * i % 150 for i in range(100)]


async def cached(session: Session) -> int:
    """Run a turn of the session; return how many of its tokens were cached."""
    return (await session.generate(messages=said("Go on."), max_tokens=2)).usage.cached_tokens


def traces(tmp_path: Path) -> list[Path]:
    """Return the worker's files that contain tokens of `SECRET`."""
    packed = pack(SECRET[:4])
    files = [one for one in (tmp_path / "data").rglob("*") if one.is_file()]
    return [one for one in files if packed in (held := one.read_bytes()) or packed.hex().encode() in held]


async def all_gone(client: Client, tmp_path: Path) -> bool:
    """Say whether no snapshot is left. Asserts that files have tokens of `SECRET` exactly if one is left."""
    left = (await settled(client.session("other"))).snapshots.stored
    assert bool(left) == bool(traces(tmp_path))
    return not left


async def forget(*sessions: Session) -> list[Closed]:
    closed = await asyncio.gather(*(one.close(forget=True) for one in sessions))
    assert all(one.settled for one in closed)
    return list(closed)


async def test_forgetting_a_parent_session_keeps_the_snapshots_of_the_tokens_that_its_fork_shares(
    local_worker: Start, endless_model: Path, tmp_path: Path
) -> None:
    worker = await local_worker(model=str(endless_model))
    await worker.client.session("other").open()
    parent = worker.client.session("parent")
    await parent.append(tokens=[*range(60, 124), *SECRET])
    fork = await parent.fork("fork", 64)
    await settled(parent)
    (closed,) = await forget(parent)
    assert closed.forgotten == 4, "of its 6 snapshots: 5 blocks and a tail"
    assert not traces(tmp_path)
    assert await cached(fork) == 64


async def test_forgetting_a_session_removes_its_snapshots_but_none_of_another_tenant_of_the_same_tokens(
    local_worker: Start, endless_model: Path
) -> None:
    worker = await local_worker(model=str(endless_model))
    mine, theirs = (worker.client.session("s", tenant=name) for name in ("default", "other"))
    for one in (mine, theirs):
        await one.append(tokens=SECRET)
        await settled(one)
    (closed,) = await forget(mine)
    assert closed.forgotten == 4, "of its 4 snapshots: 3 blocks and a tail"
    assert await cached(theirs) > 64


SOME, OTHER = [*range(60, 160)], [*range(160, 60, -1)]


async def started(start: Start, model: Path) -> Any:
    """Start a worker with a session `s` that has the tokens `SECRET`; `other` is for its figures."""
    worker = await start(model=str(model))
    await worker.client.session("other").open()
    await worker.client.session("s").append(tokens=SECRET)
    return worker


async def withdrawn(worker: Any, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    """Append to the session `s` what is cancelled once it is prefilled."""
    engine, run = worker.app._parts.engine, worker.app._parts.engine.run

    async def cancelled_late(*asked: Any, **more: Any) -> Any:
        return replace(await run(*asked, **more), complete=False)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "run", cancelled_late)
        with pytest.raises(RequestFailedError, match="nothing was added"):
            await worker.client.session("s").append(**given)


@pytest.mark.parametrize("opened", ["", "from a checkpoint", "after its close"])
async def test_forgetting_a_rewound_session_removes_the_snapshots_of_its_kept_and_its_cut_off_tokens(
    local_worker: Start, endless_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: str
) -> None:
    """The tokens that the rewind cut off continue those that the session still has.

    A worker that opens the session from a checkpoint does not read of them.
    """
    monkeypatch.setattr(record, "_CHECKPOINT_EVERY", 7 if opened == "from a checkpoint" else 512)
    worker = await started(local_worker, endless_model)
    session = worker.client.session("s")
    for tokens in (SOME, OTHER, SOME):
        await session.append(tokens=tokens)
        await session.rewind(len(SECRET))
    await session.append(tokens=OTHER)
    await settled(session)
    if opened == "after its close":
        await session.close()
    if opened:
        await worker.stop()
        worker = await local_worker(model=str(endless_model))
    await forget(worker.client.session("s"))
    assert await all_gone(worker.client, tmp_path)


async def test_forgetting_a_session_also_removes_snapshots_of_text_that_the_chat_template_replaced(
    local_worker: Start, model_with_template: Any
) -> None:
    last_only = "{{ messages[0]['content'] }}{% for m in messages[1:][-1:] %}{{ m['content'] }}{% endfor %}"
    worker = await local_worker(model=str(model_with_template("last-only", last_only)))
    session = worker.client.session("s")
    await worker.client.session("other").open()
    await session.append(messages=[{"role": "system", "content": "x" * 70}])
    for word in ("one", "two", "three"):
        said = await session.generate(messages=[{"role": "user", "content": word * 40}], max_tokens=4)
    assert said.rewritten_from is not None
    await settled(session)
    await forget(session)
    assert not (await settled(worker.client.session("other"))).snapshots.stored


async def test_forgetting_a_session_also_removes_snapshots_of_input_whose_request_was_cancelled(
    local_worker: Start, endless_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await started(local_worker, endless_model)
    session = worker.client.session("s")
    await withdrawn(worker, monkeypatch, tokens=SOME)
    await session.append(tokens=OTHER)
    await settled(session)
    await forget(session)
    assert await all_gone(worker.client, tmp_path)


async def test_forgetting_a_session_removes_snapshots_of_input_that_a_dead_worker_prefilled_and_that_expired(
    local_worker: Start, endless_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of the next worker says only that the request came too late."""
    worker = await started(local_worker, endless_model)
    engine, run, is_prefilled = worker.app._parts.engine, worker.app._parts.engine.run, asyncio.Event()

    async def run_and_die(*asked: Any, **more: Any) -> Any:
        await run(*asked, **more)
        is_prefilled.set()
        raise StoppingError

    monkeypatch.setattr(engine, "run", run_and_die)
    late = asyncio.create_task(worker.client.session("s").append(tokens=SOME, deadline_s=2))
    await is_prefilled.wait()
    assert await worker.app._store.queue.drained(10)
    late.cancel()
    await worker.stop()
    await asyncio.sleep(2)
    worker = await local_worker(model=str(endless_model))
    await forget(worker.client.session("s"))
    assert await all_gone(worker.client, tmp_path)


async def test_a_session_is_erased_even_if_its_log_changes_while_the_erasure_reads_the_log(
    local_worker: Start, endless_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker forgets the session; meanwhile the server is restarted, for example."""
    worker = await started(local_worker, endless_model)
    session = worker.client.session("s")
    await session.append(tokens=SOME)
    await session.rewind(len(SECRET))
    await settled(session)
    await worker.stop()
    worker = await local_worker(model=str(endless_model))
    await worker.client.session("s").append(tokens=OTHER)
    read, forgotten = FencedLog._parts, list[Record]()

    async def interrupted(log: FencedLog, entry: StoredMessage) -> ResultParts:
        if not forgotten:
            forgotten.append(log.record)
            worker.app._parts.sessions._sessions[log.key].forget()
        return await read(log, entry)

    monkeypatch.setattr(FencedLog, "_parts", interrupted)
    await worker.app._parts.sessions.erase(SessionKey("default", "s"))
    assert forgotten
    assert await all_gone(worker.client, tmp_path)


#: As in production: a mark is of the tokens up to the end of a block.
LONG_BLOCK = 128
FORGOTTEN = [20 + (7 * number) % 41 for number in range(3 * LONG_BLOCK)]
KEPT = [61 - (5 * number) % 41 for number in range(3 * LONG_BLOCK)]


def num_stored(worker: Any, tokens: list[int]) -> int:
    kv = worker.app._store.kv
    found = as_tokens(tokens)
    return kv.find(kv.chain("default", of=found), found).num_tokens


def num_files(worker: Any) -> int:
    """Count the files with any block of the forgotten session, in whichever folder."""
    folder = worker.settings.data_dir / "snapshots"
    blocks = [
        as_tokens(FORGOTTEN).packed(at, at + LONG_BLOCK).hex().encode()
        for at in range(0, 3 * LONG_BLOCK, LONG_BLOCK)
    ]
    files = [one.read_bytes() for one in folder.rglob("*") if one.is_file()]
    return sum(any(block in file for block in blocks) for file in files)


def whole(backup: Path, data: Path) -> None:
    shutil.rmtree(data / "snapshots")
    shutil.copytree(backup / "snapshots", data / "snapshots")


def over(backup: Path, data: Path) -> None:
    """As `cp -a` does: into the same files, with the earlier times; what is newer stays."""
    shutil.copytree(backup / "snapshots", data / "snapshots", dirs_exist_ok=True)
    (data / "worker.lock").write_bytes((backup / "worker.lock").read_bytes())


def files_only(backup: Path, data: Path) -> None:
    shutil.copytree(backup / "snapshots/snapshots", data / "snapshots/snapshots", dirs_exist_ok=True)


def quarantined(backup: Path, data: Path) -> None:
    shutil.copytree(backup / "snapshots/snapshots", data / "snapshots/quarantine", dirs_exist_ok=True)
    shutil.copy2(backup / "snapshots/lock", data / "snapshots/lock")


@pytest.mark.parametrize(
    "put_back",
    [whole, over, files_only, quarantined],
    ids=["folder replaced", "copied over the folder", "only its files", "into the quarantine"],
)
async def test_restoring_a_backup_of_the_cache_brings_back_no_kv_of_sessions_closed_with_forget(
    local_worker: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    put_back: Callable[[Path, Path], None],
) -> None:
    """Its blocks are out of the index before the worker is ready, although it has forgotten them itself."""
    data, backup = tmp_path / "data", tmp_path / "backup"
    worker = await local_worker(block_tokens=LONG_BLOCK)
    await worker.client.session("kept").append(tokens=[*KEPT, 5])
    await worker.client.session("gone").append(tokens=[*FORGOTTEN, 5])
    await worker.stop()
    shutil.copytree(data, backup)
    worker = await local_worker(block_tokens=LONG_BLOCK)
    assert num_stored(worker, FORGOTTEN) == 3 * LONG_BLOCK
    assert (await worker.client.session("gone").close(forget=True)).settled
    await worker.app._parts.erasures._look(lambda _: set())
    assert num_files(worker) == 0
    await worker.stop()
    put_back(backup, data)
    assert num_files(worker) == 3

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(erasures.Erasures, "run", never)  # it would be too late
    worker = await local_worker(block_tokens=LONG_BLOCK)
    assert (num_stored(worker, FORGOTTEN), num_stored(worker, KEPT)) == (0, 3 * LONG_BLOCK)
    assert await worker.app._store.queue.drained(10)
    assert num_files(worker) == 0
    await worker.stop()
    worker = await local_worker(block_tokens=LONG_BLOCK)
    assert worker.app._store.eraser.put_back == frozenset()


async def test_a_cache_restored_from_a_backup_older_than_the_oldest_logged_erase_order_is_emptied(
    local_worker: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await local_worker(block_tokens=LONG_BLOCK)
    await worker.client.session("kept").append(tokens=[*KEPT, 5])
    await worker.client.session("gone").append(tokens=[*FORGOTTEN, 5])
    await worker.stop()
    shutil.copytree(tmp_path / "data", tmp_path / "backup")
    worker = await local_worker(block_tokens=LONG_BLOCK)
    assert (await worker.client.session("gone").close(forget=True)).settled
    await worker.stop()
    whole(tmp_path / "backup", tmp_path / "data")
    monkeypatch.setattr(erasures, "time", lambda: time.time() + erasures._KEPT_S + 60)
    worker = await local_worker(block_tokens=LONG_BLOCK)
    assert (num_stored(worker, FORGOTTEN), num_stored(worker, KEPT)) == (0, 0)


def in_tier(tmp_path: Path, tokens: list[int]) -> int:
    block = as_tokens(tokens).packed(0, LONG_BLOCK).hex().encode()
    return sum(block in one.read_bytes() for one in (tmp_path / "tier").rglob("*") if one.is_file())


async def uploaded(worker: Any) -> None:
    """Wait until the worker's snapshots are on disk and in the remote tier."""
    assert await worker.app._store.queue.drained(10)
    await asyncio.to_thread(worker.app._store.remote._uploading.submit(lambda: None).result, 10)


async def num_fetched(worker: Any, tokens: list[int]) -> int:
    """Fetch tokens from the remote tier; return how many are then stored."""
    kv, found = worker.app._store.kv, as_tokens(tokens)
    there = await kv.find_remote(kv.chain("default", of=found), found)
    if there is not None:
        await worker.app._store.remote.fetch(there)
    return num_stored(worker, tokens)


@pytest.mark.parametrize("runs", [False, True], ids=["a new worker", "the running worker"])
async def test_restoring_a_backup_of_the_remote_tier_brings_back_no_kv_of_sessions_closed_with_forget(
    local_worker: Callable, tmp_path: Path, runs: bool
) -> None:
    """Neither for a worker that starts, nor for one that runs meanwhile; the files leave the tier."""
    settings = {"block_tokens": LONG_BLOCK, "remote_tier": str(tmp_path / "tier")}
    worker = await local_worker(**settings)
    await worker.client.session("kept").append(tokens=[*KEPT, 5])
    await worker.client.session("gone").append(tokens=[*FORGOTTEN, 5])
    await uploaded(worker)
    shutil.copytree(tmp_path / "tier", tmp_path / "backup")
    assert (await worker.client.session("gone").close(forget=True)).settled
    await worker.app._parts.tier_erasures._look(lambda _: set())
    assert (in_tier(tmp_path, FORGOTTEN), in_tier(tmp_path, KEPT)) == (0, 1)
    if not runs:
        await worker.stop()
    shutil.copytree(tmp_path / "backup", tmp_path / "tier", dirs_exist_ok=True)
    assert in_tier(tmp_path, FORGOTTEN) == 1
    if runs:
        await worker.app._parts.tier_erasures._look(lambda _: set())
    else:
        worker = await local_worker(data_dir=tmp_path / "empty", **settings)
    assert await num_fetched(worker, FORGOTTEN) == 0
    await uploaded(worker)
    assert (in_tier(tmp_path, FORGOTTEN), in_tier(tmp_path, KEPT)) == (0, 1)
    assert await num_fetched(worker, KEPT) == 3 * LONG_BLOCK


async def test_a_remote_tier_counts_as_free_of_erased_kv_only_once_the_erasures_are_recorded_in_the_tier(
    local_worker: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fresh, and the log has no note."""

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    worker = await local_worker(block_tokens=LONG_BLOCK, remote_tier=str(tmp_path / "tier"))
    eraser, look = worker.app._store.remote.eraser, worker.app._parts.tier_erasures._look
    with monkeypatch.context() as patched:
        patched.setattr(SharedDirectory, "put", full)
        for path in (tmp_path / "tier").rglob("*.*"):
            path.unlink()
        worker.app._parts.tier_erasures._noted = None
        eraser.doubt()
        with pytest.raises(OSError, match="could not erase"):
            await look(lambda _: set())
        assert not eraser.is_certain
        with capture_logs() as logged:
            erasing = asyncio.create_task(worker.app._parts.tier_erasures.run(lambda _: set(), lambda: False))
            await until(lambda: any("could not erase" in one.get("error", "") for one in logged))
            erasing.cancel()
        assert "are not carried out yet" in next(one["event"] for one in logged if "error" in one)
    await look(lambda _: set())
    assert eraser.is_certain
