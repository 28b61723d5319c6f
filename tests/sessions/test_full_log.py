"""A log that is full can be emptied, and requests that it took get results."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from nats.js.errors import APIError

from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import Failed, Generate
from turnkeep_client.session import build
from worker.wire import retention
from worker.wire.log_room import open_bytes

LIMIT = 2**20


async def is_taken(worker: Any, session: str, num_tokens: int) -> bool:
    """Send an append; return whether the log takes it."""
    try:
        await worker.client.session(session).append(tokens=[5] * num_tokens, timeout_s=10)
    except RequestFailedError as error:
        return "close sessions" not in str(error)
    return True


async def fill(worker: Any) -> int:
    """Send appends until the log refuses even a small one; return the number of sessions that have some."""
    number, num_tokens = 0, 2048
    while num_tokens:
        if await is_taken(worker, f"s{number}", num_tokens):
            number += 1
        else:
            num_tokens //= 4
    return number


async def size_of(worker: Any) -> tuple[int, int]:
    info = await worker.app._nc.jetstream().stream_info(worker.client.subjects.log_stream)
    return info.state.bytes, info.config.max_bytes


@pytest.mark.parametrize("forget", [False, True])
async def test_sessions_in_a_full_log_can_be_closed_until_it_takes_requests_again(
    local_worker: Any, forget: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_PERIOD_S", 0.5)
    worker = await local_worker(log_max_bytes=LIMIT, max_message_bytes=2**16)
    number = await fill(worker)
    assert number > 20
    for n in range(number // 2):
        await worker.client.session(f"s{n}").close(forget=forget, timeout_s=10)
        assert (await size_of(worker))[0] <= LIMIT
    async with asyncio.timeout(20):
        while not await is_taken(worker, "new", 100):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        while (await size_of(worker))[1] != open_bytes(LIMIT):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_a_request_that_just_fits_gets_its_result_and_later_ones_are_refused(
    local_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused are those that the log has when workers have used a part of the reserve, but no closes."""
    worker = await local_worker(log_max_bytes=LIMIT, max_message_bytes=2**16)
    await fill(worker)
    keeper = worker.app._parts.retention
    js = worker.app._nc.jetstream()
    stream = worker.client.subjects.log_stream
    num_bytes, _ = await size_of(worker)
    config = (await js.stream_info(stream)).config
    await js.update_stream(config.evolve(max_bytes=num_bytes + 400))  # one request more
    last = worker.client.session("last")
    assert (await last.generate(text="Why?", max_tokens=64, timeout_s=10)).usage.completion_tokens
    monkeypatch.setattr(keeper, "max_bytes", 1024)  # as if more of the log were used
    monkeypatch.setattr(keeper, "num_bytes", LIMIT)
    num_bytes, _ = await size_of(worker)
    await js.update_stream(config.evolve(max_bytes=num_bytes + 400))
    call = await worker.client.submit(last.key, build(Generate, text="Why?"), timeout_s=10)
    refused = await call
    assert isinstance(refused, Failed)
    assert (refused.code, refused.retryable) == ("overloaded", True)
    assert "close sessions" in refused.message
    assert await last.close(forget=True, timeout_s=10)


async def test_entries_that_a_worker_stores_at_once_in_a_full_log_all_fit(local_worker: Any) -> None:
    worker = await local_worker(log_max_bytes=LIMIT, max_message_bytes=2**16)
    await fill(worker)
    room = worker.app._parts.retention._journal.room
    subject = worker.client.subjects.erased("default")
    await asyncio.gather(*(room.publish(subject, b"x" * 100 * n) for n in range(1, 31)))
    num_bytes, _ = await size_of(worker)
    assert open_bytes(LIMIT) < num_bytes <= LIMIT


async def test_the_last_part_of_the_reserve_takes_only_small_entries_and_none_beyond_the_limit(
    local_worker: Any,
) -> None:
    worker = await local_worker(log_max_bytes=LIMIT, max_message_bytes=2**16)
    await fill(worker)
    room = worker.app._parts.retention._journal.room
    subject = worker.client.subjects.erased("default")
    for size, most in ((6000, LIMIT - LIMIT // 32), (3000, LIMIT)):
        answers = await asyncio.gather(
            *(room.publish(subject, b"x" * size) for _ in range(40)), return_exceptions=True
        )
        assert isinstance(answers[-1], APIError)
        assert most - 2 * size < (await size_of(worker))[0] <= most
