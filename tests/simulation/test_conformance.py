"""The simulated NATS server behaves like a real one, as far as workers and clients rely on it."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any
from uuid import uuid4

import nats
import nats.errors
import pytest
from nats.aio.msg import Msg
from nats.js import api
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError

from tests.simulation.loop import run, simulated
from tests.simulation.world import Server
from turnkeep_client.direct import DirectGets
from turnkeep_client.messages import Chunk, Closed, encode, failure
from turnkeep_client.subjects import CONSUMER, SessionKey, Subjects
from worker.process.constants import Constants
from worker.process.settings import Settings
from worker.wire import streams
from worker.wire.chunks import PublishedChunks
from worker.wire.connection import BrokerError, confirm_subscriptions
from worker.wire.fence import FencedError
from worker.wire.journal import Journal
from worker.wire.outbox import Outbox

EXPECT = "Nats-Expected-Last-Subject-Sequence"
ACK_WAIT_S = 1.0


class Place:
    """The streams and the consumer that a worker makes, under a subject prefix of their own."""

    def __init__(self, nc: Any, folder: Path) -> None:
        self.nc = nc
        self.js = nc.jetstream()
        self.subjects = Subjects(f"p{uuid4().hex[:12]}")
        self.settings = Settings(data_dir=folder, log_max_bytes=65_536, max_message_bytes=4096)
        self.constants = Constants(ack_wait_s=ACK_WAIT_S)

    async def make(self) -> None:
        await streams.ensure(self.js, self.subjects, self.settings, self.constants)

    def of(self, kind: str, session: str = "s") -> str:
        return f"{self.subjects.prefix}.t.{session}.{kind}"

    async def put(self, kind: str, body: bytes = b"x", session: str = "s", **headers: str) -> int:
        ack = await self.js.publish(self.of(kind, session), body, headers=headers or None)
        return int(ack.seq)

    async def pull(self, batch: int, wait_s: float, **more: int) -> tuple[list[Msg], list[str]]:
        """Pull messages as `Intake` does; return them, and the status messages that ended the pull."""
        found: list[Msg] = []
        ends: list[str] = []

        async def arrived(message: Msg) -> None:
            if message.subject.startswith("_INBOX."):
                headers = message.headers or {}
                ends.append(f"{headers.get('Status')} {headers.get('Description')}")
            else:
                found.append(message)

        inbox = self.nc.new_inbox()
        sub = await self.nc.subscribe(inbox, cb=arrived)
        asked = {"batch": batch, "expires": int(wait_s * 1e9), **more}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.subjects.log_stream}.{CONSUMER}"
        await self.nc.publish(subject, json.dumps(asked).encode(), reply=inbox)
        await asyncio.sleep(wait_s + 0.1)
        await sub.unsubscribe()
        return found, ends


async def a_write_with_a_wrong_expected_sequence_stores_nothing(place: Place) -> None:
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data)

    await place.nc.subscribe(place.of("out"), cb=hear)
    await place.nc.flush()
    await place.nc.flush()
    first = await place.put("commit", b"one", **{EXPECT: "0"})
    assert await place.put("commit", b"two", "other", **{EXPECT: "0"}) == first + 1
    with pytest.raises(APIError) as refused:
        await place.put("commit", b"stale", **{EXPECT: "0"})
    assert refused.value.err_code == 10071
    with pytest.raises(APIError) as refused:
        await place.put("closed", b"never", **{"Nats-Expected-Last-Sequence": str(2**62)})
    assert refused.value.err_code == 10071
    second = await place.put("commit", b"three", **{EXPECT: str(first)})
    await asyncio.sleep(0.1)
    assert heard == [b"one", b"three"], "told under its stored subject, and only if it is stored"
    last = await place.js.get_last_msg(place.subjects.log_stream, place.of("out"))
    assert (last.seq, last.data, last.headers) == (second, b"three", {EXPECT: str(first)})


async def after_a_removed_result_the_expected_sequence_is_the_one_before(place: Place) -> None:
    first = await place.put("commit", **{EXPECT: "0"})
    second = await place.put("commit", **{EXPECT: str(first)})
    await place.js.delete_msg(place.subjects.log_stream, second)
    with pytest.raises(APIError):
        await place.put("commit", **{EXPECT: str(second)})
    third = await place.put("commit", **{EXPECT: str(first)})
    assert third == second + 1
    await place.js.purge_stream(place.subjects.log_stream, subject=f"{place.subjects.prefix}.t.s.*")
    await place.put("commit", **{EXPECT: "0"})


async def a_message_id_repeated_within_the_window_is_stored_once(place: Place) -> None:
    subject, headers = place.of("in"), {"Nats-Msg-Id": "one"}
    first = await place.js.publish(subject, b"x", headers=headers)
    again = await place.js.publish(place.of("in", "other"), b"y", headers=headers)
    assert (again.seq, again.duplicate) == (first.seq, True)
    await asyncio.sleep(streams.DEDUPE_S + 0.3)
    later = await place.js.publish(subject, b"x", headers=headers)
    assert (later.seq, later.duplicate) == (first.seq + 1, None)


async def an_unacknowledged_message_is_redelivered(place: Place) -> None:
    names = ("acked", "silent", "busy", "over")
    seqs = {name: await place.put("in", session=name) for name in names}
    found, ends = await place.pull(64, 0.1)
    assert [message.subject for message in found] == [place.of("in", name) for name in names]
    assert [message.metadata.sequence.stream for message in found] == list(seqs.values())
    assert ends == ["408 Request Timeout"]
    by_name = dict(zip(names, found, strict=True))
    await by_name["acked"].ack()
    await by_name["over"].term()
    await asyncio.sleep(ACK_WAIT_S * 0.4)
    await by_name["busy"].in_progress()
    again, _ = await place.pull(64, ACK_WAIT_S * 0.75)
    assert [message.metadata.sequence.stream for message in again] == [seqs["silent"]]
    assert again[0].metadata.num_delivered == 2
    await by_name["silent"].ack()  # acknowledges the first of two deliveries: this counts too
    last, _ = await place.pull(64, ACK_WAIT_S * 2)
    assert {message.metadata.sequence.stream for message in last} == {seqs["busy"]}
    info = await place.js.consumer_info(place.subjects.log_stream, CONSUMER)
    assert (info.num_ack_pending, info.num_pending) == (1, 0)


async def messages_of_a_dead_worker_are_redelivered_at_once_when_taken_back(place: Place) -> None:
    for name in ("acked", "held"):
        await place.put("in", session=name)
    (acked, _), _ = await place.pull(64, 0.1)
    await acked.ack()
    await streams.take_back(place.js, place.subjects)
    again, _ = await place.pull(64, 0.1)
    assert [(message.subject, message.metadata.num_delivered) for message in again] == [
        (place.of("in", "held"), 2)
    ]
    more, _ = await place.pull(64, ACK_WAIT_S * 0.5)
    assert not more, "it is held again, for the usual time"
    assert (await place.js.consumer_info(place.subjects.log_stream, CONSUMER)).config.ack_wait == ACK_WAIT_S


async def a_returned_message_is_redelivered_after_its_delay(place: Place) -> None:
    for name in ("now", "later"):
        await place.put("in", session=name)
    (now, later), _ = await place.pull(2, 0.1)
    await now.nak()
    await later.nak(delay=1.0)
    found, _ = await place.pull(1, 0.8)
    assert [message.subject for message in found] == [place.of("in", "now")]
    await found[0].ack()
    found, _ = await place.pull(64, 1.1)
    assert {message.subject for message in found} == {place.of("in", "later")}


async def a_purged_message_is_not_redelivered(place: Place) -> None:
    gone = await place.put("in", session="gone")
    await place.put("in", session="kept")
    await place.pull(64, 0.1)
    await place.js.purge_stream(place.subjects.log_stream, seq=gone + 1, subject=place.of("in", "gone"))
    found, _ = await place.pull(64, ACK_WAIT_S * 1.5)
    assert {message.subject for message in found} == {place.of("in", "kept")}


async def a_pull_ends_at_its_batch_size_or_byte_limit(place: Place) -> None:
    for _ in range(3):
        await place.put("in", b"x" * 1000)
    found, ends = await place.pull(2, 0.1)
    assert (len(found), ends) == (2, []), "a batch that is full ends without a word"
    await place.put("in", b"x" * 3000)
    found, ends = await place.pull(64, 0.2, max_bytes=2500)
    assert (len(found), ends) == (1, ["409 Message Size Exceeds MaxBytes"])


async def direct_gets_read_a_subject_in_order(place: Place) -> None:
    seqs = [await place.put("in", bytes([65 + i]), session="ab"[i % 2]) for i in range(6)]
    gets = DirectGets(place.nc, timeout_s=2.0)

    async def read(**request: Any) -> tuple[list[tuple[int, bytes]], int]:
        messages, num_more = await gets.read(place.subjects.log_stream, request)
        return [(int((one.headers or {})["Nats-Sequence"]), one.data) for one in messages], num_more

    own = place.of("in", "a")
    assert await read(seq=1, batch=2, next_by_subj=own) == ([(seqs[0], b"A"), (seqs[2], b"C")], 1)
    assert await read(seq=seqs[2] + 1, batch=2, next_by_subj=own) == ([(seqs[4], b"E")], 0)
    assert await read(seq=seqs[5], batch=2, next_by_subj=own) == ([], 0)
    await place.put("in", b"G", session="a", **{"Nats-Last-Sequence": "77"})
    batch, _ = await gets.read(place.subjects.log_stream, {"seq": seqs[2], "batch": 9, "next_by_subj": own})
    named = [(one.headers or {})["Nats-Last-Sequence"] for one in batch]
    assert named == ["0", str(seqs[2]), str(seqs[4])], "each message names the one before it in the batch"
    await place.js.delete_msg(place.subjects.log_stream, seqs[5] + 1)
    every = place.subjects.every("in")
    assert [seq for seq, _ in (await read(seq=1, batch=9, next_by_subj=every))[0]] == seqs
    lasts = {"multi_last": [own, place.of("in", "b"), place.of("in", "none")], "batch": 3}
    assert (await read(**lasts))[0] == [(seqs[4], b"E"), (seqs[5], b"F")]
    await place.js.delete_msg(place.subjects.log_stream, seqs[2])
    assert [seq for seq, _ in (await read(seq=1, batch=9, next_by_subj=own))[0]] == [seqs[0], seqs[4]]


async def missing_messages_streams_consumers_and_responders_raise_errors(place: Place) -> None:
    seq = await place.put("in", b"here", Name="value")
    log = place.subjects.log_stream
    for direct in (True, False):
        found = await place.js.get_msg(log, seq, direct=direct)
        assert (found.seq, found.data, found.subject) == (seq, b"here", place.of("in"))
        assert found.headers["Name"] == "value"
        with pytest.raises(NotFoundError):
            await place.js.get_msg(log, seq + 1, direct=direct)
        with pytest.raises(NotFoundError):
            await place.js.get_last_msg(log, place.of("out"), direct=direct)
    with pytest.raises(NotFoundError):
        await place.js.stream_info(f"{log}_none")
    with pytest.raises(NotFoundError):
        await place.js.consumer_info(log, "none")
    with pytest.raises(NoStreamResponseError):
        await place.js.publish(f"{place.subjects.prefix}.nowhere", b"")
    with pytest.raises(nats.errors.NoRespondersError):
        await place.nc.request(f"{place.subjects.prefix}.t.s.ctl", b"")


async def removing_a_message_twice_raises_an_error_with_code_500(place: Place) -> None:
    """The code is not 404, as it is for reading a removed message."""
    seq = await place.put("in")
    await place.js.delete_msg(place.subjects.log_stream, seq)
    with pytest.raises(APIError) as refused:
        await place.js.delete_msg(place.subjects.log_stream, seq)
    assert (refused.value.code, refused.value.err_code) == (500, 10057)
    journal = Journal(place.nc, place.subjects)
    await journal.delete(seq)


async def a_purge_removes_only_messages_of_its_subject_below_its_sequence(place: Place) -> None:
    seqs = [await place.put(kind, session=name) for kind in ("in", "attempt") for name in ("a", "b")]
    await place.js.purge_stream(
        place.subjects.log_stream, seq=seqs[2], subject=f"{place.subjects.prefix}.t.a.*"
    )
    info = await place.js.stream_info(
        place.subjects.log_stream, subjects_filter=f"{place.subjects.prefix}.t.*.*"
    )
    left = {place.of("attempt", "a"): 1, place.of("in", "b"): 1, place.of("attempt", "b"): 1}
    assert info.state.subjects == left
    assert await place.put("in") == seqs[-1] + 1


async def a_message_that_is_too_large_or_overfills_the_stream_is_refused(place: Place) -> None:
    with pytest.raises(APIError) as too_large:
        await place.put("in", b"x" * 4097)
    assert too_large.value.err_code == 10054
    for _ in range(12):
        await place.put("in", b"x" * 4000)
    with pytest.raises(APIError) as full:
        await asyncio.gather(*(place.put("in", b"x" * 4000) for _ in range(5)))
    assert full.value.err_code == 10077
    assert (await place.js.stream_info(place.subjects.log_stream)).state.messages > 10


async def a_key_keeps_only_its_last_message_until_that_expires(place: Place) -> None:
    name = place.subjects.prefix
    config = api.StreamConfig(
        name=f"KV_{name}",
        subjects=[f"$KV.{name}.>"],
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.MEMORY,
        discard=api.DiscardPolicy.NEW,
        max_msgs_per_subject=1,
        allow_msg_ttl=True,
    )
    assert await streams.ensure_stream(place.js, config) is False
    assert await streams.ensure_stream(place.js, config) is False, "again"
    subject = f"$KV.{name}.worker"
    first = await place.js.publish(subject, b"1", headers={EXPECT: "0"}, msg_ttl=1)
    second = await place.js.publish(subject, b"2", headers={EXPECT: str(first.seq)}, msg_ttl=1)
    assert (await place.js.get_last_msg(f"KV_{name}", subject)).data == b"2"
    with pytest.raises(NotFoundError):
        await place.js.get_msg(f"KV_{name}", first.seq)
    await asyncio.sleep(2.2)
    with pytest.raises(NotFoundError):
        await place.js.get_last_msg(f"KV_{name}", subject)
    with pytest.raises(APIError):
        await place.js.publish(subject, b"3", headers={EXPECT: str(second.seq)}, msg_ttl=1)
    await place.js.publish(subject, b"3", headers={EXPECT: "0"}, msg_ttl=1)


async def a_message_reaches_one_of_a_queue_group_and_every_other_subscriber(place: Place) -> None:
    heard: Counter[str] = Counter()

    def hear(name: str) -> Callable[[Msg], Awaitable[None]]:
        async def arrived(message: Msg) -> None:
            heard[name] += 1

        return arrived

    subject = place.of("ctl")
    for name, queue in (("one", "q"), ("other", "q"), ("alone", "")):
        await place.nc.subscribe(place.subjects.every("ctl"), queue, cb=hear(name))
    await place.nc.flush()
    await place.nc.flush()
    for _ in range(20):
        await place.nc.publish(subject, b"")
    await asyncio.sleep(0.1)
    assert heard["alone"] == 20
    assert heard["one"] + heard["other"] == 20
    assert min(heard.values()) > 0


async def a_request_that_another_worker_removed_gets_no_result(place: Place) -> None:
    key, journal = SessionKey("t", "s"), Journal(place.nc, place.subjects)
    seqs = [await place.put("in") for _ in range(2)]
    removed, there = (encode(Closed(id="c", seq=seq, position=9, forgotten=3, settled=False)) for seq in seqs)
    await place.js.delete_msg(place.subjects.log_stream, seqs[0])
    with pytest.raises(FencedError):
        await journal.commit(key, removed, 0, {}, server=journal.server)
    assert await journal.commit(key, there, 0, {}, server=journal.server) > seqs[1]


async def a_result_stored_after_another_one_cannot_be_stored_again_as_the_first(place: Place) -> None:
    """A lagging replica may hide both results, so that a worker commits with expected sequence 0."""
    key, journal = SessionKey("t", "s"), Journal(place.nc, place.subjects)
    seqs = [await place.put("in") for _ in range(2)]
    cancelled, refused = (encode(failure("r", "expired", "so it is", seq=seq)) for seq in reversed(seqs))
    first = await journal.commit(key, cancelled, 0, {}, server=journal.server)
    second = await journal.commit(key, refused, first, {}, server=journal.server)
    assert await journal.commit(key, refused, first, {}, server=journal.server) == second, (
        "its own, of which the ack was lost"
    )
    with pytest.raises(FencedError):  # another worker's, in the same place
        await journal.commit(key, cancelled, first, {}, server=journal.server)
    with pytest.raises(FencedError):  # of a worker that has read another process's log
        await journal.commit(key, cancelled, second, {}, server="an earlier one")
    with pytest.raises(FencedError):
        await journal.commit(key, refused, 0, {}, server=journal.server)


async def a_worker_that_another_one_overtook_publishes_no_more_chunks(place: Place) -> None:
    key = SessionKey("t", "s")
    one, other = (Journal(place.nc, place.subjects) for _ in range(2))
    seq = await place.put("in")

    def chunk(i: int) -> Chunk:
        return Chunk(i, (7,), "x", seq=seq)

    first = await one.chunks.publish(key, "g", chunk(0), 0, server=one.server)
    assert await one.chunks.publish(key, "g", chunk(0), 0, server=one.server) == first, (
        "its own, of which the ack was lost"
    )
    with pytest.raises(FencedError):
        await other.chunks.publish(key, "g", chunk(1), 0, server=other.server)
    stored = datetime.fromtimestamp(0, UTC)
    assert await other.chunks.read(key, "g", seq, stored) == PublishedChunks(
        [chunk(0)], first, first_seq=first
    )
    second = await other.chunks.publish(key, "g", chunk(1), first, server=other.server)
    with pytest.raises(FencedError):
        await one.chunks.publish(key, "g", Chunk(1, (8,), "y", seq=seq), first, server=one.server)
    await other.chunks.seal(key, "g", seq, second, server=other.server)
    with pytest.raises(FencedError):
        await one.chunks.publish(key, "g", chunk(2), second, server=one.server)
    published = await other.chunks.read(key, "g", seq, stored)
    assert published.is_sealed
    third = await other.chunks.publish(key, "g", chunk(2), second, server=other.server)
    assert third == published.last_seq + 1, "its own seal does not stop it"
    await Outbox(place.nc, place.subjects).end(key, "g", seq, None)
    await place.nc.flush()
    await Outbox(place.nc, place.subjects).end(key, "g", seq + 1, None)  # of a later request with the same id
    await place.nc.flush()
    ended = await one.chunks.read(key, "g", seq, stored)
    assert (ended.has_ended, ended.is_sealed) == (True, False)
    with pytest.raises(FencedError):
        await one.chunks.publish(key, "g", chunk(3), third, server=one.server)


async def a_cancelled_answer_stays_sealed_after_the_log_loses_its_result(place: Place) -> None:
    """Clients have already received the answer's end, with the text that the worker had held back."""
    key, journal = SessionKey("t", "s"), Journal(place.nc, place.subjects)
    seq = await place.put("in")
    chunk = Chunk(0, (7,), "x", seq=seq)
    first = await journal.chunks.publish(key, "g", chunk, 0, server=journal.server)
    await journal.chunks.seal(key, "g", seq, first, server=journal.server)
    await Outbox(place.nc, place.subjects).end(key, "g", seq, Chunk(1, (), "y", seq=seq))
    await place.nc.flush()
    published = await journal.chunks.read(key, "g", seq, datetime.fromtimestamp(0, UTC))
    assert (published.has_ended, published.is_sealed) == (True, True)


