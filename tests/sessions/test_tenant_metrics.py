"""Metrics by tenant: sent only on the metrics subject, for as many tenants as the setting says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.parts import LocalWorker
from turnkeep_client.client import Client, connect
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import TenantFigures
from worker.process.setting_kinds import TenantLimits


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


async def test_the_first_tenants_have_their_own_metrics_and_all_others_are_counted_together(
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


async def test_metrics_by_tenant_count_restored_tokens_and_active_sessions(
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


async def test_metrics_name_no_tenant_without_the_setting(
    local_worker: Callable[..., Awaitable[LocalWorker]],
) -> None:
    worker = await local_worker()
    await talk(worker, "acme")
    assert await figures(worker.client) == TenantFigures()
