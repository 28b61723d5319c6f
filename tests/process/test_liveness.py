"""Workers of one prefix know each other, only one has a name, and the others notice when it dies."""

import asyncio
import contextlib
import os
import shutil
import signal
import time

import msgspec
import nats.errors
import pytest

from tests.parts import fall_asleep, until
from turnkeep_client.subjects import Subjects
from worker.cluster import liveness as members_of
from worker.cluster.liveness import Members
from worker.wire.connection import BrokerError, connect
from worker.wire.log_room import open_bytes
from worker.wire.records import ensure_records, record_subject

PATIENCE_S = 30


class Kept(Members):
    """A worker's membership record, with the tasks that renew it and watch the other workers."""

    task = watching = None

    async def join(self):
        await super().join()
        self.task = asyncio.create_task(self.keep())
        self.watching = asyncio.create_task(self.watch())

    async def leave(self):
        tasks = {task for task in (self.task, self.watching) if task is not None}
        left = tasks
        while left:  # Python 3.11's `wait_for` swallows a cancellation that comes together with its result
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=0.1)
        if tasks:
            await super().leave()


@pytest.fixture
async def members(nats_url):
    """Yield a function that makes a worker's membership record, on a connection of its own.

    `told` collects the reasons for which the worker lost its record.
    """
    connections, made = [], []
    subjects = Subjects(f"lease{time.monotonic_ns()}")

    async def make(worker, directory, url=nats_url, **login):
        connections.append(await connect(url, name=worker, **login))
        lost = []
        one = Kept(connections[-1], subjects, worker=worker, directory=directory, lost=lost.append)
        one.told = lost
        made.append(one)
        return one

    yield make
    for one in made:
        await one.leave()
    for connection in connections:
        await connection.close()


async def pair(members):
    first, second = await members("first", "one"), await members("second", "two")
    await first.join()
    await second.join()
    return first, second


def kill(one):
    """End a worker as `kill -9` does: its record is neither renewed nor removed."""
    one.task.cancel()
    one.watching.cancel()
    one.task = one.watching = None


def ended(one):
    """Return the names of the workers that `one` has reported as ended since the last report."""
    names = [gone.worker for gone in one._gone]
    one._gone.clear()
    return names


async def test_a_second_worker_with_the_same_name_is_refused_with_a_one_line_error(local_worker, tmp_path):
    """It is refused before it changes anything: the streams keep the first worker's settings."""
    first = await local_worker()
    with pytest.raises(BrokerError) as refused:
        await local_worker(data_dir=tmp_path / "second", log_max_bytes=2**25)
    assert f"worker 'test' (pid {os.getpid()} on " in str(refused.value)
    assert f"serves the prefix {first.settings.prefix!r}" in str(refused.value)
    assert str(refused.value).endswith("choose another --worker name")
    assert "\n" not in str(refused.value)
    assert (await first.client.session("s").append(text="hello")).position == 5
    connection = await connect(first.settings.nats, name="test")
    config = (await connection.jetstream().stream_info(f"{first.settings.prefix}_log")).config
    await connection.close()
    assert config.max_bytes == open_bytes(first.settings.log_max_bytes)


async def test_a_second_worker_on_a_subject_prefix_with_another_model_is_refused_and_the_first_still_answers(
    local_worker, tmp_path, tiny_model
):
    first = await local_worker()
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    weights = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(weights[:-2] + b"\x3f\x3f")
    with pytest.raises(
        BrokerError, match=r"worker 'test' .* with another model; give this worker the same one"
    ):
        await local_worker(data_dir=tmp_path / "second", worker="second", model=str(other))
    assert (await first.client.session("s").append(text="hello")).position == 5


async def test_a_second_worker_of_another_protocol_version_is_refused_and_the_first_still_answers(
    local_worker, tmp_path, monkeypatch
):
    first = await local_worker()
    monkeypatch.setattr(members_of, "PROTOCOL", 99)
    with pytest.raises(
        BrokerError,
        match=r"worker 'test' .* with version 1 of the protocol, and this worker has 99; stop all",
    ):
        await local_worker(data_dir=tmp_path / "second", worker="second")
    assert (await first.client.session("s").append(text="hello")).position == 5


async def test_a_worker_on_a_dead_workers_data_directory_takes_over_its_membership_record_at_once(members):
    dead, other = await members("w", "same"), await members("w", "same")
    await dead.join()
    kill(dead)
    looks = []
    look = other._holder

    async def counted():
        looks.append(await look())
        return looks[-1]

    other._holder = counted
    await other.join()
    assert [(holder.boot, seq) for holder, seq in looks] == [(dead.me.boot, dead._seq)]


async def test_a_dead_workers_name_becomes_free_for_other_workers_after_a_while(members):
    dead, other = await members("w", "one"), await members("w", "two")
    await dead.join()
    kill(dead)
    async with asyncio.timeout(PATIENCE_S):
        await other.join()
    assert (await other._holder())[0].boot == other.me.boot


