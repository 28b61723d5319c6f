"""`forget` also erases the KV of tokens that the session had before: cut off, replaced, or never answered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_forks import settled
from test_shared_forgotten import SECRET, all_gone, forget

from ops.log.ending import end
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.subjects import SessionKey
from worker.sessions import record
from worker.sessions.record import Record
from worker.sessions.session_log import FencedLog

Start = Any  # of `local_worker`

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


@pytest.mark.parametrize("opened", ["", "from the whole log", "from a checkpoint"])
async def test_forgetting_a_rewound_session_leaves_no_snapshot_of_it(
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
    if opened:
        await worker.stop()
        worker = await local_worker(model=str(endless_model))
    await forget(worker.client.session("s"))
    assert await all_gone(worker.client, tmp_path)


async def test_forgetting_a_session_leaves_no_snapshot_of_text_that_the_template_replaced(
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


async def test_forgetting_a_session_leaves_no_snapshot_of_a_withdrawn_requests_input(
    local_worker: Start, endless_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await started(local_worker, endless_model)
    session = worker.client.session("s")
    await withdrawn(worker, monkeypatch, tokens=SOME)
    await session.append(tokens=OTHER)
    await settled(session)
    await forget(session)
    assert await all_gone(worker.client, tmp_path)


async def test_forgetting_a_session_leaves_no_snapshot_of_an_input_that_an_earlier_template_rendered(
    local_worker: Start, model_with_template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    worker = await started(local_worker, model_with_template("plain", plain))
    session = worker.client.session("s")
    await withdrawn(worker, monkeypatch, messages=[{"role": "user", "content": "secret " * 30}])
    await session.append(tokens=OTHER)
    await settled(session)
    await worker.stop()
    worker = await local_worker(model=str(model_with_template("marked", "> " + plain)))
    await forget(worker.client.session("s"))
    assert await all_gone(worker.client, tmp_path)


async def test_removing_a_closed_session_leaves_no_snapshot_of_it(
    local_worker: Start, endless_model: Path, tmp_path: Path
) -> None:
    worker = await started(local_worker, endless_model)
    session = worker.client.session("s")
    await settled(session)
    await session.close()
    assert (await end(worker.client, "s", 20, forget=True)).settled
    assert await all_gone(worker.client, tmp_path)


async def test_a_session_is_erased_although_its_log_changes_while_it_is_read_from_the_beginning(
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
    add, forgotten = FencedLog._add_results, list[Record]()

    async def interrupted(log: FencedLog, read: Record, *until: Any) -> bool:
        if read is not log.record and not forgotten:
            forgotten.append(log.record)
            worker.app._parts.sessions._sessions[log.key].forget()
        return await add(log, read, *until)

    monkeypatch.setattr(FencedLog, "_add_results", interrupted)
    await worker.app._parts.sessions.erase(SessionKey("default", "s"))
    assert forgotten
    assert await all_gone(worker.client, tmp_path)
