"""A GPU reports a failed command buffer late and once: no token and no snapshot may be made from its results.

A CPU stands for the GPU here: an evaluation sets all keys and values on the device to 0, and raises an error.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from engine_process import Process, open_process
from tiny_models import BLOCK, alone, answer, key, prompt

from cache.kv.states import leaves
from cache.names.tokens import as_tokens
from worker.batch.batch import Batch
from worker.device import machine
from worker.device.request import TurnRequest
from worker.engine.port import DeviceFaultError

pytestmark = pytest.mark.metal
EVALUATE = mx.eval


@dataclass
class Buffers:
    """Makes the next `num_left` evaluations fail for whose calling frame `fails` returns true."""

    fails: Callable[[Any], bool] = lambda frame: False
    process: Process | None = None
    num_failed: int = 0
    num_left: int = 0
    launched: list[Any] = field(default_factory=list)

    def evaluate(self, *args: Any) -> None:
        if self.num_left and self.fails(sys._getframe(1)):
            self.num_left -= 1
            self.num_failed += 1
            self.zero()
            raise RuntimeError("[METAL] Command buffer execution failed")
        EVALUATE(*args)

    def zero(self) -> None:
        """Set all keys and values of turns and idle sessions on the device to 0."""
        runner = self.process.engine._device._runner
        batch = runner._batch
        every = [turn.caches or [] for turn in runner._scheduler.prefilling]
        every += [row.caches or [] for row in batch.rows]
        every += [idle.caches for idle in runner.idle_kv._resident.values()]
        for _, cache in (leaf for caches in every for leaf in leaves(caches)):
            if getattr(cache, "keys", None) is not None:
                cache.keys, cache.values = mx.zeros_like(cache.keys), mx.zeros_like(cache.values)

    def in_cut(self, frame: Any) -> bool:
        return frame.f_code.co_name == "_memory"

    def in_mixed_step(self, frame: Any) -> bool:
        return is_step(frame) and bool(frame.f_locals["pieces"]) and bool(frame.f_locals["self"].rows)

    def in_prefill(self, frame: Any) -> bool:
        return is_step(frame) and bool(frame.f_locals["pieces"])

    def in_step_ahead(self, frame: Any) -> bool:
        return is_step(frame) and any(frame.f_locals["launched"] is one for one in self.launched)

    def in_decoding(self, frame: Any) -> bool:
        return is_step(frame) and bool(frame.f_locals["self"].rows)


def is_step(frame: Any) -> bool:
    return frame.f_code.co_name == "step" and "launched" in frame.f_locals


@pytest.fixture
def buffers(monkeypatch) -> Buffers:
    made = Buffers()
    launch = Batch._launch_next

    def launched(batch: Batch, step: Any) -> Any:
        ahead = launch(batch, step)
        if ahead is not None:
            made.launched.append(ahead)
        return ahead

    monkeypatch.setattr(Batch, "_launch_next", launched)
    monkeypatch.setattr(machine, "fails_late", lambda: True)
    monkeypatch.setattr(mx, "eval", made.evaluate)
    return made


def start(process: Process, name: str, tokens: list[int], num: int) -> tuple[asyncio.Task[Any], list[int]]:
    growing = answer(num)
    run = process.engine.run(TurnRequest(key(name), as_tokens(tokens), answer=growing), lambda: False)
    return asyncio.create_task(run), growing.tokens


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():  # noqa: ASYNC110 - the device thread sets it
            await asyncio.sleep(0.001)


#: Tokens of an answer: more than a busy machine computes before a prompt beside it begins.
NUM = 8 * BLOCK
PLACES = ["in_cut", "in_mixed_step", "in_prefill", "in_step_ahead", "in_decoding"]


@pytest.mark.parametrize("place", PLACES)
async def test_no_token_and_no_snapshot_is_made_from_the_results_of_a_failed_evaluation(
    make_model, trials, tmp_path, buffers, place
) -> None:
    """Answers and the failed step's prompt continue from snapshots; idle sessions are restored."""
    model = make_model("llama")
    texts = {name: prompt(3 * BLOCK + n, salt=n + 1) for n, name in enumerate(("a", "b", "c"))}
    idle = prompt(2 * BLOCK + 5, salt=9)
    async with open_process(model, tmp_path, trials=trials) as process:
        buffers.process = process
        await process.append(idle, "idle")
        tasks: dict[str, tuple[asyncio.Task[Any], list[int]]] = {}

        def have_begun() -> bool:
            return len(tasks) > 1 and all(len(tokens) > BLOCK + 2 for _, tokens in [*tasks.values()][:2])

        # Checked on the device thread: the answers may be over before this thread runs again.
        buffers.fails, buffers.num_left = lambda frame: have_begun() and getattr(buffers, place)(frame), 1
        tasks |= {name: start(process, name, texts[name], NUM) for name in ("a", "b")}
        await until(have_begun)
        if place in ("in_mixed_step", "in_prefill"):
            tasks["c"] = start(process, "c", texts["c"], NUM)
        for task, _ in tasks.values():
            await asyncio.wait_for(task, 60)
        assert buffers.num_failed == 1
        _, more, _ = await process.generate(idle, 10, name="idle")
        assert more == alone(model, idle, 10)[0]
        for name, (_, tokens) in tasks.items():
            assert tokens == alone(model, texts[name], NUM)[0], name
        assert await process.store.queue.drained(10)
    async with open_process(model, tmp_path, trials=trials) as process:
        for name, (_, tokens) in tasks.items():
            outcome, more, _ = await process.generate(texts[name] + tokens, 10, name=name)
            assert more == alone(model, texts[name] + tokens, 10)[0], name
            assert outcome.num_prefilled <= BLOCK


async def test_an_answer_completes_even_if_copying_the_kv_of_its_last_tokens_fails(
    make_model, trials, tmp_path, buffers
) -> None:
    model, tokens = make_model("llama"), prompt(BLOCK + 3)
    async with open_process(model, tmp_path, trials=trials) as process:
        buffers.process = process
        buffers.fails, buffers.num_left = buffers.in_cut, 1
        task, said = start(process, "s", tokens, 2)
        await until(lambda: buffers.num_failed == 1)
        assert (await task).complete
        assert said == alone(model, tokens, 2)[0]
        _, more, _ = await process.generate(tokens + said, 5)
        assert more == alone(model, tokens + said, 5)[0]


async def test_a_prompt_that_fails_every_time_ends_with_an_error_and_changes_no_other_answer(
    make_model, trials, tmp_path, buffers
) -> None:
    """The prompt is tried twice. An answer beside it restarts as often as needed."""
    model, tokens = make_model("llama"), prompt(BLOCK + 3)

    def poisoned(frame: Any) -> bool:
        return is_step(frame) and any(piece.tokens[:2] == [95, 95] for piece in frame.f_locals["pieces"])

    async with open_process(model, tmp_path, trials=trials) as process:
        buffers.process = process
        buffers.fails, buffers.num_left = poisoned, 100
        task, said = start(process, "s", tokens, 40)
        await until(lambda: len(said) > 5)
        doomed, _ = start(process, "doomed", [95] * BLOCK, 5)
        with pytest.raises(DeviceFaultError, match="Command buffer"):
            await asyncio.wait_for(doomed, 60)
        assert buffers.num_failed == 2
        await asyncio.wait_for(task, 60)
        assert said == alone(model, tokens, 40)[0]
