"""Example programs of docs/protocol.md, run with a real worker."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

from raw_wire import Start, append, generate

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


async def test_the_documented_durable_consumer_gets_each_answer_once_across_its_restart(
    wire: Start, nats_url: str
) -> None:
    w = await wire()
    found = re.search(r"```python\n(.*?)```", PAGE[PAGE.index("### A durable consumer") :], re.DOTALL)
    assert found is not None
    program = found[1].replace("turnkeep_log", f"{w.prefix}_log").replace('"turnkeep.', f'"{w.prefix}.')
    await w.send("one", append("a"))
    seen: list[bytes] = []
    for session in ("one", "two"):
        result = await w.send(session, generate("g", text="x"))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"NATS_URL": nats_url},
        )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 20)
        assert line.startswith(f"{session} {result['seq']} {{'prompt_tokens'".encode())
        seen.append(line)
        async with asyncio.timeout(20):
            while (await w.js.consumer_info(f"{w.prefix}_log", "billing")).num_ack_pending:
                pass
        process.kill()
        await process.communicate()
    assert len(set(seen)) == 2
