"""Workers and servers killed with `kill -9` at any moment: nothing is lost, nothing is said twice."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import hypothesis.strategies as st
import nats
import pytest
from hypothesis import HealthCheck, given, settings

from turnkeep_client.client import Client
from turnkeep_client.errors import NoWorkerError, RequestFailedError
from turnkeep_client.messages import (
    Append,
    Chunk,
    Failed,
    Generate,
    Generated,
    Request,
    Result,
    Rewind,
    decode_chunk,
    decode_request,
    decode_result,
)
from turnkeep_client.subjects import SessionKey, Subjects
from worker.models.tokenizer import Tokenizer
from worker.sessions.execution import _sampling
from worker.sessions.fold import Fold
from worker.sessions.record import Pending, Record
from worker.wire.consistent_reads import Entry
from worker.wire.journal import Journal

pytestmark = pytest.mark.process

BLOCK = 32  # as tests/conftest.py starts workers with
QUICK = ("--ack-wait-s", "0.5")
SUBJECTS = Subjects()


async def until(condition: Callable[[], Any], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        await asyncio.sleep(0.002)


@pytest.fixture
async def started(worker_process: Any, endless_model: Path) -> Any:
    """Start a worker process, and connect to it once it serves."""
    clients = []

    async def start(*options: str) -> tuple[Any, Client]:
        process = worker_process(*options, model=endless_model)
        process.start()
        clients.append(await process.client())
        await until(lambda: '"event": "ready"' in process.log)
        return process, clients[-1]

    yield start
    for client in clients:
        await client.close()


@pytest.fixture
async def alone(local_worker: Callable[..., Awaitable[Any]], endless_model: Path, tmp_path: Path) -> Client:
    """A client of a worker that is never interrupted."""
    worker = await local_worker(model=str(endless_model), data_dir=tmp_path / "alone")
    client: Client = worker.client
    return client


def restart(process: Any) -> None:
    process.kill()
    process.start()


@dataclass
class Followed:
    """One answer as its client sees it."""

    generation: Any
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.tokens)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    async def follow(self) -> Generated:
        async for chunk in self.generation:
            self.chunks.append(chunk)
        result: Generated = self.generation.result
        assert self.tokens == result.tokens
        assert self.text == result.text
        return result


KINDS: tuple[Literal["in", "out"], ...] = ("in", "out")


class LogReader:
    """What a session's log and token streams hold, read past client and worker."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def entries(self, name: str) -> list[Entry]:
        nc = await nats.connect(self._url)
        try:
            journal, found = Journal(nc, nc.jetstream(), SUBJECTS), []
            for kind in KINDS:
                after, more = 0, True
                while more:
                    entries, more = await journal.page(SessionKey("default", name), kind, after)
                    found += entries
                    after = entries[-1].seq if entries else after
            return sorted(found, key=lambda entry: entry.seq)
        finally:
            await nc.close()

    async def answered(self, name: str) -> list[tuple[Request, Result]]:
        """Pair every request with its one result."""
        entries = await self.entries(name)
        requests = {entry.seq: decode_request(entry.body) for entry in entries if entry.kind == "in"}
        results = [decode_result(entry.body) for entry in entries if entry.kind == "out"]
        assert sorted(result.seq for result in results) == sorted(requests), "one result for each request"
        return [(requests[result.seq], result) for result in sorted(results, key=lambda result: result.seq)]

    async def published(self, name: str, request_id: str) -> list[bytes]:
        nc = await nats.connect(self._url)
        try:
            js, subject = nc.jetstream(), SUBJECTS.tokens(SessionKey("default", name), request_id)
            subscription = await js.subscribe(subject, stream=SUBJECTS.token_stream, ordered_consumer=True)
            bodies = [(await subscription.next_msg(timeout=30)).data]
            while bodies[-1]:
                bodies.append((await subscription.next_msg(timeout=30)).data)
            return bodies
        finally:
            await nc.close()


