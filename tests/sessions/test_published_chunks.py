"""Token chunks reach clients only after they are stored, so a crash cannot lose chunks that a client has."""

import asyncio
import json
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.js.api import StreamConfig
from raw_wire import Start, Wire, append, generate

from tests.parts import fall_asleep, until
from turnkeep_client.chunks import Assembly
from turnkeep_client.messages import Chunk, decode_chunk, encode
from turnkeep_client.subjects import SessionKey
from worker.process import clock
from worker.sessions import streaming
from worker.wire.fence import FencedError
from worker.wire.journal import Journal
from worker.wire.outbox import Outbox


class Heard:
    """The chunks of an answer that a subscriber has received, and whether the stream has ended."""

    def __init__(self) -> None:
        self.chunks: list[dict[str, Any]] = []
        self.over = asyncio.Event()

    async def take(self, message: Msg) -> None:
        if message.data:
            self.chunks.append(json.loads(message.data))
        else:
            self.over.set()

    @property
    def text(self) -> str:
        return "".join(chunk["text"] for chunk in self.chunks)


async def listen(w: Wire) -> Heard:
    heard = Heard()
    await w.nc.subscribe(f"{w.prefix}.default.s.tok.g", cb=heard.take)
    return heard


def whole(heard: Heard) -> list[Chunk]:
    """Join all received chunks as a client does; return the new part of each."""
    assembly = Assembly()
    news = [assembly.add(decode_chunk(json.dumps(chunk).encode())) for chunk in heard.chunks]
    assert not assembly.has_gap
    return [one for one in news if one]


async def limited(w: Wire, max_msg_size: int, stream: str = "tok") -> StreamConfig:
    """Make a stream refuse messages above this size; return its configuration before."""
    before = (await w.js.stream_info(f"{w.prefix}_{stream}")).config
    await w.js.update_stream(before.evolve(max_msg_size=max_msg_size))
    return before


@pytest.mark.simulated
async def test_chunks_that_the_full_token_stream_refuses_to_store_are_not_published_to_clients(
    wire: Start,
) -> None:
    w = await wire()
    heard = await listen(w)
    await limited(w, 64)  # room for the empty message that ends a stream
    result = await w.send("s", generate("g", text="abc", max_tokens=8))
    assert len(result["tokens"]) == 8
    await asyncio.wait_for(heard.over.wait(), 10)
    assert heard.chunks == []


async def test_once_the_token_stream_has_refused_a_chunk_no_kv_of_that_answer_is_saved(wire: Start) -> None:
    """If the worker died before the result, another one might draw other tokens: then nothing erased it."""
    w = await wire()
    await limited(w, 64)
    await w.send("s", generate("g", text="abc", max_tokens=300, ignore_eos=True))
    app, key = w.worker.app, SessionKey("default", "s")
    assert await app._store.queue.drained(10)
    tokens = app._parts.sessions._get(key).history.tokens
    chain = app._store.kv.chain(key.tenant)
    assert app._store.kv.find(chain, tokens).num_tokens <= len(tokens) - 300


@pytest.mark.simulated
async def test_an_answer_whose_result_the_log_refuses_as_too_large_gets_an_error_result(wire: Start) -> None:
    w = await wire()
    await limited(w, 900, "log")
    result = await w.send("s", generate("g", text="abc", max_tokens=400))
    assert (result["code"], result["message"].partition(" (")[0]) == (
        "invalid_request",
        "the result is larger than the log takes",
    )
    session = w.worker.app._parts.sessions._get(SessionKey("default", "s"))
    assert not session.history.tokens, "not even its input was added"


@pytest.mark.simulated
async def test_once_the_token_stream_has_refused_a_chunk_clients_get_no_further_chunks_of_that_answer(
    wire: Start,
) -> None:
    """A worker that resumes an answer reads chunks up to the first gap, so it would lose later ones."""
    w = await wire()
    heard = await listen(w)
    running = await w.publish("s", generate("g", text="eee", max_tokens=1900))
    await w.until("s", "running")
    await until(lambda: heard.chunks)
    before = await limited(w, 64)  # room for the empty message that ends a stream
    await asyncio.sleep(0.1)
    await w.js.update_stream(before)
    result = await w.result(running)
    assert len(heard.text) < len(result["text"])
    position = 0
    for chunk in heard.chunks:
        assert chunk["i"] == position
        position += len(chunk["tokens"])


