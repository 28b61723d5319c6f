"""Valid requests of each type, and what the protocol promises for them."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats.errors
import pytest
import structlog
from nats.js.errors import APIError
from raw_wire import LONG, PATIENCE_S, Start, append, generate

from tests.parts import TINY_KV_BYTES
from tests.simulation.world import Server
from turnkeep_client.client import Client
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import Metrics, decode_result
from turnkeep_client.subjects import SessionKey
from worker.sessions import cancelling
from worker.sessions.pending import PendingRequest
from worker.sessions.session import ServedSession
from worker.wire.consistent_reads import ConsistentReads
from worker.wire.fence import FencedError

pytestmark = pytest.mark.simulated


@pytest.fixture
async def client(wire: Start) -> Client:
    """A client of a worker with the usual settings."""
    started = await wire()
    client: Client = started.worker.client
    return client


async def seen(client: Client, is_it: Callable[[Metrics], bool]) -> Metrics:
    """Wait for a metrics message for which `is_it` is true; return it."""
    async with asyncio.timeout(20):
        async for metrics in client.metrics():
            if is_it(metrics):
                return metrics
    raise AssertionError("the metrics ended")


async def quiet(client: Client) -> Metrics:
    """Wait until no request runs and all snapshots are written; return the metrics."""
    return await seen(client, lambda m: m.running == m.snapshots.in_flight == 0 < m.snapshots.durable)


async def replicated(*_: Any) -> bool:
    return True


# Cancelling


@pytest.mark.real
async def test_a_cancelled_answer_keeps_its_tokens_and_the_next_answer_continues_the_same_text(
    client: Client,
) -> None:
    session = client.session("s")
    generation = session.generate(text="eee", max_tokens=1900)
    chunks = []
    async for chunk in generation:
        chunks.append(chunk)
        if len(chunks) == 3:
            assert (await generation.cancel()).was == "running"
    result = generation.result
    assert result.finish_reason == "cancelled"
    assert 3 <= len(result.tokens) < 1900
    assert result.tokens == tuple(token for chunk in chunks for token in chunk.tokens)
    assert result.text == "".join(chunk.text for chunk in chunks)
    assert result.position == 3 + len(result.tokens)
    alone = await client.session("whole").generate(text="eee", max_tokens=len(result.tokens) + 8)
    assert alone.tokens[: len(result.tokens)] == result.tokens
    # The same tokens as without the cancel. The last token of the cancelled answer has no KV yet.
    assert (await session.generate(max_tokens=8)).tokens == alone.tokens[len(result.tokens) :]


async def test_reading_a_page_of_the_log_leaves_out_removed_entries_that_a_lagging_replica_still_has(
    wire: Start, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = await wire()
    monkeypatch.setattr(ConsistentReads, "_is_replicated", replicated)
    result = await w.send("s", append("a"))
    key, journal = SessionKey("default", "s"), w.worker.app._parts.retention._journal
    await asyncio.sleep(1)
    server.faults.lag_s = 0.5
    assert (await journal.page(key, "in", 0))[0]
    await journal.remove(key, result["seq"] + 2)
    for _ in range(20):
        assert await journal.page(key, "in", 0) == ([], 0)


async def test_an_answer_ends_with_finish_reason_length_before_its_result_exceeds_the_message_limit(
    wire: Start,
) -> None:
    """The session keeps the streamed tokens and can continue."""
    w = await wire(max_message_bytes=8 * 1024)
    result = await w.send("s", generate("a", text="\x01\x02\x03", max_tokens=1900))
    assert (result["type"], result["finish_reason"]) == ("generated", "length")
    assert 400 < len(result["tokens"]) < 1900
    assert len(json.dumps(result)) < 8 * 1024
    assert (await w.send("s", generate("b")))["type"] == "generated"


@pytest.mark.parametrize("is_fenced", [False, True], ids=["not fenced", "fenced by the running request"])
async def test_a_cancel_is_confirmed_even_if_its_request_starts_to_run_at_the_same_time(
    wire: Start, monkeypatch: pytest.MonkeyPatch, *, is_fenced: bool
) -> None:
    """The session's task, not the cancel, then stores the request's result."""

    async def begun(session: ServedSession, pending: PendingRequest) -> bool:
        session.stop_active()
        await pending.done.wait()
        if is_fenced:
            raise FencedError("it was begun meanwhile")
        return False

    monkeypatch.setattr(cancelling, "_is_begun", begun)
    w = await wire()
    seq = await w.publish("s", generate("a", **LONG))
    told = await w.control("s", {"type": "cancel", "id": "a"})
    assert told == {"type": "cancelled", "id": "a", "was": "waiting"}
    assert (await w.result(seq))["finish_reason"] == "cancelled"


# How answers end


async def test_an_answer_has_at_most_max_tokens_tokens_for_any_max_tokens(client: Client) -> None:
    for most in (1, 2, 31, 32, 33):
        result = await client.session(f"s{most}").generate(text="eee", max_tokens=most)
        assert (result.finish_reason, len(result.tokens)) == ("length", most)


async def test_a_worker_with_an_idle_timeout_of_zero_does_not_keep_its_event_loop_busy(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps between two checks for idle sessions."""
    w = await wire(history_idle_timeout_s=0)
    client: Client = w.worker.client
    assert (await client.session("s").append(text="hello")).position == 5
    await seen(client, lambda m: m.sessions == 0)
    loop = asyncio.get_running_loop()
    looks: list[None] = []
    original = loop.call_soon

    def counted(*arguments: Any, **more: Any) -> Any:
        looks.append(None)
        return original(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "call_soon", counted)
        await asyncio.sleep(0.5)
    assert len(looks) < 5000
    assert (await client.session("s").append(text="hello")).position == 10