async def assert_stream_is_record(log: LogReader, name: str, result: Generated) -> None:
    """Check what can be read back from the token stream: the record, without a gap, a repeat or an edit."""
    *bodies, last = await log.published(name, result.id)
    assert last == b""
    chunks = [decode_chunk(body) for body in bodies]
    assert [chunk.i for chunk in chunks] == [0, *itertools.accumulate(len(c.tokens) for c in chunks[:-1])]
    assert tuple(token for chunk in chunks for token in chunk.tokens) == result.tokens
    assert "".join(chunk.text for chunk in chunks) == result.text


def seed_of(name: str, request: Generate, seq: int) -> int:
    """Return the seed that the worker draws a request with, its own one included."""
    pending = Pending(seq, request, "", datetime.now(UTC))
    return _sampling(SessionKey("default", name), request, pending, {}, None).seed


async def test_answers_killed_in_the_middle_go_on_as_if_nothing_had_been(started: Any, alone: Client) -> None:
    """Their clients, the token stream, the record, and an uninterrupted worker all tell the same.

    None of them waits for `ack_wait`, which is longer here than this test waits for anything.
    """
    process, client = await started("--ack-wait-s", "600")
    options: dict[str, Any] = {
        "greedy": {"temperature": 0.0},
        "hot": {"temperature": 0.8},
        "seeded": {"temperature": 0.8, "seed": 5},
    }
    answers = {
        name: Followed(client.session(name).generate(text=f"{name}, begin: ", max_tokens=600, **given))
        for name, given in options.items()
    }
    tasks = {name: asyncio.create_task(answer.follow()) for name, answer in answers.items()}
    for life, num_tokens in enumerate((20, 60)):  # a second life ends before its time too
        await until(lambda: all(len(answer.tokens) >= num_tokens for answer in answers.values()))  # noqa: B023
        await until(lambda: process.log.count("resuming an interrupted answer") == 3 * life)  # noqa: B023
        assert not any(task.done() for task in tasks.values())
        restart(process)
    results = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    assert process.log.count("resuming an interrupted answer") == 6

    log = LogReader(process.url)
    for name, result in results.items():
        assert len(result.tokens) == 600
        ((request, recorded),) = await log.answered(name)
        assert recorded == result
        await assert_stream_is_record(log, name, result)
        given = {**options[name], "seed": seed_of(name, request, result.seq)}
        whole = await alone.session(name).generate(text=f"{name}, begin: ", max_tokens=600, **given)
        assert (whole.tokens, whole.text) == (result.tokens, result.text)


async def snapshots_are_durable(session: Any) -> None:
    """Wait for the disk: a tiny model computes blocks faster than they are synced, a real one does not."""
    while (await session.info()).worker.snapshots.in_flight:  # noqa: ASYNC110  # only the worker knows
        await asyncio.sleep(0.02)


async def test_a_kill_between_turns_costs_a_block_at_most(started: Any, alone: Client) -> None:
    """A session of 1,500 tokens; the next turn prefills what is new, and goes on with the same tokens."""
    process, client = await started(*QUICK)
    long, news = "All work and no play. " * 67, "What now? "

    async def first_turn(session: Any) -> Generated:
        await session.append(text=long)
        result: Generated = await session.generate(max_tokens=50, temperature=0.7, seed=1)
        return result

    async def next_turn(session: Any) -> Generated:
        result: Generated = await session.generate(text=news, max_tokens=60, temperature=0.7, seed=2)
        return result

    session, uninterrupted = client.session("s"), alone.session("s")
    before = await first_turn(session)
    assert before.position > 1500
    assert before.tokens == (await first_turn(uninterrupted)).tokens
    await snapshots_are_durable(session)
    restart(process)
    after, expected = await next_turn(session), await next_turn(uninterrupted)
    assert after.tokens == expected.tokens
    assert after.usage.prefilled_tokens <= BLOCK + len(news) + 1
    assert after.usage.cached_tokens + after.usage.prefilled_tokens == before.position + len(news)


