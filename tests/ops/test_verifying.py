"""`turnkeep sessions --verify` and `cache remains` find each fault and what a forget has left, no more."""

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ops.log.verifying import LogFault, faults
from tests.commands.command_runs import command, where
from tests.parts import LocalWorker
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.log import EXPECT_HEADER, HISTORY_HEADER, Entry, Stored
from turnkeep_client.session_log import paired
from turnkeep_client.subjects import SessionKey
from worker.wire import retention

Start = Callable[..., Awaitable[LocalWorker]]
KEY = SessionKey("default", "garden")


async def verified(worker: LocalWorker, *arguments: object) -> tuple[int, str]:
    done = await command("sessions", "--verify", *arguments, *where(worker))
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


async def lived(start: Start, **settings: Any) -> LocalWorker:
    """Start a worker; send appends, generates and rewinds to the session `garden`, one of them twice."""
    worker = await start(**settings)
    session = worker.client.session("garden")
    await session.append(text="x" * 40, request_id="a")
    await session.append(text="x" * 40, request_id="a")
    with pytest.raises(RequestFailedError):
        await session.rewind(999, request_id="far")
    await session.generate(messages=[{"role": "user", "content": "What is red?"}], max_tokens=9)
    await session.rewind(30)
    await session.append(text="y" * 200)
    await session.generate(text="z", max_tokens=5)
    return worker


async def entries_of(worker: LocalWorker, kind: str) -> list[Stored]:
    return [one async for _, one in worker.client.stored.every(KEY, kind)]


def found_in(requests: Sequence[Stored], results: Sequence[Stored]) -> list[LogFault]:
    then = datetime(2026, 11, 20, tzinfo=UTC)
    asked = [Entry(one.seq, KEY, "in", then, one.body, one.headers) for one in requests]
    answers = [Entry(one.seq, KEY, "out", then, one.body, one.headers) for one in results]
    return faults(paired(KEY, [*asked, *answers]), {})


async def test_the_command_verify_finds_no_fault_in_a_log_with_forks_policies_refusals_and_closed_sessions(
    local_worker: Start, tmp_path: Path
) -> None:
    """Repeats, refusals, rewinds, forks of forks, policies, long inputs, closed and forgotten sessions."""
    worker = await lived(local_worker, closed_ttl_s=600.0, max_message_bytes=32 * 2**10)
    garden = worker.client.session("garden")
    await garden.append(text="l" * 1750, request_id="long")
    assert any("Turnkeep-Parts" in one.headers for one in await entries_of(worker, "out"))
    fork = await garden.fork("fork", 70)
    await fork.append(text="more")
    await (await fork.fork("fork-of-fork")).generate(text="x", max_tokens=3)
    endless = worker.client.session("endless", cache={"policy": "sink_window", "sink": 2, "window": 64})
    await endless.generate(text="w" * 300, max_tokens=40)
    again = worker.client.session("again")
    await again.append(text="first life")
    await again.close()
    await again.open()
    await again.append(text="second life")
    forgotten = worker.client.session("forgotten")
    await forgotten.append(text="secret")
    await forgotten.close(forget=True)
    code, out = await verified(worker)
    assert (code, out.split(";")[0]) == (0, "6 sessions, 0 damaged"), out
    assert (await verified(worker, "fork", "again"))[0] == 0
    done = await command("sessions", "--verify", "nobody", *where(worker))
    assert (done.returncode, done.stdout) == (1, "")
    assert "no session nobody" in done.stderr


async def test_the_command_verify_reports_each_missing_log_entry_and_no_undamaged_session(
    local_worker: Start,
) -> None:
    """A missing last entry may stay undetected: the log could have ended before it."""
    worker = await lived(local_worker)
    await worker.client.session("other").append(text="sound")
    requests, results = await entries_of(worker, "in"), await entries_of(worker, "out")
    assert found_in(requests, results) == []
    for one in requests:
        assert found_in([other for other in requests if other is not one], results) == [], "results have it"
    bare = [Stored(one.seq, re.sub(rb',"asked":.*', b"}", one.body), one.headers) for one in results]
    assert "is gone" in {fault.what.partition(":")[0] for fault in found_in([], bare)}
    for one in results[:-1]:
        found = found_in(requests, [other for other in results if other is not one])
        assert one.seq in {fault.seq for fault in found} or found[0].what.startswith("has no result"), one
    assert b"unknown_session" in results[2].body or b"invalid_request" in results[2].body
    (lost,) = found_in(requests[:3], results[1:3])
    assert (lost.seq, lost.what[:13]) == (requests[0].seq, "has no result")
    await worker.client.stored.delete(results[3].seq)
    code, out = await verified(worker)
    assert code == 1
    assert f"default/garden at {results[3].seq}: is gone" in out
    assert "2 sessions, 1 damaged" in out
    assert "default/other" not in out
    code, out = await verified(worker, "--json")
    (damaged,) = json.loads(out)["damaged"]
    assert (code, damaged["session"]) == (1, "garden")
    assert results[3].seq in {one["seq"] for one in damaged["faults"]}