async def a_worker_whose_chunks_have_all_expired_reads_the_log_before_it_publishes(place: Place) -> None:
    key, journal = SessionKey("t", "s"), Journal(place.nc, place.subjects)
    seq = await place.put("in")
    first = await journal.chunks.publish(key, "g", Chunk(0, (7,), "x", seq=seq), 0, server=journal.server)
    await journal.chunks.remove(key, seq + 1)
    with pytest.raises(FencedError):
        await journal.chunks.publish(key, "g", Chunk(1, (7,), "x", seq=seq), first, server=journal.server)
    with pytest.raises(FencedError):
        await journal.chunks.seal(key, "g", seq, first, server=journal.server)
    again = await journal.chunks.publish(key, "g", Chunk(0, (7,), "x", seq=seq), 0, server=journal.server)
    assert again == first + 1
    await journal.remove(key, seq + 1)
    with pytest.raises(FencedError):
        await journal.chunks.publish(key, "g", Chunk(1, (7,), "x", seq=seq), first, server=journal.server)


async def the_first_chunk_of_an_answer_to_a_removed_request_is_taken_back(place: Place) -> None:
    key, seq = SessionKey("t", "s"), await place.put("in")
    journal = Journal(place.nc, place.subjects)
    first = await journal.chunks.publish(key, "kept", Chunk(0, (7,), "x", seq=seq), 0, server=journal.server)
    with pytest.raises(FencedError):
        await journal.chunks.publish(key, "gone", Chunk(0, (7,), "x", seq=seq + 9), 0, server=journal.server)
    info = await place.js.stream_info(
        place.subjects.token_stream, subjects_filter=place.subjects.tokens(key, "*")
    )
    assert (info.state.subjects, info.state.last_seq) == ({place.subjects.tokens(key, "kept"): 1}, first + 1)


