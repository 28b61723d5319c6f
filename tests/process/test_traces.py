"""A worker sends spans of its turns to a collector: complete, without text, and without delaying turns."""

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from otlp_receiver import Receiver
from structlog.testing import capture_logs

from turnkeep_client.errors import RequestFailedError
from worker.observe.otlp import Traces
from worker.observe.traces import Phase, TurnTimes
from worker.observe.tracing import TracesError

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE_ID, SPAN_ID = PARENT.split("-")[1:3]
#: Longer than a block of 32 tokens, so that there is KV to restore.
TEXT = "What is purple, and why do so few flags have it? "


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.close()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


async def test_the_trace_of_a_client_contains_its_turn_as_a_span_with_the_turns_phases_as_child_spans(
    local_worker: Callable[..., Awaitable[Any]], receiver: Receiver
) -> None:
    worker = await local_worker(otlp_endpoint=receiver.url)
    headers: dict[str, str] = {}
    with TracerProvider().get_tracer("agent").start_as_current_span("step") as step:
        TraceContextTextMapPropagator().inject(headers)
    before_ns = time.time_ns()
    said = await worker.client.session("garden").generate(
        messages=[{"role": "user", "content": TEXT}], max_tokens=40, headers=headers
    )
    after_ns = time.time_ns() + 10**9  # the result is out before the turn is over
    await worker.stop()

    (turn,) = receiver.turns()
    assert receiver.paths == ["/v1/traces"]
    assert turn.name == "chat tiny"
    assert turn.trace_id == f"{step.get_span_context().trace_id:032x}"
    assert turn.parent_id == f"{step.get_span_context().span_id:016x}"
    assert turn.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "turnkeep",
        "gen_ai.request.model": "tiny",
        "gen_ai.conversation.id": "garden",
        "gen_ai.usage.input_tokens": said.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": said.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": [said.finish_reason],
        "turnkeep.tenant": "default",
        "turnkeep.seq": said.seq,
    }
    assert turn.resource["service.name"] == "turnkeep"
    assert turn.resource["service.instance.id"] == "test"
    assert before_ns - 10**6 <= turn.start_ns < turn.end_ns <= after_ns  # the log's time has microseconds

    parts = receiver.children(turn)
    assert set(parts) == {"queue", "kv_search", "prefill", "decode", "snapshot"}
    assert {span.trace_id for span in parts.values()} == {turn.trace_id}
    assert all(turn.start_ns <= span.start_ns <= span.end_ns <= turn.end_ns for span in parts.values())
    assert parts["queue"].start_ns == turn.start_ns
    in_order = [parts[name] for name in ("queue", "kv_search", "prefill", "decode")]
    assert all(one.end_ns <= next_.start_ns for one, next_ in itertools.pairwise(in_order))
    assert parts["prefill"].attributes["turnkeep.tokens"] == said.usage.prefilled_tokens
    assert parts["decode"].attributes["turnkeep.tokens"] == said.usage.completion_tokens
    assert parts["decode"].start_ns <= parts["snapshot"].start_ns


async def test_the_trace_span_of_an_append_after_a_restart_shows_the_number_of_restored_tokens(
    local_worker: Callable[..., Awaitable[Any]], receiver: Receiver
) -> None:
    worker = await local_worker()
    await worker.client.session("garden").append(text=TEXT * 2)
    await worker.stop()
    worker = await local_worker(otlp_endpoint=receiver.url)
    more = await worker.client.session("garden").append(text="And blue?")
    await worker.stop()
    (turn,) = receiver.turns()
    parts = receiver.children(turn)
    assert (turn.name, turn.parent_id) == ("append tiny", "")
    assert turn.attributes["gen_ai.usage.cache_read.input_tokens"] == more.cached_tokens > 0
    assert parts["restore"].attributes["turnkeep.tokens"] == more.cached_tokens
    assert parts["kv_search"].end_ns <= parts["restore"].start_ns
    assert parts["restore"].end_ns <= parts["prefill"].start_ns
    assert "decode" not in parts


async def test_trace_spans_contain_no_text_of_the_conversation(
    local_worker: Callable[..., Awaitable[Any]], receiver: Receiver
) -> None:
    worker = await local_worker(otlp_endpoint=receiver.url)
    garden = worker.client.session("garden")
    await garden.generate(messages=[{"role": "user", "content": "purple flags"}], stop=["purple"])
    with pytest.raises(RequestFailedError):
        await garden.generate(messages=[{"role": "user", "content": "purple flags"}] * 200)
    with pytest.raises(RequestFailedError):
        await garden.append(text="purple", expect_position=3)
    await worker.stop()
    assert [span.attributes.get("error.type") for span in receiver.turns()] == [
        None,
        "context_exceeded",
        "position_conflict",
    ]
    assert [span.is_error for span in receiver.turns()] == [False, True, True]
    assert not any(b"purple" in body for body in receiver.bodies)


