"""GPUs that fail as Metal does: no worker stays and fails."""

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from turnkeep_client.client import Client
from worker import app
from worker.device import machine
from worker.model_start import WorkerError

EVALUATE = mx.eval
PREFIX = "[METAL] Command buffer execution failed:"
IGNORED = f"{PREFIX} Ignored (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
FAULT = f"{PREFIX} Caused GPU Address Fault Error (0000000b:kIOGPUCommandBufferCallbackErrorPageFault)"
TOO_LONG = (
    f"{PREFIX} Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
)
NO_MEMORY = f"{PREFIX} Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"


async def ask(client: Client, name: str) -> Any:
    """Ask for an answer as a tenant of its own, who shares no KV with the others."""
    session = client.session(name, tenant=name)
    return await session.generate(text="word " * 60, max_tokens=20, ignore_eos=True)


class Gpu:
    """Makes an evaluation of the device thread raise if `error` returns a text for the calling frame."""

    def __init__(self) -> None:
        self.error: Callable[[Any], str | None] = lambda frame: None
        self.num_failed = 0

    def evaluate(self, *args: Any) -> None:
        frame = sys._getframe(1)
        if threading.current_thread().name == "device" and (error := self.error(frame)) is not None:
            self.num_failed += 1
            raise RuntimeError(error)
        EVALUATE(*args)

    def fails(self, num: int, error: str = FAULT) -> None:
        """Make the next `num` evaluations fail, the first of which is a step with a prompt."""
        self.error = lambda frame: (
            error if self.num_failed < num and (self.num_failed or num_prompt_tokens(frame) > 1) else None
        )


def num_prompt_tokens(frame: Any) -> int:
    """Count the prompt tokens of the step that evaluates; 0 for other evaluations."""
    is_step = frame.f_code.co_name == "step" and "launched" in frame.f_locals
    return sum(len(piece.tokens) for piece in frame.f_locals["pieces"]) if is_step else 0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU that takes pieces of up to eight blocks (256 tokens)."""
    made, device = Gpu(), replace(machine.profile(), prompt_blocks=8)
    monkeypatch.setattr(machine, "fails_late", lambda: True)
    monkeypatch.setattr(machine, "profile", lambda: device)
    monkeypatch.setattr(mx, "eval", made.evaluate)
    return made


@pytest.mark.metal
@pytest.mark.parametrize("num", [1, 2, 3])
async def test_no_request_fails_if_the_gpu_reports_the_same_error_up_to_three_times(
    local_worker: Any, gpu: Gpu, num: int
) -> None:
    """Command buffers that were in flight report the error again, after the first report."""
    client = (await local_worker()).client
    said = await ask(client, "before")
    gpu.fails(num)
    result = await ask(client, "after")
    assert gpu.num_failed == num
    assert result.tokens == said.tokens


@pytest.mark.metal
@pytest.mark.parametrize("is_whole", [True, False], ids=["every evaluation", "every step of a request"])
async def test_a_worker_whose_gpu_fails_every_time_exits_and_a_restarted_worker_answers_the_request(
    local_worker: Any, gpu: Gpu, *, is_whole: bool
) -> None:
    """If a request of one token still runs, the GPU may have only failed because of the prompt."""
    worker = await local_worker()
    said = await ask(worker.client, "before")
    gpu.error = lambda frame: IGNORED if is_whole or num_prompt_tokens(frame) > 1 else None
    first = asyncio.create_task(ask(worker.client, "first"))
    if not is_whole:
        with pytest.raises(Exception, match="internal"):
            await first
        first = asyncio.create_task(ask(worker.client, "second"))
    with pytest.raises(WorkerError, match=r"^the GPU .*; start the worker again"):
        await asyncio.wait_for(asyncio.shield(worker.task), app._STOP_S / 2)  # its turns do not end
    gpu.error = lambda frame: None
    await local_worker()
    assert (await asyncio.wait_for(first, 60)).tokens == said.tokens


@pytest.mark.metal
async def test_a_worker_whose_gpu_fails_at_the_start_exits_with_a_one_line_error(
    local_worker: Any, gpu: Gpu
) -> None:
    gpu.error = lambda frame: IGNORED if num_prompt_tokens(frame) else None
    with pytest.raises(machine.DeviceError, match=r"^the GPU has failed: .*; start the worker again$"):
        await local_worker()


@pytest.mark.metal
@pytest.mark.parametrize("error", [TOO_LONG, NO_MEMORY], ids=["time", "memory"])
async def test_a_gpu_timeout_or_memory_error_in_a_prefill_piece_makes_later_prefill_pieces_smaller(
    local_worker: Any, gpu: Gpu, error: str
) -> None:
    """Pieces of 256, 128, 64 and 32 tokens fail; none of these failures counts against the request."""
    client = (await local_worker()).client
    said = await ask(client, "before")
    gpu.error = lambda frame: error if num_prompt_tokens(frame) > 20 else None
    for name in ("one", "two"):
        assert (await ask(client, name)).tokens == said.tokens
        assert gpu.num_failed == 4, "the next prompt begins with small pieces"
