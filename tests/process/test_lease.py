"""One worker at a time serves a prefix: a second one refuses to start, a dead one keeps nobody waiting."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import nats.errors
import pytest

from turnkeep_client.client import connect as client
from turnkeep_client.subjects import Subjects
from worker.wire.connection import BrokerError, connect
from worker.wire.lease import Lease

PATIENCE_S = 30


class Kept(Lease):
    """A lease with the task that a worker keeps it by."""

    task = None

    async def acquire(self):
        await super().acquire()
        self.task = asyncio.create_task(self.keep())

    async def release(self):
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
            await super().release()


@pytest.fixture
async def leases(nats_url):
    """Make leases of one prefix, each on a connection of its own; `lost` collects what they are told."""
    connections, made = [], []
    subjects = Subjects(f"lease{time.monotonic_ns()}")

    async def make(worker, directory, url=nats_url, **login):
        connections.append(await connect(url, name=worker, **login))
        lost = []
        lease = Kept(
            connections[-1].jetstream(), subjects, worker=worker, directory=directory, lost=lost.append
        )
        lease.told = lost
        made.append(lease)
        return lease

    yield make
    for lease in made:
        await lease.release()
    for connection in connections:
        await connection.close()


def kill(lease):
    """End a lease as `kill -9` does: it is neither renewed nor given back."""
    lease.task.cancel()
    lease.task = None


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # a state of another process
            await asyncio.sleep(0.02)


async def test_a_second_worker_is_refused_with_one_line_and_the_first_one_goes_on(local_worker, tmp_path):
    """Before it has changed anything: its settings are not the streams' then."""
    first = await local_worker()
    with pytest.raises(BrokerError) as refused:
        await local_worker(data_dir=tmp_path / "second", worker="second", log_max_bytes=2**25)
    assert f"worker 'test' (pid {os.getpid()} on " in str(refused.value)
    assert f"serves the prefix {first.settings.prefix!r}" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (await first.client.session("s").append(text="hello")).position == 5
    connection = await connect(first.settings.nats, name="test")
    config = (await connection.jetstream().stream_info(f"{first.settings.prefix}_log")).config
    await connection.close()
    assert config.max_bytes == first.settings.log_max_bytes


async def test_a_copied_data_directory_does_not_take_the_lease_of_the_running_worker(local_worker, tmp_path):
    first = await local_worker()
    shutil.copytree(first.settings.data_dir, tmp_path / "copy")
    with pytest.raises(BrokerError, match=r"worker 'test'.* serves the prefix"):
        await local_worker(data_dir=tmp_path / "copy", worker="second")
    assert (await first.client.session("s").append(text="hello")).position == 5


async def test_a_worker_that_stopped_keeps_nobody_waiting(local_worker, tmp_path):
    first = await local_worker()
    await first.stop()
    second = await local_worker(data_dir=tmp_path / "second")
    assert (await second.client.session("s").append(text="hello")).position == 5


async def test_the_lease_of_a_dead_worker_is_taken_at_once_with_its_data_directory(leases):
    dead, other = await leases("dead", "same"), await leases("restarted", "same")
    await dead.acquire()
    kill(dead)
    looks = []
    look = other._holder

    async def counted():
        looks.append(await look())
        return looks[-1]

    other._holder = counted
    await other.acquire()
    assert [(holder.worker, seq) for holder, seq in looks] == [("dead", dead._seq)]


async def test_the_lease_of_a_dead_worker_runs_out_for_others(leases):
    dead, other = await leases("dead", "one"), await leases("other", "two")
    await dead.acquire()
    kill(dead)
    async with asyncio.timeout(PATIENCE_S):
        await other.acquire()
    assert (await other._holder())[0].worker == "other"


