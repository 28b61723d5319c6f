"""What a client gets of an answer if chunks are lost, repeated or split, or servers are killed."""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import nats
import pytest
from nats.aio.msg import Msg
from scripted_worker import KEY, SUBJECTS, TEXTS, TOKENS, FakeWorker, answer, generated, heard, refuse, silent

import turnkeep_client.calls
import turnkeep_client.generation
import turnkeep_client.wire
from tests.parts import NatsServer, until
from turnkeep_client.calls import Call
from turnkeep_client.client import Client, connect
from turnkeep_client.errors import (
    ClientClosedError,
    NoAnswerError,
    NoWorkerError,
    RequestFailedError,
    ResultRemovedError,
    ResultTimeoutError,
)
from turnkeep_client.generation import Generation
from turnkeep_client.messages import (
    Append,
    Cancelled,
    CancelRequest,
    Chunk,
    Failed,
    Generate,
    Open,
    Request,
    decode_control,
    decode_request,
    encode,
)
from turnkeep_client.subjects import SessionKey

TEXT = "".join(TEXTS)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls search the log after 0.1 s without an event, instead of 2 s."""
    monkeypatch.setattr(turnkeep_client.calls, "FIRST_POLL_S", 0.1)
    monkeypatch.setattr(turnkeep_client.wire, "FIRST_ACK_S", 0.3)


async def read_all(generation: Generation) -> list[Chunk]:
    """Read all chunks, and check that they are contiguous and join to the result."""
    chunks = [chunk async for chunk in generation]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    assert tuple(tokens) == generation.result.tokens
    assert "".join(chunk.text for chunk in chunks) == generation.result.text
    assert [chunk.i for chunk in chunks] == [
        sum(len(c.tokens) for c in chunks[:n]) for n in range(len(chunks))
    ]
    return chunks


def subscriptions(client: Client) -> int:
    """Count the client's subscriptions, without nats-py's own inbox for replies."""
    return sum(not sub.subject.startswith("_INBOX.") for sub in client._wire._nats._subs.values())


async def test_awaiting_and_iterating_a_generation_at_the_same_time_sends_one_request(
    client: Client, worker: FakeWorker
) -> None:
    generation = client.session("s1").generate(text="hi", max_tokens=6)
    readers, waiters = [read_all(generation) for _ in range(2)], [generation.wait() for _ in range(2)]
    *both, first, second = await asyncio.gather(*readers, *waiters)
    assert [[chunk.text for chunk in chunks] for chunks in both] == [list(TEXTS)] * 2
    assert first == second == generation.result
    assert [chunk.text async for chunk in generation] == [TEXT]
    assert [seq for seq, _ in worker.requests] == [generation.seq]
    assert subscriptions(client) == 0


async def test_reading_the_result_before_the_generation_has_ended_raises_an_error(
    client: Client, worker: FakeWorker
) -> None:
    generation = client.session("s1").generate(text="hi")
    with pytest.raises(RuntimeError, match="await it first"):
        _ = generation.result


async def test_breaking_out_of_the_iteration_over_an_answer_leaves_no_subscription_or_task(
    client: Client, worker: FakeWorker
) -> None:
    """A `break` ends all subscriptions and tasks, but the request is still answered."""
    go_on = asyncio.Event()

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        await worker.chunk(request, 0, [11], "He")
        await go_on.wait()
        await worker.result(generated(seq, request))

    await client.session("s1").append(text="hi")  # nats-py's inbox for replies is there from now on
    worker.script = script
    before = asyncio.all_tasks()
    generation = client.session("s1").generate(text="hi")
    async for _ in generation:
        break
    await asyncio.sleep(0.05)
    assert subscriptions(client) == 0
    assert [task.get_coro().__name__ for task in asyncio.all_tasks() - before] == ["script"]
    go_on.set()
    assert (await generation).text == TEXT
    assert subscriptions(client) == 0


async def test_a_task_that_waits_for_a_result_ends_immediately_when_it_is_cancelled_at_any_moment(
    client: Client, worker: FakeWorker
) -> None:
    """Even at the moment of the log's acknowledgement. No worker answers, so a lost cancel would hang."""
    worker.script = silent
    session = client.session("s1")
    for step in range(150):
        task = asyncio.ensure_future(session.append(text="hi"))
        await asyncio.sleep(0.0002 * (step % 15))
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=2)
        assert done
        assert task.cancelled()
    assert subscriptions(client) == 0


