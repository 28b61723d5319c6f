"""How many sessions of a tenant are active, few during a flood; metrics by tenant."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.parts import LocalWorker
from turnkeep_client.client import Client, connect
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import TenantFigures
from turnkeep_client.subjects import SessionKey
from worker.engine.port import StoppingError
from worker.process.setting_kinds import TenantLimits
from worker.sessions.shares import Shares

ROWS = 8
MOST = 4 * ROWS
FLOOD = 4 * MOST
A_WHILE_S = 60.0


class Crowd:
    """Sessions of several tenants; each waits until it may be active, and is active until `end` ends it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.shares = Shares(ROWS, lambda: self.now_s)
        self.at_work: list[tuple[str, str]] = []
        self.came_in: list[str] = []
        self._ends: dict[tuple[str, str], asyncio.Event] = {}
        self.tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def come(
        self,
        tenant: str,
        *sessions: str,
        priority: int = 0,
        at_once: bool = False,
        max_new: int = 1000,
        most_s: float | None = None,
    ) -> None:
        """Add waiting sessions of a tenant, and let the event loop run until nothing changes."""
        for session in sessions:
            self.tasks[tenant, session] = asyncio.create_task(
                self._work((tenant, session), priority, at_once, max_new, most_s)
            )
        await settled()

    async def flood(self, tenant: str) -> None:
        await self.come(tenant, *(f"s{number}" for number in range(FLOOD)))

    async def end(self, tenant: str, session: str | None = None) -> None:
        """End an active session of a tenant: `session`, or the one that became active first."""
        key = next(one for one in self.at_work if one[0] == tenant and session in (None, one[1]))
        self._ends[key].set()
        await settled()

    def num(self, tenant: str) -> int:
        return Counter(one for one, _ in self.at_work)[tenant]

    async def _work(
        self, key: tuple[str, str], priority: int, at_once: bool, max_new: int, most_s: float | None
    ) -> None:
        place = self.shares.enter(SessionKey(*key), priority, at_once=at_once, max_new=max_new, most_s=most_s)
        async with place:
            self.at_work.append(key)
            self.came_in.append(key[1])
            self._ends[key] = asyncio.Event()
            try:
                await self._ends[key].wait()
            finally:
                self.at_work.remove(key)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@asynccontextmanager
async def crowd() -> AsyncIterator[Crowd]:
    made = Crowd()
    yield made
    for task in made.tasks.values():
        task.cancel()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)


async def test_after_another_tenants_request_a_flooding_tenant_gets_only_a_quarter_of_the_batch_rows() -> (
    None
):
    async with crowd() as one:
        await one.flood("loud")
        assert one.num("loud") == MOST
        await one.end("loud")
        assert one.num("loud") == MOST
        await one.come("quiet", "s")
        assert one.num("quiet") == 1
        while one.num("loud") > ROWS // 4:
            before = one.num("loud")
            await one.end("loud")
            assert one.num("loud") == before - 1
        await one.end("loud")
        assert one.num("loud") == ROWS // 4
        await one.end("quiet")
        await one.end("loud")
        assert one.num("loud") == ROWS // 4  # the other tenant may come back soon
        one.now_s += A_WHILE_S
        await one.end("loud")
        assert one.num("loud") == MOST


async def test_a_flooding_tenant_may_fill_only_a_quarter_of_the_rows_while_another_tenant_is_active() -> None:
    async with crowd() as one:
        await one.come("quiet", "s")
        await one.flood("loud")
        for _ in range(MOST):
            await one.end("loud")
        assert one.num("loud") == ROWS // 4
        one.now_s += A_WHILE_S
        await one.end("loud")
        assert one.num("loud") == ROWS // 4


