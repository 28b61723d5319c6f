"""Simulated histories: new ones after each change of the code, and some that have failed before."""

import asyncio
import gc
import hashlib
import os
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from anyio import create_task_group

from ops.log.importing import Import
from tests.simulation import history, operators
from tests.simulation.actors import History, Plan, Supervisor
from tests.simulation.history import Outcome, world
from tests.simulation.loop import Process, _Task, run, simulated
from tests.simulation.played import ROOT, simulate
from tests.simulation.world import Server
from turnkeep_client.client import connect
from turnkeep_client.errors import NoAnswerError, RequestFailedError, TurnkeepError
from turnkeep_client.messages import Generate, encode, failure
from turnkeep_client.subjects import SessionKey
from turnkeep_client.wire import NatsWire

#: The number of new histories in a run. `make soak` runs more.
HISTORIES = os.environ.get("TURNKEEP_TEST_HISTORIES", "150")


@pytest.mark.timeout(3600)
def test_simulating_new_histories_of_requests_and_faults_breaks_no_invariant() -> None:
    """The seeds come from a digest of the code, so each change of the code runs new histories.

    Unchanged code runs the same ones again. To replay a failure, run `make simulate SEED=...`.
    """
    code = hashlib.sha256()
    for room in ("worker", "protocol/turnkeep_client", "tests/simulation"):
        for path in sorted((ROOT / room).rglob("*.py")):
            code.update(path.read_bytes())
    seed = int.from_bytes(code.digest()[:4]) * 100_000
    status, said = simulate(str(seed), "--histories", HISTORIES)
    print(said[-4000:])
    assert status == 0


def test_a_finished_simulated_history_leaves_no_asyncio_task_in_memory() -> None:
    for seed in (1009, 1028):  # their workers are killed with open scopes of anyio
        history.simulate(seed)
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, _Task)]


def test_a_worker_on_a_lagging_replica_does_not_run_again_a_request_that_a_dead_worker_answered() -> None:
    num_runs = 0

    async def main(history: History) -> None:
        nonlocal num_runs
        server, supervisor = history.server, Supervisor(history, 0)
        server.on_stored = lambda subject: supervisor.kill() if subject.endswith(".commit") else None
        for _ in range(2):
            worker = supervisor.prepare()
            device, run = worker.device_of_hashes, worker.device_of_hashes.run

            async def counted(*args: Any, run: Any = run, **more: Any) -> Any:
                nonlocal num_runs
                num_runs += 1
                return await run(*args, **more)

            device.run = counted  # type: ignore[method-assign]
            assert supervisor.process is not None
            supervisor.process.start(worker.run())
            await worker.ready.wait()
            if supervisor.num_lives == 1:
                server.handle("turnkeep.t.s.in", "", b'{"type":"append","id":"a","text":"x"}', None)
                await asyncio.sleep(0.5)
                server.faults.lag_s = plan.lag_s
        await asyncio.sleep(3)

    for seed in range(8):
        with simulated(seed) as loop, world(loop, Outcome(seed, []), tell=False) as (server, note):
            plan = replace(Plan.of(Random(1)), num_workers=1, leases=False, lag_s=5.0)
            plan.settings |= {"ack_wait_s": 0.5}
            run(loop, main(History(loop, server, plan, note)))
    assert num_runs == 8