async def test_the_command_verify_reports_a_result_that_was_changed_or_duplicated(
    local_worker: Start,
) -> None:
    """Changes tokens, digests, positions and types of results, adds a result, makes requests unreadable."""
    worker = await lived(local_worker)
    requests, results = await entries_of(worker, "in"), await entries_of(worker, "out")
    changing = [one for one in results if HISTORY_HEADER in one.headers and b"repeat_of" not in one.body]

    def changed(at: Stored, body: bytes, **headers: str) -> list[int]:
        some = [Stored(one.seq, body, {**one.headers, **headers}) if one is at else one for one in results]
        return [fault.seq for fault in found_in(requests, some)]

    for one in changing:
        for pattern, instead in (
            (rb'"position":\d+', b'"position":7777'),
            (rb'"type":"\w+"', b'"type":"grown"'),
            (rb'"kept":\d+', b'"kept":9999'),
            (rb'"input":".{3}', b'"input":"zzz'),
            (rb'"tokens":\[\d+', b'"tokens":[1'),
            (rb"\{", b""),
        ):
            body = re.sub(pattern, instead, one.body, count=1)
            if body != one.body:
                assert one.seq in changed(one, body), (one, body)
        assert changed(one, one.body, **{HISTORY_HEADER: "00" * 16}) == [one.seq]
    last = results[-1].seq
    twice = Stored(last + 1, results[0].body, {**results[0].headers, EXPECT_HEADER: str(last)})
    assert [(fault.seq, "second" in fault.what) for fault in found_in(requests, [*results, twice])] == [
        (last + 1, True)
    ]
    early = Stored(last, results[-1].body, {**results[-1].headers, EXPECT_HEADER: str(results[0].seq)})
    (fault,) = found_in(requests, [*results[:-1], early])
    assert fault.what.startswith(f"was stored behind {results[0].seq}")
    closing = []
    for one in results:
        said = json.loads(one.body)
        said["asked"]["request"] = {"type": "close", "id": "c"}
        closing.append(Stored(one.seq, json.dumps(said).encode(), one.headers))
    assert {fault.what.partition(" the ")[0] for fault in found_in([], closing)} == {"does not fit"}


@pytest.mark.parametrize(
    ("what", "lie"),
    [("", 0), ("position", 0), ("position", 7777), (HISTORY_HEADER, "00" * 16)],
    ids=["sound", "position 0", "position 7777", "other history"],
)
async def test_the_command_verify_reports_a_cancelled_result_with_a_wrong_position_or_a_wrong_history_digest(
    local_worker: Start, what: str, lie: object
) -> None:
    worker = await lived(local_worker)
    requests, results = await entries_of(worker, "in"), await entries_of(worker, "out")
    last, seq = results[-1], results[-1].seq + 1
    headers = {**last.headers, EXPECT_HEADER: str(last.seq)}
    said = {**json.loads(last.body), "tokens": [], "finish_reason": "cancelled", "seq": seq}
    if what == HISTORY_HEADER:
        headers[what] = str(lie)
    elif what:
        said[what] = lie
    body = json.dumps(said).encode()
    requests.append(Stored(seq, requests[-1].body, {}))
    results.append(Stored(seq + 1, body, headers))
    assert [one.seq for one in found_in(requests, results)] == [seq + 1] * bool(what)


async def test_the_command_verify_reports_a_fork_without_its_inherited_tokens_but_not_a_fork_without_parent(
    local_worker: Start,
) -> None:
    worker = await lived(local_worker)
    garden = worker.client.session("garden")
    for name in ("one", "two"):
        await (await garden.fork(name)).append(text="more")
    await garden.close(forget=True)
    assert (await verified(worker))[0] == 0
    key = SessionKey("default", "one")
    (base,) = [one async for _, one in worker.client.stored.every(key, "checkpoint")]
    await worker.client.stored.delete(base.seq)
    code, out = await verified(worker)
    assert (code, out.count("default/")) == (1, 1), out
    assert f"names tokens in the messages up to {base.seq}, which are gone or changed" in out


async def test_the_command_verify_accepts_a_result_written_by_a_newer_version(local_worker: Start) -> None:
    worker = await lived(local_worker)
    requests, results = await entries_of(worker, "in"), await entries_of(worker, "out")
    last = results[-1]
    headers = {**last.headers, "Turnkeep-Build": "worker=a version=999.0"}
    newer = Stored(last.seq, re.sub(rb'"type":"\w+"', b'"type":"grown"', last.body), headers)
    assert found_in(requests, [*results[:-1], newer]) == []


