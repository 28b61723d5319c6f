"""Several workers serve one prefix: limits of sessions by tenant, taking over, draining, and retention."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import nats
import pytest

from tests.parts import until
from turnkeep_client.client import connect
from turnkeep_client.log import BUILD_HEADER, words
from worker.cluster.owners import Owners
from worker.cluster.routing import Routing
from worker.process.setting_kinds import TenantLimits
from worker.sessions.sessions import Sessions
from worker.wire import intake, retention

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from nats.aio.msg import Msg

    Start = Callable[..., Awaitable[Any]]

PATIENCE_S = 60
PLACES = 4
SESSIONS = [f"s{number}" for number in range(40)]


@pytest.fixture
def cluster(local_worker: Start, tmp_path: Path, endless_model: Path) -> Start:
    """Return a function that starts a worker with a low limit of sessions by tenant."""

    async def start(name: str, **settings: Any) -> Any:
        settings = {"ack_wait_s": 60.0, "model": str(endless_model), "max_waiting": 2 * PLACES} | settings
        settings |= {"tenants": TenantLimits(sessions=PLACES), "max_batch": 2}
        return await local_worker(data_dir=tmp_path / name, worker=name, **settings)

    return start


class Flood:
    """Sends `generate` requests of one tenant in many sessions; collects their results and attempts."""

    def __init__(self, nc: nats.NATS, prefix: str) -> None:
        self.results: list[tuple[str, str]] = []
        self.noted: list[Msg] = []
        self.nc = nc
        self.prefix = prefix

    async def begin(self, num_tokens: int) -> None:
        self._answers = await self.nc.subscribe(f"{self.prefix}.*.*.out", cb=self._answered)
        await self.nc.subscribe(f"{self.prefix}.*.*.attempt", cb=self._noted)
        asked = json.dumps({"type": "generate", "text": "eee", "max_tokens": num_tokens})
        for name in SESSIONS:
            body = json.dumps(json.loads(asked) | {"id": f"r-{name}"}).encode()
            await self.nc.jetstream().publish(f"{self.prefix}.loud.{name}.in", body)

    async def _answered(self, message: Msg) -> None:
        maker = words((message.headers or {})[BUILD_HEADER])["worker"]
        self.results.append((maker, json.loads(message.data)["type"]))

    async def _noted(self, message: Msg) -> None:
        self.noted.append(message)

    async def end(self) -> None:
        await until(lambda: len(self.results) >= len(SESSIONS))

    async def stored(self) -> None:
        """Wait for all results stored until now: a worker may hear of them before this connection does."""
        await self.nc.flush()
        await until(lambda: not self._answers.pending_msgs)

    @property
    def makers(self) -> Counter[str]:
        return Counter(maker for maker, _ in self.results)


@pytest.fixture
async def flood(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[str], Flood]]:
    """Yield a function that makes a `Flood`; requests that a worker returns are redelivered soon."""
    monkeypatch.setattr(intake, "_RETURN_S", 0.1)
    nc = await nats.connect(nats_url)
    yield lambda prefix: Flood(nc, prefix)
    await nc.close()


async def returned(worker: Any, num: int) -> None:
    await until(lambda: worker.app._parts.intake.num_returned >= num)


async def test_a_joining_worker_answers_a_part_of_the_many_requests_that_wait_in_the_log(
    cluster: Start, flood: Callable[[str], Flood]
) -> None:
    """A worker at its limit returns further requests, and no attempt is noted for them."""
    first = await cluster("first", max_attempts=1)
    loud = flood(first.settings.prefix)
    await loud.begin(200)
    await returned(first, 20)
    second = await cluster("second", max_attempts=1)
    most = Counter[str]()
    async with asyncio.timeout(PATIENCE_S):
        while len(loud.results) < len(SESSIONS):
            for one in (first, second):
                name = one.settings.worker
                most[name] = max(most[name], one.app._parts.intake.num_sessions)
            waiting = sum(one.app._parts.intake.num_returned for one in (first, second))
            assert waiting <= len(SESSIONS) - len(loud.results), "each is counted once"
            await asyncio.sleep(0.01)
    assert most == {"first": PLACES, "second": PLACES}, "the limit is each worker's"
    assert min(loud.makers.values()) >= 12, loud.makers
    assert {kind for _, kind in loud.results} == {"generated"}
    assert not loud.noted


async def test_a_request_that_comes_again_while_a_worker_looks_up_its_owner_has_crashed_no_worker(
    cluster: Start, flood: Callable[[str], Flood], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the other worker ends. As if this one had been asleep."""
    first, second = [await cluster(name, max_attempts=1, ack_wait_s=0.5) for name in ("first", "second")]
    owner, is_over = Owners.owner, asyncio.Event()

    async def slow(self: Owners, key: Any) -> Any:
        if self is first.app._parts.owners:
            await is_over.wait()
        return await owner(self, key)

    monkeypatch.setattr(Owners, "owner", slow)
    loud = flood(first.settings.prefix)
    await loud.begin(3)
    await until(lambda: loud.results)
    await second.stop()
    await asyncio.sleep(2.0)
    is_over.set()
    await loud.end()
    assert {kind for _, kind in loud.results} == {"generated"}


