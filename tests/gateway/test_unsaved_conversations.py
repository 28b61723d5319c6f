"""A conversation whose KV stays off the disk, by a header of each API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnkeep_client.messages import SessionCache

Start = Any
UNSAVED = {"x-turnkeep-snapshots": "none"}
SAID = SessionCache(policy="full", snapshots="none")
HELLO = {"role": "user", "content": "Hello, this is long enough for some blocks of the cache. " * 4}


@pytest.fixture
async def worker(local_worker: Start, calling_model: Path) -> Any:
    return await local_worker(model=str(calling_model))


@pytest.fixture
async def served(worker: Any, door: Start) -> Any:
    return await door(worker.settings.nats, worker.settings.prefix)


def num_files(worker: Any) -> int:
    return len(list(worker.settings.data_dir.rglob("*.safetensors")))


async def chat(served: Any, messages: list[Any], headers: dict[str, str]) -> tuple[str, str, str]:
    """Send a conversation; return the answer, its session, and how that was found."""
    raw = await served.openai.chat.completions.with_raw_response.create(
        model="m", messages=messages, max_tokens=8, extra_headers=headers
    )
    name, how = raw.headers["x-turnkeep-session"].split()
    return raw.parse().choices[0].message.content or "", name, how


async def test_a_header_keeps_a_conversations_kv_off_the_disk(worker: Any, served: Any) -> None:
    """Its sessions are continued only by requests with the header; each key's request has it, too."""
    said, name, how = await chat(served, [HELLO], UNSAVED)
    assert how == "begun"
    assert (await worker.client.session(name).info()).cache == SAID
    more = [HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    assert (await chat(served, more, UNSAVED))[1:] == (name, "continued")
    _, fork, how = await chat(served, more, UNSAVED | {"Idempotency-Key": "k-1"})
    assert (await worker.client.session(fork).info()).cache == SAID
    _, alone, how = await chat(served, [HELLO], UNSAVED | {"Idempotency-Key": "k-2"})
    assert (await worker.client.session(alone).info()).cache == SAID
    raw = await served.openai.completions.with_raw_response.create(
        model="m", prompt=HELLO["content"], max_tokens=8, extra_headers=UNSAVED
    )
    assert raw.status_code == 200
    await worker.app._store.queue.drained(9.0)
    assert num_files(worker) == 0
    _, other, how = await chat(served, more, {})
    assert (other != name, how) == (True, "begun")
    assert (await worker.client.session(other).info()).cache != SAID


async def test_only_the_header_keeps_the_kv_of_a_response_off_the_disk(worker: Any, served: Any) -> None:
    """Agents send `store: false` with each request, and go on after a restart."""
    create = served.openai.responses.with_raw_response.create
    await create(model="m", input=[HELLO], max_output_tokens=8, store=False, extra_headers=UNSAVED)
    await worker.app._store.queue.drained(9.0)
    assert num_files(worker) == 0
    await create(model="m", input=[HELLO], max_output_tokens=8, store=False)
    await worker.stop()
    assert num_files(worker) > 0


async def test_another_value_of_the_header_is_refused(served: Any, http: Any) -> None:
    body = {"model": "m", "messages": [HELLO], "max_tokens": 2}
    refused = await http.post("/v1/chat/completions", json=body, headers={"x-turnkeep-snapshots": "off"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "x-turnkeep-snapshots can only be none"
