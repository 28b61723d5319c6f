"""Runs the core of a worker process: an engine, a device and an open store, without NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from tiny_models import BLOCK, GREEDY, answer, key, loaded

from cache.disk.codec import PLAIN, Codec
from cache.names.identity import Identity
from cache.names.policy import FULL, Policy
from cache.names.tokens import as_tokens
from cache.store import Store
from tests.at_rest import come_to_rest
from worker.batch.row_sampler import RowSampling
from worker.device.device import Device
from worker.device.request import TurnRequest
from worker.device.served_model import DeviceOptions
from worker.engine.engine import Engine
from worker.engine.ledger import Ledger
from worker.engine.port import TurnResult
from worker.models.model import LoadedModel
from worker.observe.telemetry import Telemetry

IDENTITY = Identity(weights="w", config="c", tokenizer="t", kv_dtype="float32", block_tokens=BLOCK)


class Recorded:
    """A model that records the bits of the logits from which answers are drawn."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.bits: list[bytes] = []

    def __call__(self, tokens: mx.array, cache: Any, **options: Any) -> mx.array:
        logits = self._model(tokens, cache=cache, **options)
        if tokens.shape[1] == 1:
            mx.eval(logits)
            self.bits.append(bytes(memoryview(logits).cast("B")))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Process:
    """A worker process reduced to an engine, a device and an open store."""

    def __init__(self, engine: Engine, store: Store, model: Recorded) -> None:
        self.engine = engine
        self.store = store
        self.model = model

    async def append(self, tokens: list[int], name: str = "s", policy: Policy = FULL) -> TurnResult:
        outcome = await self.engine.run(
            TurnRequest(key(name), as_tokens(tokens), policy=policy), lambda: False
        )
        assert outcome is not None
        return outcome

    async def generate(
        self,
        tokens: list[int],
        num: int,
        sampling: RowSampling = GREEDY,
        name: str = "s",
        policy: Policy = FULL,
    ) -> tuple[TurnResult, list[int], list[bytes]]:
        """Answer; return the turn's result, the tokens, and the bits of the logits of each token."""
        growing = answer(num)
        self.model.bits.clear()
        outcome = await self.engine.run(
            TurnRequest(key(name), as_tokens(tokens), answer=growing, sampling=sampling, policy=policy),
            lambda: False,
        )
        assert outcome is not None
        return outcome, growing.tokens, self.model.bits[-num:]


@asynccontextmanager
async def open_process(
    model: Any,
    directory: Path,
    *,
    queue_bytes: int = 1 << 28,
    max_bytes: int = 1 << 30,
    num_blocks: int = 1,
    limit_bytes: int | None = None,
    codec: Codec = PLAIN,
    trials: Path | None = None,
    load: Callable[[], LoadedModel] | None = None,
    stall_s: float = 0.25,
    max_batch: int = 4,
    **options: Any,
) -> AsyncIterator[Process]:
    """Run a `Process` on a snapshot directory, with blocks of `num_blocks` times `BLOCK` tokens.

    `load` loads the model on the device thread, in place of `model`. `options` are those of a `Device`.
    """
    recorded = Recorded(model)

    def load_recorded() -> LoadedModel:
        if load is None:
            return loaded(recorded)
        found = load()
        recorded._model = found.model
        return replace(found, model=recorded)

    block = num_blocks * BLOCK
    device = Device(
        load_recorded,
        lambda error: None,
        DeviceOptions(
            block_tokens=block,
            max_batch=max_batch,
            stall_s=stall_s,
            limit_bytes=limit_bytes,
            trials=trials,
            **options,
        ),
    )
    await asyncio.to_thread(device.start)
    assert device.served.unsupported_cache is None
    store = await Store.open(
        directory,
        identity=replace(IDENTITY, caches=device.served.caches, block_tokens=block),
        layout=device.served.layout,
        max_bytes=max_bytes,
        queue_bytes=queue_bytes,
        min_free_bytes=0,
        codec=codec,
    )
    engine = Engine(device, Ledger(1 << 30), store, Telemetry(), piece_tokens=block)
    device.cut_snapshots(store.queue.vacant_bytes, queue_bytes)
    try:
        yield Process(engine, store, recorded)
        await come_to_rest(engine, is_busy=lambda: bool(engine._runs))
    finally:
        assert await asyncio.to_thread(device.stop)
        assert await store.close()
