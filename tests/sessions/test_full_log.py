"""A log that is full can be emptied, and requests that it took get results."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog
from nats.js.errors import APIError

from turnkeep_client import calls
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import Failed, Generate
from turnkeep_client.session import build
from worker.wire import retention
from worker.wire.log_room import LogRoom, open_bytes

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
async def test_sessions_in_a_full_log_can_be_closed_which_makes_room_for_requests_again(
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


async def test_a_close_that_a_worker_was_to_store_in_a_full_log_is_sent_again_if_the_worker_stays_silent(
    local_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have crashed."""
    worker = await local_worker(log_max_bytes=LIMIT, max_message_bytes=2**16)
    await fill(worker)
    asked, publish = [], LogRoom.publish

    async def silent_at_first(self: LogRoom, subject: str, *entry: Any) -> Any:
        asked.append(subject)
        return await (asyncio.sleep(3600) if len(asked) == 1 else publish(self, subject, *entry))

    monkeypatch.setattr(LogRoom, "publish", silent_at_first)
    monkeypatch.setattr(calls, "_ASK_S", 0.5)
    await worker.client.session("s0").close(timeout_s=20)


async def test_a_request_that_just_fits_into_a_nearly_full_log_gets_its_result_and_later_requests_fail(
    local_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused are those that the log has once a result has used the reserve, but no closes."""
    monkeypatch.setattr(retention, "_PERIOD_S", 1000)  # the worker does not see yet that the log is full
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
    keeper.num_bytes = num_bytes = (await size_of(worker))[0]  # as it reads every 10 s
    assert num_bytes > open_bytes(LIMIT)
    await js.update_stream(config.evolve(max_bytes=num_bytes + 400))
    call = await worker.client.submit(last.key, build(Generate, text="Why?"), timeout_s=10)
    refused = await call
    assert isinstance(refused, Failed)
    assert (refused.code, refused.retryable) == ("overloaded", True)
    assert "close sessions" in refused.message
    assert await last.close(timeout_s=10)
    await js.purge_stream(stream, keep=1)  # the worker has not seen yet that there is room again
    assert await worker.client.session("next").append(text="Why?", timeout_s=10)


async def test_entries_that_several_workers_store_at_the_same_time_in_a_full_log_are_all_stored(
    local_worker: Any,
) -> None:
    """Each raises the size for its own entry, and sets back the raises of the others."""
    worker = await local_worker(log_max_bytes=LIMIT, max_message_bytes=2**16)
    await fill(worker)
    nc, subject, raises = worker.app._nc, worker.client.subjects.erased("default"), list[str]()

    class Room(LogRoom):
        async def ask(self, what: str, config: Any = None) -> Any:
            raises.extend([what] if config else [])
            return await super().ask(what, config)

    rooms = [Room(nc, worker.client.subjects.log_stream) for _ in range(4)]
    bodies = [b"x" * 20 * n for n in range(1, 26)]
    await asyncio.gather(*(rooms[0].publish(subject, body) for body in bodies))
    assert len(raises) <= len(bodies), "the entries of one worker take turns"
    await asyncio.gather(*(room.publish(subject, body) for body in bodies for room in rooms))
    num_bytes, _ = await size_of(worker)
    assert open_bytes(LIMIT) < num_bytes <= LIMIT


async def test_running_workers_adopt_the_log_size_limit_of_a_worker_that_starts_later(
    local_worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_PERIOD_S", 0.2)
    first = await local_worker(log_max_bytes=LIMIT)
    second = await local_worker(worker="second", data_dir=tmp_path / "second", log_max_bytes=2 * LIMIT)
    assert (await size_of(first))[1] == open_bytes(2 * LIMIT)
    async with asyncio.timeout(10):
        while first.app._parts.retention.max_bytes != 2 * LIMIT:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert second.app._parts.retention.max_bytes == 2 * LIMIT


@pytest.mark.parametrize("by_hand", [3 * LIMIT, -1])
async def test_a_size_limit_of_the_log_that_was_raised_by_hand_is_set_back_and_the_worker_logs_that_once(
    local_worker: Any, monkeypatch: pytest.MonkeyPatch, by_hand: int
) -> None:
    monkeypatch.setattr(retention, "_PERIOD_S", 0.1)
    worker = await local_worker(log_max_bytes=LIMIT)
    js, stream = worker.app._nc.jetstream(), worker.client.subjects.log_stream
    config = (await js.stream_info(stream)).config
    with structlog.testing.capture_logs() as lines:
        await js.update_stream(config.evolve(max_bytes=by_hand))
        async with asyncio.timeout(10):
            while (await size_of(worker))[1] != open_bytes(LIMIT):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
    (said,) = [line for line in lines if "log_max_bytes" in line["event"]]
    assert (said["log_level"], said["found"], said["max_bytes"]) == ("warning", by_hand, open_bytes(LIMIT))


async def test_the_last_log_space_kept_for_workers_takes_small_entries_only_and_none_above_the_logs_limit(
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
