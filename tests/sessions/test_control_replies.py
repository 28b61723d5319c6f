"""Requests on `ctl` and `ask` are answered though their worker is away; long replies are divided."""

import asyncio
import json
from typing import Any

import pytest
from msgspec import structs
from raw_wire import Start, Wire, append, generate

from commands.control import print_info
from tests.matrices import thinned
from tests.simulation.world import Server
from turnkeep_client.messages import Cancelled, decode_result
from worker.sessions.control import Control

SESSIONS = [f"s{number}" for number in range(16)]
IMAGE = {"type": "image", "digest": "0" * 64}
ASK = {"text": "hello", "max_tokens": 4}
AWAY = ["paused", "killed", "stopped"]


@pytest.fixture
async def cluster(quiet_wire: Start) -> list[Wire]:
    """Two workers, of which each has some of the sessions."""
    started = [await quiet_wire(worker=name, ack_wait_s=60.0) for name in "ab"]
    await asyncio.sleep(1.0)
    await asyncio.gather(*(started[0].send(session, append("first")) for session in SESSIONS))
    return started


async def end(wire: Wire, how: str) -> None:
    if how == "paused":
        wire.worker.process.stall(80.0)
    elif how == "killed":
        wire.worker.process.kill()
    else:
        wire.worker.app.stop()


def held_up(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Make turns wait for the device until the event that this returns is set."""
    engine, over = wire.worker.app._parts.engine, asyncio.Event()
    run = engine.run

    async def held(*arguments: Any, **options: Any) -> Any:
        await over.wait()
        return await run(*arguments, **options)

    monkeypatch.setattr(engine, "run", held)
    return over


async def replies(wire: Wire, kind: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask once in each session; return the replies, which must come within 4 s."""
    raw = json.dumps(body).encode()
    asked = (wire.nc.request(wire.subject(session, kind), raw, timeout=4.0) for session in SESSIONS)
    return [json.loads(one.data) for one in await asyncio.gather(*asked)]


@pytest.mark.simulated
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # coroutines of what is killed
@pytest.mark.parametrize(("away", "begun_s"), thinned(AWAY, [-0.5, -0.01, 0.003, 0.02]))
async def test_a_request_on_the_ask_subject_is_answered_once_and_within_4_s_although_its_worker_is_away(
    cluster: list[Wire], server: Server, away: str, begun_s: float
) -> None:
    """The worker goes away before the asks, as they arrive, or in the middle of the answers."""
    (a, b), log = cluster, server.jetstream.streams["turnkeep_log"]
    asking = asyncio.create_task(replies(b, "ask", ASK)) if begun_s > 0 else None
    await asyncio.sleep(max(begun_s, 0.0))
    await end(a, away)
    await asyncio.sleep(max(-begun_s, 0.0))
    said = await (asking or replies(b, "ask", ASK))
    assert {one["type"] for one in said} == {"generated"}
    await asyncio.sleep(90.0)
    for session in SESSIONS:
        results = [decode_result(one.data) for one in log.matching(f"turnkeep.default.{session}.out")]
        assert len(results) == len(log.matching(f"turnkeep.default.{session}.in"))
        assert sum(one.repeat_of is None for one in results) == 2
        assert {one.position for one in results} == {5, 14}


@pytest.mark.simulated
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("away", "begun_s"), thinned(AWAY, [-0.5, -0.01, 0.0005, 0.001]))
async def test_a_control_request_is_answered_within_4_s_although_its_worker_or_the_sessions_owner_is_away(
    cluster: list[Wire], away: str, begun_s: float
) -> None:
    a, b = cluster
    asking = asyncio.create_task(replies(b, "ctl", {"type": "info"})) if begun_s > 0 else None
    await asyncio.sleep(max(begun_s, 0.0))
    await end(a, away)
    await asyncio.sleep(max(-begun_s, 0.0))
    assert [one["position"] for one in await (asking or replies(b, "ctl", {"type": "info"}))] == [5] * 16


@pytest.mark.simulated
async def test_a_request_on_the_ask_subject_is_answered_although_nats_is_lost_while_its_result_is_stored(
    quiet_wire: Start, server: Server
) -> None:
    """The worker misses its own result on `out`, and finds it in the log."""
    w = await quiet_wire()

    def cut(subject: str) -> None:
        if subject.endswith(".commit"):
            server.cut(next(one for one in server.links if one.connection._process is w.worker.process))

    server.on_stored = cut
    reply = await w.nc.request(w.subject("s", "ask"), json.dumps(ASK).encode(), timeout=15.0)
    assert json.loads(reply.data)["type"] == "generated"


@pytest.mark.simulated
async def test_an_ask_request_whose_session_is_forgotten_during_a_nats_outage_gets_an_error_that_says_so(
    quiet_wire: Start, server: Server
) -> None:
    """Else the caller would wait for 15 minutes for what nobody has any more."""
    w = await quiet_wire()
    asking = asyncio.create_task(w.nc.request(w.subject("s", "ask"), json.dumps(ASK).encode(), timeout=15))
    stored = asyncio.Event()

    def cut(subject: str) -> None:
        if subject.endswith(".commit") and not stored.is_set():
            stored.set()
            server.cut(next(one for one in server.links if one.connection._process is w.worker.process))

    server.on_stored = cut
    await stored.wait()
    await w.send("s", {"type": "close", "id": "c", "forget": True})
    told = json.loads((await asking).data)
    assert (told["type"], told["code"], told["retryable"]) == ("failed", "unknown_session", False)
    assert "removed from the log" in told["message"]