async def test_a_tenant_is_treated_as_flooding_until_none_of_its_sessions_waits_for_a_slot() -> None:
    async with crowd() as one:
        await one.flood("a")
        await one.flood("b")
        for _ in range(FLOOD - MOST):
            await one.end("a")
            await one.end("b")
        assert (one.num("a"), one.num("b")) == (MOST // 2, MOST // 2)  # as many wait
        for _ in range(MOST // 2):
            await one.end("a")
        await one.end("b")
        assert (one.num("a"), one.num("b")) == (MOST // 2, MOST // 2 - 1)  # all of a's are active


async def test_two_flooding_tenants_get_equal_numbers_of_active_sessions() -> None:
    async with crowd() as one:
        await one.flood("a")
        await one.flood("b")
        for tenant in ("a", "b"):
            while one.num(tenant) > MOST // 2:
                await one.end(tenant)
            await one.end(tenant)
            assert one.num(tenant) == MOST // 2


async def test_during_a_flood_of_long_answers_a_quarter_more_sessions_with_short_answers_are_admitted() -> (
    None
):
    async with crowd() as one:
        await one.flood("loud")
        await one.come("loud", *(f"short{number}" for number in range(FLOOD)), max_new=3)
        assert one.came_in[MOST:] == [f"short{number}" for number in range(MOST // 4)]
        await one.end("loud", "short0")
        assert one.came_in[-1] == f"short{MOST // 4}"
        while shorts := [session for _, session in one.at_work if session.startswith("short")]:
            await one.end("loud", shorts[0])
        assert one.num("loud") == MOST  # a place of a short answer that has ended is none for a long one


@pytest.mark.parametrize(("after_s", "next_one"), [(1.0, f"short{MOST // 4}"), (100.0, f"s{MOST}")])
async def test_a_session_with_a_long_answer_waits_behind_short_answers_only_for_a_limited_time(
    after_s: float, next_one: str
) -> None:
    async with crowd() as one:
        await one.flood("loud")
        one.now_s = after_s
        await one.come("loud", *(f"short{number}" for number in range(FLOOD)), max_new=3)
        await one.end("loud", "s0")
        assert one.came_in[MOST + MOST // 4] == next_one


async def test_of_a_tenants_waiting_sessions_the_one_with_the_highest_priority_becomes_active_first() -> None:
    async with crowd() as one:
        await one.flood("loud")
        await one.come("loud", "later")
        await one.come("loud", "important", priority=1)
        await one.end("loud")
        assert one.came_in[-1] == "important"


async def test_a_tenant_above_its_session_limit_gets_no_slot_until_it_is_below_the_limit_again() -> None:
    async with crowd() as one:
        await one.flood("loud")
        one.shares.admit(SessionKey("loud", f"s{MOST + 9}"))
        await one.come("loud", "new", at_once=True)
        assert one.came_in[-2:] == [f"s{MOST + 9}", "new"]
        assert one.num("loud") == MOST + 2
        for _ in range(2):
            await one.end("loud")
        assert one.num("loud") == MOST
        await one.end("loud")
        assert one.num("loud") == MOST


async def test_a_session_cancelled_just_as_it_becomes_active_passes_its_slot_to_the_next_session() -> None:
    async with crowd() as one:
        await one.flood("loud")
        first_waiting = one.tasks["loud", f"s{MOST}"]
        one._ends["loud", "s0"].set()
        await asyncio.sleep(0)  # s0 ends and activates the next session, whose task has not run yet
        first_waiting.cancel()
        await settled()
        assert first_waiting.cancelled()
        assert one.num("loud") == MOST


async def test_a_session_that_becomes_active_at_its_deadline_counts_against_the_limit_of_its_tenant() -> None:
    async with crowd() as one:
        await one.flood("loud")
        await one.come("loud", "late", most_s=0.0)
        assert one.came_in[-1] == "late"
        await one.end("loud", "late")
        assert one.num("loud") == MOST


async def test_sessions_that_wait_for_a_slot_fail_at_once_when_the_worker_stops() -> None:
    async with crowd() as one:
        await one.flood("loud")
        one.shares.stop()
        await settled()
        assert sum(not task.done() for task in one.tasks.values()) == MOST
        with pytest.raises(StoppingError):
            await one.tasks["loud", f"s{FLOOD - 1}"]
        while one.at_work:
            await one.end("loud")
        await one.come("quiet", "s")
        with pytest.raises(StoppingError):
            await one.tasks["quiet", "s"]


async def figures(client: Client) -> TenantFigures:
    """Return the counts by tenant of the second metrics message: the first may precede the last result."""
    heard = client.metrics()
    async with asyncio.timeout(10):
        await anext(heard)
        return (await anext(heard)).by_tenant


async def talk(worker: LocalWorker, tenant: str) -> Any:
    """Generate an answer for a tenant, and have one request refused; return the answer."""
    assert worker.settings.nats is not None
    async with connect(worker.settings.nats, prefix=worker.settings.prefix, tenant=tenant) as client:
        session = client.session("s")
        answer = await session.generate(text="x" * 40, max_tokens=4)
        with pytest.raises(RequestFailedError):
            await session.append(text="y", expect_position=999)
        told = (await session.info()).worker
        assert told.by_tenant == TenantFigures(), "a tenant hears nothing of others"
        return answer


async def test_the_first_tenants_have_metrics_of_their_own_and_all_later_tenants_are_counted_together(
    local_worker: Callable[..., Awaitable[LocalWorker]],
) -> None:
    worker = await local_worker(tenants=TenantLimits(metrics=2))
    answers = {tenant: await talk(worker, tenant) for tenant in ("acme", "beta", "gamma", "delta")}
    found = await figures(worker.client)
    once = {"ok": 1, "position_conflict": 1}
    assert found.requests == {"acme": once, "beta": once, "_other": {"ok": 2, "position_conflict": 2}}
    for kind in ("prefilled", "cached"):
        numbers = {tenant: getattr(answer.usage, f"{kind}_tokens") for tenant, answer in answers.items()}
        numbers["_other"] = numbers.pop("gamma") + numbers.pop("delta")
        expected = {name: number for name, number in numbers.items() if number}
        assert getattr(found, f"{kind}_tokens") == expected
    assert found.generated_tokens["_other"] == sum(len(answers[name].tokens) for name in ("gamma", "delta"))
    assert found.sessions == {"acme": 0, "beta": 0}


async def test_metrics_by_tenant_include_restored_tokens_and_active_sessions(
    local_worker: Callable[..., Awaitable[LocalWorker]], endless_model: Any
) -> None:
    worker = await local_worker(tenants=TenantLimits(metrics=2), model=str(endless_model))
    await worker.client.session("s").generate(text="x" * 100, max_tokens=4)
    await worker.stop()
    worker = await local_worker(tenants=TenantLimits(metrics=2), model=str(endless_model))
    answer = worker.client.session("s").generate(text="y", max_tokens=50_000)
    await anext(aiter(answer))
    found = await figures(worker.client)
    assert found.sessions == {"default": 1}
    assert found.restored_tokens["default"] >= 96
    await answer.cancel()


async def test_metrics_contain_no_tenant_names_unless_the_setting_for_metrics_by_tenant_is_on(
    local_worker: Callable[..., Awaitable[LocalWorker]],
) -> None:
    worker = await local_worker()
    await talk(worker, "acme")
    assert await figures(worker.client) == TenantFigures()
