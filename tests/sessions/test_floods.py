"""One tenant's flood: others are answered, and memory stays bounded."""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from raw_wire import Start, Wire, append, generate

from tests.parts import until
from worker.cluster import endpoints
from worker.process.setting_kinds import TenantLimits
from worker.sessions.fold import Fold
from worker.sessions.history import TokenHistory
from worker.sessions.session import ServedSession
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
async def test_a_request_of_another_tenant_is_answered_before_half_of_the_requests_of_a_flooding_tenant(
    wire: Start,
) -> None:
    one = await wire(max_waiting=MAX_SESSIONS, tenants=TenantLimits(sessions=MAX_SESSIONS // 2))
    await one.send("s", append("warm"), tenant="quiet")
    flood = [
        await one.publish(f"s{n}", generate(f"r{n}", text="eee", max_tokens=20), tenant="loud")
        for n in range(NUM_FLOOD)
    ]
    mine = await one.publish("s", generate("mine"), tenant="quiet")
    assert (await one.result(mine))["type"] == "generated"
    before = await answered_before(one, mine, "loud")
    for seq in flood:
        assert (await one.result(seq))["type"] == "generated"
    assert before < NUM_FLOOD // 2
    await one.check_log()


@pytest.mark.usefixtures("_small")
async def test_a_request_that_a_worker_returned_to_nats_before_stopping_is_not_counted_as_a_failed_attempt(
    wire: Start,
) -> None:
    one = await wire(max_waiting=1, tenants=TenantLimits(sessions=1), max_attempts=1)
    seqs = [await one.publish(f"s{n}", generate("r", text="eee", max_tokens=200)) for n in range(3)]
    await until(lambda: one.worker.app._parts.intake.num_returned >= 2)
    await one.worker.stop()
    two = await wire(max_attempts=1)
    assert [(await two.result(seq))["type"] for seq in seqs] == ["generated"] * 3


@pytest.mark.usefixtures("_small")
async def test_a_request_waiting_for_its_tenants_share_at_a_worker_stop_is_not_counted_as_a_failed_attempt(
    wire: Start,
) -> None:
    one = await wire(max_batch=1, max_attempts=1)
    seqs = [await one.publish(f"s{n}", generate("r", text="eee", max_tokens=200)) for n in range(8)]
    await until(lambda: one.worker.app._parts.intake.num_sessions >= len(seqs))
    await one.worker.stop()
    two = await wire(max_attempts=1)
    assert [(await two.result(seq))["type"] for seq in seqs] == ["generated"] * len(seqs)


async def test_hanging_control_requests_of_one_tenant_leave_capacity_for_those_of_other_tenants(
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


@pytest.mark.real
async def test_long_texts_of_two_tenants_are_tokenised_in_alternation_however_many_one_tenant_sends(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, extend, tokenised = await wire(), Fold.extend, list[str]()
    one.worker.app._parts.sessions._services.fold.tokenising._most = 1  # as on two CPUs

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
async def test_a_backlog_of_80_mb_of_requests_in_one_session_grows_the_workers_memory_by_less_than_32_mib(
    worker_process: Callable[..., Any],
) -> None:
    """When the worker starts, 80 requests of 1 MB wait; it reads them in pages."""
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
    for n in range(1, 81):
        await js.publish("turnkeep.default.s.in", body.replace(b'"r0"', b'"r%d"' % n))
    worker.go_on()
    await results(js, 81)
    grown = peak_bytes(worker.worker_pid) - before
    assert grown < 32 * 2**20
    await nc.close()


async def results(js: JetStreamContext, num: int) -> None:
    """Wait until the log has at least `num` results of the session."""
    async with asyncio.timeout(120):
        while True:
            info = await js.stream_info("turnkeep_log", subjects_filter="turnkeep.default.s.out")
            if sum((info.state.subjects or {}).values()) >= num:
                return
            await asyncio.sleep(0.2)
