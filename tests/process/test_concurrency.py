"""Task groups end only after all of their tasks, and raise the error of a task unchanged."""

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
from worker.process.concurrency import in_thread, shielded, task_group
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


async def test_a_task_that_swallows_cancellations_ends_with_its_task_group():
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


async def test_a_shielded_call_finishes_although_the_scope_around_it_is_cancelled():
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
async def test_a_background_task_that_ends_stops_the_worker_with_an_error_that_names_it(
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
