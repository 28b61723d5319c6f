"""Deadlines: late requests are not started, and running answers end with the tokens generated until then."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.parts import fall_asleep
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import Append, Failed, Generate
from turnkeep_client.subjects import SessionKey

LONG = list(range(40, 200)) * 12  # next to the tiny model's context


async def submitted(client: Any, name: str, *requests: Append | Generate) -> list[Any]:
    return [await client.submit(SessionKey("default", name), one, timeout_s=20) for one in requests]


async def test_a_request_whose_deadline_has_passed_expires_without_being_validated_or_run(
    local_worker: Any,
) -> None:
    """It has expired, whatever else would be said of it."""
    worker = await local_worker()
    first, *late, last = await submitted(
        worker.client,
        "late",
        Append(id="first", tokens=tuple(LONG)),
        Append(id="a", tokens=(40, 41, 42), deadline_s=0.01, expect_position=0),
        Generate(id="g", tokens=(40, 41, 42), deadline_s=0.01),
        Generate(id="too-long", tokens=tuple(LONG) * 2, deadline_s=0.01),
        Generate(id="last", tokens=(50,), max_tokens=2, deadline_s=60),
    )
    position = (await first).position
    for pending in late:
        result = await pending
        assert isinstance(result, Failed)
        assert (result.code, result.retryable, result.position) == ("expired", True, position)
        assert "deadline" in result.message
    assert (await last).usage.prompt_tokens == position + 1
    info = await worker.client.session("late").info()
    assert info.worker.prefilled_tokens + info.worker.cached_tokens == (position - 1) + (position + 1)


@pytest.mark.simulated
async def test_a_deadline_that_passes_while_the_machine_sleeps_ends_the_answer_soon_after_the_sleep(
    local_worker: Any, endless_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock by which the event loop sleeps does not go on meanwhile, on macOS or Linux."""
    worker = await local_worker(model=str(endless_model), max_draft=0)
    generation = worker.client.session("s").generate(tokens=[40, 41], max_tokens=50_000, deadline_s=1000)
    woken_s = 0.0
    async for chunk in generation:
        if chunk.i >= 4 and not woken_s:
            woken_s = asyncio.get_running_loop().time()
            fall_asleep(monkeypatch, 3600)
    assert generation.result.finish_reason == "expired"
    assert asyncio.get_running_loop().time() - woken_s < 20


@pytest.mark.simulated
async def test_a_running_answer_ends_at_its_deadline_with_the_tokens_generated_until_then(
    local_worker: Any, endless_model: Path
) -> None:
    worker = await local_worker(model=str(endless_model), max_draft=0)
    session = worker.client.session("running")
    generation = session.generate(tokens=[40, 41], max_tokens=50_000, deadline_s=0.5)
    seen = [token async for chunk in generation for token in chunk.tokens]
    result = generation.result
    assert result.finish_reason == "expired"
    assert 0 < len(result.tokens) < 50_000
    assert seen == list(result.tokens)
    assert result.position == 2 + len(seen)
    after = await session.generate(tokens=[42], max_tokens=1)
    assert after.usage.prompt_tokens == result.position + 1
    repeated = await session.generate(
        tokens=[40, 41], max_tokens=50_000, deadline_s=0.5, request_id=result.id
    )
    assert (repeated.tokens, repeated.repeat_of) == (result.tokens, result.seq)


async def test_a_request_that_waits_behind_other_sessions_of_its_tenant_expires_at_its_deadline(
    local_worker: Any, endless_model: Path
) -> None:
    worker = await local_worker(model=str(endless_model), max_batch=1)
    client, long = worker.client, Generate(id="long", tokens=(40, 41), max_tokens=30_000)
    running = [await client.submit(SessionKey("default", f"busy{number}"), long) for number in range(4)]
    await asyncio.sleep(0.5)
    with pytest.raises(RequestFailedError, match="deadline"):
        await client.session("late").generate(tokens=[42], max_tokens=200, deadline_s=0.5, timeout_s=5)
    assert not any(one.is_resolved() for one in running)
