"""Several real workers: kills, pauses, erasing at all of them, a shared tier; who takes a session."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import nats
import psutil
import pytest
from parts import WorkerProcess, free_port, until

from turnkeep_client.client import connect
from turnkeep_client.direct import DirectGets
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.log import BUILD_HEADER, words
from turnkeep_client.subjects import SessionKey, Subjects
from worker.cluster import liveness
from worker.cluster.liveness import Members
from worker.cluster.owners import Owners, choose_by_hash
from worker.cluster.routing import Routing
from worker.process.cache_parts import cache_codec, remote_tier
from worker.process.settings import SettingsError
from worker.wire.records import Member, address, read_members

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from nats.aio.client import Client as Nats
    from nats.aio.msg import Msg

    from turnkeep_client.client import Client

    Start = Callable[..., Awaitable[Any]]
PATIENCE_S = 30
SESSIONS = [f"s{number}" for number in range(16)]


@pytest.fixture
def cluster(local_worker: Start, tmp_path: Path, endless_model: Path) -> Start:
    """Return a function that starts a worker of the prefix under a name."""

    async def start(name: str, **settings: Any) -> Any:
        settings = {"ack_wait_s": 60.0, "model": str(endless_model)} | settings
        return await local_worker(data_dir=tmp_path / name, worker=name, **settings)

    return start


def _maker(result: Msg) -> str:
    return words((result.headers or {})[BUILD_HEADER])["worker"]


class Look:
    """Reads the results of a prefix, and asks its workers: which one serves which session."""

    def __init__(self, nc: Nats, prefix: str) -> None:
        self.nc = nc
        self._prefix = prefix
        self._subjects = Subjects(prefix)
        self._gets = DirectGets(nc, timeout_s=5)

    async def _bodies(self, session: str, kind: str) -> list[Msg]:
        subject = f"{self._prefix}.default.{session}.{kind}"
        asked = {"seq": 1, "batch": 1000, "next_by_subj": subject}
        return (await self._gets.read(f"{self._prefix}_log", asked))[0]

    async def makers(self, session: str) -> list[str]:
        """Return the workers that stored the results of a session, in order."""
        requests, results = await self._bodies(session, "in"), await self._bodies(session, "out")
        assert len(requests) == len(results), "each request has one result"
        return [_maker(one) for one in results]

    async def last_maker(self, session: str) -> str:
        """Return the worker that stored a session's last result, even while the log removes the session."""
        return _maker((await self._bodies(session, "out"))[-1])

    async def owner(self, session: str) -> str:
        """Return the worker that is at work on a session; empty if none is."""
        for one in await read_members(self._gets, self._subjects):
            asked = await self.nc.request(address(self._subjects, one, "at_work"), timeout=5)
            if ["default", session] in json.loads(asked.data):
                return one.worker
        return ""


@pytest.fixture
async def look(nats_url: str) -> AsyncIterator[Callable[[str], Look]]:
    nc = await nats.connect(nats_url)
    yield lambda prefix: Look(nc, prefix)
    await nc.close()


async def turns(client: Client, *, number: int = 1) -> list[Any]:
    """Append once to each session, all at the same time; repeat this `number` times; return the results."""
    found = []
    for _ in range(number):
        appends = (client.session(name).append(text="x" * 64, timeout_s=PATIENCE_S) for name in SESSIONS)
        found += await asyncio.gather(*appends)
    return found


