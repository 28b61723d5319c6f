"""A request that crashes workers, or fails each time, becomes a dead letter; a returned one does not."""

import asyncio
import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from anyio import move_on_after
from raw_wire import Start, Wire, append, generate

from tests.simulation import device
from tests.simulation.device import POISON
from tests.simulation.loop import _process as current
from tests.simulation.world import Server
from worker.cluster.liveness import Members
from worker.sessions import sessions
from worker.sessions.dead_letters import AttemptNote, RequestAttempts
from worker.sessions.fold import Fold
from worker.sessions.pending import PendingRequest

pytestmark = pytest.mark.simulated


async def lives(wire: Start, first: Wire, *seqs: int) -> int:
    """Start a worker whenever one has ended, until these requests have results; return how many ran."""
    last, num = first, 1
    async with asyncio.timeout(120):
        while not {*seqs} <= {*first.results}:
            if last.worker.is_dead:
                last, num = await wire(ack_wait_s=1.0), num + 1
            await asyncio.sleep(0.1)
    return num


async def test_a_request_that_crashes_three_workers_fails_and_becomes_a_dead_letter(wire: Start) -> None:
    """Other requests that run during the crashes are answered."""
    w = await wire(ack_wait_s=1.0)
    letters = await w.nc.subscribe(w.subject("s", "dead"))
    others = [await w.publish(f"o{n}", generate("g", text="eee", max_tokens=1500)) for n in range(3)]
    before = await w.publish("s", append("before"))
    await w.result(before)
    poison = await w.publish("s", {"type": "append", "id": "poison", "tokens": [POISON]})
    behind = await w.publish("s", append("behind"))
    assert await lives(wire, w, *others, before, poison, behind) == 4
    (result,) = w.results[poison]
    assert (result["type"], result["code"], result["id"]) == ("failed", "internal", "poison")
    assert "3 attempts" in result["message"]
    answers = [[one["type"] for one in w.results[seq]] for seq in (*others, before, behind)]
    assert answers == [["generated"]] * 3 + [["appended"]] * 2
    letter = json.loads((await letters.next_msg()).data)
    assert (letter["seq"], letter["id"], letter["attempts"]) == (poison, "poison", 3)
    assert not letters.pending_msgs


# The coroutines of killed workers are collected at the end, and their last lines run.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_crashes_of_two_workers_at_the_same_request_are_counted_together(wire: Start) -> None:
    started = [await wire(ack_wait_s=1.0, worker=name) for name in ("one", "two")]
    w = started[0]
    poison = await w.publish("s", {"type": "append", "id": "poison", "tokens": [POISON]})
    async with asyncio.timeout(120):
        while poison not in w.results:
            if all(one.worker.is_dead for one in started):
                started.append(await wire(ack_wait_s=1.0, worker="one"))
            await asyncio.sleep(0.1)
    assert "3 attempts" in w.results[poison][0]["message"]
    assert [one.worker.is_dead for one in started] == [True, True, True, False]


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_RETRY_S", 0.02)