async def a_forgotten_answer_publishes_nothing_after_a_new_one_under_its_id(place: Place) -> None:
    key, seq = SessionKey("t", "s"), await place.put("in")
    stalled, other = (Journal(place.nc, place.subjects) for _ in range(2))
    first = await stalled.chunks.publish(key, "g", Chunk(0, (7,), "x", seq=seq), 0, server=stalled.server)
    await other.remove(key, seq + 1)
    await other.chunks.remove(key, seq + 1)
    again = await place.put("in")
    last = await other.chunks.publish(key, "g", Chunk(0, (8,), "y", seq=again), 0, server=other.server)
    with pytest.raises(FencedError):
        await stalled.chunks.publish(key, "g", Chunk(1, (7,), "x", seq=seq), first, server=stalled.server)
    with pytest.raises(FencedError):
        await stalled.chunks.seal(key, "g", seq, first, server=stalled.server)
    assert (await place.js.stream_info(place.subjects.token_stream)).state.last_seq == last


async def an_atomic_batch_is_stored_whole_or_not_at_all(place: Place) -> None:
    config = (await place.nc.request(f"$JS.API.STREAM.INFO.{place.subjects.log_stream}")).data
    changed = json.dumps(json.loads(config)["config"] | {"allow_atomic": True}).encode()
    await place.nc.request(f"$JS.API.STREAM.UPDATE.{place.subjects.log_stream}", changed)
    first = await place.put("in")

    async def batch(name: str, after: int, *numbers: int) -> dict[str, Any]:
        for number in numbers:
            headers = {"Nats-Batch-Id": name, "Nats-Batch-Sequence": str(number)}
            headers |= {"Nats-Expected-Last-Sequence": str(after)} if number == 1 else {}
            headers |= {"Nats-Batch-Commit": "1"} if number == numbers[-1] else {}
            reply = await place.nc.request(place.of("in"), b"x", headers=headers, timeout=2)
            assert bool(reply.data) == (number == numbers[-1])
        return {"seq": 0, **json.loads(reply.data)}

    assert (await batch("late", first - 1, 1, 2))["error"]["err_code"] == 10071
    assert (await batch("torn", first, 1, 3))["error"]["err_code"] == 10176
    assert (await batch("whole", first, 1, 2, 3))["seq"] == first + 3