async def test_of_several_workers_started_together_under_one_name_one_joins_and_all_others_fail(members):
    made = [await members("w", f"d{number}") for number in range(4)]
    outcomes = await asyncio.gather(*(one.join() for one in made), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(BrokerError) == 3
    winner = next(one for one, outcome in zip(made, outcomes, strict=True) if outcome is None)
    assert (await winner._holder())[0].boot == winner.me.boot


async def test_workers_that_start_together_find_each_other_and_agree_which_of_them_is_first(members):
    made = [await members(f"w{number}", f"d{number}") for number in range(4)]
    await asyncio.gather(*(one.join() for one in made))
    await until(lambda: all(len(one.others) == 3 for one in made))
    assert [one.is_first for one in made].count(True) == 1


async def test_a_worker_that_slept_past_the_expiry_of_its_membership_record_is_no_member_until_renewal(
    members, monkeypatch
):
    only = await members("one", "a")
    await only.join()
    assert only.has_record
    fall_asleep(monkeypatch, 60.0)
    assert not only.has_record, "another worker may have joined meanwhile"
    await until(lambda: only.has_record)


@pytest.mark.parametrize("ending", ["killed", "stopped"])
async def test_other_workers_report_an_ended_worker_as_gone_exactly_once_and_within_a_second(members, ending):
    first, second = await pair(members)
    if ending == "killed":
        kill(second)
        await second._nc.close()
    else:
        await second.leave()
    async with asyncio.timeout(1.0):
        gone = await first.next_ended()
    assert (gone.boot, gone.serves, first.others) == (second.me.boot, False, {})
    await asyncio.sleep(1.0)
    assert not ended(first), "once, though its record is there for two seconds"


async def test_a_worker_that_restarts_before_others_noticed_its_death_is_reported_as_gone_exactly_once(
    members,
):
    """Else nobody takes the sessions that it had and that belong to other workers."""
    first, dead, back = await members("a", "one"), await members("b", "two"), await members("b", "two")
    await first.join()
    await dead.join()
    kill(dead)
    await dead._nc.close()
    await back.join()
    async with asyncio.timeout(1.0):
        gone = await first.next_ended()
    assert (gone.boot, first.others["b"].boot) == (dead.me.boot, back.me.boot)
    await asyncio.sleep(1.0)
    assert (ended(first), first.others["b"].boot) == ([], back.me.boot)


@pytest.mark.parametrize("killed", ["d", "bcd", "bcdefghijklmn"])
async def test_all_survivors_report_within_one_second_that_several_workers_died_together(members, killed):
    """Each pings only the next two; the others are told, or look as soon as a neighbour is silent."""
    made = {name: await members(name, name) for name in "abcdefghijklmno"}
    await asyncio.gather(*(one.join() for one in made.values()))
    await until(lambda: all(len(one.others) == 14 for one in made.values()))
    for name in killed:
        kill(made[name])
    await asyncio.gather(*(made[name]._nc.close() for name in killed))
    left = [one for name, one in made.items() if name not in killed]
    async with asyncio.timeout(1.0):
        missed = [{(await one.next_ended()).worker for _ in killed} for one in left]
    assert missed == [{*killed}] * len(left)
    assert not any(ended(one) for one in left)


async def test_a_running_worker_that_another_worker_wrongly_reports_as_gone_stays_a_member(members):
    """The other one's connection may go to another server of the cluster, with a cut between them."""
    first, second = await pair(members)
    await second._nc.publish(first.common_address("gone"), msgspec.json.encode(second.me))
    await asyncio.sleep(0.5)
    assert list(first.others) == ["second"]
    assert not ended(first)


async def test_a_worker_missing_from_the_member_list_is_treated_as_running_only_if_it_answers_a_ping(
    members,
):
    """While a worker runs, a request that it has attempted has not crashed it."""
    first, second = await pair(members)
    first.others.clear()
    assert await first.runs(second.me.boot)
    assert not await first.runs(first.me.boot)
    kill(second)
    await second._nc.close()
    assert not await first.runs(second.me.boot)
    assert not await first.runs("a run of nobody")


async def test_a_worker_that_stops_renewing_its_membership_record_stays_a_member_while_it_answers_checks(
    members,
):
    first, second = await pair(members)
    second.task.cancel()  # it renews no more
    second.task = None
    await asyncio.sleep(4)
    assert list(first.others) == ["second"]


async def test_undecodable_messages_in_the_membership_stream_are_ignored(members):
    one = await members("w", "d")
    await ensure_records(one._js, one._subjects, None)
    for garbage in (b"", b"{}", b"\xff", b'{"worker":1}'):
        await one._js.publish(one._subject, garbage)
        await one._js.publish(record_subject(one._subjects, "other"), garbage)
    await one.join()
    await one._js.publish(one._subject, garbage)
    assert await one._renew() is None
    assert (await one._holder())[0].worker == "w"
    assert one.told == []
    assert not one.others


async def test_a_worker_renews_its_membership_record_after_a_lost_ack_or_after_the_record_expired(members):
    one = await members("w", "d")
    await one.join()
    kill(one)
    one._seq -= 1  # the server took it, and the worker never heard of it
    assert await one._renew() is None
    assert one.has_record
    await one._js.delete_msg(one.stream, one._seq)  # it ran out
    assert await one._renew() is None
    assert (await one._holder()) == (one.me, one._seq)
    assert one.has_record


async def test_a_paused_worker_that_lost_its_name_gets_an_error_that_names_the_new_owner(members):
    paused, other = await members("w", "one"), await members("w", "two")
    await paused.join()
    kill(paused)
    async with asyncio.timeout(PATIENCE_S):
        await other.join()
    paused.task = asyncio.create_task(paused.keep())
    await until(lambda: paused.told)
    assert "worker 'w' (pid " in paused.told[0]
    assert other.told == []


@pytest.mark.process
async def test_a_worker_makes_its_membership_record_again_after_the_nats_server_restarts(server, members):
    """The server keeps the record in memory only, so it loses the record."""
    await server.start()
    one = await members("w", "d", url=server.url, token=server.token)
    await one.join()
    killed = server.pid
    os.kill(killed, signal.SIGKILL)
    await until(lambda: server.pid not in (None, killed))
    holder = None
    async with asyncio.timeout(PATIENCE_S):
        while holder is None:
            with contextlib.suppress(nats.errors.Error):
                holder, _ = await one._holder()
            await asyncio.sleep(0.05)
    assert holder.worker == "w"
    assert one.told == []
