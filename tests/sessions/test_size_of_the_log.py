"""How many messages a turn writes, and how many bytes of the log it takes."""

from __future__ import annotations

from collections import Counter

import pytest
from raw_wire import Start, generate

from tests.simulation import device
from tests.simulation.world import Server

TURNS = 100
MAX_TOKENS = 32


@pytest.mark.simulated
async def test_the_log_of_100_turns_has_a_request_and_a_result_each_and_at_most_191_kilobytes(
    wire: Start, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CONTEXT", 100_000)
    w = await wire()
    question = {"role": "user", "content": "And what would you say about the second point of it?"}
    for number in range(TURNS):
        result = await w.send("s", generate(f"g{number}", messages=[question], max_tokens=MAX_TOKENS))
        assert len(result["tokens"]) == MAX_TOKENS
    log, chunks = (server.jetstream.streams[f"turnkeep_{name}"] for name in ("log", "tok"))
    kinds, sizes = Counter[str](), Counter[str]()
    for one in log.matching("turnkeep.default.s.>"):
        kind = one.subject.rpartition(".")[2]
        kinds[kind] += 1
        sizes[kind] += one.size_bytes
    assert kinds == {"in": TURNS, "out": TURNS}
    assert sizes.total() <= 191_000, sizes
    assert len(chunks.matching("turnkeep.default.s.tok.>")) <= TURNS * (MAX_TOKENS + 1), (
        "the last one ends it"
    )