def test_a_client_gets_the_result_of_a_request_that_is_answered_and_removed_from_the_log_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that comes back for its answer has looked for the result before, and then for the request."""

    async def main(server: Server) -> None:
        nc = server.connection()
        await nc.connect([])
        await nc.jetstream().add_stream(name="turnkeep_log", subjects=["turnkeep.*.*.*"])
        client, request = await connect("nats://world:4222", tenant="t"), Generate(id="g", text="x")
        server.handle("turnkeep.t.s.in", "", encode(request), None)
        log, bodies_at = server.jetstream.streams["turnkeep_log"], NatsWire.bodies_at

        async def answered(*args: Any) -> dict[int, bytes]:
            if (asked := log.get(1)) is not None:
                log.store("turnkeep.t.s.out", encode(failure("g", "expired", "late", seq=1)), {})
                log.remove(asked)
            return await bodies_at(*args)

        monkeypatch.setattr(NatsWire, "bodies_at", answered)
        with pytest.raises(RequestFailedError, match="late"):
            await client.session("s").follow(request, 1)

    with simulated(7) as loop, world(loop, Outcome(7, []), tell=False) as (server, _):
        run(loop, main(server))


def test_while_the_leader_of_the_log_is_silent_the_log_is_not_read_from_a_lagging_replica() -> None:
    """For a client, an entry that it does not read is one that the log does not have."""

    async def main(server: Server) -> None:
        server.is_clustered, nc = True, server.connection()
        await nc.connect([])
        await nc.jetstream().add_stream(name="turnkeep_log", subjects=["turnkeep.*.*.*"])
        client = await connect("nats://world:4222", tenant="t")
        key = SessionKey("t", "s")

        async def read() -> list[int]:
            return [one.seq async for _, one in client.stored.every(key, "in")]

        server.handle("turnkeep.t.s.in", "", b"{}", None)
        server.faults.lag_s = 600.0
        outcomes = []
        for silent_s in (0.0, 1.0) * 20:
            server.faults.silent_until_s = server.loop.time() + silent_s
            try:
                outcomes.append(await read())
            except NoAnswerError:
                outcomes.append(None)
        assert outcomes[1::2] == [None] * 20, "the leader was silent"
        assert [1] in outcomes[::2]
        assert all(one in ([1], None) for one in outcomes[::2])

    with simulated(7) as loop, world(loop, Outcome(7, []), tell=False) as (server, _):
        run(loop, main(server))


def test_a_session_import_that_fails_after_its_entries_were_stored_leaves_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It removes them, as if the reply of the server had been lost."""
    monkeypatch.setattr(operators, "_DEEDS", {"copies a session": operators._copy})
    store, num_stored = Import._store, 0

    async def fails(self: Import, *args: Any, **more: Any) -> int:
        nonlocal num_stored
        num_stored += await store(self, *args, **more)
        raise TurnkeepError("no reply")

    monkeypatch.setattr(Import, "_store", fails)
    for seed in range(3):
        plan = {"kinds": ("operator",), "num_faults": 5, "num_requests": 9, "num_visitors": 0}
        assert history.simulate(seed, favoured=plan).wrong == []
    assert num_stored


def test_simulated_histories_that_once_failed_break_no_invariant() -> None:
    seeds = (8100450, 8100518, 700054, 701771, 9001005, 10001516, 30000467, 4101331, 941006054, 3108359)
    status, said = simulate(*map(str, seeds), "--histories", "1")
    assert status == 0, said
    assert "10 histories" in said


def test_request_ids_of_an_erased_session_can_be_reused_even_if_a_newer_worker_answered_the_requests() -> (
    None
):
    plan = {"kinds": ("newer worker",), "num_faults": 5, "num_requests": 9, "num_clients": 3}
    plan |= {"num_visitors": 0, "num_sessions": 1, "sync_s": 0.0, "num_workers": 1}
    assert history.simulate(77, favoured=plan | {"weights": (10, 30, 10, 20, 5, 0)}).wrong == []


def test_the_end_of_a_simulation_closes_coroutines_of_tasks_that_have_not_started() -> None:
    """Otherwise Python warns for each killed worker that a coroutine was never awaited."""

    async def main(process: Process) -> None:
        async def live() -> None:
            async with create_task_group() as tasks:
                tasks.start_soon(asyncio.sleep, 1)
                process.kill()

        process.start(live())
        await asyncio.sleep(2)

    with simulated(7) as loop:  # here warnings are errors
        run(loop, main(Process(loop, "worker")))


def test_the_end_of_a_simulation_closes_the_coroutines_that_a_killed_task_starts_in_its_finally_block() -> (
    None
):
    """As a gateway does that cancels an answer which nobody waits for."""

    async def main(process: Process) -> None:
        async def live() -> None:
            try:
                await asyncio.sleep(1)
            finally:
                asyncio.create_task(asyncio.sleep(1))  # noqa: RUF006  # it never runs

        process.start(live())
        await asyncio.sleep(0.5)
        process.kill()

    with simulated(7) as loop:  # here warnings are errors
        run(loop, main(Process(loop, "gateway")))


def test_the_same_seed_gives_the_same_simulated_history_in_every_process() -> None:
    (first, said), (second, again) = (simulate("5", "--histories", "8", "--traces") for _ in range(2))
    assert (first, second) == (0, 0)
    assert re.findall(r"trace \w+", said) == re.findall(r"trace \w+", again)
    assert len(set(re.findall(r"trace \w+", said))) == 8
