"""A machine that sleeps stops worker and NATS server together, for longer than either may be silent."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from tests.parts import WorkerProcess

pytestmark = pytest.mark.process

#: Longer than a worker's record lives without it, and than requests stay with a silent worker.
SLEEP_S = 13.0


async def test_an_answer_goes_on_after_a_sleep_longer_than_a_worker_may_be_silent(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    worker = worker_process()
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
        assert "attempt" not in {entry.kind for entry in await client.log("asleep")}