async def test_a_killed_nats_server_loses_nothing_that_was_acknowledged(started: Any, alone: Client) -> None:
    """The worker starts its server again; the answer under way completes, what waited is answered."""
    process, client = await started(*QUICK)
    answer = Followed(client.session("s").generate(text="Begin: ", max_tokens=1000))
    task = asyncio.create_task(answer.follow())
    await until(lambda: len(answer.tokens) >= 20)
    waiting = [
        await client.submit(SessionKey("default", "s"), Append(id=f"a{i}", text="more. ")) for i in range(3)
    ]
    state = json.loads((process.data_dir / "nats-server.json").read_text())
    os.kill(state["pid"], signal.SIGKILL)
    result = await asyncio.wait_for(task, 90)
    assert len(result.tokens) == 1000
    appended = [await asyncio.wait_for(pending.wait(), 90) for pending in waiting]
    assert [result.position for result in appended] == [result.position + 6 * n for n in (1, 2, 3)]
    assert len(await LogReader(process.url).answered("s")) == 4
    assert json.loads((process.data_dir / "nats-server.json").read_text())["pid"] != state["pid"]
    whole = await alone.session("s").generate(text="Begin: ", max_tokens=1000)
    assert whole.tokens == result.tokens


async def test_a_stop_in_the_middle_leaves_what_is_open_to_the_next_start(
    started: Any, alone: Client
) -> None:
    """SIGTERM: exit status 0 within seconds, no result for what was cut short, no contradiction later."""
    process, client = await started()
    answer = Followed(client.session("s").generate(text="Begin: ", max_tokens=1000, temperature=0.9))
    task = asyncio.create_task(answer.follow())
    await until(lambda: len(answer.tokens) >= 20)
    waiting = await client.submit(SessionKey("default", "s"), Append(id="waits", text="more. "))
    assert process.stop() == 0
    num_seen = len(answer.tokens)
    assert not task.done()
    assert num_seen < 1000
    process.start()
    result = await asyncio.wait_for(task, 90)
    appended = await asyncio.wait_for(waiting.wait(), 90)
    assert appended.position == result.position + 6
    assert "resuming an interrupted answer" in process.log
    assert result.usage.prefilled_tokens <= len("Begin: "), "its tail was cut on the way down"
    log = LogReader(process.url)
    (request, recorded), _ = await log.answered("s")
    assert recorded == result
    await assert_stream_is_record(log, "s", result)
    whole = await alone.session("s").generate(
        text="Begin: ", max_tokens=1000, temperature=0.9, seed=seed_of("s", request, result.seq)
    )
    assert whole.tokens == result.tokens


SAMPLINGS = st.sampled_from([{}, {"temperature": 0.8}, {"temperature": 0.8, "seed": 7}])
TEXTS = st.integers(1, 90).map(lambda n: ("The quick brown fox. " * 5)[:n])
OPERATIONS = st.one_of(
    st.tuples(st.just("append"), TEXTS),
    st.tuples(st.just("generate"), TEXTS, SAMPLINGS, st.integers(1, 60)),
    st.tuples(st.just("chat"), TEXTS, SAMPLINGS, st.integers(1, 40)),
    st.tuples(st.just("rewind"), st.floats(0, 1)),
    st.tuples(st.just("cancel"), SAMPLINGS, st.integers(0, 40)),
)
SCRIPTS = st.lists(st.lists(OPERATIONS, min_size=5, max_size=8), min_size=3, max_size=3)
#: After how many results, and how many milliseconds later.
CRASHES = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 60)), min_size=1, max_size=2)


