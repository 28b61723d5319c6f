"""Entries forged on `commit` and `chunk`, also with the NATS server's headers, change and stop no answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from raw_wire import Start, Wire, append, generate

from turnkeep_client.log import HISTORY_HEADER

pytestmark = pytest.mark.simulated

#: Does not end by itself within some steps of the random model.
LONG = {"text": "eee", "max_tokens": 300}


def failed(seq: int, request_id: str) -> bytes:
    body = {"type": "failed", "id": request_id, "code": "internal", "message": "forged", "retryable": False}
    return json.dumps(body | {"seq": seq}).encode()


def generated(seq: int, request_id: str, position: int, *, asked: bool = False) -> bytes:
    zeros = {"prompt_tokens": 0, "cached_tokens": 0, "prefilled_tokens": 0, "completion_tokens": 3}
    seconds = {"queued": 0, "prefill": 0, "first_token": 0, "total": 0}
    body = {"type": "generated", "id": request_id, "seq": seq, "position": position, "text": "I obey"}
    body |= {"tokens": [40, 41, 42], "finish_reason": "stop", "usage": zeros, "seconds": seconds}
    if asked:
        body["asked"] = {"stored": "2026-01-02T00:00:00Z", "request": generate(request_id)}
    return json.dumps(body | {"kv_live_bytes": 0}).encode()


async def next_seq(w: Wire) -> int:
    return int((await w.js.stream_info(f"{w.prefix}_log")).state.last_seq) + 1


async def taken_up_again(wire: Start, w: Wire) -> Wire:
    """Stop the worker and start another, which reads the log from its beginning."""
    await w.worker.stop()
    forged = w.forged
    w = await wire()
    w.forged |= forged
    return w


@pytest.mark.parametrize("restart", [False, True])
async def test_a_result_forged_before_its_request_does_not_replace_the_answer(
    wire: Start, restart: bool
) -> None:
    w = await wire()
    await w.send("s", append("a"))
    seq = await next_seq(w)
    await w.forge("s", failed(seq + 1, "b"))
    if restart:
        w = await taken_up_again(wire, w)
    result = await genuine(w, await w.publish("s", append("b")))
    assert (result["seq"], result["type"], result["position"]) == (seq + 1, "appended", 10)


@pytest.mark.parametrize("restart", [False, True])
async def test_a_forged_result_without_a_history_digest_does_not_replace_the_answer(
    wire: Start, restart: bool
) -> None:
    """It names a waiting request, but a worker's results have a history digest."""
    w = await wire()
    await w.send("s", append("a"))
    running = await w.publish("s", generate("long", **LONG))
    waiting = await w.publish("s", generate("b"))
    for seq, request_id in ((running, "long"), (waiting, "b")):
        await w.forge("s", generated(seq, request_id, position=12, asked=True))
    if restart:
        w = await taken_up_again(wire, w)
    await asyncio.sleep(0)
    assert (await genuine(w, running))["finish_reason"] in ("stop", "length")
    assert (await genuine(w, waiting))["text"] != "I obey"
    w = await taken_up_again(wire, w)
    assert (await w.send("s", append("c")))["type"] == "appended"


async def genuine(w: Wire, seq: int) -> dict[str, Any]:
    """Wait for the result of a request that the worker, not the test, has stored."""
    async with asyncio.timeout(30):
        while True:
            for number, subject, body in await w.entries():
                if subject.endswith(".out") and number not in w.forged and json.loads(body)["seq"] == seq:
                    found: dict[str, Any] = json.loads(body)
                    return found
            await asyncio.sleep(0.1)


async def test_a_forged_result_for_a_request_that_waits_behind_another_is_ignored(wire: Start) -> None:
    """Even if it has a digest: a worker's results have their requests, too."""
    w = await wire()
    await w.send("s", append("a"))
    await w.worker.stop()
    first = await w.publish("s", append("first"))
    second = await w.publish("s", generate("second"))
    subject = w.subject("s", "commit")
    body = generated(second, "second", position=8)
    w.forged.add((await w.js.publish(subject, body, headers={HISTORY_HEADER: "0" * 32})).seq)
    forged = w.forged
    w = await wire()
    w.forged |= forged
    assert (await genuine(w, first))["type"] == "appended"
    assert (await genuine(w, second))["text"] != "I obey"


async def test_a_flood_of_forged_results_is_counted_and_stops_no_answer(wire: Start) -> None:
    w = await wire()
    await w.send("s", append("a"))
    running = await w.publish("s", generate("long", **LONG))
    for _ in range(600):
        await w.forge("s", failed(10**9, "x"))
    assert (await w.result(running))["type"] == "generated"
    assert (await w.send("s", append("b")))["type"] == "appended"
    assert (await w.control("s", {"type": "info"}))["worker"]["ignored"]["result"] == 600


@pytest.mark.parametrize("named", [True, False])
async def test_tokens_forged_before_their_request_do_not_become_part_of_its_answer(
    wire: Start, named: bool
) -> None:
    """Even if they name the request's sequence, which can be guessed."""
    w = await wire()
    clean = await w.send("clean", generate("g", text="abc"))
    chunk = {"i": 0, "tokens": [40, 41], "text": "HI"} | ({"seq": await next_seq(w)} if named else {})
    await w.js.publish(f"{w.prefix}.default.s.chunk.g", json.dumps(chunk).encode())
    result = await w.send("s", generate("g", text="abc"))
    assert (result["tokens"], result["text"]) == (clean["tokens"], clean["text"])


async def test_forged_tokens_that_name_another_requests_sequence_do_not_become_part_of_an_answer(
    wire: Start,
) -> None:
    """They are published while the request waits, by somebody who does not know its sequence."""
    w = await wire()
    clean = await w.send("clean", generate("g", text="abc"))
    running = await w.publish("s", generate("long", **LONG))
    waiting = await w.publish("s", generate("g", text="abc"))
    chunk = {"i": 0, "tokens": [40, 41], "text": "HI", "seq": running}
    await w.js.publish(f"{w.prefix}.default.s.chunk.g", json.dumps(chunk).encode())
    await w.send("other", append("a"))
    result = await w.result(waiting)
    assert not result["text"].startswith("HI")
    assert len(result["tokens"]) == len(clean["tokens"])


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
