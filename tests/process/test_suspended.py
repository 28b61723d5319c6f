"""A machine that sleeps stops worker and NATS server together, for longer than every time to live."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from tests.parts import WorkerProcess

pytestmark = pytest.mark.process

#: The least time that a worker accepts for chunks, and a sleep that is longer than every other time, too.
TTL_S, SLEEP_S = 10.0, 13.0


async def test_an_answer_goes_on_after_a_sleep_longer_than_every_time_to_live(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    worker = worker_process("--token-ttl-s", str(TTL_S), "--ack-wait-s", "1", "--max-attempts", "1")
    worker.start()
    request = {"text": "abc", "max_tokens": 1500, "timeout_s": 100}
    async with await worker.client(timeout_s=60) as client:
        whole = await client.session("awake").generate(**request)
        pids = [worker.pid, worker.worker_pid, worker.server_pid]
        tokens: list[int] = []
        async with client.session("asleep").generate(**request) as answer:
            async for chunk in answer:
                tokens += chunk.tokens
                if chunk.i == 3:
                    for pid in pids:
                        os.kill(pid, signal.SIGSTOP)
                    await asyncio.sleep(SLEEP_S)
                    for pid in reversed(pids):
                        os.kill(pid, signal.SIGCONT)
            result = answer.result
        assert result.finish_reason == whole.finish_reason
        assert [*result.tokens] == [*whole.tokens]
        assert tokens == [*whole.tokens]
    assert "given_up" not in worker.log