async def test_the_command_verify_finds_no_fault_in_a_partly_removed_closed_session(
    local_worker: Start,
) -> None:
    """A worker may crash during the removal: of requests before the close, then results, then the close."""
    worker = await lived(local_worker)
    session = worker.client.session("garden")
    closed = await session.close()
    await session.open()
    await session.append(text="again")
    requests, results = await entries_of(worker, "in"), await entries_of(worker, "out")
    (end,) = (one for one in results if b'"type":"closed"' in one.body)
    left_requests = [one for one in requests if one.seq >= closed.seq]
    body = end.body.replace(b'"type":"closed"', b'"type":"closed","forgotten":1')
    forgets = [Stored(one.seq, body, one.headers) if one is end else one for one in results]
    assert found_in(requests[2:], forgets) == [], "these are removed one by one"
    late = [one for one in results if one.seq > closed.seq or one is results[-3]]
    assert found_in(left_requests, late) == []
    late = [one for one in results if one.seq > closed.seq]
    assert found_in(left_requests, late) == []
    assert found_in([one for one in left_requests if one.seq > closed.seq], late) == []
    late = [one for one in late if one is not end]
    assert found_in([one for one in left_requests if one.seq > closed.seq], late) == []


async def test_the_command_verify_reports_no_fault_for_log_entries_stored_during_its_run(
    worker: LocalWorker,
) -> None:
    async def talk_on() -> None:
        for number in range(20):
            await worker.client.session(f"s{number % 3}").append(text=f"turn {number}")

    talking = asyncio.create_task(talk_on())
    while not talking.done():
        code, out = await verified(worker)
        assert code == 0, out
    await talking


TEXT = "Rumpelstilzchen says: “ü”. " * 20
TOKENS = [20 + (7 * number) % 41 for number in range(300)]


async def searched(worker: LocalWorker, *arguments: object) -> tuple[int, str]:
    places = ("--data-dir", worker.settings.data_dir, *where(worker))
    done = await command("cache", "remains", "gone", *arguments, *places)
    return done.returncode, done.stdout


async def test_the_command_cache_remains_lists_log_entries_kv_files_and_texts_left_of_a_forgotten_session(
    local_worker: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    """Entries and chunks of the log, files of KV under any name of a folder, and texts; else 0."""
    monkeypatch.setattr(retention, "_PERIOD_S", 0.2)
    worker = await local_worker(block_tokens=128)
    session, copy = worker.client.session("gone"), tmp_path / "copy"
    await session.append(tokens=TOKENS)
    await session.generate(text=TEXT, max_tokens=4)
    await worker.client.session("kept").append(tokens=TOKENS[::-1])
    await worker.app._store.queue.drained(10)
    shutil.copytree(worker.settings.data_dir / "snapshots", copy)
    for name in ("gone", "gnoe"):
        refused = await command("cache", "remains", name, *where(worker))
        assert refused.stdout == "", "a name that nobody forgot is no proof"
        assert f"the log does not say that default/{name} was forgotten" in refused.stderr
    before = [one async for one in worker.client.stored.remains(session.key)]
    assert {one.headers["Nats-Subject"].split(".")[3] for one in before} >= {"out", "tok"}
    assert (await session.close(forget=True)).settled

    for _ in range(100):
        if (found := await searched(worker))[0] == 0:
            break
    assert found == (0, "0 remains of default/gone\n")
    code, shown = await searched(worker, "--in", copy)
    num_kept = 3  # two blocks and a tail
    assert (code, shown.count("KV: ")) == (1, len([*copy.rglob("*.safetensors")]) - num_kept)
    (tmp_path / "copy" / "notes.txt").write_text("x" * 2**20 + json.dumps(TEXT))
    code, shown = await searched(worker, "--in", copy, "--text", TEXT[:40], "--json")
    texts = [one["where"] for one in json.loads(shown)["remains"] if one["what"] == "text"]
    assert texts == [str(copy / "notes.txt")]
    shutil.copytree(tiny_model, worker.settings.data_dir / "models" / "tiny")
    assert (await searched(worker, "--text", "im_start"))[0] == 0, "a word of the tokenizer is nobody's text"
    await session.open()
    await session.append(text="Something else.")
    assert (await searched(worker))[0] == 0, "what came after it is not what was forgotten"


async def test_the_command_cache_remains_lists_log_entries_of_a_forgotten_session_that_are_not_yet_removed(
    local_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the worker has not removed them."""
    monkeypatch.setattr(retention.Retention, "run", lambda _: asyncio.sleep(3600))
    worker = await local_worker()
    await worker.client.session("gone").append(text=TEXT)
    await worker.client.session("gone").close(forget=True)
    code, shown = await searched(worker)
    prefix = worker.settings.prefix
    left = [f"log: {prefix}.default.gone.{kind}" for kind in ("in", "out")]
    assert (code, shown.splitlines()) == (1, [*left, "2 remains of default/gone"])