@pytest.mark.simulated
@pytest.mark.parametrize("kind", ["ask", "ctl"])
async def test_several_equal_requests_with_the_same_reply_subject_each_get_a_reply(
    cluster: list[Wire], kind: str
) -> None:
    a, heard = cluster[0], list[Any]()

    async def hear(message: Any) -> None:
        heard.append(json.loads(message.data))

    await a.nc.subscribe("replies", cb=hear)
    for _ in range(5):
        body = {"type": "info"} if kind == "ctl" else ASK | {"id": "same"}
        await a.nc.publish(a.subject("s0", kind), json.dumps(body).encode(), reply="replies")
    await asyncio.sleep(5.0)
    assert len(heard) == 5


@pytest.mark.simulated
async def test_the_command_info_lists_a_request_that_waits_for_the_device_among_the_waiting_requests(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    w = await quiet_wire()
    over = held_up(w, monkeypatch)

    async def shown() -> list[list[str]]:
        await print_info(w.worker.client, "s")
        rows = (line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines())
        return [row for row in rows if row[0] == "state" or row[:2] == ["requests", "waiting"]]

    seq = await w.publish("s", generate("first", text="eee"))
    await w.until("s", "waiting")
    assert await shown() == [["state", "waiting"], ["requests", "waiting", "first"]]
    await w.publish("s", append("second", ""))
    assert await shown() == [["state", "waiting"], ["requests", "waiting", "first, second"]]
    over.set()
    await w.result(seq)
    await w.until("s", "idle")
    assert await shown() == [["state", "idle"], ["requests", "waiting", "none"]]


@pytest.mark.simulated
async def test_an_info_request_lists_the_waiting_requests_of_a_session_in_pages(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = await quiet_wire()
    ids = [f"{number:064d}" for number in range(300)]
    over = held_up(w, monkeypatch)
    await w.publish("s", generate("first", text="eee"))
    await w.until("s", "waiting")
    for request_id in ids:
        await w.publish("s", append(request_id, ""))
    info = await w.control("s", {"type": "info"})
    assert (info["type"], info["num_waiting"], info["waiting"]) == ("session", 300, ids[:100])
    cancelled = await w.control("s", {"type": "cancel", "id": ids.pop(200)})
    assert cancelled["type"] == "cancelled"
    told: list[str] = []
    while page := (await w.control("s", {"type": "info", "skip": len(told), "limit": 70}))["waiting"]:
        told += page
    assert told == ids
    assert (await w.control("s", {"type": "info", "limit": 0}))["waiting"] == []
    client = await w.worker.client.session("s").info(skip=297)
    assert (client.waiting, client.num_waiting) == (tuple(ids[297:]), 299)
    over.set()


@pytest.mark.simulated
async def test_a_control_reply_larger_than_the_nats_message_limit_is_replaced_by_an_error_reply(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here another reply takes the place of the one to a count."""
    w = await quiet_wire()
    limit = w.nc.max_payload

    async def counted(*_: object) -> Cancelled:
        return Cancelled(id="c", was="running" * limit)

    monkeypatch.setattr(Control, "_count", counted)
    await w.send("s", append("a"))
    reply = await w.control("s", {"type": "count", "text": "a"})
    assert (reply["type"], reply["code"]) == ("failed", "invalid_request")
    assert "the answer takes" in reply["message"]
    assert f"the server carries {limit}; ask for less of it" in reply["message"]


@pytest.mark.simulated
async def test_the_error_reply_to_a_control_or_ask_request_contains_the_id_of_the_request(
    quiet_wire: Start,
) -> None:
    w = await quiet_wire()
    reply = await w.control("s", {"type": "cancel", "id": "mine", "more": 1})
    assert (reply["code"], reply["id"]) == ("invalid_request", "mine")
    asked = await w.nc.request(w.subject("s", "ask"), b'{"id":"mine","more":1}', timeout=20)
    assert json.loads(asked.data)["id"] == "mine"


@pytest.mark.simulated
async def test_a_refused_count_or_ask_request_gets_the_error_that_the_same_generate_request_would_get(
    quiet_wire: Start,
) -> None:
    w = await quiet_wire(other_model="refuse")
    asked = await w.nc.request(w.subject("s", "ask"), b'{"text":"a","temperature":-1}', timeout=20)
    assert json.loads(asked.data)["field"] == "temperature"
    for count in ({"tokens": [2**31]}, {"messages": [{"role": "user", "content": [IMAGE]}]}):
        reply = await w.control("s", {"type": "count", **count})
        result = await w.send("s", {"type": "generate", "id": f"g{len(count)}", "max_tokens": 1, **count})
        assert [reply[name] for name in ("code", "field", "message")] == [
            result[name] for name in ("code", "field", "message")
        ]
    await w.send("s", append("a"))
    await w.send("s", generate("g"))
    fold = w.worker.app._parts.sessions._services.fold
    fold.model = structs.replace(fold.model, weights="other")
    assert (await w.control("s", {"type": "count", "text": "a"}))["code"] == "history_diverged"


@pytest.mark.simulated
async def test_a_control_request_that_raises_an_exception_gets_an_error_reply_and_later_requests_succeed(
    quiet_wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = await quiet_wire()

    async def counted(*_: object) -> Cancelled:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(Control, "_count", counted)
        reply = await w.control("s", {"type": "count", "text": "a"})
    assert (reply["type"], reply["code"]) == ("failed", "internal")
    assert (await w.control("s", {"type": "count", "text": "a"}))["type"] == "counted"
