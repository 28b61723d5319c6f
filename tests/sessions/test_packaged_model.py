"""The packaged model over NATS: answers a question, and reports the exact size of its KV."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client as Nats

pytestmark = [pytest.mark.model, pytest.mark.process]

BLOCK = 128
#: 30 layers, keys and values of 3 heads of 64 float32 numbers.
KV_BYTES = 30 * 2 * 3 * 64 * 4


@pytest.fixture
def process(worker_process: Callable[..., Any], packaged_folder: Path, tmp_path: Path) -> Any:
    """A worker without a model setting, whose data directory has the converted packaged model."""
    models = tmp_path / "data" / "models"
    models.mkdir(parents=True)
    (models / packaged_folder.name).symlink_to(packaged_folder)
    process = worker_process(model=None)
    process.start()
    return process


@pytest.fixture
async def nc(process: Any) -> AsyncIterator[Nats]:
    """A plain NATS connection to the worker's server, opened when the worker is ready."""
    while '"event": "ready"' not in process.log:
        assert process.running
        await asyncio.sleep(0.05)
    nc = await nats.connect(process.url)
    yield nc
    await nc.close()


async def ask(nc: Nats, kind: str, body: dict[str, Any], session: str = "s") -> dict[str, Any]:
    reply = await nc.request(f"turnkeep.default.{session}.{kind}", json.dumps(body).encode(), timeout=180)
    found: dict[str, Any] = json.loads(reply.data)
    return found


async def request(nc: Nats, body: dict[str, Any], session: str = "s") -> dict[str, Any]:
    """Publish a request to the log, and wait for its result on `out`."""
    results = await nc.subscribe(f"turnkeep.default.{session}.out")
    ack = await nc.jetstream().publish(f"turnkeep.default.{session}.in", json.dumps(body).encode())
    while True:
        result: dict[str, Any] = json.loads((await results.next_msg(timeout=180)).data)
        if result["seq"] == ack.seq:
            await results.unsubscribe()
            return result


async def test_the_packaged_model_answers_a_question_and_continues_a_session_after_a_kill(
    process: Any, nc: Nats
) -> None:
    """By NATS messages without the client. The session has 600 tokens, and its KV sizes are checked too."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = await ask(nc, "ask", {"messages": question, "max_tokens": 40})
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert_kv(answer)

    await request(nc, {"type": "open", "id": "o"}, "long")
    info = await ask(nc, "ctl", {"type": "info"}, "long")
    assert (info["position"], info["kv_live_bytes"]) == (0, 0)
    added = await request(nc, {"type": "append", "id": "a", "text": STORY}, "long")
    assert added["position"] >= 600
    assert_kv(added)
    begun = {"type": "generate", "id": "g", "max_tokens": 8, "text": " And then"}
    before = await request(nc, begun, "long")
    assert_kv(before)

    in_flight = 1
    while in_flight:  # what the disk does not have yet is lost with the process
        await asyncio.sleep(0.05)
        in_flight = (await ask(nc, "ctl", {"type": "info"}, "long"))["worker"]["snapshots"]["in_flight"]
    process.lose_worker()
    process.go_on()
    news = {"type": "generate", "id": "h", "max_tokens": 8, "text": " But in the end"}
    after = await request(nc, news, "long")
    num_new = after["usage"]["prompt_tokens"] - before["position"]
    assert after["usage"]["prefilled_tokens"] <= BLOCK + num_new + 1
    assert_kv(after)

    whole = await request(nc, {"type": "append", "id": "a", "text": STORY}, "alone")
    assert whole["prefilled_tokens"] <= 1, "the same beginning is shared by all sessions of the tenant"
    for turn in (begun, news):
        expected = await request(nc, turn, "alone")
    assert expected["tokens"] == after["tokens"]


def assert_kv(result: dict[str, Any]) -> None:
    """Assert that the KV has the size of all the session's tokens, or of all but the last."""
    num_tokens, rest = divmod(result["kv_live_bytes"], KV_BYTES)
    assert rest == 0
    assert result["position"] - 1 <= num_tokens <= result["position"]


STORY = "".join(
    f" On day {day} the ship sailed past island number {day * 7 % 31}, and the captain counted the birds."
    for day in range(29)
)
