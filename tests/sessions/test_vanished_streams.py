"""Somebody deletes the token stream or the consumer while a worker runs: the worker creates it again."""

from __future__ import annotations

import asyncio

import pytest
from raw_wire import Start, generate

from turnkeep_client.subjects import CONSUMER
from worker.wire import streams


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_KEEP_S", 0.1)


@pytest.mark.parametrize("what", ["consumer", "token stream"])
async def test_a_worker_creates_a_deleted_consumer_or_token_stream_again(wire: Start, what: str) -> None:
    w = await wire()
    first = await w.send("s", generate("a", text="one", max_tokens=2))
    if what == "consumer":
        await w.js.delete_consumer(f"{w.prefix}_log", CONSUMER)
    else:
        await w.js.delete_stream(f"{w.prefix}_tok")
    await asyncio.sleep(0.5)
    second = await w.send("s", generate("b", text="two", max_tokens=2))
    assert second["position"] == first["position"] + 5
