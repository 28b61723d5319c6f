"""Tests of what may differ on a GPU: models in 16 and 4 bits, hybrids, windows, restores beside answers.

The tests pass on every device. In 16 bits, rows that run together may round otherwise than alone, so answers
are compared with answers that ran in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from architectures import build
from engine_process import Process, open_process
from tiny_models import BLOCK, key, prompt

from worker.device import machine

pytestmark = pytest.mark.metal

KINDS = ["llama", "qwen3_moe", "qwen3_next", "gemma3_text", "qwen3_moe in 4 bits"]
#: On a CPU the machine of sessions watches the others.
HERE = KINDS[-1:] if mx.default_device() == mx.cpu else KINDS


@pytest.fixture(params=HERE)
def open_model(request, tmp_path, trials) -> Callable[[], AbstractAsyncContextManager[Process]]:
    """Return a function that runs a `Process` with weights as a worker loads them on this device."""
    kind, _, packed = request.param.partition(" in ")
    model = build(kind)
    if not machine.on_cpu():
        model.set_dtype(mx.bfloat16)
    if packed:
        nn.quantize(model, 32, 4, class_predicate=lambda _, module: _is_divisible(module, 32))
    mx.eval(model.parameters())
    return lambda: open_process(model, tmp_path, num_blocks=2, trials=trials)


def _is_divisible(module: Any, group: int) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0


async def test_the_same_prompt_gets_the_same_answer_in_two_sessions(open_model) -> None:
    async with open_model() as process:
        _, first, bits = await process.generate(prompt(5 * BLOCK), 12, name="one")
        _, again, _ = await process.generate(prompt(5 * BLOCK), 12, name="two")
    assert first == again
    types = {2: np.uint16, 4: np.float32}
    logits = np.frombuffer(bits[-1], types[len(bits[-1]) // 96])
    assert (logits != logits[0]).any()
    exponents = 0x7F80 if logits.dtype == np.uint16 else None  # all ones in a bfloat16 that is not finite
    assert np.isfinite(logits).all() if exponents is None else ((logits & exponents) != exponents).all()


async def test_sessions_restored_beside_a_running_answer_get_the_same_tokens(open_model) -> None:
    texts = [prompt(6 * BLOCK + n, salt=n + 2) for n in range(4)]
    async with open_model() as before:
        expected = [(await before.generate(text, 8, name=f"s{n}"))[1] for n, text in enumerate(texts)]
        _, long, _ = await before.generate(prompt(20), 80, name="long")
        assert await before.store.queue.drained(10)
    async with open_model() as after:
        answer = asyncio.create_task(after.generate(prompt(20, salt=3), 80, name="new"))
        for _ in range(3):
            for n, text in enumerate(texts):
                outcome, tokens, _ = await after.generate(text, 8, name=f"s{n}")
                assert tokens == expected[n]
                assert outcome.num_prefilled <= 2 * BLOCK + 1
                after.engine.forget(key(f"s{n}"))
        _, said, _ = await answer
    assert len(said) == len(long) == 80
