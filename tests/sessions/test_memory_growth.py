"""Answers that exceed a real worker's memory while they run: they pause, and have the right content."""

from __future__ import annotations

import asyncio
import json

import pytest
from nats.aio.msg import Msg
from raw_wire import Start, append, generate

from tests.matrices import first

LENGTH = 700
#: The bytes of KV per token of the tiny model.
TOKEN_BYTES = 512


@pytest.mark.parametrize("snapshots", first(["keep", "off"]))
async def test_concurrent_answers_that_exceed_the_memory_equal_those_generated_one_at_a_time(
    wire: Start, snapshots: str
) -> None:
    """There are four answers of 700 tokens and an idle session, and memory for 1,100 tokens."""
    w = await wire(kv_bytes=1100 * TOKEN_BYTES, snapshots=snapshots)
    chunks: dict[str, list[dict]] = {}
    furthest: list[int] = []  # tokens of the longest answer as each one began

    async def heard(message: Msg) -> None:
        if message.data:
            name = message.subject.split(".")[-1]
            if name not in chunks:
                furthest.append(max((some[-1]["i"] for some in chunks.values()), default=0))
            chunks.setdefault(name, []).append(json.loads(message.data))

    await w.nc.subscribe(f"{w.prefix}.*.*.tok.*", cb=heard)
    await w.send("idle", append("a", "y" * 200))
    most_waiting = 0

    def body(i: int, name: str) -> dict:
        text = "once upon a time"[: 4 * (i + 1)]
        return generate(f"{name}{i}", text=text, max_tokens=LENGTH, temperature=1.0, seed=i)

    seqs = [await w.publish(f"s{i}", body(i, "together")) for i in range(4)]
    results = asyncio.gather(*(w.result(seq) for seq in seqs))
    while not results.done():
        info = await w.control("s0", {"type": "info"})
        most_waiting = max(most_waiting, info["worker"]["waiting_for_memory"])
        assert info["worker"]["resident_kv_bytes"] <= 1100 * TOKEN_BYTES
        await asyncio.sleep(0.01)
    assert most_waiting, "they did not fit together"
    assert furthest[1] < LENGTH // 2, "nor did one wait for all that another might need"
    for i, result in enumerate(await results):
        alone = await w.send(f"alone{i}", body(i, "alone"))
        assert (result["type"], result["finish_reason"]) == ("generated", alone["finish_reason"])
        assert result["tokens"] == alone["tokens"]
        assert result["usage"] == alone["usage"] | {
            name: result["usage"][name] for name in ("cached_tokens", "prefilled_tokens")
        }
        assert result["usage"]["cached_tokens"] + result["usage"]["prefilled_tokens"] == 4 * (i + 1)
        heard_tokens = [token for chunk in chunks[f"together{i}"] for token in chunk["tokens"]]
        assert heard_tokens == result["tokens"], "no token twice, none left out"
        assert "".join(chunk["text"] for chunk in chunks[f"together{i}"]) == result["text"]
