"""The page about the protocol tells the truth where a test can tell."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from scripted_worker import KEY, TEXTS, FakeWorker, NatsServer

from turnkeep_client.errors import ERROR_CODES, RETRYABLE
from turnkeep_client.messages import Append, Close, Generate, Message, Open, Rewind

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


async def test_the_example_runs_as_it_is_written(server: NatsServer, worker: FakeWorker) -> None:
    """With raw nats-py and nothing of ours; only the address and the session's name are the test's."""
    found = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    program = (
        found[1]
        .replace("nats://127.0.0.1:4222", server.url)
        .replace("default.demo", f"default.{KEY.session}")
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert err == b""
    assert out.decode().startswith("".join(TEXTS) + "\n generated {'prompt_tokens': 3")
    asked = Generate(
        id="turn-1", max_tokens=32, messages=(Message(role="user", content="Name three primes."),)
    )
    assert [request for _, request in worker.requests] == [asked]


def test_every_error_code_stands_there_with_its_retryable() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \|", PAGE, re.MULTILINE)
    assert dict(rows) == {code: "yes" if code in RETRYABLE else "no" for code in ERROR_CODES}


def test_every_field_of_every_request_stands_there() -> None:
    for kind in (Open, Append, Generate, Rewind, Close):
        for field in (kind.__struct_config__.tag, *kind.__struct_fields__):
            assert f"`{field}`" in PAGE, (kind, field)