@pytest.mark.usefixtures("_soon")
async def test_a_request_that_raises_an_unknown_error_three_times_fails_and_becomes_a_dead_letter(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, bitten = RequestAttempts.attempt, 0

    async def venomous(attempts: RequestAttempts, pending: PendingRequest, answer: Any) -> Any:
        nonlocal bitten
        if pending.id == "venom":
            bitten += 1
            raise LookupError("bitten")
        return await attempt(attempts, pending, answer)

    monkeypatch.setattr(RequestAttempts, "attempt", venomous)
    one = await wire()
    letters = await one.nc.subscribe(one.subject("s", "dead"))
    poison = await one.publish("s", append("venom"))
    behind = await one.publish("s", append("behind"))
    failed = await one.result(poison)
    assert (failed["code"], (await one.result(behind))["type"]) == ("internal", "appended")
    assert "LookupError: bitten" in failed["message"]
    assert bitten == 3
    assert json.loads((await letters.next_msg(timeout=5)).data)["id"] == "venom"


@pytest.mark.usefixtures("_soon")
async def test_a_request_of_a_session_whose_log_cannot_be_read_fails_and_other_sessions_are_answered(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await wire()
    await one.send("s", append("a", "BANE"))
    await one.worker.stop()
    replay = Fold.replay

    def baneful(fold: Fold, history: Any, request: Any, *result: Any) -> Any:
        if request.id == "a":
            raise OverflowError("too much")
        return replay(fold, history, request, *result)

    monkeypatch.setattr(Fold, "replay", baneful)
    two = await wire()
    second, other = await two.publish("s", append("b")), await two.publish("other", append("b"))
    failed = await two.result(second)
    assert failed["code"] == "history_diverged"
    assert "go on in a new session" in failed["message"]
    assert (await two.result(other))["type"] == "appended"


@pytest.mark.parametrize(("ends", "num_lives"), [(False, 2), (True, 3)])
async def test_forgetting_a_fork_succeeds_even_if_its_parents_log_cannot_be_read(
    wire: Start, monkeypatch: pytest.MonkeyPatch, ends: bool, num_lives: int
) -> None:
    """Reading the parent raises an error, or kills the worker."""
    w = await wire(ack_wait_s=1.0)
    await w.send("s", append("a"))
    await w.send("fork", {"type": "open", "id": "o", "from": {"session": "s"}})
    await asyncio.sleep(1)  # all is acknowledged
    w.worker.process.kill()
    replay = Fold.replay

    def baneful(fold: Fold, history: Any, request: Any, *result: Any) -> Any:
        if request.id == "a":
            if ends:
                current.get().kill()  # type: ignore[union-attr]
            raise OverflowError("too much")
        return replay(fold, history, request, *result)

    monkeypatch.setattr(Fold, "replay", baneful)
    forget = await w.publish("fork", {"type": "close", "id": "c", "forget": True})
    assert await lives(wire, w, forget) == num_lives
    (closed,) = w.results[forget]
    assert (closed["type"], closed.get("settled", True)) == ("closed", True)


async def test_four_normal_worker_stops_during_an_append_are_not_counted_as_failed_attempts(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each stop the device is running the same input, without progress."""
    w = await wire(ack_wait_s=1.0)
    with monkeypatch.context() as patched:
        patched.setattr(device, "move_on_after", lambda _: move_on_after(600))
        seq, last = await w.publish("s", append("a")), w
        for _ in range(3):
            await last.until("s", "running")
            await last.worker.stop()
            last = await wire(ack_wait_s=1.0)
        await last.until("s", "running")
        await last.worker.stop()
    await wire(ack_wait_s=1.0)
    assert (await w.result(seq))["type"] == "appended"


async def next_attempts(mine: RequestAttempts, stored_s: int) -> int:
    """Return how many attempts the next one makes at a request of which there is no note yet."""

    async def published(_: object) -> Any:
        return SimpleNamespace(num_tokens=0)

    async def runs(_: object) -> bool:
        return False

    mine._log.published, mine._services.runs = published, runs  # type: ignore[method-assign]
    here = PendingRequest(7, None, None, datetime.fromtimestamp(stored_s, UTC))
    return (await mine._next(AttemptNote(), here)).attempts


@pytest.mark.parametrize(("stored_s", "attempts"), [(1, 1), (2, 2)])
async def test_a_recorded_failed_attempt_is_not_counted_for_a_later_request_at_the_same_log_sequence(
    stored_s: int, attempts: int
) -> None:
    """Workers attempt a request once more than allowed if one of them does not count an earlier crash."""
    mine = RequestAttempts(SimpleNamespace(first_seq=0), SimpleNamespace(boot="me"))  # type: ignore[arg-type]
    mine._begun = datetime.fromtimestamp(1, UTC)
    assert await next_attempts(mine, stored_s) == attempts


@pytest.mark.parametrize(("first_seq", "attempts"), [(0, 2), (6, 1), (7, 1), (8, 2)])
async def test_a_request_counts_as_attempted_once_before_if_another_worker_may_have_got_it(
    first_seq: int, attempts: int
) -> None:
    """At sequence 7, where `first_seq` is the first that no other worker got, and 0 not known."""
    log: Any = SimpleNamespace(first_seq=first_seq)
    assert await next_attempts(RequestAttempts(log, SimpleNamespace(boot="me")), 1) == attempts  # type: ignore[arg-type]


@pytest.mark.parametrize(("last", "left"), [(AttemptNote(), 0), (AttemptNote(7, 3), 2)])
async def test_a_worker_stop_subtracts_the_attempt_it_ended_from_a_requests_recorded_failed_attempts(
    last: AttemptNote, left: int
) -> None:
    """No note means that this attempt is the first; the tokens that it published are noted."""
    stored = list[dict[str, Any]]()

    async def published(_: object) -> Any:
        return SimpleNamespace(num_tokens=5)

    async def append(_: object, __: str, body: bytes) -> None:
        stored.append(json.loads(body))

    services = SimpleNamespace(boot="me", journal=SimpleNamespace(append=append))
    mine = RequestAttempts(SimpleNamespace(key=None, published=published), services)  # type: ignore[arg-type]
    await mine._uncount(PendingRequest(7, None, None, datetime.fromtimestamp(1, UTC)), last)
    (note,) = stored
    assert (note["seq"], note.get("attempts", 0), note["tokens"]) == (7, left, 5)


@pytest.mark.parametrize(("runs", "kind"), [(True, "appended"), (False, "failed")])
async def test_an_attempt_of_another_worker_at_a_request_counts_as_a_crash_only_if_that_worker_is_gone(
    wire: Start, monkeypatch: pytest.MonkeyPatch, runs: bool, kind: str
) -> None:
    """If the server lost a session's owner, two workers may run its request at the same time."""

    async def answers(_: Members, boot: str) -> bool:
        return runs and boot == "other"

    w = await wire(ack_wait_s=1.0)
    with monkeypatch.context() as patched:
        patched.setattr(device, "move_on_after", lambda _: move_on_after(600))
        seq = await w.publish("s", append("a"))
        await w.until("s", "running")
        w.worker.process.kill()
    note = {"seq": seq, "attempts": 3, "by": "other"}
    await w.js.publish(w.subject("s", "attempt"), json.dumps(note).encode())
    monkeypatch.setattr(Members, "runs", answers)
    await wire(ack_wait_s=1.0)
    assert (await w.result(seq))["type"] == kind


@pytest.mark.parametrize(("text", "expected"), [("hello", "appended"), ("other", "id_conflict")])
async def test_a_request_with_an_already_used_id_does_not_become_a_dead_letter_if_its_worker_crashes(
    wire: Start, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    """Such a request runs nothing, so it cannot have ended them."""
    w, begun = await wire(ack_wait_s=1.0, max_attempts=1), asyncio.Event()
    await w.send("s", append("a"))

    async def stuck(*_: Any) -> Any:
        begun.set()
        await asyncio.sleep(1000)

    with monkeypatch.context() as patched:
        patched.setattr(RequestAttempts, "attempt", stuck)
        seq = await w.publish("s", append("a", text=text))
        await begun.wait()
        w.worker.process.kill()
    await wire(ack_wait_s=1.0, max_attempts=1)
    result = await w.result(seq)
    assert expected in (result["type"], result.get("code"))


async def test_requests_that_a_stopping_worker_leaves_unanswered_are_answered_at_once_by_another_worker(
    quiet_wire: Start, server: Server
) -> None:
    """It stops between two steps of pulling, passing on and answering the requests, and keeps no delivery."""
    stays = await quiet_wire(worker="stays", ack_wait_s=60.0)
    (consumer,) = server.jetstream.streams["turnkeep_log"].consumers.values()
    for number in range(10):
        stops = await quiet_wire(worker="stops", ack_wait_s=60.0)
        await asyncio.sleep(0.5)
        asked = [asyncio.create_task(stays.send(f"s{session}", append(f"{number}"))) for session in range(30)]
        await asyncio.sleep(number * 0.001)
        stops.worker.app.stop()
        async with asyncio.timeout(5.0):
            await asyncio.gather(*asked)
        await stops.worker.task
        await asyncio.sleep(1.0)
        assert not consumer.pending
