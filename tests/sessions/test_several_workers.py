"""Several workers serve one prefix: limits of sessions by tenant, taking over, and draining."""

import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError
from raw_wire import LONG, Start, Wire, append, generate

from tests.parts import until
from turnkeep_client.log import BUILD_HEADER, words
from turnkeep_client.subjects import SessionKey
from worker.cluster.owners import Owners, choose_by_hash
from worker.cluster.routing import Routing
from worker.process.setting_kinds import TenantLimits
from worker.wire import intake
from worker.wire.records import Member

pytestmark = pytest.mark.simulated

PLACES = 4
SESSIONS = [f"s{number}" for number in range(40)]


@pytest.fixture
def cluster(wire: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that starts a worker with few sessions by tenant; returned ones come again soon."""
    monkeypatch.setattr(intake, "_RETURN_S", 0.1)

    async def start(name: str, **settings: Any) -> Wire:
        few = {"tenants": TenantLimits(sessions=PLACES), "max_waiting": 2 * PLACES, "max_batch": 2}
        own = {"worker": name, "data_dir": tmp_path / name, "ack_wait_s": 60.0}
        return await wire(**(own | few | settings))

    return start


class Flood:
    """Sends a `generate` of one tenant in each of many sessions; has the workers of results, and attempts."""

    def __init__(self, wire: Wire) -> None:
        self.makers: dict[int, str] = {}
        self.noted: list[bytes] = []
        self.seqs: list[int] = []
        self._wire = wire

    async def begin(self, num_tokens: int) -> None:
        await self._wire.nc.subscribe(f"{self._wire.prefix}.*.*.out", cb=self._answered)
        await self._wire.nc.subscribe(f"{self._wire.prefix}.*.*.attempt", cb=self._noted)
        asked = generate("r", text="eee", max_tokens=num_tokens)
        self.seqs = [await self._wire.publish(name, asked, tenant="loud") for name in SESSIONS]

    async def _answered(self, message: Msg) -> None:
        maker = words((message.headers or {})[BUILD_HEADER])["worker"]
        self.makers[json.loads(message.data)["seq"]] = maker

    async def _noted(self, message: Msg) -> None:
        self.noted.append(message.data)

    async def end(self) -> None:
        """Wait until each request is answered by tokens."""
        await until(lambda: self._wire.results.keys() >= {*self.seqs})
        assert [
            self._wire.results[seq][0]
            for seq in self.seqs
            if self._wire.results[seq][0]["type"] != "generated"
        ] == []

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.makers[seq] for seq in self.seqs if seq in self.makers)


async def returned(wire: Wire, num: int) -> None:
    await until(lambda: wire.worker.app._parts.intake.num_returned >= num)


async def test_a_newly_joined_worker_answers_a_part_of_the_many_requests_that_wait_in_the_log(
    cluster: Start,
) -> None:
    """A worker at its limit returns further requests, and no attempt is noted for them."""
    first = await cluster("first", max_attempts=1)
    loud = Flood(first)
    await loud.begin(100)
    await returned(first, 20)
    second = await cluster("second", max_attempts=1)
    most = Counter[str]()
    while len(loud.makers) < len(SESSIONS):
        waiting = 0
        for name, one in (("first", first), ("second", second)):
            most[name] = max(most[name], one.worker.app._parts.intake.num_sessions)
            waiting += one.worker.app._parts.intake.num_returned
        assert waiting <= len(SESSIONS) - len(loud.makers), "each is counted once"
        await asyncio.sleep(0.01)
    assert most == {"first": PLACES, "second": PLACES}, "the limit is each worker's"
    assert min(loud.counts["first"], loud.counts["second"]) >= 12, loud.counts
    await loud.end()
    assert not loud.noted


@pytest.mark.real
async def test_a_request_redelivered_while_its_sessions_owner_is_looked_up_is_not_counted_as_a_crash(
    cluster: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the other worker ends. As if this one had been asleep."""
    first, second = [await cluster(name, max_attempts=1, ack_wait_s=0.5) for name in ("first", "second")]
    owner, is_over = Owners.owner, asyncio.Event()

    async def slow(self: Owners, key: Any) -> Any:
        if self is first.worker.app._parts.owners:
            await is_over.wait()
        return await owner(self, key)

    monkeypatch.setattr(Owners, "owner", slow)
    loud = Flood(first)
    await loud.begin(3)
    await until(lambda: loud.makers)
    await second.worker.stop()
    await asyncio.sleep(2.0)
    is_over.set()
    await loud.end()


async def makers(wire: Wire, session: str) -> list[str]:
    """Return the workers that stored the results of a session, in order; each request has one."""
    found: dict[str, list[Any]] = {"in": [], "out": []}
    stream = f"{wire.prefix}_log"
    for seq in range(1, (await wire.js.stream_info(stream)).state.last_seq + 1):
        with contextlib.suppress(NotFoundError):
            message = await wire.js.get_msg(stream, seq)
            _, _, name, kind = str(message.subject).split(".")
            if name == session and kind in found:
                found[kind].append(words((message.headers or {}).get(BUILD_HEADER, "")).get("worker"))
    assert len(found["in"]) == len(found["out"])
    return found["out"]


async def two(wire: Start) -> tuple[Wire, Wire]:
    first, second = [await wire(worker=name, ack_wait_s=60.0) for name in ("first", "second")]
    return first, second


async def test_a_worker_that_is_slow_to_report_its_active_sessions_still_counts_as_serving_those_sessions(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker that was paused goes on too, and a request that has crashed nobody is given up."""
    listed = Routing._listed

    async def late(self: Routing, *args: Any) -> bytes:
        await asyncio.sleep(0.5)  # longer than a worker that joins would wait
        return await listed(self, *args)

    monkeypatch.setattr(Routing, "_listed", late)
    workers, key = await two(wire), SessionKey("default", "s")
    seq = await workers[0].publish("s", generate("a", **LONG))
    parts = [one.worker.app._parts for one in workers]
    await until(lambda: any(key in one.intake.at_work for one in parts))
    (idle,) = (one.owners for one in parts if key not in one.intake.at_work)
    assert await asyncio.gather(idle.num_busy(key), idle.is_elsewhere(key)) == [1, True]
    await workers[0].control("s", {"type": "cancel", "id": "a"})
    await workers[0].result(seq)


async def test_a_session_in_use_stays_with_its_worker_when_another_worker_joins(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although no result names its worker yet, and hashing would choose the other one from now on."""
    monkeypatch.setattr(intake, "_FETCH", 1)  # so that both get some
    both = [Member(name, "host", 1, name, boot=name) for name in ("first", "second")]
    name = next(
        one for one in SESSIONS if choose_by_hash(both, SessionKey("default", one)).worker == "second"
    )
    first = await wire(worker="first", ack_wait_s=60.0)
    await first.publish(name, generate("a", **LONG))
    await until(lambda: first.worker.app._parts.intake.num_sessions)
    second = await wire(worker="second", ack_wait_s=60.0)
    await asyncio.gather(*(first.send(name, append(f"a{n}")) for n in range(4)))
    assert set(await makers(first, name)) == {"first"}
    assert not len(second.worker.app._parts.sessions), "it did not even read its log"
    assert second.worker.app._parts.intake.num_sessions == 0


async def drain(one: Wire, body: bytes) -> Any:
    """Drain a worker, or with `b"false"` no longer; return the names of the others that take its sessions."""
    members = one.worker.app._members
    return json.loads((await one.nc.request(members.address(members.me, "drain"), body, timeout=5)).data)


async def test_a_draining_worker_hands_each_session_over_to_another_worker_between_two_requests(
    wire: Start,
) -> None:
    first, second = await two(wire)
    names = SESSIONS[:16]

    async def turn(number: int) -> set[str]:
        """Append once to each session; return the workers that did it."""
        await asyncio.gather(*(first.send(name, append(f"a{number}")) for name in names))
        return {(await makers(first, name))[-1] for name in names}

    assert await turn(1) == {"first", "second"}
    await first.send("busy", append("a"))
    is_first = await makers(first, "busy") == ["first"]
    (drained, name), (other, others) = [(first, "first"), (second, "second")][:: 1 if is_first else -1]
    busy = await first.publish("busy", generate("g", **LONG))
    await first.until("busy", "running")
    assert await drain(drained, b"true") == [others]
    names.append("new")
    assert await turn(2) == {others}
    assert (await first.control("busy", {"type": "cancel", "id": "g"}))["was"] == "running"
    await first.result(busy)
    assert (await makers(first, "busy"))[-1] == name
    await first.send("busy", append("b"))
    assert (await makers(first, "busy"))[-1] == others
    assert drained.worker.app._parts.intake.num_sessions == 0
    assert await drain(drained, b"false") == [others]
    await first.send("fork", {"type": "open", "id": "o", "from": {"session": "new"}})
    assert await makers(first, "fork") == [others], "which has its parent"
    await drain(other, b"true")
    assert await turn(3) == {name}


async def test_a_worker_that_reads_turns_added_to_a_session_by_another_worker_counts_the_sessions_new_size(
    wire: Start,
) -> None:
    """Else its limit of memory for idle sessions would be wrong by what it has read of that session."""
    first, second = await two(wire)
    await drain(second, b"true")
    await first.send("s", append("a", "hello"))
    session = first.worker.app._parts.sessions._sessions[SessionKey("default", "s")]
    await until(lambda: session.counted_bytes)
    before = session.counted_bytes
    await drain(second, b"false")
    await drain(first, b"true")
    await first.send("s", append("b", " and more than before"))
    assert await makers(first, "s") == ["first", "second"]
    await drain(first, b"false")
    await drain(second, b"true")
    await first.send("forgotten", append("c", "hello"))
    await first.send("forgotten", {"type": "close", "id": "d", "forget": True})
    assert await makers(first, "forgotten") == ["first", "first"]
    assert before < session.counted_bytes == session.log.record.size_bytes


@pytest.mark.parametrize("name", ["s", "not~a~name"])
async def test_a_worker_still_answers_requests_after_another_worker_has_forwarded_a_malformed_request(
    quiet_wire: Start, name: str
) -> None:
    """A tenant may send requests to subjects whose session name is not valid."""
    first, _ = await two(quiet_wire)
    members, seq = first.worker.app._members, await first.publish(name, b"[]")
    for passed in (b"[]", json.dumps({"subject": first.subject(name, "in"), "seq": seq}).encode()):
        with contextlib.suppress(nats.errors.TimeoutError):  # what makes no sense gets no answer
            await first.nc.request(members.address(members.me, "deliver"), passed, timeout=1)
    assert (await first.result(seq))["code"] == "invalid_request"
    assert (await first.send("other", append("a")))["position"] == 5
    assert not first.worker.task.done()