INTERLEAVINGS = settings(
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(INTERLEAVINGS, max_examples=1)
@given(scripts=SCRIPTS, crashes=CRASHES)
async def test_any_interleaving_with_crashes_gives_each_session_the_history_it_has_alone(
    crowd: Crowd, scripts: list[list[tuple[Any, ...]]], crashes: list[tuple[int, int]]
) -> None:
    """Append, generate, rewind, cancel and `kill -9` on several sessions at once."""
    await crowd.live_through(scripts, crashes)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@settings(INTERLEAVINGS, max_examples=50)
@given(scripts=SCRIPTS, crashes=CRASHES)
async def test_fifty_interleavings_with_crashes_give_each_session_the_history_it_has_alone(
    crowd: Crowd, scripts: list[list[tuple[Any, ...]]], crashes: list[tuple[int, int]]
) -> None:
    await crowd.live_through(scripts, crashes)


class Crowd:
    """Several sessions on a worker that dies, and one that does not to compare them with."""

    def __init__(self, process: Any, client: Client, alone: Client, tokenizer: Tokenizer) -> None:
        self._process = process
        self._client = client
        self._alone = alone
        self._fold = Fold(tokenizer)
        self._log = LogReader(process.url)
        self._names = (f"s{i}" for i in itertools.count())
        self._num_results = 0

    async def live_through(
        self, scripts: list[list[tuple[Any, ...]]], crashes: list[tuple[int, int]]
    ) -> None:
        """Play a script in each of several sessions while the worker is killed, and compare them."""
        self._num_results = 0
        names = [next(self._names) for _ in scripts]
        killer = asyncio.create_task(self._kill(crashes))
        await asyncio.gather(*(self._play(*part) for part in zip(names, scripts, strict=True)))
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        for name in names:
            await self._compare(name)

    async def _kill(self, crashes: list[tuple[int, int]]) -> None:
        for num_results, delay_ms in sorted(crashes):
            await until(lambda: self._num_results >= num_results)  # noqa: B023
            await asyncio.sleep(delay_ms / 1000)
            restart(self._process)

    async def _play(self, name: str, script: list[tuple[Any, ...]]) -> None:
        session = self._client.session(name)
        position = 0
        for operation, *details in script:
            with contextlib.suppress(
                RequestFailedError
            ):  # a rewind of nothing; `compare` sees all the others
                position = (await self._operate(session, position, operation, *details)).position
            self._num_results += 1

    async def _operate(self, session: Any, position: int, operation: str, *details: Any) -> Any:
        match operation, *details:
            case "append", text:
                return await session.append(text=text)
            case "generate", text, sampling, num:
                return await Followed(session.generate(text=text, max_tokens=num, **sampling)).follow()
            case "chat", text, sampling, num:
                messages = [{"role": "user", "content": text}]
                return await Followed(
                    session.generate(messages=messages, max_tokens=num, **sampling)
                ).follow()
            case "rewind", share:
                return await session.rewind(int(position * share))
            case "cancel", sampling, after:
                return await self._cancelled(session, after, sampling)
        raise AssertionError(operation)

    async def _cancelled(self, session: Any, after: int, sampling: dict[str, Any]) -> Generated:
        answer = Followed(session.generate(text="Go on. ", max_tokens=150, **sampling))
        task = asyncio.create_task(answer.follow())
        await until(lambda: len(answer.tokens) >= after or task.done())
        while not task.done():
            try:
                await answer.generation.cancel()
            except NoWorkerError:  # it was just killed
                await asyncio.sleep(0.05)
            except RequestFailedError:
                break  # the answer was faster, or the request is not yet in the log
        return await task

    async def _compare(self, name: str) -> None:
        """Run a session's requests again on the other worker, and hold both logs against each other."""
        session = self._alone.session(name)
        for request, recorded in await self._log.answered(name):
            if isinstance(recorded, Failed):
                assert (request.__struct_config__.tag, recorded.code) == ("rewind", "unknown_session")
                continue
            if isinstance(recorded, Generated) and not recorded.tokens:
                continue
            match request:
                case Append(text=text):
                    result = await session.append(text=text)
                case Rewind(position=position):
                    result = await session.rewind(position)
                case Generate():
                    result = await session.generate(
                        text=request.text,
                        messages=request.messages,
                        max_tokens=len(recorded.tokens),
                        temperature=request.temperature,
                        seed=seed_of(name, request, recorded.seq),
                    )
                    assert result.tokens == recorded.tokens
                    await assert_stream_is_record(self._log, name, recorded)
            assert result.position == recorded.position
        record = Record(self._fold)
        entries = await self._log.entries(name)
        record.add_results([entry for entry in entries if entry.kind == "out"])
        record.add_requests([entry for entry in entries if entry.kind == "in"], {})
        record.end_fold()
        assert record.diverged is None
        assert not record.pending


@pytest.fixture
async def crowd(started: Any, alone: Client, endless_model: Path) -> Crowd:
    process, client = await started(*QUICK)
    return Crowd(process, client, alone, Tokenizer.from_folder(endless_model))