async def test_a_malformed_trace_header_starts_a_new_trace_and_an_unsampled_header_makes_no_span(
    local_worker: Callable[..., Awaitable[Any]], receiver: Receiver
) -> None:
    """A repeated request has a span of its own, which names the first request."""
    worker = await local_worker(otlp_endpoint=receiver.url)
    garden = worker.client.session("garden")
    bad = ["", "00", "x" * 5000, PARENT[:-1], PARENT + "é", f"00-{'0' * 32}-{SPAN_ID}-01", "ff" + PARENT[2:]]
    for value in bad:
        await garden.append(text="a", headers={"traceparent": value, "tracestate": "=,=;é"})
    await garden.append(text="a", headers={"traceparent": PARENT[:-1] + "0"})
    sent = {"Traceparent": PARENT, "TraceState": "vendor=7"}
    first = await garden.append(text="a", request_id="one", headers=sent)
    sent["Traceparent"] = PARENT.replace("4bf9", "aaaa")
    again = await garden.append(text="a", request_id="one", headers=sent)
    await worker.stop()
    *turns, one, two = receiver.turns()
    assert len(turns) == len(bad)
    assert {span.parent_id for span in turns} == {""}
    assert len({span.trace_id for span in (*turns, one, two)}) == len(bad) + 2
    assert (one.trace_id, one.parent_id, one.state) == (TRACE_ID, SPAN_ID, "vendor=7")
    assert two.trace_id == TRACE_ID.replace("4bf9", "aaaa")
    assert (again.repeat_of, two.attributes["turnkeep.repeat_of"]) == (first.seq, first.seq)
    assert set(receiver.children(two)) == {"queue"}


async def test_the_trace_span_of_a_request_on_the_ask_subject_is_a_child_of_the_clients_span(
    local_worker: Callable[..., Awaitable[Any]], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nats

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)  # as well as the setting
    monkeypatch.setenv("OTEL_SERVICE_NAME", "garden-worker")
    worker = await local_worker()
    nc = await nats.connect(worker.settings.nats)
    subject = f"{worker.settings.prefix}.default.garden.ask"
    body = json.dumps({"text": "a", "max_tokens": 2}).encode()
    await nc.request(subject, body, timeout=20, headers={"traceparent": PARENT, "Nats-Msg-Id": "x"})
    await nc.close()
    await worker.stop()
    (turn,) = receiver.turns()
    assert (turn.name, turn.parent_id) == ("text_completion tiny", SPAN_ID)
    assert turn.resource["service.name"] == "garden-worker"


async def test_turns_succeed_while_the_trace_collector_is_down_and_spans_arrive_once_the_collector_is_back(
    local_worker: Callable[..., Awaitable[Any]], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with capture_logs() as logs:
        worker = await local_worker(otlp_endpoint=receiver.url)
        garden = worker.client.session("garden")
        await garden.append(text="a")
        await asyncio.to_thread(receiver.wait_for, 1)
        receiver.close()
        await garden.append(text="b")
        while not (lost := [line for line in logs if "spans are lost" in line["event"]]):
            await garden.append(text="c")
        again = Receiver(receiver.port)
        while not again.turns():
            await garden.append(text="d")
            await asyncio.sleep(0.05)
        await worker.stop()
        again.close()
    assert lost[0]["why"]
    told = [line for line in logs if "spans" in line["event"] and line["log_level"] == "warning"]
    assert [line["event"].split(" ")[0] for line in told] == ["spans", "the"]


def test_turns_do_not_wait_for_a_hanging_trace_collector_and_lost_spans_are_logged(
    receiver: Receiver,
) -> None:
    """More spans are made than fit into the queue."""
    taken, done = threading.Event(), threading.Event()
    take = receiver.take

    def hang(path: str, body: bytes) -> None:
        taken.set()
        done.wait(30)
        take(path, body)

    receiver.take = hang  # type: ignore[method-assign]
    traces, waited = Traces(receiver.url, {}), [Phase("queue", 0.0, 1.0)]
    with capture_logs() as logs:
        traces.add(TurnTimes("chat m", {}, {}, waited, 0.1, time.monotonic()))
        assert taken.wait(20)
        for _ in range(5000):  # of two spans
            traces.add(TurnTimes("chat m", {}, {}, waited, 0.1, time.monotonic()))
        assert not done.is_set()
        done.set()
        receiver.wait_for(1 + 8192 // 2)
        traces.stop()
    assert ["takes spans again; some are lost" in line["event"] for line in logs] == [True]


def test_stopping_does_not_wait_for_a_hanging_trace_collector_and_logs_that_spans_are_lost(
    receiver: Receiver,
) -> None:
    taken, done = threading.Event(), threading.Event()
    receiver.take = lambda *_: (taken.set(), done.wait(30))  # type: ignore[assignment, func-returns-value]
    traces = Traces(receiver.url, {})
    with capture_logs() as logs:
        traces.add(TurnTimes("chat m", {}, {}, [Phase("queue", 0.0, 1.0)], 0.1, time.monotonic()))
        assert taken.wait(20)
        traces.stop()
        assert not done.is_set()
    done.set()
    assert ["are lost" in line["event"] for line in logs] == [True]


@pytest.fixture
def sdk_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Make OpenTelemetry fail to import in child processes; the returned function says if one tried."""
    folder, mark = tmp_path / "path" / "opentelemetry", tmp_path / "imported"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nraise ImportError('no opentelemetry')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    return mark.exists


@pytest.mark.process
async def test_opentelemetry_is_imported_only_if_a_trace_collector_is_configured(
    worker_process: Callable[..., Any], sdk_wanted: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_process()
    worker.forks = False  # a process that has imported nothing yet
    worker.start()
    async with await worker.client() as client:
        await client.session("s").generate(text="a", max_tokens=2, headers={"traceparent": PARENT})
    assert worker.stop() == 0
    assert not sdk_wanted()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    worker.start()
    async with await worker.client() as client:
        await client.session("s").append(text="a")
    assert worker.stop() == 0
    assert sdk_wanted()
    assert len(re.findall(r"pip install -e '\.\[traces\]'", worker.log)) == 1


async def test_a_worker_with_a_trace_collector_but_without_the_opentelemetry_library_fails_to_start(
    local_worker: Callable[..., Awaitable[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "worker.observe.otlp", None)
    with pytest.raises(TracesError, match=r"otlp_endpoint: .* missing; pip install 'turnkeep\[traces\]'"):
        await local_worker(otlp_endpoint="http://127.0.0.1:1")
