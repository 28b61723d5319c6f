"""One tenant's flood, or answers that exceed the memory: others are answered, and memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from raw_wire import LONG, Start, Wire, append, generate

from tests.matrices import first
from tests.parts import until
from worker.cluster import endpoints
from worker.process.setting_kinds import TenantLimits
from worker.sessions.fold import Fold
from worker.sessions.history import TokenHistory
from worker.sessions.record import Record
from worker.sessions.session import ServedSession
from worker.sessions.session_log import FencedLog
from worker.wire import consistent_reads, intake

pytestmark = pytest.mark.simulated


#: Ten times as many sessions as the worker has in memory at a time.
MAX_SESSIONS = 8
NUM_FLOOD = 80


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the worker read and pull few requests at a time, and get returned requests again soon."""
    monkeypatch.setattr(consistent_reads, "_BATCH", 8)
    monkeypatch.setattr(intake, "_FETCH", 8)
    monkeypatch.setattr(intake, "_RETURN_S", 0.1)


async def answered_before(wire: Wire, seq: int, tenant: str) -> int:
    """Count a tenant's results that the log has before the result of the request at `seq`."""
    count = 0
    for _, subject, body in await wire.entries():
        if not subject.endswith(".out"):
            continue
        if json.loads(body)["seq"] == seq:
            return count
        count += subject.split(".")[-3] == tenant
    raise AssertionError("there is no such result")


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("num_sessions", [1, NUM_FLOOD])
async def test_a_tenants_request_is_answered_before_half_of_another_tenants_flood_is_answered(
    wire: Start, num_sessions: int
) -> None:
    """Whether the flood is in one session or in many."""
    one = await wire(max_waiting=MAX_SESSIONS, tenants=TenantLimits(sessions=MAX_SESSIONS // 2))
    await one.send("s", append("warm"), tenant="quiet")
    flood = [
        await one.publish(f"s{n % num_sessions}", generate(f"r{n}", text="eee", max_tokens=20), tenant="loud")
        for n in range(NUM_FLOOD)
    ]
    mine = await one.publish("s", generate("mine"), tenant="quiet")
    assert (await one.result(mine))["type"] == "generated"
    before = await answered_before(one, mine, "loud")
    for seq in flood:
        assert (await one.result(seq))["type"] == "generated"
    assert before < NUM_FLOOD // 2
    await one.check_log()


async def test_while_another_tenant_is_active_a_flooding_tenant_soon_has_at_most_one_running_answer(
    wire: Start,
) -> None:
    """So the other tenant's steps are short, and most of the flood waits in the log."""
    one = await wire(max_batch=4)
    await one.send("s", append("warm"), tenant="quiet")
    flood = [
        await one.publish(f"s{n}", generate("r", text="eee", max_tokens=60), tenant="loud")
        for n in range(NUM_FLOOD)
    ]
    running, number = NUM_FLOOD, 0
    while running > 1:
        number += 1
        assert (await one.send("s", generate(f"r{number}"), tenant="quiet"))["type"] == "generated"
        running = (await one.control("s", {"type": "info"}, tenant="quiet"))["worker"]["running"]
    assert len(one.results) - 1 - number < NUM_FLOOD // 2
    for seq in flood:
        assert (await one.result(seq))["type"] == "generated"


async def test_a_short_answer_does_not_wait_for_long_answers_of_its_own_tenant(wire: Start) -> None:
    """The tenant's long answers, which run for minutes, occupy all rows of the batch."""
    one = await wire(max_batch=2)
    for n in range(12):
        await one.publish(f"s{n}", generate("r", **LONG))
    while (await one.control("s", {"type": "metrics"}))["running"] < 8:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert (await one.send("short", generate("r", text="eee", max_tokens=3)))["type"] == "generated"
    assert len(one.results) == 1
    for n in range(12):
        await one.control(f"s{n}", {"type": "cancel", "id": "r"})


async def test_a_worker_that_stops_reads_no_further_waiting_sessions_from_the_log(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would read all sessions of a flood, and answer none."""
    fold, folded = FencedLog._read_log, 0

    async def counted(log: FencedLog, record: Record) -> None:
        nonlocal folded
        folded += 1
        await fold(log, record)

    monkeypatch.setattr(FencedLog, "_read_log", counted)
    one = await wire(max_batch=1)
    for n in range(NUM_FLOOD):
        await one.publish(f"s{n}", generate("r", **LONG))
    await until(lambda: folded >= 4)
    await one.worker.stop()
    assert folded == 4
    two = await wire(max_batch=4)
    for n in range(NUM_FLOOD):
        await two.control(f"s{n}", {"type": "cancel", "id": "r"})


@pytest.mark.usefixtures("_small")
async def test_a_request_that_waits_for_its_tenants_room_does_not_wait_for_another_tenants_flood(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker returns both to the log; those of the flood come again one after another."""
    monkeypatch.setattr(intake, "_RETURNS_PER_S", 2)
    one = await wire(tenants=TenantLimits(sessions=1))
    flood = [
        await one.publish(f"s{n}", generate("r", text="eee", max_tokens=2), tenant="loud")
        for n in range(NUM_FLOOD)
    ]
    mine = [await one.publish(f"s{n}", generate("r", text="eee"), tenant="quiet") for n in range(2)]
    for seq in (*mine, *flood):
        async with asyncio.timeout(600):
            while seq not in one.results:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    assert await answered_before(one, mine[1], "loud") < NUM_FLOOD // 4


@pytest.mark.usefixtures("_small")
async def test_a_request_that_a_worker_returned_before_it_stopped_counts_no_attempt(wire: Start) -> None:
    one = await wire(max_waiting=1, tenants=TenantLimits(sessions=1), max_attempts=1)
    seqs = [await one.publish(f"s{n}", generate("r", text="eee", max_tokens=200)) for n in range(3)]
    await until(lambda: one.worker.app._parts.intake.num_returned >= 2)
    await one.worker.stop()
    two = await wire(max_attempts=1)
    assert [(await two.result(seq))["type"] for seq in seqs] == ["generated"] * 3


@pytest.mark.usefixtures("_small")
async def test_a_request_that_waits_for_its_tenants_share_when_the_worker_stops_counts_no_attempt(
    wire: Start,
) -> None:
    one = await wire(max_batch=1, max_attempts=1)
    seqs = [await one.publish(f"s{n}", generate("r", text="eee", max_tokens=200)) for n in range(8)]
    await until(lambda: one.worker.app._parts.intake.num_sessions >= len(seqs))
    await one.worker.stop()
    two = await wire(max_attempts=1)
    assert [(await two.result(seq))["type"] for seq in seqs] == ["generated"] * len(seqs)


@pytest.mark.usefixtures("_small")
async def test_a_request_behind_one_that_is_cancelled_while_the_worker_stops_counts_no_attempt(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = endpoints.Endpoints.close

    async def cancelling(self: endpoints.Endpoints) -> None:
        assert (await one.control("s7", {"type": "cancel", "id": "r"}))["type"] == "cancelled"
        await close(self)

    one = await wire(max_batch=1, max_attempts=1)
    for n in range(8):
        await one.publish(f"s{n}", generate("r", text="eee", max_tokens=200))
    behind = await one.publish("s7", generate("r2", text="eee", max_tokens=20))
    await until(lambda: one.worker.app._parts.intake.num_sessions >= 8)
    with monkeypatch.context() as patch:
        patch.setattr(endpoints.Endpoints, "close", cancelling)
        await one.worker.stop()
    two = await wire(max_attempts=1)
    assert (await two.result(behind))["type"] == "generated"


@pytest.mark.parametrize("wait_s", [0.0, 0.001, 0.002])
async def test_requests_of_a_burst_that_reach_a_stopping_worker_count_no_attempt(
    wire: Start, wait_s: float
) -> None:
    """Some are delivered, and the worker has not read them yet."""
    one = await wire(max_attempts=1)
    publishing = [asyncio.create_task(one.publish(f"s{n}", append("r", "ab"))) for n in range(100)]
    await asyncio.sleep(wait_s)
    await one.worker.stop()
    seqs = await asyncio.gather(*publishing)
    two = await wire(max_attempts=1)
    found = [one.results[seq][0] if seq in one.results else await two.result(seq) for seq in seqs]
    assert [result["type"] for result in found] == ["appended"] * len(seqs)


@pytest.mark.usefixtures("_small")
async def test_a_stop_neither_marks_a_forgotten_session_nor_hides_that_a_request_has_crashed_workers(
    wire: Start,
) -> None:
    one = await wire(max_waiting=1, tenants=TenantLimits(sessions=1))
    busy = await one.publish("busy", generate("r", text="eee", max_tokens=20))
    gone = await one.publish("secret", append("a", "ab"))  # no room: the worker returns it
    while not one.worker.app._parts.intake.num_returned:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.001)
    await one.result(busy)
    assert (await one.send("secret", {"type": "close", "id": "c", "forget": True}))["type"] == "closed"
    await one.result(gone)
    last = await one.publish("busy", generate("r2", text="eee", max_tokens=200))
    seq = await one.publish("bad", append("a", "ab"))
    while one.worker.app._parts.intake.num_returned < 2:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.001)
    note = b'{"seq":%d,"attempts":2}' % seq
    await one.nc.publish("turnkeep.default.bad.attempt", note)
    await one.worker.stop()
    assert last not in one.results
    notes = {subject: body for _, subject, body in await one.entries() if subject.endswith(".attempt")}
    assert notes.pop("turnkeep.default.bad.attempt") == note
    assert "turnkeep.default.secret.attempt" not in notes
    await wire()
    assert [(await one.result(of))["type"] for of in (last, seq)] == ["generated", "appended"]


@pytest.mark.usefixtures("_small")
async def test_a_long_queue_of_one_session_is_answered_in_order_across_a_restart(wire: Start) -> None:
    """The queue is longer than one read of the log, and the worker stops in the middle of it."""
    one = await wire(max_waiting=MAX_SESSIONS)
    seqs = await asyncio.gather(*(one.publish("s", append(f"r{n}", "ab")) for n in range(60)))
    await one.result(seqs[9])
    await one.worker.stop()
    assert seqs[-1] not in one.results
    two = await wire(max_waiting=MAX_SESSIONS)
    async with asyncio.timeout(120):
        while await two.position("s") != 2 * len(seqs):  # noqa: ASYNC110 - asked over the wire
            await asyncio.sleep(0.2)
    await two.check_log()
    order = [json.loads(body)["seq"] for _, subject, body in await two.entries() if subject.endswith(".out")]
    assert order == seqs


@pytest.mark.usefixtures("_small")
async def test_a_waiting_request_that_the_worker_has_not_read_yet_can_be_cancelled(wire: Start) -> None:
    """Of a long queue, only the first requests are in memory; the rest is in the log."""
    one = await wire()
    long = await one.publish("s", generate("long", text="eee", max_tokens=1500))
    seqs = [await one.publish("s", append(f"r{n}", "a")) for n in range(30)]
    assert await one.control("s", {"type": "cancel", "id": "r29"}) == {
        "type": "cancelled",
        "id": "r29",
        "was": "waiting",
    }
    assert (await one.result(seqs[-1]))["code"] == "expired"
    assert long not in one.results
    await one.control("s", {"type": "cancel", "id": "long"})
    await one.result(seqs[-2])
    await one.check_log()


async def test_control_requests_of_one_tenant_leave_capacity_for_other_tenants(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, look, waiting = asyncio.Event(), ServedSession.refresh, 0

    async def waits(session: ServedSession, **how: bool) -> None:
        nonlocal waiting
        waiting += 1
        if session.key.tenant == "loud":
            await go_on.wait()
        await look(session, **how)

    monkeypatch.setattr(ServedSession, "refresh", waits)
    monkeypatch.setattr(endpoints, "_MAX_OPEN", 4)
    one = await wire()
    info = {"type": "info"}
    asked = [asyncio.create_task(one.control(f"s{n}", info, tenant="loud")) for n in range(4)]
    await until(lambda: waiting >= 4)
    assert (await one.control("s", info, tenant="loud"))["code"] == "overloaded"
    assert (await one.control("s", info, tenant="quiet"))["code"] == "unknown_session"
    go_on.set()
    assert {answer["code"] for answer in await asyncio.gather(*asked)} == {"unknown_session"}


async def test_a_tenants_questions_about_many_sessions_do_not_delay_another_tenants_request(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart the worker reads the log of each of these sessions, a few at a time."""
    one, fold, num_answered = await wire(), FencedLog._read_log, 0
    for n in range(NUM_FLOOD):
        await one.send(f"s{n}", append("r"), tenant="loud")
    await one.send("s", append("warm"), tenant="quiet")
    await one.worker.stop()

    async def slow(log: FencedLog, record: Record) -> None:
        await asyncio.sleep(0.5)
        await fold(log, record)

    async def ask(number: int) -> None:
        nonlocal num_answered
        assert (await two.control(f"s{number}", {"type": "info"}, tenant="loud"))["position"] == 5
        num_answered += 1

    monkeypatch.setattr(FencedLog, "_read_log", slow)
    two = await wire()
    asked = [asyncio.create_task(ask(n)) for n in range(NUM_FLOOD)]
    await asyncio.sleep(0.1)
    assert (await two.send("s", append("mine"), tenant="quiet"))["type"] == "appended"
    num_before = num_answered
    await asyncio.gather(*asked)
    assert num_before < 20


@pytest.mark.real
async def test_a_tenants_many_long_texts_are_tokenised_in_turn_with_another_tenants(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, extend, tokenised = await wire(), Fold.extend, list[str]()
    one.worker.app._parts.sessions._services.fold.tokenising.num_free = 1  # as on two CPUs

    def slow(fold: Fold, history: TokenHistory, request: Any, grids: Any, answer: Any = None) -> Any:
        time.sleep(0.05)  # tokenising a long text
        tokenised.append(request.id)
        return extend(fold, history, request, grids, answer)

    monkeypatch.setattr(Fold, "extend", slow)
    said = {"type": "append", "messages": [{"role": "user", "content": "e"}]}
    flood = [await one.publish(f"s{n}", {**said, "id": f"r{n}"}, tenant="loud") for n in range(24)]
    await until(lambda: len(tokenised) >= 2)
    mine = await one.publish("s", {**said, "id": "mine"}, tenant="quiet")
    for seq in (mine, *flood):
        assert (await one.result(seq))["type"] == "appended"
    assert tokenised.index("mine") < 12


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(peak) * 1024


@pytest.mark.real
@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the peak of another process")
async def test_a_session_backlog_of_120_mb_makes_the_worker_grow_by_less_than_40_mib(
    worker_process: Callable[..., Any],
) -> None:
    """When the worker starts, 120 requests of 1 MB wait; it reads them in pages."""
    worker = worker_process()
    worker.start()
    await until(lambda: '"ready"' in worker.log)
    nc = await nats.connect(worker.url)
    js = nc.jetstream()
    body = json.dumps(append("r0", "x" * 1_000_000, no_such_field=1)).encode()
    await js.publish("turnkeep.default.s.in", body)
    await results(js, 1)
    before = peak_bytes(worker.worker_pid)
    worker.lose_worker()
    for n in range(1, 121):
        await js.publish("turnkeep.default.s.in", body.replace(b'"r0"', b'"r%d"' % n))
    worker.go_on()
    await results(js, 121)
    grown = peak_bytes(worker.worker_pid) - before
    assert grown < 40 * 2**20
    await nc.close()


async def results(js: JetStreamContext, num: int) -> None:
    """Wait until the log has at least `num` results of the session."""
    async with asyncio.timeout(120):
        while True:
            info = await js.stream_info("turnkeep_log", subjects_filter="turnkeep.default.s.out")
            if sum((info.state.subjects or {}).values()) >= num:
                return
            await asyncio.sleep(0.2)


LENGTH = 700
#: The bytes of KV per token of the tiny model.
TOKEN_BYTES = 512


@pytest.mark.real
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