# Questions


async def test_an_info_request_returns_the_state_and_progress_of_a_running_and_of_an_idle_session(
    wire: Start,
) -> None:
    w = await wire()
    seqs = [await w.publish("s", generate("a", **LONG)), await w.publish("s", append("b"))]
    info = await w.until("s", "running")
    while not info.get("progress") or not info["progress"]["generated_tokens"] or not info["waiting"]:
        info = await w.control("s", {"type": "info"})
    assert (info["tenant"], info["session"], info["state"], info["active"]) == (
        "default",
        "s",
        "running",
        "a",
    )
    assert info["waiting"] == ["b"]
    assert (info["position"], info["progress"]["context_tokens"]) == (0, 3)
    assert 0 < info["progress"]["generated_tokens"] <= 1900
    assert info["worker"]["running"] == 1
    results = [await w.result(seq) for seq in seqs]
    info = await w.until("s", "idle")
    assert info["position"] == results[1]["position"] == 1908
    assert (info["active"], info["waiting"], info["progress"], info["requests"]) == (None, [], None, 2)
    assert info["resident"]
    assert (info["policy"], info["model"]) == ("full", "hashes")


@pytest.mark.real
async def test_the_metrics_of_a_worker_without_turns_have_the_memory_of_its_model(wire: Start) -> None:
    w = await wire(metrics_interval_s=0.1)
    metrics = await seen(w.worker.client, lambda one: one.mlx_active_bytes > 0)
    assert metrics.weight_bytes <= metrics.mlx_active_bytes <= metrics.mlx_peak_bytes


@pytest.mark.real
async def test_snapshot_counts_in_metrics_add_up_and_request_counts_match_the_answers(wire: Start) -> None:
    """Snapshots: `accepted = durable + sum(dropped) + failed + cancelled + in_flight`, in every message."""
    w = await wire(metrics_interval_s=0.1)
    client: Client = w.worker.client
    messages: list[Metrics] = []

    async def listen() -> None:
        async for metrics in client.metrics():
            messages.append(metrics)  # noqa: PERF401  # it is read while it grows

    listener = asyncio.create_task(listen())
    answers = await asyncio.gather(
        *(client.session(f"s{n}").generate(text="abc " * 40, max_tokens=40) for n in range(4))
    )
    with pytest.raises(RequestFailedError):
        await client.session("s1").rewind(10_000)
    await quiet(client)
    last = await seen(client, lambda m: "rewind" in m.requests)
    listener.cancel()
    for metrics in [*messages, last]:
        counts = metrics.snapshots
        settled = counts.durable + sum(counts.dropped.values()) + counts.failed + counts.cancelled
        assert counts.accepted == settled + counts.in_flight
        for histogram in (
            metrics.time_to_first_token,
            metrics.time_per_output_token,
            metrics.batch_size,
            metrics.event_loop_lag,
            metrics.queue_time,
            metrics.request_duration,
        ):
            assert len(histogram.counts) == len(histogram.bounds) + 1
            assert sum(histogram.counts) == histogram.count
            assert list(histogram.bounds) == sorted(histogram.bounds)
            assert histogram.sum >= 0
    assert last.requests["generate"] == {"ok": 4}
    assert last.requests["rewind"] == {"invalid_request": 1}
    assert last.generated_tokens == sum(answer.usage.completion_tokens for answer in answers)
    assert last.prefilled_tokens == sum(answer.usage.prefilled_tokens for answer in answers)
    assert last.cached_tokens == sum(answer.usage.cached_tokens for answer in answers)
    assert last.time_to_first_token.count == last.queue_time.count == last.request_duration.count == 4
    assert last.request_duration.sum >= last.queue_time.sum
    # The first token of an answer has no time per token, since the prompt's prefill precedes it.
    assert last.time_per_output_token.count == last.generated_tokens - len(answers)
    assert 0 < last.decoding_s <= last.time_per_output_token.sum, "each step counts once, whatever its rows"
    assert (last.running, last.waiting, last.sessions, last.resident_sessions) == (0, 0, 4, 4)
    assert last.resident_kv_bytes == sum(answer.kv_live_bytes for answer in answers) <= last.kv_limit_bytes
    assert last.snapshots.stored > 0
    assert last.snapshots.stored_bytes > last.snapshots.stored * TINY_KV_BYTES
    assert 0 < last.mlx_active_bytes <= last.mlx_peak_bytes
    assert last.process_bytes > 0


