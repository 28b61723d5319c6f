"""Task groups end only after all of their tasks, and raise their errors; tenants take turns for places."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from anyio import CancelScope, fail_after, sleep, sleep_forever
from anyio.lowlevel import checkpoint

from tests.parts import free_port
from turnkeep_client.errors import TurnkeepError
from worker.app import WorkerError
from worker.process.concurrency import Rotation, in_thread, shielded, task_group
from worker.wire.intake import Intake
from worker.wire.retention import Retention

ROOT = Path(__file__).parents[2]


class WrongError(TurnkeepError):
    pass


async def test_an_error_in_the_body_of_a_task_group_is_raised_unchanged():
    cause = ValueError("why")

    async def body():
        async with task_group() as outer, task_group() as inner:
            outer.start_soon(sleep_forever)
            inner.start_soon(sleep_forever)
            raise WrongError from cause

    with pytest.raises(WrongError) as caught:
        await body()
    assert caught.value.__cause__ is cause


async def test_an_error_of_an_awaited_task_is_raised_unchanged_by_its_task_group():
    async def fails():
        raise WrongError

    async def body():
        async with task_group() as tasks:
            await tasks.start_soon(in_thread, lambda: None)
            await tasks.start_soon(fails)

    with pytest.raises(WrongError):
        await body()


async def test_a_task_that_swallows_cancellations_is_cancelled_again_until_its_task_group_ends():
    """nats-py's calls swallow a cancellation that arrives together with the reply."""
    swallowed = 0

    async def swallows():
        nonlocal swallowed
        while swallowed < 5:
            try:
                await sleep_forever()
            except asyncio.CancelledError:
                swallowed += 1
        await sleep_forever()

    with fail_after(5):
        async with task_group() as tasks:
            tasks.start_soon(swallows)
            await checkpoint()
            tasks.cancel_scope.cancel()
    assert swallowed == 5


async def test_a_shielded_call_finishes_although_its_surrounding_cancel_scope_is_cancelled():
    done = []

    async def end(what):
        await sleep(0.01)
        done.append(what)

    with CancelScope() as scope:
        scope.cancel()
        try:
            await sleep_forever()
        finally:
            await shielded(end, "part")
    assert done == ["part"]


@pytest.mark.parametrize(("part", "name"), [(Intake.keep_alive, "keep-alive"), (Retention.run, "retention")])
@pytest.mark.parametrize("how", ["ends", "fails"])
async def test_the_worker_stops_with_an_error_that_names_the_task_if_a_background_task_ends(
    local_worker, monkeypatch, part, name, how
):
    go_on = asyncio.Event()

    async def ends(_):
        await go_on.wait()
        if how == "fails":
            raise RuntimeError("no more")

    monkeypatch.setattr(Intake if part is Intake.keep_alive else Retention, part.__name__, ends)
    worker = await local_worker()
    assert (await worker.client.session("s").append(text="hello")).position == 5
    go_on.set()
    await worker.client.close()
    with pytest.raises(WorkerError) as caught:
        await worker.task
    why = "RuntimeError('no more')" if how == "fails" else "None"
    assert str(caught.value) == f"the {name} task ended: {why}"
    assert not [task for task in asyncio.all_tasks() if "worker." in task.get_name()]


#: Python runs this module at each start. A worker then takes a minute to load its model.
SLOW_START = """
import sys, time
if "worker.main" in sys.orig_argv:
    from worker.models import model
    model.load = lambda *args, **named: (print("loading", file=sys.stderr, flush=True), time.sleep(60))
"""


@pytest.mark.process
async def test_a_second_signal_ends_a_worker_that_is_still_loading_its_model(tmp_path, tiny_model):
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    command = [sys.executable, "-m", "commands", "serve", "--data-dir", tmp_path / "data"]
    command += ["--nats-port", str(free_port()), "--model", tiny_model]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(  # noqa: ASYNC220
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        async with asyncio.timeout(60):
            while await asyncio.to_thread(process.stderr.readline) != "loading\n":
                pass
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait) == 128 + signal.SIGINT
            assert process.stderr.read() == ""


class Crowd:
    """Tasks of several tenants; each keeps its place until `end` ends it."""

    def __init__(self, most: int) -> None:
        self.rotation = Rotation(most)
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def come(self, *names: str) -> None:
        """Start tasks; a task's name begins with the letter of its tenant."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._stay(name))
        await settled()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settled()

    async def _stay(self, name: str) -> None:
        async with self.rotation.enter(name[0]):
            self.inside.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.inside.remove(name)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_limited_number_of_slots_goes_to_waiting_tasks_in_rotation_among_tenants() -> None:
    crowd = Crowd(2)
    await crowd.come("a1", "a2", "a3", "a4", "a5", "b1", "b2", "c1")
    order = []
    while crowd.inside:
        order.append(crowd.inside[0])
        await crowd.end(crowd.inside[0])
    assert order == ["a1", "a2", "a3", "b1", "c1", "a4", "b2", "a5"]


@pytest.mark.parametrize("is_late", [False, True], ids=["slot not yet given", "slot just given"])
async def test_a_task_cancelled_while_it_waits_for_a_slot_passes_the_slot_to_the_next_tenants_task(
    is_late: bool,
) -> None:
    """Also if it has just got the place, and has not run since."""
    crowd = Crowd(1)
    await crowd.come("a1", "b1", "c1")
    if is_late:
        crowd._ends["a1"].set()
        await asyncio.sleep(0)
    crowd.tasks["b1"].cancel()
    await settled()
    await crowd.end("a1")
    assert (crowd.tasks["b1"].cancelled(), crowd.inside) == (True, ["c1"])
    await crowd.end("c1")
    await crowd.come("d1")
    assert crowd.inside == ["d1"]
    await crowd.end("d1")