async def test_of_workers_that_start_together_one_serves(leases):
    made = [await leases(f"w{number}", f"d{number}") for number in range(4)]
    outcomes = await asyncio.gather(*(lease.acquire() for lease in made), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(BrokerError) == 3
    winner = next(lease for lease, outcome in zip(made, outcomes, strict=True) if outcome is None)
    assert (await winner._holder())[0].worker == winner._me.worker


@pytest.mark.parametrize("garbage", [b"", b"{}", b"\xff", b'{"worker":1}'])
async def test_what_no_worker_has_written_is_no_lease(leases, garbage):
    lease = await leases("w", "d")
    await lease._make_stream()
    await lease._js.publish(lease._subject, garbage)
    await lease.acquire()
    await lease._js.publish(lease._subject, garbage)
    assert await lease._renew() is None
    assert (await lease._holder())[0].worker == "w"
    assert lease.told == []


async def test_a_renewal_that_came_late_or_whose_ack_was_lost_is_made_good(leases):
    lease = await leases("w", "d")
    await lease.acquire()
    kill(lease)
    lease._seq -= 1  # the server took it, and the worker never heard of it
    assert await lease._renew() is None
    assert lease.is_unbroken
    await lease._js.delete_msg(lease._stream, lease._seq)  # it ran out
    assert await lease._renew() is None
    assert (await lease._holder()) == (lease._me, lease._seq)
    assert lease.is_held
    assert not lease.is_unbroken, "another worker may have had it meanwhile"


async def test_who_lost_the_lease_is_told_who_has_it(leases):
    paused, other = await leases("paused", "one"), await leases("other", "two")
    await paused.acquire()
    kill(paused)
    async with asyncio.timeout(PATIENCE_S):
        await other.acquire()
    paused.task = asyncio.create_task(paused.keep())
    await until(lambda: paused.told)
    assert "worker 'other' (pid " in paused.told[0]
    assert other.told == []


@pytest.mark.process
async def test_the_lease_is_taken_again_on_a_server_that_was_started_anew(server, leases):
    """It lies in the server's memory, and the worker is still the only one."""
    await server.start()
    lease = await leases("w", "d", url=server.url, token=server.token)
    await lease.acquire()
    killed = server.pid
    os.kill(killed, signal.SIGKILL)
    await until(lambda: server.pid not in (None, killed))
    holder = None
    async with asyncio.timeout(PATIENCE_S):
        while holder is None:
            with contextlib.suppress(nats.errors.Error):
                holder, _ = await lease._holder()
            await asyncio.sleep(0.05)
    assert holder.worker == "w"
    assert lease.told == []


@pytest.mark.process
async def test_a_paused_worker_that_was_replaced_stops_and_no_request_is_lost(nats_url, tiny_model, tmp_path):
    prefix = f"paused{time.monotonic_ns()}"
    logs = [tmp_path / f"{name}.log" for name in ("first", "second")]
    workers = []

    def start(log):
        command = [
            sys.executable,
            "-m",
            "worker",
            "serve",
            "--data-dir",
            log.with_suffix(""),
            "--nats",
            nats_url,
        ]
        options = ["--prefix", prefix, "--model", tiny_model, "--log-format", "json", "--worker", log.stem]
        options += ["--log-max-bytes", "64MiB", "--min-free-disk", "0"]
        with log.open("wb") as output:
            workers.append(subprocess.Popen([*command, *options], stdout=output, stderr=output))

    try:
        start(logs[0])
        await until(lambda: '"event": "ready"' in logs[0].read_text())
        async with await client(nats_url, prefix=prefix) as requests:
            assert (await requests.session("s").append(text="hello")).position == 5
            workers[0].send_signal(signal.SIGSTOP)
            start(logs[1])
            await until(lambda: '"event": "ready"' in logs[1].read_text())
            workers[0].send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(workers[0].wait, PATIENCE_S) == 1
            words = [line for line in logs[0].read_text().splitlines() if not line.startswith("{")]
            assert len(words) == 1
            assert "worker 'second' (pid " in words[0]
            assert f"has taken over the prefix {prefix!r}" in words[0]
            assert (await requests.session("s").append(text="hello")).position == 10
            entries = await requests.log("s")
            assert [entry.kind for entry in entries] == ["in", "out"] * 2
            assert [json.loads(entry.body)["type"] for entry in entries if entry.kind == "out"] == [
                "appended"
            ] * 2
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(signal.SIGCONT)
                worker.terminate()
                worker.wait(30)