@pytest.mark.simulated
async def test_an_answer_that_runs_longer_than_the_token_stream_retains_chunks_loses_no_text(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a worker that resumes the answer nor a late client lacks chunks."""
    monkeypatch.setattr(streaming, "_COPY_AT", 0.05)
    monkeypatch.setattr(streaming, "_COPY_BYTES", 2048)
    w = await wire(token_ttl_s=10.0)
    config = (await w.js.stream_info(f"{w.prefix}_tok")).config
    await w.js.update_stream(config.evolve(max_age=1.5, duplicate_window=1.0))
    heard = await listen(w)
    body = generate("g", text="eee", max_tokens=1900)
    seq = await w.publish("s", body)
    await asyncio.sleep(3)
    await w.worker.stop()
    known = max(chunk["i"] + len(chunk["tokens"]) for chunk in heard.chunks)
    assert w.results == {}
    late = await w.js.get_msg(f"{w.prefix}_tok", subject=f"{w.prefix}.default.s.tok.g", seq=1, next=True)
    assert late.time is not None
    assert clock.time() - late.time.timestamp() < 2
    two = await wire(token_ttl_s=10.0)
    result = await two.result(seq)
    assert result["resumed_tokens"] == known
    await asyncio.sleep(1)  # the last chunk may come behind the result, on another subscription
    assert result["text"] == "".join(chunk.text for chunk in whole(heard))


def test_chunks_that_are_published_again_are_joined_into_messages_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = [Chunk(number, (number,), "text") for number in range(1, 10)]
    monkeypatch.setattr(streaming, "_COPY_BYTES", 2 * len(encode(chunks[0])))
    assert [len(one.tokens) for one in streaming._batches(chunks)] == [2, 2, 2, 2, 1]


@pytest.mark.simulated
async def test_chunks_that_expired_while_the_machine_slept_are_published_again(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = await wire(token_ttl_s=600.0)
    heard = await listen(w)
    await w.publish("s", generate("g", text="eee", max_tokens=1900))
    await until(lambda: len(heard.chunks) >= 20)
    fall_asleep(monkeypatch, 400)
    await until(lambda: [chunk["i"] for chunk in heard.chunks].count(0) >= 2)


@pytest.mark.simulated
async def test_a_running_answer_publishes_its_chunks_again_if_the_token_stream_dropped_the_first_chunks(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the token stream is limited, and it drops the oldest chunks. No text is lost."""
    monkeypatch.setattr(streaming, "_LOOK_S", 0.1)
    w = await wire()
    heard = await listen(w)
    seq = await w.publish("s", generate("g", text="eee", max_tokens=1900))
    await until(lambda: len(heard.chunks) >= 20)
    kept = (await w.js.stream_info(f"{w.prefix}_tok")).state.last_seq
    await w.js.purge_stream(f"{w.prefix}_tok", seq=kept)
    await asyncio.sleep(0.5)
    assert [chunk["i"] for chunk in heard.chunks].count(0) == 2, "not again at each later look"
    await w.worker.stop()
    known = max(chunk["i"] + len(chunk["tokens"]) for chunk in heard.chunks)
    assert w.results == {}
    result = await (await wire()).result(seq)
    assert result["resumed_tokens"] == known


@pytest.mark.simulated
async def test_no_worker_can_publish_a_chunk_of_an_answer_that_expired_before_its_first_chunk(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stalled one might, if the worker that stored the result died before it ended the stream."""

    async def dies(*_: Any) -> None:
        pass

    monkeypatch.setattr(Outbox, "end", dies)
    w = await wire()
    await w.worker.stop()
    seq = await w.publish("s", generate("g", text="abc", deadline_s=0.2))
    await asyncio.sleep(0.4)
    await wire()
    assert (await w.result(seq))["code"] == "expired"
    stalled, late = Journal(w.nc, w.worker.app._subjects), Chunk(0, (7,), "x", seq=seq)
    with pytest.raises(FencedError):
        await stalled.chunks.publish(SessionKey("default", "s"), "g", late, 0, server=stalled.server)


@pytest.mark.simulated
async def test_a_stalled_worker_does_not_delete_its_published_first_chunk_if_another_worker_answered(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks late whether its session was forgotten; another worker has continued the answer meanwhile."""
    w = await wire()
    await w.send("s", append("a"))
    await w.worker.stop()
    seq = await w.publish("s", generate("g", text="abc"))
    stalled, late = Journal(w.nc, w.worker.app._subjects), Chunk(0, (70,), "x", seq=seq)
    goes_on, is_gone = asyncio.Event(), stalled.chunks._is_gone

    async def stalls(asked: int) -> bool:
        await goes_on.wait()
        return await is_gone(asked)

    monkeypatch.setattr(stalled.chunks, "_is_gone", stalls)
    publishes = stalled.chunks.publish(SessionKey("default", "s"), "g", late, 0, server=stalled.server)
    publishing = asyncio.create_task(publishes)
    await asyncio.sleep(0.5)
    await wire()
    assert (await w.result(seq))["tokens"][0] == 70
    await w.js.delete_msg(f"{w.prefix}_log", seq)
    goes_on.set()
    with pytest.raises(FencedError):
        await publishing
    first = await w.js.get_msg(f"{w.prefix}_tok", subject=f"{w.prefix}.default.s.tok.g", next=True, seq=1)
    assert decode_chunk(first.data or b"").tokens == (70,)


@pytest.mark.simulated
async def test_a_worker_that_resumes_an_answer_deletes_its_own_first_chunk_if_the_session_was_erased(
    wire: Start,
) -> None:
    """The chunk that it has read is of another stalled worker, which will take that one back."""
    w = await wire()
    await w.worker.stop()
    seq = await w.publish("s", generate("g", text="abc"))
    subject = f"{w.prefix}.default.s.chunk.g"
    ack = await w.js.publish(subject, json.dumps({"i": 0, "tokens": [50], "text": "x", "seq": seq}).encode())
    await w.js.delete_msg(f"{w.prefix}_log", seq)
    stalled, next_one = Journal(w.nc, w.worker.app._subjects), Chunk(1, (7,), "y", seq=seq)
    key = SessionKey("default", "s")
    with pytest.raises(FencedError):
        await stalled.chunks.publish(key, "g", next_one, ack.seq, server=stalled.server, resumes=True)
    assert (await w.js.stream_info(f"{w.prefix}_tok")).state.messages == 1