async def test_closing_a_parent_and_its_fork_with_forget_at_two_workers_leaves_no_kv_at_either_worker(
    cluster: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker sees the other's session as open; only the log says that both are being closed."""
    closings, erase = [], Owners.erase

    async def with_the_fork(self: Any, forgotten: SessionKey) -> dict[str, bool]:
        confirmed = await erase(self, forgotten)
        if forgotten.session == "parent":
            closings.append(await second.client.session("fork").close(forget=True, timeout_s=PATIENCE_S))
        return confirmed

    monkeypatch.setattr(Owners, "erase", with_the_fork)
    first = await cluster("first")
    parent = first.client.session("parent")
    await parent.append(text="x" * 400, timeout_s=PATIENCE_S)
    await parent.fork("fork")
    tokens = first.app._parts.sessions._get(SessionKey("default", "parent")).history.tokens
    second, key = await cluster("second"), SessionKey("default", "fork")
    for one in (first, second):  # as if the first one had been away
        one.app._parts.owners.remember(key, second.app._members.me.boot)
    await second.client.session("fork").append(text="y" * 40, timeout_s=PATIENCE_S)
    await until(lambda: all(_stored(worker.app._store, tokens) for worker in (first, second)))
    closings.append(await parent.close(forget=True, timeout_s=PATIENCE_S))
    assert [one.settled for one in closings] == [True, True]
    assert [_stored(worker.app._store, tokens) for worker in (first, second)] == [0, 0]


async def test_a_restarted_worker_erases_snapshots_of_sessions_closed_with_forget_while_it_was_stopped(
    cluster: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that another session shares stay."""
    first = await cluster("first")
    kept, gone = first.client.session("kept"), first.client.session("gone")
    begins = "the same beginning " * 20
    await kept.append(text=f"{begins}but then this", timeout_s=PATIENCE_S)
    await gone.append(text=f"{begins} and then that" * 3, timeout_s=PATIENCE_S)
    tokens = first.app._parts.sessions._get(SessionKey("default", "gone")).history.tokens
    other = first.app._parts.sessions._get(SessionKey("default", "kept")).history.tokens
    await first.stop()
    second = await cluster("second")
    await second.client.session("kept").append(text="?", timeout_s=PATIENCE_S)
    assert (await second.client.session("gone").close(forget=True, timeout_s=PATIENCE_S)).settled
    first = await cluster("first")
    store = first.app._store
    await until(lambda: _stored(store, tokens) <= tokens.num_common(other))
    assert _stored(store, other) == len(other) - 1
    await first.stop()
    first = await cluster("first")
    assert _stored(first.app._store, other) == len(other) - 1


def _stored(store: Any, tokens: Any) -> int:
    match = store.kv.match(store.kv.chain("default"), tokens)
    store.kv.release(match)
    return int(match.num_tokens)


async def test_a_worker_that_still_runs_a_session_does_not_confirm_the_erasure_of_its_kv(
    cluster: Start,
) -> None:
    """What its turn stores continues the session's tokens, so these stay until the turn has ended."""
    first = await cluster("first")
    session, key = first.client.session("s"), SessionKey("default", "s")
    await session.append(text="x" * (12 * 32 + 1))
    async with session.generate(text="y" * 100, max_tokens=20_000) as answer:
        async for chunk in answer:
            tokens = first.app._parts.sessions._get(key).history.tokens
            if chunk.i > 100 and _stored(first.app._store, tokens):
                break
        assert not await first.app._parts.sessions.erase(key), "as another worker asks for it"
        assert _stored(first.app._store, tokens)


@pytest.fixture
async def processes(
    nats_url: str, endless_model: Path, tmp_path: Path
) -> AsyncIterator[Callable[..., Awaitable[tuple[str, dict[str, WorkerProcess]]]]]:
    """Yield a function that starts workers as processes; it returns their prefix, and the workers by name."""
    made: dict[str, WorkerProcess] = {}
    prefix = f"several{time.monotonic_ns()}"

    async def start(*names: str) -> tuple[str, dict[str, WorkerProcess]]:
        for name in names:
            options = ("--nats", nats_url, "--prefix", prefix, "--worker", name)
            made[name] = WorkerProcess(tmp_path / name, endless_model, free_port(), *options)
            made[name].start()
        await until(lambda: all('"event": "ready"' in one.log for one in made.values()))
        return prefix, made

    yield start
    for one in made.values():
        if one.running:
            one.stop()


def member(name: str, **fields: Any) -> Member:
    return Member(name, "host", 1, name, boot=f"boot{name}", serves=True, **fields)


def test_only_the_sessions_of_an_ended_worker_move_and_are_spread_over_all_other_workers() -> None:
    workers = [member(name) for name in "abcd"]
    keys = [SessionKey("t", f"s{number}") for number in range(400)]
    before = {key: choose_by_hash(workers, key) for key in keys}
    shares = Counter(one.worker for one in before.values())
    assert min(shares.values()) > 60, shares
    after = {key: choose_by_hash(workers[1:], key) for key in keys}
    assert {before[key].worker for key in keys if before[key] != after[key]} == {"a"}
    assert {after[key].worker for key in keys if before[key].worker == "a"} == {*"bcd"}


def owners_of(me: Member, others: list[Member], out: dict[str, str], forks: dict[str, str]) -> Owners:
    """Make `Owners` over a log with the workers of last results, and the parents of forks, by session."""

    async def last(key: SessionKey, _: str) -> Any:
        made = out.get(key.session)
        return SimpleNamespace(headers={BUILD_HEADER: f"worker={made}"}) if made else None

    async def first(key: SessionKey, kind: str) -> Any:
        if kind == "out":
            return None
        body: dict[str, Any] = {"type": "open", "id": "o"}
        if (parent := forks.get(key.session)) is not None:
            body["from"] = {"session": parent}
        return SimpleNamespace(body=json.dumps(body).encode())

    journal: Any = SimpleNamespace(last=last, first=first)
    members: Any = SimpleNamespace(me=me, others={one.worker: one for one in others})
    intake: Any = SimpleNamespace(at_work=[])
    nobody: Any = None
    return Owners(nobody, members, journal, intake)


@pytest.mark.parametrize("at", "abc")
async def test_all_workers_of_a_subject_prefix_choose_the_same_worker_for_a_session(at: str) -> None:
    """That of its last result, else that of its parent, else one by hashing its root."""
    all_of_them = {name: member(name) for name in "abc"}
    out = {"ran": "b", "parent": "c", "ended": "z", "fork": "z", "loop": "z", "other": "z"}
    forks = {"new": "parent", "fork": "ended", "branch": "fork", "loop": "other", "other": "loop"}
    others = [one for name, one in all_of_them.items() if name != at]
    made = owners_of(all_of_them[at], others, out, forks)

    async def owner(session: str) -> tuple[str, bool]:
        found = await made.owner(SessionKey("t", session))
        return found.member.worker, found.is_free

    assert await owner("ran") == ("b", False)
    assert await owner("new") == ("c", False)
    root = choose_by_hash([*all_of_them.values()], SessionKey("t", "ended")).worker
    assert {await owner(name) for name in ("ended", "fork", "branch")} == {(root, True)}
    assert (await owner("loop"))[1], "a forged log cannot keep a worker in a loop"


async def test_a_draining_worker_counts_as_owner_of_its_sessions_and_itself_names_their_next_owner() -> None:
    """It may be at work on the session, which only it knows."""
    drains, other, key = member("a", drains=True), member("b"), SessionKey("t", "s")
    assert (await owners_of(other, [drains], {"s": "a"}, {}).owner(key)).member == drains
    assert (await owners_of(drains, [other], {"s": "a"}, {}).owner(key)).member == other
    assert (await owners_of(drains, [], {"s": "a"}, {}).owner(key)).member == drains
    also = member("b", drains=True)
    assert (await owners_of(drains, [also], {"s": "a"}, {}).owner(key)).member == drains


async def test_forgetting_a_session_asks_all_other_workers_to_erase_it_and_counts_those_that_confirm() -> (
    None
):
    answers = {"yes": b"true", "not yet": b"false", "also yes": b"true", "stops": b'"stops"'}

    async def request(address: str, *_: Any, **__: Any) -> Any:
        if address not in answers:
            raise nats.errors.TimeoutError
        return SimpleNamespace(data=answers[address])

    names = [*answers, "paused"]
    others = {name: SimpleNamespace(boot=name, worker=name) for name in names}
    members: Any = SimpleNamespace(others=others, address=lambda member, _: member.worker)
    nc: Any = SimpleNamespace(request=request)
    nobody: Any = None
    made = Owners(nc, members, nobody, nobody)
    erased = await made.erase(SessionKey("default", "s"))
    assert erased == {name: name in ("yes", "also yes") for name in names}


async def test_a_control_request_whose_answer_a_cut_connection_has_lost_is_asked_again_at_once() -> None:
    asked = asyncio.Queue[str]()

    async def request(address: str, *_: Any, **__: Any) -> Any:
        asked.put_nowait(address)
        if asked.qsize() == 1:
            await anyio.sleep_forever()
        return SimpleNamespace(data=b"answer")

    made = owners_of(member("a"), [member("b")], {"s": "b"}, {})
    made._nc = SimpleNamespace(request=request)  # type: ignore[assignment]  # a stub
    made._members = SimpleNamespace(  # type: ignore[assignment]  # a stub
        me=member("a"),
        others={"b": member("b")},
        has_record=True,
        address=lambda one, _: one.worker,
        knows=lambda _: True,
        has_reconnected=lambda _: False,
    )
    answering = asyncio.create_task(made.control(SessionKey("t", "s"), "t.s.ctl", b"{}"))
    await until(lambda: asked.qsize() == 1)
    made.reconnected()
    async with asyncio.timeout(5):
        assert await answering == b"answer"
    assert asked.qsize() == 2


class LossyProxy:
    """Passes connections on to a NATS server; cuts the first one on which `word` would reach the server."""

    def __init__(self, port: int, word: bytes) -> None:
        self._port = port
        self._word = word
        self.has_cut = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass(reader, to_server))
            tasks.create_task(self._pass(from_server, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                if self._word in data and not self.has_cut:
                    self.has_cut = True
                    break
                writer.write(data)
        writer.close()


async def test_a_control_request_to_a_worker_that_loses_its_connection_for_a_moment_is_answered_in_seconds(
    cluster: Start, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is back before two pings are missed, only its record says that its answer is lost."""
    monkeypatch.setattr(liveness, "_MISSES", 1000)
    proxy, key = LossyProxy(urlsplit(nats_url).port or 4222, b'"type":"session"'), SessionKey("default", "s")
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        owner = await cluster("owner", nats=f"nats://127.0.0.1:{port}")
        await owner.client.session("s").append(text="abc", timeout_s=PATIENCE_S)
        other = await cluster("other")
        subject = other.client.subjects.of(key, "ctl")
        async with asyncio.timeout(PATIENCE_S):
            answer = await other.app._parts.owners.control(key, subject, b'{"type":"info"}')
        assert answer is not None, "of the worker that has the session"
        assert json.loads(answer)["position"] == 3
        assert proxy.has_cut
        await owner.stop()


async def test_workers_that_forward_requests_to_a_stopping_worker_are_told_at_once_that_it_is_stopping() -> (
    None
):
    """They would wait for up to two minutes. After its tasks were cancelled it starts no new one."""
    answers = []

    async def respond(answer: bytes) -> None:
        answers.append(answer)

    asked: Any = SimpleNamespace(respond=respond)
    async with anyio.create_task_group() as tasks:
        hear = routing_with(tasks=tasks)._spawning(lambda _: anyio.sleep_forever())
        await hear(asked)
        await asyncio.sleep(0)
        tasks.cancel_scope.cancel()
        await hear(asked)
        assert answers == [b'"stops"'], "of the second one"
    assert answers == [b'"stops"', b'"stops"']


def routing_with(**parts: Any) -> Any:
    """Make a `Routing` of which only these parts are used."""
    me = SimpleNamespace(boot="me", drains=False)
    members = SimpleNamespace(me=me, others={})
    unused = dict.fromkeys(("subjects", "journal", "intake", "tasks", "ring", "control", "erase"))
    made = {**unused, "nc": None, "members": members, "owners": SimpleNamespace(takers=lambda: [me])} | parts
    return Routing(**made)


@pytest.mark.process
async def test_an_answer_continues_at_another_worker_within_seconds_of_a_kill(
    nats_url: str, processes: Any, look: Any
) -> None:
    """Its tokens are those of an answer without a kill."""
    prefix, workers = await processes("first", "second")
    log = look(prefix)
    async with connect(nats_url, prefix=prefix) as client:
        asked = {"text": "eee", "max_tokens": 3000, "timeout_s": PATIENCE_S}
        whole = await client.session("whole").generate(**asked)
        generation = client.session("s").generate(**asked)
        tokens: list[int] = []
        killed, times_s = "", list[float]()
        async for chunk in generation:
            tokens += chunk.tokens
            if len(tokens) > 40 and not killed:
                killed = await log.owner("s")
                workers[killed].kill()
            times_s.append(time.monotonic())
        assert tokens == list(whole.tokens) == list(generation.result.tokens)
        gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
        assert max(gaps_s) < 10
        assert await log.makers("s") == [({*workers} - {killed}).pop()]


@pytest.mark.packaging
@pytest.mark.process
async def test_a_paused_worker_process_loses_no_request_and_stores_no_second_result_when_resumed(
    nats_url: str, processes: Any, look: Any
) -> None:
    """Of the requests on `ask` and `ctl`, the server gives about half to the paused worker."""
    prefix, workers = await processes("first", "second")
    log = look(prefix)
    async with connect(nats_url, prefix=prefix) as client:
        await turns(client)
        generation = client.session("s").generate(text="eee", max_tokens=900, timeout_s=PATIENCE_S)
        await generation.send()
        while not (paused := await log.owner("s")):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        paused_worker = psutil.Process(workers[paused].worker_pid)
        paused_worker.suspend()
        asks = (client.ask(name, text="x", max_tokens=1, timeout_s=PATIENCE_S) for name in SESSIONS)
        infos = (client.session(name).info() for name in SESSIONS)
        await asyncio.gather(*asks, *infos)
        await turns(client)
        assert (await generation).finish_reason == "length"
        paused_worker.resume()
        await turns(client, number=2)
        (other,) = {*workers} - {paused}
        assert await log.makers("s") == [other]
        found = [await log.makers(name) for name in SESSIONS]
        assert all(len(one) == 5 for one in found)
        assert {one[-1] for one in found} <= {*workers}
        assert workers[paused].running


async def test_other_workers_answer_requests_of_sessions_whose_worker_is_still_loading_its_model(
    cluster: Start, look: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await cluster("first"), await cluster("second")
    await turns(first.client)
    log = look(first.settings.prefix)
    mine = [name for name in SESSIONS if await log.last_maker(name) == "first"]
    await first.stop()
    name_model, go_on = Members.name_model, asyncio.Event()

    async def loads(members: Members, model: str) -> None:
        await go_on.wait()
        await name_model(members, model)

    monkeypatch.setattr(Members, "name_model", loads)
    starting = asyncio.create_task(cluster("first"))
    await until(lambda: "first" in second.app._members.others)
    async with asyncio.timeout(5):
        for name in mine:
            await second.client.session(name).append(text="more")
    go_on.set()
    await starting


async def test_a_worker_whose_remote_tier_is_a_file_or_its_own_directory_fails_to_start(
    local_worker: Start, tmp_path: Path
) -> None:
    """A service starts again by itself, as its disk may be mounted later: it is no error in the settings."""
    (tmp_path / "tier").write_text("a file")
    with pytest.raises(
        TurnkeepError, match=r"remote_tier: .*tier cannot be used: .*; mount its disk"
    ) as told:
        await local_worker(remote_tier=str(tmp_path / "tier"))
    assert not isinstance(told.value, SettingsError)
    for place in ("data", "data/snapshots/tier"):
        with pytest.raises(SettingsError, match="is this worker's own directory; choose another"):
            await local_worker(remote_tier=str(tmp_path / place))


async def test_a_worker_starts_although_its_object_store_does_not_answer_but_not_if_the_store_refuses(
    local_worker: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("ALLOW_HTTP", "true")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    worker = await local_worker(remote_tier="s3://bucket/kv")
    await worker.client.session("s").append(text="x")
    with pytest.raises(TurnkeepError, match="remote_tier: s3://bucket/kv cannot be used"):  # `serve --check`
        remote_tier(worker.settings, cache_codec(worker.settings), must_answer=True)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{port}")
        with pytest.raises(TurnkeepError, match=r"remote_tier: s3://bucket/kv cannot be used: .* 404"):
            await local_worker(data_dir=tmp_path / "two", worker="two", remote_tier="s3://bucket/kv")