async def test_a_tenant_is_answered_while_another_tenants_requests_fill_both_workers(
    cluster: Start, flood: Callable[[str], Flood]
) -> None:
    first, second = await cluster("first"), await cluster("second")
    loud = flood(first.settings.prefix)
    await loud.begin(300)
    await returned(first, 8)
    await returned(second, 8)
    quiet = await connect(first.settings.nats, prefix=first.settings.prefix, tenant="quiet")
    async with quiet:
        for number in range(4):
            asked = {"text": "eee", "max_tokens": 3, "timeout_s": PATIENCE_S}
            assert (await quiet.session(f"q{number}").generate(**asked)).usage.completion_tokens == 3
    assert len(loud.results) < len(SESSIONS) // 2
    await loud.end()


async def test_a_drained_worker_answers_no_requests_although_the_other_worker_is_at_its_limit(
    cluster: Start, flood: Callable[[str], Flood]
) -> None:
    first, second = await cluster("first"), await cluster("second")
    loud = flood(first.settings.prefix)
    await loud.begin(300)
    await returned(first, 8)
    await second.app._members.drain(on=True)
    await until(lambda: not second.app._parts.intake.num_sessions)
    await loud.stored()
    num_before = loud.makers["second"]
    assert len(loud.results) < len(SESSIONS) - 2 * PLACES, "the flood goes on"
    await loud.end()
    assert loud.makers["second"] == num_before


@pytest.fixture
async def sessions(cluster: Start) -> AsyncIterator[Callable[..., Awaitable[list[Any]]]]:
    """Yield a function that starts two workers, and has the second one own new sessions of one tenant."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(append: bool) -> list[Any]:
            first, second = [await cluster(name, max_attempts=1) for name in ("first", "second")]
            await first.app._members.drain(on=True)  # it keeps no new sessions
            where = {"prefix": first.settings.prefix, "tenant": "t"}
            client = await stack.enter_async_context(await connect(first.settings.nats, **where))
            found = [client.session(f"s{number}") for number in range(PLACES)]
            if append:
                await asyncio.gather(*(one.append(text="e") for one in found))
                await first.app._members.drain(on=False)
            return [second, *found]

        yield start


async def stopping(worker: Any) -> None:
    """Begin to stop a worker, and return once it begins no more turns."""
    worker.app.stop()
    while not worker.app._parts.engine._stopping:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_request_that_waits_while_its_sessions_worker_stops_counts_no_attempt(
    sessions: Callable[..., Awaitable[list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, *found = await sessions(append=True)
    excuse = Sessions.excuse

    async def late(self: Sessions, *firsts: Any) -> None:
        if self is worker.app._parts.sessions:
            await asyncio.sleep(1)  # as if it took so long to end its turns
        await excuse(self, *firsts)

    monkeypatch.setattr(Sessions, "excuse", late)
    await stopping(worker)
    answered = await asyncio.gather(*(one.append(text="e") for one in found))
    assert [one.position for one in answered] == [2] * len(found)
    await worker.task


async def test_a_request_that_the_server_sent_to_a_pull_that_had_ended_counts_no_attempt(
    sessions: Callable[..., Awaitable[list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-server 2.15.1 does so for some milliseconds after a stopping worker has unsubscribed."""

    async def lost(self: Routing, key: Any) -> None:
        del self._routed[key]

    worker, *found = await sessions(append=True)
    monkeypatch.setattr(Routing, "_route", lost)  # the other worker hears of none
    await stopping(worker)
    answered = await asyncio.gather(*(one.append(text="e") for one in found))
    assert [one.position for one in answered] == [2] * len(found)
    await worker.task


async def test_only_one_of_two_workers_runs_retention_and_the_other_one_does_once_it_stops(
    cluster: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[retention.Retention] = []
    sweep = retention.Retention.sweep

    async def noted(self: retention.Retention) -> None:
        swept.append(self)
        await sweep(self)

    monkeypatch.setattr(retention.Retention, "sweep", noted)
    monkeypatch.setattr(retention, "_PERIOD_S", 0.05)
    first, second = await cluster("first"), await cluster("second")
    swept.clear()
    await asyncio.sleep(0.5)
    assert set(swept) == {first.app._parts.retention}
    await first.stop()
    await until(lambda: second.app._parts.retention in swept)
