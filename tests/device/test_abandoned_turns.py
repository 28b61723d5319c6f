"""Turns whose task ended before the device did leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import mlx.core as mx
import pytest
from engine_process import Process
from parts import until
from tiny_models import BLOCK, answer, key

from cache.names.tokens import as_tokens, pack
from worker.device.request import TurnRequest
from worker.text.answer import Answer

PROMPT = [1 + i % 90 for i in range(3 * BLOCK + 3)]


class Held:
    """A model that waits, once `num_steps` is 0, in its fifth step until it is let go."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.num_steps = 100_000
        self.arrived, self.go_on = threading.Event(), threading.Event()

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.num_steps += tokens.shape[1] == 1
        if self.num_steps == 5:
            self.arrived.set()
            assert self.go_on.wait(20)
        return self._model(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class FencedError(Exception):
    pass


async def abandoned(process: Process, model: Held, *, fenced: bool) -> Answer:
    """Run a turn whose task ends while the device is in a step; return its answer."""
    growing, begun = answer(40), asyncio.Event()
    model.num_steps = 0

    async def publish(_: Any) -> None:
        await asyncio.to_thread(model.arrived.wait, 20)
        begun.set()
        if fenced:
            raise FencedError
        await asyncio.Event().wait()

    asked = TurnRequest(key("s"), as_tokens(PROMPT), answer=growing)
    task = asyncio.create_task(process.engine.run(asked, lambda: False, publish))
    await begun.wait()
    if not fenced:
        task.cancel()
    with pytest.raises(FencedError if fenced else asyncio.CancelledError):
        await task
    assert process.engine.num_running == 1, "the device still has its memory"
    return growing


@pytest.mark.parametrize("fenced", [True, False], ids=["ended by the fence", "ended by a cancel"])
async def test_a_session_erased_while_the_device_still_runs_its_cancelled_turn_leaves_no_kv(
    make_model, open_process, fenced
) -> None:
    model = Held(make_model("llama"))
    async with open_process(model, num_blocks=32) as process:
        growing = await abandoned(process, model, fenced=fenced)
        tokens = [*PROMPT, *growing.tokens]
        erased = await process.engine.erase(key("s"), as_tokens(tokens), 0)
        process.engine.forget(key("another"))  # the first one stays forgotten
        model.go_on.set()
        assert erased.settled
        await process.append(PROMPT[::-1], "other")  # the abandoned turn has ended before this one
        await until(lambda: not process.engine.num_running)
        assert len(growing.tokens) < 40
        assert await process.store.queue.drained(5)
        chain = process.store.kv.chain(key("s").tenant)
        assert process.store.kv.find(chain, tokens).num_tokens == 0
        assert process.engine.live_bytes(key("s"), as_tokens(tokens)) == 0


async def test_after_a_turn_is_cancelled_while_its_restore_waits_for_memory_its_snapshots_can_be_erased(
    make_model, open_process
) -> None:
    tokens, asked = [1 + i % 90 for i in range(12 * BLOCK + 3)], asyncio.Event()
    async with open_process(make_model("llama")) as process:
        engine = process.engine
        await process.append(tokens)
        assert await process.store.queue.drained(5)
        engine.forget(key("s"))
        engine.ledger.max_bytes = engine.size_bytes(len(tokens)) + 5000
        engine._device.reserve_room = lambda *_: asked.set()  # type: ignore[method-assign]  # a long step
        turn = asyncio.create_task(process.append([*tokens, 5]))
        await asyncio.wait_for(asked.wait(), 20)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert (await process.store.eraser.erase(key("s").tenant, pack(tokens))).settled