class Cancelling:
    """Runs the worker's side of cancels: refuses the first one unless `has_read`, and counts all of them."""

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.num_asked = 0
        self.has_read = True
        self.cancelled = asyncio.Event()

    async def start(self) -> None:
        await self.worker.nats.subscribe(SUBJECTS.of(KEY, "ctl"), cb=self._on_control)
        await heard(self.worker.nats)
        self.worker.script = self._script

    async def _on_control(self, message: Msg) -> None:
        request = decode_control(message.data)
        assert isinstance(request, CancelRequest)
        self.num_asked += 1
        if not self.has_read:
            self.has_read = True
            refused = Failed(id=request.id, code="invalid_request", message="unknown", retryable=False)
            await message.respond(encode(refused))
            return
        await message.respond(encode(Cancelled(id=request.id, was="running")))
        self.cancelled.set()

    async def _script(self, worker: FakeWorker, seq: int, request: Request) -> None:
        await worker.chunk(request, 0, [11], "He")
        await self.cancelled.wait()
        await worker.result(generated(seq, request, text="He", tokens=(11,), finish_reason="cancelled"))


@pytest.mark.parametrize("has_read", [True, False])
async def test_leaving_the_async_with_block_of_a_generation_early_cancels_the_answer(
    client: Client, worker: FakeWorker, has_read: bool
) -> None:
    """Also if the worker has not read the request yet, so that it refuses the first cancel."""
    cancelling = Cancelling(worker)
    await cancelling.start()
    cancelling.has_read = has_read
    generation = client.session("s1").generate(text="hi")

    async def read() -> None:
        async with generation:
            async for _ in generation:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read()
    assert cancelling.num_asked == 2 - has_read
    assert (await generation).finish_reason == "cancelled"
    assert subscriptions(client) == 0


async def test_an_answer_is_cancelled_even_if_its_reader_is_cancelled_again_while_it_leaves_the_block(
    client: Client, worker: FakeWorker
) -> None:
    """A cancelled scope of anyio, as of a web server whose browser has left, cancels at every await."""
    cancelling = Cancelling(worker)
    await cancelling.start()
    generation = client.session("s1").generate(text="hi")
    with anyio.CancelScope() as scope:
        async with generation:
            async for _ in generation:
                scope.cancel()
    assert scope.cancelled_caught
    assert cancelling.num_asked == 1
    assert (await generation).finish_reason == "cancelled"
    assert subscriptions(client) == 0


