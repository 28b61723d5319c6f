"""Status headers that a publisher sets on a result or a chunk are not mistaken for the NATS server's."""

from __future__ import annotations

import asyncio

import pytest
from raw_wire import Start, append, generate

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("status", ["404", "408", "500", "503", "204", "nonsense"])
async def test_forged_empty_results_and_chunks_with_a_status_header_stop_no_answer(
    wire: Start, status: str
) -> None:
    """A commit that fails because of a forged entry reads this entry and tries again, as often as needed."""
    w = await wire()
    await w.send("s", append("a"))
    seq = await w.publish("s", generate("b", text="eee", max_tokens=300))
    await w.until("s", "running")
    headers = {"Status": status, "Description": "made up"}
    for _ in range(3):
        ack = await w.js.publish(w.subject("s", "commit"), b"", headers=headers)
        w.forged.add(ack.seq)
    async with asyncio.timeout(20):
        assert (await w.result(seq))["type"] == "generated"
    assert (await w.send("s", append("c")))["type"] == "appended"
    for body in (b"", b"{}"):
        await w.js.publish(f"{w.prefix}.default.s.chunk.d", body, headers=headers)
    assert (await w.send("s", generate("d", text="x")))["type"] == "generated"