#: Every scene above.
SCENES = [one for one in [*globals().values()] if iscoroutinefunction(one) and one.__module__ == __name__]


async def play(scene: Callable[[Place], Awaitable[None]], nc: Any, folder: Path) -> None:
    place = Place(nc, folder)
    await place.make()
    await scene(place)


async def _ignore(*_: Any) -> None:
    pass


@pytest.mark.parametrize("scene", SCENES)
def test_the_simulated_nats_server_passes_the_checks_of_each_conformance_scene(
    scene: Callable[[Place], Awaitable[None]], tmp_path: Path
) -> None:
    async def main(server: Server) -> None:
        nc = server.connection()
        await nc.connect(["world"], error_cb=_ignore)
        await play(scene, nc, tmp_path)

    with simulated(7) as loop:
        run(loop, main(Server(loop)))


def test_confirming_nats_subscriptions_waits_for_a_crashed_server_and_fails_on_a_closed_connection() -> None:
    async def main(server: Server) -> None:
        nc = server.connection()
        await nc.connect(["world"], error_cb=_ignore)
        confirming = asyncio.ensure_future(confirm_subscriptions(nc))
        await asyncio.sleep(0)
        server.crash()
        await asyncio.sleep(15)
        assert not confirming.done()
        server.start()
        await asyncio.wait_for(confirming, 15)
        await nc.close()
        with pytest.raises(BrokerError, match="has closed the connection"):
            await confirm_subscriptions(nc)

    with simulated(7) as loop:
        run(loop, main(Server(loop)))


@pytest.mark.parametrize("scene", SCENES)
async def test_a_real_nats_server_passes_the_checks_of_each_conformance_scene(
    scene: Callable[[Place], Awaitable[None]], nats_url: str, tmp_path: Path
) -> None:
    nc = await nats.connect(nats_url)
    try:
        await play(scene, nc, tmp_path)
    finally:
        await nc.close()