async def test_leaving_the_async_with_block_of_an_answered_or_unsent_request_sends_no_cancel(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelling = Cancelling(worker)
    await cancelling.start()
    async with client.session("s1").generate(text="hi"):
        pass
    assert worker.requests == []
    worker.script = answer
    async with client.session("s1").generate(text="hi") as generation:
        assert (await generation).text == TEXT
        reads: list[Any] = []
        monkeypatch.setattr(client._wire, "read", lambda *given: reads.append(given) or asyncio.sleep(0, []))
    assert (cancelling.num_asked, reads) == (0, [])


async def test_a_generate_request_that_no_stream_stored_is_not_sent_again_when_its_async_with_block_is_left(
    client: Client, server: NatsServer
) -> None:
    """No worker has ever run, so no stream stores the request; one starts within the time of the cancel."""

    async def read() -> None:
        async with client.session("s1").generate(text="hi") as generation:
            await generation

    connection = await nats.connect(server.url)
    reading = asyncio.create_task(read())
    await asyncio.sleep(1.0)  # four attempts take 0.6 s
    worker = FakeWorker(connection)
    await worker.start()
    with pytest.raises(NoAnswerError, match="no worker was ever started"):
        await reading
    assert (await worker.js.stream_info(SUBJECTS.log_stream)).state.messages == 0
    await worker.stop()


async def test_leaving_the_async_with_block_before_the_log_acknowledges_the_request_cancels_the_answer(
    client: Client, worker: FakeWorker
) -> None:
    """Also if the worker has not read the request yet, so that it refuses the first cancel."""
    cancelling = Cancelling(worker)
    await cancelling.start()
    cancelling.has_read = False
    ids = []

    async def never(seq: int, request: Request, acknowledge: Acknowledge) -> None:
        ids.append(request.id)
        reading.cancel()

    async def read() -> None:
        async with client.session("s1").generate(text="hi") as generation:
            await generation

    await acknowledge_by_hand(worker, never)
    reading = asyncio.create_task(read())
    await asyncio.wait([reading], timeout=10)
    assert reading.cancelled()
    assert cancelling.num_asked == 2
    assert len(ids) == 1


async def test_the_time_between_two_reads_of_the_caller_does_not_count_towards_the_answers_timeout(
    client: Client, worker: FakeWorker
) -> None:
    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        for i in range(2):
            await worker.chunk(request, i, [TOKENS[i]], TEXTS[i])
            await asyncio.sleep(1.2)
        await worker.result(generated(seq, request))

    worker.script = script
    generation, num_read = client.session("s1").generate(text="hi", timeout_s=0.8), 0
    async for _ in generation:
        num_read += 1
        await asyncio.sleep(0.9)
    assert num_read == 3


async def test_iterating_over_a_failed_generation_yields_its_chunks_and_then_raises_an_error(
    client: Client, worker: FakeWorker
) -> None:
    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        await worker.chunk(request, 0, [11], "He")
        await asyncio.sleep(0.1)
        await worker.result(Failed(id=request.id, seq=seq, code="internal", message="boom", retryable=True))

    worker.script = script
    chunks = aiter(client.session("s1").generate(text="hi"))
    assert (await anext(chunks)).text == "He"
    with pytest.raises(RequestFailedError, match="internal: boom") as caught:
        await anext(chunks)
    assert caught.value.retryable


async def test_repeating_a_running_generation_under_its_request_id_yields_all_of_its_chunks(
    client: Client, worker: FakeWorker
) -> None:
    """The earlier chunks are read from the token stream while the first request is still being answered."""
    has_begun, beginning_seen = asyncio.Event(), asyncio.Event()

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        first_seq, first = worker.requests[0]
        if seq == first_seq:
            await worker.chunk(first, 0, [11, 12], "Hello")
            await worker.chunk(first, 2, [13], ", ")
            has_begun.set()
            return
        await worker.chunk(first, 3, [14], TEXTS[3])
        await asyncio.wait_for(beginning_seen.wait(), 5)
        await worker.result(generated(first_seq, first))
        await worker.result(generated(seq, request, repeat_of=first_seq))

    worker.script = script
    session = client.session("s1")
    await client.submit(KEY, Generate(id="g1", text="hi"))
    await asyncio.wait_for(has_begun.wait(), 5)
    chunks = []
    async for chunk in session.generate(text="hi", request_id="g1"):
        chunks.append(chunk)
        if chunk.i == 3:
            beginning_seen.set()
    assert [chunk.text for chunk in chunks] == ["Hello", ", ", "wör", "ld!"]


async def test_an_answer_under_a_reused_request_id_has_no_chunks_of_the_earlier_answer(
    client: Client, worker: FakeWorker
) -> None:
    """The log no longer has the first session, but the token stream still has its chunks."""
    is_read = asyncio.Event()

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        first = worker.requests[0][1]
        if not isinstance(request, Generate):
            await answer(worker, seq, request)
        elif request is first:
            for i in range(3):
                await worker.chunk(request, i, [90 + i], "old")
            await worker.result(generated(seq, request, tokens=(90, 91, 92), text="oldoldold"))
        else:
            await worker.chunk(first, 3, [], "late")
            await worker.chunk(request, 1, [12], "llo")
            await asyncio.sleep(0.2)
            await worker.chunk(request, 0, [11, 12], "Hello")
            await asyncio.wait_for(is_read.wait(), 5)
            await worker.result(generated(seq, request))

    worker.script = script
    session = client.session("s1")
    await read_all(session.generate(text="hi", request_id="g1"))
    await session.close()
    await worker.js.purge_stream(SUBJECTS.log_stream)
    await session.open()
    texts = []
    async for chunk in session.generate(text="hi", request_id="g1"):
        texts.append(chunk.text)
        is_read.set()
    assert texts == ["Hello", TEXT[5:]]


async def test_a_caller_that_reads_slowly_gets_every_chunk(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turnkeep_client.generation, "MAX_WAITING_CHUNKS", 2)
    published = asyncio.Event()

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        for i in range(6):
            await worker.chunk(request, i, [TOKENS[i]], TEXTS[i])
        published.set()
        await asyncio.sleep(0.2)
        await worker.result(generated(seq, request))

    worker.script = script
    texts = []
    async for chunk in client.session("s1").generate(text="hi"):
        await published.wait()
        await asyncio.sleep(0.02)
        texts.append(chunk.text)
    assert texts == list(TEXTS)


async def test_a_client_call_whose_result_was_removed_from_the_log_raises_an_error_instead_of_waiting(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session was closed with `forget` while the client was disconnected, so the answer is gone."""

    async def deaf(subject: str, on_body: Callable[[bytes], None]) -> Callable[[], Awaitable[None]]:
        return lambda: asyncio.sleep(0)

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        await worker.result(generated(seq, request))
        subject = f"{SUBJECTS.prefix}.default.s1.*"
        await worker.js.purge_stream(SUBJECTS.log_stream, subject=subject)
        await worker.js.publish(f"{SUBJECTS.prefix}.default.other.out", b"{}")

    monkeypatch.setattr(client._wire, "listen", deaf)
    worker.script = script
    with pytest.raises(ResultRemovedError, match="was removed from the log before its result was received"):
        await client.session("s1").append(text="hi", timeout_s=20)


async def test_a_client_call_whose_removed_request_was_the_last_log_entry_raises_an_error_after_a_delay(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only after that time is it certain that no replica merely lags behind."""
    for name, seconds in (("FIRST_POLL_S", 0.2), ("DOUBT_S", 0.1), ("MOST_LAG_S", 1.0)):
        monkeypatch.setattr(turnkeep_client.calls, name, seconds)

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        await worker.js.purge_stream(SUBJECTS.log_stream, subject=f"{SUBJECTS.prefix}.default.s1.*")

    worker.script = script
    begun_s = time.monotonic()
    with pytest.raises(ResultRemovedError):
        await client.session("s1").append(text="hi", timeout_s=20)
    assert time.monotonic() - begun_s > 1.0


async def test_a_client_call_whose_request_the_server_lost_raises_an_error_even_if_its_sequence_was_reused(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although requests before and after it, sent before or after the loss, are still there."""
    for name, seconds in (("FIRST_POLL_S", 0.2), ("DOUBT_S", 0.1)):
        monkeypatch.setattr(turnkeep_client.calls, name, seconds)
    is_over = asyncio.Event()

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        await is_over.wait()
        await worker.result(generated(seq, request))

    worker.script = script
    session = client.session("s1")
    there = [session.generate(text="hi", timeout_s=20) for _ in range(3)]
    for one in there:
        await one.send()
    answers = [asyncio.create_task(one.wait()) for one in there]
    lost = [session.follow(Generate(id="lost", text="hi"), one.seq or 0).wait() for one in there]
    async with asyncio.timeout(10):
        for error in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(error, ResultRemovedError)
    is_over.set()
    assert [one.text for one in await asyncio.gather(*answers)] == [TEXT] * 3


async def test_a_client_call_keeps_waiting_if_only_one_log_read_says_that_its_request_is_missing(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turnkeep_client.calls, "DOUBT_S", 0.1)
    bodies_at, denied = client._wire.bodies_at, asyncio.Event()

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        await denied.wait()
        await asyncio.sleep(0.5)
        await worker.result(generated(seq, request))

    async def deny(stream: str, subject: str, seqs: Collection[int]) -> dict[int, bytes]:
        if denied.is_set():
            return await bodies_at(stream, subject, seqs)
        denied.set()
        return dict.fromkeys(seqs, b"{}")

    worker.script = script
    monkeypatch.setattr(client._wire, "bodies_at", deny)
    assert (await client.session("s1").generate(text="hi", timeout_s=20)).text == TEXT


async def test_the_client_checks_concurrently_which_requests_left_the_log_and_delays_no_other_call(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is looked up twice, with a pause of 2 s between; a running answer goes on meanwhile."""
    monkeypatch.setattr(turnkeep_client.calls, "FIRST_POLL_S", 0.2)
    monkeypatch.setattr(turnkeep_client.calls, "DOUBT_S", 2.0)
    num_lost, seqs, all_in = 10, list[int](), asyncio.Event()

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        if request.id != "there":
            seqs.append(seq)
            if len(seqs) == num_lost:
                all_in.set()
            return
        await all_in.wait()
        for one in seqs:
            await worker.js.delete_msg(SUBJECTS.log_stream, one)
        await asyncio.sleep(1)
        await worker.result(generated(seq, request))

    worker.script = script
    session = client.session("s1")

    async def lost(number: int) -> None:
        with pytest.raises(ResultRemovedError):
            await session.append(text=f"hi {number}", timeout_s=60)

    async with asyncio.timeout(15):  # one after the other, the ten pauses would take 20 s
        losing = asyncio.gather(*map(lost, range(num_lost)))
        assert (await session.generate(text="hi", request_id="there", timeout_s=60)).text == TEXT
        await losing


async def test_client_calls_that_wait_for_the_same_session_share_their_reads_of_the_log(
    client: Client, worker: FakeWorker, server: NatsServer
) -> None:
    """If 700 calls waited for a slow worker, each would otherwise read all results, 256 at a time."""
    num_calls, num_reads = 200, 0
    is_over = asyncio.Event()

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        await is_over.wait()
        await worker.result(generated(seq, request))

    async def count(message: Msg) -> None:
        nonlocal num_reads
        num_reads += message.reply.startswith(client._wire._nats._inbox_prefix.decode())

    nc = await nats.connect(server.url)
    client._wire._nats._inbox_prefix = bytearray(b"_INBOX.counted")
    await nc.subscribe(f"$JS.API.DIRECT.GET.{SUBJECTS.log_stream}", cb=count)
    await heard(nc)
    worker.script = script
    calls = [client.session("s1").generate(text="hi") for _ in range(num_calls)]
    waiting = asyncio.gather(*calls)
    await asyncio.sleep(1.5)
    is_over.set()
    assert [answer.text for answer in await waiting] == [TEXT] * num_calls
    assert 0 < num_reads < num_calls / 2
    await nc.close()


async def test_a_client_without_permission_to_read_the_log_still_gets_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for the result in the log meanwhile, and for the request whose chunks it receives."""
    monkeypatch.setattr(turnkeep_client.wire, "READ_S", 0.2)
    config = tmp_path / "permissions.conf"
    config.write_text(
        """
        authorization { users = [{ user: w, password: w }, { user: c, password: c, permissions: {
            publish: ["turnkeep.>"], subscribe: ["_INBOX.>", "turnkeep.>"] } }] }
        """
    )
    server = NatsServer(tmp_path / "js", ("-c", str(config)))
    server.start()

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        await worker.chunk(request, 0, [90], "other", seq=seq - 1)
        await asyncio.sleep(1)
        await worker.result(generated(seq, request))

    worker = FakeWorker(await nats.connect(server.url, user="w", password="w"))
    await worker.start()
    async with connect(server.url, user="c", password="c") as client:
        session = client.session("s1")
        await session.append(text="a")
        worker.script = script
        assert [one.text for one in await read_all(session.generate(text="hi", timeout_s=10))] == [TEXT]
        # A request that the log seems to lack may have been answered.
        sent = session.generate(text="hi", timeout_s=10)
        await sent.send()
        bodies_at = {sent.seq: b"{}"}
        monkeypatch.setattr(client._wire, "bodies_at", lambda *_: asyncio.sleep(0, bodies_at))
        monkeypatch.setattr(turnkeep_client.calls, "DOUBT_S", 0.1)
        assert (await sent).text == TEXT
    await worker.stop()
    server.kill()


@pytest.mark.parametrize("headers", [{"Status": "503"}, {"Status": "408", "Description": "Timeout"}])
async def test_a_client_call_keeps_waiting_for_its_result_while_the_log_cannot_be_read(
    client: Client, server: NatsServer, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    """A restarted server needs some time before it can read each of its streams."""
    for name in ("DOUBT_S", "MOST_LAG_S"):
        monkeypatch.setattr(turnkeep_client.calls, name, 0.1)
    monkeypatch.setattr(client._feeds, "timeout_s", 1.0)
    nc = await nats.connect(server.url)

    async def reply(message: Msg) -> None:
        known = {"Nats-Sequence": "9"} if b"last_by_subj" in message.data else headers
        await nc.publish(message.reply, b"", headers=known)

    await nc.subscribe(f"$JS.API.DIRECT.GET.{SUBJECTS.log_stream}", cb=reply)
    await heard(nc)
    with pytest.raises(ResultTimeoutError):
        await client.session("s1").follow(Generate(id="g1", text="hi"), 5)
    with pytest.raises(NoWorkerError, match="could not be read"):
        await client.log()
    await nc.close()


async def test_a_timeout_error_names_the_request_id_and_a_repeat_under_that_id_gets_the_answer(
    client: Client, worker: FakeWorker
) -> None:
    worker.script = silent
    session = client.session("s1")
    with pytest.raises(ResultTimeoutError, match=r"request g1: no answer for 0.2 s.*same id"):
        await session.generate(text="hi", request_id="g1", timeout_s=0.2)
    with pytest.raises(TimeoutError):
        await read_all(session.generate(text="hi", request_id="g1", timeout_s=0.2))
    assert subscriptions(client) == 0
    worker.script = answer
    assert (await session.generate(text="hi", request_id="g1", timeout_s=10)).text == TEXT


async def test_a_timeout_error_says_that_the_nats_server_is_lost(client: Client, server: NatsServer) -> None:
    server.kill()
    await until(lambda: not client.connected)
    with pytest.raises(
        ResultTimeoutError, match=r"0.1 s, and the connection to the NATS server is lost; send"
    ):
        await client.session("s1").append(text="hi", timeout_s=0.1)


async def test_a_timeout_error_says_that_the_nats_server_has_not_stored_the_request(
    client: Client, worker: FakeWorker
) -> None:
    async def never(*_: object) -> None:
        pass

    await acknowledge_by_hand(worker, never)
    with pytest.raises(ResultTimeoutError, match=r"0.5 s, and the NATS server has not confirmed that"):
        await client.session("s1").append(text="hi", timeout_s=0.5)


async def test_a_second_waiter_gets_the_answer_if_the_first_is_cancelled_before_the_log_has_the_request(
    client: Client, worker: FakeWorker, server: NatsServer
) -> None:
    server.kill()
    generation = client.session("s1").generate(text="hi", request_id="g1")
    reader = asyncio.create_task(read_all(generation))
    await asyncio.sleep(0.1)
    waiter = asyncio.create_task(generation.wait())
    await asyncio.sleep(0.1)
    reader.cancel()
    await asyncio.wait([reader])
    server.start()
    assert (await asyncio.wait_for(waiter, 20)).text == TEXT
    assert subscriptions(client) == 0


async def test_two_waiters_for_an_answer_both_get_the_error_if_the_open_of_their_session_is_refused(
    client: Client, worker: FakeWorker
) -> None:
    worker.script = refuse
    generation = client.session("s1", cache={"policy": "full"}).generate(text="hi")
    waiters = (read_all(generation), generation.wait())
    for error in await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 20):
        assert isinstance(error, RequestFailedError)
    assert subscriptions(client) == 0
    assert {type(request) for _, request in worker.requests} == {Open}, "no turn under another policy"


async def test_the_timeout_of_a_generation_counts_from_the_moment_when_the_generation_is_awaited(
    client: Client, worker: FakeWorker
) -> None:
    """Not from when the generation was prepared or sent, nor from an earlier wait that timed out."""
    session = client.session("s1")
    prepared = [session.generate(text="hi", timeout_s=0.5) for _ in range(2)]
    await prepared[0].send()
    await asyncio.sleep(0.6)
    assert [(await one).text for one in prepared] == [TEXT, TEXT]
    worker.script = silent
    late = session.generate(text="hi", request_id="g1", timeout_s=0.2)
    waiting = (late.wait(), late.wait())
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, ResultTimeoutError)
    seq, request = worker.requests[-1]
    await answer(worker, seq, request)
    await asyncio.sleep(0.3)
    assert [one.text for one in await asyncio.gather(late.wait(), late.wait())] == [TEXT, TEXT]


async def test_two_waiters_for_one_answer_that_retry_after_timeouts_do_not_shorten_each_others_timeouts(
    client: Client, worker: FakeWorker
) -> None:
    worker.script = silent
    generation = client.session("s1").generate(text="hi", timeout_s=0.2)
    num_timeouts = 0

    async def keep_waiting() -> None:
        nonlocal num_timeouts
        while num_timeouts < 100:
            try:
                await generation
            except ResultTimeoutError:
                num_timeouts += 1

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.1):
            await asyncio.gather(keep_waiting(), keep_waiting())
    assert 0 < num_timeouts <= 12


async def test_closing_a_client_ends_waiting_calls_with_an_error(client: Client, worker: FakeWorker) -> None:
    worker.script = silent
    readers = [
        asyncio.create_task(read_all(client.session("s1").generate(text="hi"))),
        asyncio.create_task(client.session("s1").append(text="hi")),
    ]
    await asyncio.sleep(0.2)
    await client.close()
    for reader in readers:
        with pytest.raises(ClientClosedError, match="closed"):
            await asyncio.wait_for(reader, 5)
    with pytest.raises(ClientClosedError, match="closed"):
        await client.session("s1").generate(text="hi")


Acknowledge = Callable[[], Awaitable[None]]


async def acknowledge_by_hand(
    worker: FakeWorker, script: Callable[[int, Request, Acknowledge], Awaitable[None]]
) -> None:
    """Make the log's stream store messages without acknowledging them; `script` decides about that."""
    config = (await worker.js.stream_info(SUBJECTS.log_stream)).config
    config.no_ack = True
    await worker.js.update_stream(config)
    seqs = itertools.count(1)

    async def take(message: Msg) -> None:
        seq = next(seqs)

        async def acknowledge() -> None:
            ack = {"stream": SUBJECTS.log_stream, "seq": seq}
            await worker.nats.publish(message.reply, json.dumps(ack).encode())

        await script(seq, decode_request(message.data), acknowledge)

    await worker.nats.subscribe(SUBJECTS.every("in"), cb=take)
    await heard(worker.nats)


async def test_a_client_call_returns_a_result_that_arrives_before_the_acknowledgement_of_its_request(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept until the acknowledgement names the request's sequence; other results are ignored."""
    monkeypatch.setattr(turnkeep_client.calls, "FIRST_POLL_S", 60)

    async def script(seq: int, request: Request, acknowledge: Acknowledge) -> None:
        for i, text in enumerate(TEXTS):
            await worker.chunk(request, i, [TOKENS[i]], text, seq)
        await worker.nats.publish(SUBJECTS.of(KEY, "out"), encode(generated(77, request, text="another")))
        await worker.nats.publish(SUBJECTS.of(KEY, "out"), encode(generated(seq, request)))
        await worker.nats.flush()
        await asyncio.sleep(0.1)
        await acknowledge()

    worker.script = silent
    await acknowledge_by_hand(worker, script)
    chunks = await read_all(client.session("s1").generate(text="hi", timeout_s=5))
    assert "".join(chunk.text for chunk in chunks) == TEXT


async def test_a_client_call_ignores_a_result_with_its_requests_log_sequence_but_another_request_id() -> None:
    """A server that has lost the call's request may give its sequence to another one."""
    wire, feeds = SimpleNamespace(epoch=0), SimpleNamespace(timeout_s=1.0)
    call = Call(wire, feeds, SessionKey("t", "s"), Append(id="mine", text="a"))  # type: ignore[arg-type]
    for request_id, is_mine in (('"other"', False), ("null", False), ('"mine"', True)):
        call.resolve(b'{"type":"failed","seq":5,"id":%s}' % request_id.encode())
        assert call.is_resolved() == is_mine