@pytest.mark.real
async def test_a_prefilled_request_that_lacks_a_place_in_the_batch_counts_as_waiting_until_its_first_token(
    wire: Start, endless_model: Path
) -> None:
    client: Client = (await wire(model=str(endless_model), max_batch=1)).worker.client
    first = client.session("first").generate(text="eee", max_tokens=30_000)
    chunks = aiter(first)
    await anext(chunks)
    second = asyncio.create_task(client.session("second").generate(text="abc", max_tokens=4).wait())
    metrics = await seen(client, lambda m: m.prefilled_tokens == 3 + 3 - 1)  # one token waits for a place
    assert (metrics.running, metrics.waiting, metrics.waiting_for_memory) == (1, 1, 0)
    await asyncio.sleep(0.5)
    await first.cancel()
    answer = await second
    assert 0.5 <= answer.seconds.queued <= answer.seconds.first_token
    metrics = await seen(client, lambda m: m.requests.get("generate") == {"ok": 2})
    assert metrics.queue_time.sum >= answer.seconds.queued


async def test_an_ask_request_interrupted_by_a_worker_stop_gets_an_error_and_is_answered_after_a_restart(
    wire: Start,
) -> None:
    w = await wire()
    asking = asyncio.create_task(
        w.nc.request(w.subject("s", "ask"), json.dumps(LONG).encode(), timeout=PATIENCE_S)
    )
    await w.until("s", "running")
    await w.worker.stop()
    told = json.loads((await asking).data)
    assert (told["type"], told["code"]) == ("failed", "overloaded")
    w = await wire()
    assert (await w.result(1))["type"] == "generated"


async def test_a_slow_ask_request_gets_a_reply_that_says_not_to_repeat_it_and_its_answer_is_stored(
    wire: Start,
) -> None:
    """Its answer goes on: another ask would be a second request."""
    w = await wire(token_ttl_s=0.2)
    told = await w.nc.request(w.subject("s", "ask"), json.dumps(LONG).encode(), timeout=PATIENCE_S)
    late = json.loads(told.data)
    assert (late["type"], late["code"], late["retryable"]) == ("failed", "overloaded", False)
    assert "comes on the session's out" in late["message"]
    assert (await w.result(1))["type"] == "generated"


# Who sees what


async def test_every_log_line_of_a_request_names_its_session_and_its_id(wire: Start) -> None:
    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as lines:
        w = await wire()
        started = len(lines)
        await w.send("s", append("a"))
        await w.send("s", generate("b"))
        await w.send("s", {"type": "rewind", "id": "c", "position": 10_000})
        await w.send("s", b"no request")
        running = await w.publish("s", generate("d", **LONG))
        await w.publish("s", append("e"))
        await w.until("s", "running")
        for request_id in ("e", "d"):
            await w.control("s", {"type": "cancel", "id": request_id})
        await w.result(running)
        await w.until("s", "idle")
        of_requests = lines[started:]
        await w.worker.stop()
    answered = [line for line in of_requests if line["event"] == "answered"]
    assert [line.get("request") for line in answered] == ["a", "b", "c", None, "e", "d"]
    for line in of_requests:
        assert line.get("session") == "default/s", line
        assert "request" in line, line


async def test_if_a_full_log_refuses_a_repeated_request_the_client_finds_the_result_of_the_first_request(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its acknowledgement is lost, and the log is full when the client sends it again."""
    publish, is_first = client._wire._jetstream.publish, True

    async def failing(*given: Any, **named: Any) -> Any:
        nonlocal is_first
        if not is_first:
            raise APIError(code=503, err_code=10077, description="maximum bytes exceeded")
        is_first, ack = False, await publish(*given, **named)
        await asyncio.sleep(5)  # it is answered
        await client.stored.delete(ack.seq)
        raise nats.errors.TimeoutError

    monkeypatch.setattr(client._wire._jetstream, "publish", failing)
    answer = await client.session("s").append(text="hello", timeout_s=20)
    (result,) = await client.log("s")
    assert (answer.seq, answer.tokens) == (decode_result(result.body).seq, 5)
