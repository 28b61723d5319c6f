"""What a session's methods send, return and raise, against a real server and a scripted worker."""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.msg import Msg
from nats.js.api import StreamConfig
from nats.js.errors import APIError, NoStreamResponseError
from scripted_worker import (
    KEY,
    SUBJECTS,
    TOKENS,
    FakeWorker,
    answer,
    generated,
    heard,
    metrics,
    plain_result,
    refuse,
    silent,
)

from tests.parts import NatsServer, free_port, until
from turnkeep_client import client as client_module
from turnkeep_client import retry, retrying, session
from turnkeep_client.client import Client, connect
from turnkeep_client.errors import (
    ClientClosedError,
    InvalidMessageError,
    NoAnswerError,
    NoServerError,
    NotPermittedError,
    NoWorkerError,
    RequestFailedError,
    ResultTimeoutError,
)
from turnkeep_client.log import Stored
from turnkeep_client.loop import run_tools
from turnkeep_client.messages import (
    UNLOADED,
    Append,
    CachePolicy,
    Cancelled,
    Close,
    Embedded,
    Failed,
    Generate,
    Message,
    Open,
    Request,
    Reranked,
    Rewind,
    UnknownResult,
    encode,
)
from turnkeep_client.nats_client import Nats
from turnkeep_client.sampling import Sampling
from turnkeep_client.session import Session
from turnkeep_client.subjects import SessionKey
from worker.wire.connection import confirm_subscriptions


async def test_each_client_session_method_sends_the_request_of_its_name_and_returns_its_result(
    client: Client, worker: FakeWorker
) -> None:
    session = client.session("s1")
    assert (await session.open()).position == 0
    assert (await session.append(text="a", request_id="a1")).tokens == 3
    assert (await session.generate(max_tokens=6)).tokens == TOKENS
    assert (await session.rewind(2)).position == 2
    assert (await session.close()).position == 9
    kinds = [type(request) for _, request in worker.requests]
    assert kinds == [Open, Append, Generate, Rewind, Close]
    assert len({request.id for _, request in worker.requests}) == 5


async def test_a_client_returns_unknown_finish_reasons_and_raises_unknown_error_codes_of_newer_workers(
    client: Client, worker: FakeWorker
) -> None:
    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        if isinstance(request, Generate):
            await worker.result(generated(seq, request, tokens=(), text="", finish_reason="content_filter"))
        else:
            await worker.result(
                Failed(id=request.id, seq=seq, code="out_of_credit", message="pay", retryable=True)
            )

    worker.script = script
    session = client.session("s1")
    assert (await session.generate()).finish_reason == "content_filter"
    with pytest.raises(RequestFailedError, match="out_of_credit: pay") as caught:
        await session.append(text="a")
    assert caught.value.retryable


async def test_a_result_of_an_unknown_type_raises_an_error_that_asks_to_update_the_client(
    client: Client, worker: FakeWorker
) -> None:
    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        body = {"type": "forked", "id": request.id, "seq": seq, "position": 3}
        await worker.result(UnknownResult(type="forked", seq=seq, body=encode(body)))

    worker.script = script
    session = client.session("s1")
    for call in (session.append(text="a"), session.generate()):
        with pytest.raises(InvalidMessageError, match=r"newer than this client.*'forked'; update"):
            await call


def test_the_generate_method_of_a_session_takes_every_field_of_a_generate_request() -> None:
    own = {field.name for field in msgspec.structs.fields(Generate)}
    explicit = set(inspect.signature(Session.generate).parameters) - {
        "self",
        "timeout_s",
        "headers",
        "sampling",
    }
    assert own == set(Sampling.__annotations__) | explicit - {"request_id"} | {"id"}


INVALID: list[tuple[Callable[[Any], Any], str]] = [
    (lambda session: session.generate(max_token=5), "did you mean 'max_tokens'"),
    (lambda session: session.generate(max_tokens=-1), "max_tokens must be a whole number"),
    (lambda session: session.generate(temperature=float("nan")), "temperature must be `float`"),
    (lambda session: session.generate(text="a", tokens=[1]), "at most one of messages, text, tokens"),
    (lambda session: session.generate(request_id="a b"), "id must be 1 to 64 of the characters"),
    (lambda session: session.generate(text="a", id="turn-1"), "takes no 'id' here: .* request_id"),
    (lambda session: session.append(), "exactly one of messages, text, tokens"),
    (lambda session: session.append(messages=[{"role": "user", "contents": ""}]), "mean 'content'"),
    (lambda session: session.append(text="\ud800"), "whole Unicode characters"),
    (lambda session: session.append(text="a", request_id=""), "id must be"),
    (lambda session: run_tools(session, {}, most=1, request_id=""), "id must be"),
    (lambda session: session.append(tokens=[object()]), "cannot be written as JSON"),
    (lambda session: session.open({"policy": "lru"}), "cache.policy must be full, paged or sink_window"),
    (lambda session: session.open({"sink": 4}), "cache takes sink with the policy sink_window only"),
    (lambda session: session.rewind(-1), "position must be a whole number, at least 0 and at most 9007"),
    (lambda session: session.cancel("*"), "request id .* must be 1 to 64"),
    (lambda session: session.cancel(7), "request id 7 is not valid: it must be 1 to 64"),
    (lambda session: session.fork(None), "session None is not valid: it must be 1 to 64"),
    (lambda session: session.generate(messages="Hello."), r"^messages must be `array \| null`, not `str`"),
    (lambda session: session.generate(messages={"role": "user"}), r"^messages must be .*, not `object`"),
    (lambda session: session.generate(messages=7), r"^messages must be .*, not `int`"),
    (lambda session: session.append(text=b"a"), "a text must be `str`, not `bytes`"),
    (lambda session: session.generate(messages=[{"role": "user", "content": b"a"}]), "not `bytes`"),
    (lambda session: session.count(messages=b"a"), r"^messages must be .*, not `str`"),
    (lambda session: session.open(tags="ab"), "tags must be `array`, not `str`"),
    (lambda session: session.append(text="a", timeout_s="5"), "timeout_s must be a number, not str"),
    (lambda session: session.generate(text="a", headers="a: b"), "headers must be a mapping, not str"),
    (lambda session: session.append(text="a", headers={"a": 5}), "headers must be a mapping of str to str"),
    (lambda session: session.history(before="2"), "before must be a number, not str"),
    (lambda session: session.samples("2"), "n must be a whole number, not str"),
    (lambda session: retry(session.append, attempts=None), "attempts must be a whole number, not NoneType"),
    (lambda session: run_tools(session, None), "functions must be a mapping, not NoneType"),
    (lambda session: run_tools(session, {}, most="2"), "most must be a whole number, not str"),
    (lambda session: run_tools(session, {}, tools="a"), r"tools must be `array \| null`, not `str`"),
    (lambda session: run_tools(session, {}, tools=[{}]), r"tools\[0\] needs the field 'function'"),
]


async def test_a_client_refuses_a_request_with_an_unknown_or_out_of_range_field_without_sending_it(
    client: Client, worker: FakeWorker
) -> None:
    for call, sentence in INVALID:
        with pytest.raises(InvalidMessageError, match=sentence):
            await call(client.session("s1"))
    with pytest.raises(InvalidMessageError, match="id must be"):
        await client.submit(KEY, Append(id="a b", text="a"))
    with pytest.raises(InvalidMessageError, match="inputs must be a list, not str"):
        await client.embed("one text")
    with pytest.raises(InvalidMessageError, match="documents must be a list, not NoneType"):
        await client.rerank("a", None)  # type: ignore[arg-type]
    for given in (None, 7, ["nats://a"]):  # as of a variable of the environment that is not set
        with pytest.raises(InvalidMessageError, match="the URL of the NATS servers must be text, not"):
            await connect(given)  # type: ignore[arg-type]
    for option in ("timeout_s", "connect_timeout_s", "control_timeout_s"):
        with pytest.raises(InvalidMessageError, match=f"^{option} must be a number, not NoneType"):
            connect(**{option: None})  # type: ignore[arg-type]
    with pytest.raises(InvalidMessageError, match="timeout_s must be a number, not str"):
        await client.ask("s1", text="a", timeout_s="5")  # type: ignore[arg-type]
    with pytest.raises(InvalidMessageError, match="timeout_s must be a number, not str"):
        await client.embed(["a"], timeout_s="5")  # type: ignore[arg-type]
    assert worker.requests == []


async def test_the_messages_of_a_request_may_be_any_iterable(client: Client, worker: FakeWorker) -> None:
    said: list[Any] = [Message("user", "a"), {"role": "user", "content": "b"}]
    call = client.session("s1").generate(messages=(one for one in said))  # type: ignore[arg-type]
    assert [one.content for one in call._call.request.messages] == ["a", "b"]


async def test_a_session_with_a_cache_policy_is_opened_once_before_its_first_turn(
    client: Client, worker: FakeWorker
) -> None:
    """Even if several turns begin at the same time; before the first turn nothing is sent."""
    cache = {"policy": "sink_window", "window": 64}
    session = client.session("s1", cache=cache)
    generation = session.generate(max_tokens=6)
    assert worker.requests == []
    await asyncio.gather(generation.wait(), session.append(text="a"), session.append(text="b"))
    opened, *turns = [request for _, request in worker.requests]
    assert isinstance(opened, Open)
    assert opened.cache == CachePolicy(policy="sink_window", window=64)
    assert {type(turn) for turn in turns} == {Generate, Append}
    assert len(turns) == 3
    assert [type(request) for _, request in worker.requests].count(Open) == 1


async def test_a_session_object_with_window_0_or_a_text_as_cache_policy_is_refused(client: Client) -> None:
    with pytest.raises(InvalidMessageError, match=r"cache needs a window of 1 to \d+ tokens, not 0"):
        client.session("s1", cache={"policy": "sink_window", "window": 0})
    words: Any = "sink_window"
    with pytest.raises(InvalidMessageError, match="cache must be `object`, not `str`"):
        client.session("s1", cache=words)


async def test_session_tenant_worker_and_prefix_names_with_forbidden_characters_are_refused_by_the_client(
    client: Client, server: NatsServer
) -> None:
    with pytest.raises(InvalidMessageError, match=r"session 'a\.b' is not valid"):
        client.session("a.b")
    with pytest.raises(InvalidMessageError, match="tenant '' is not valid"):
        client.session("s1", tenant="")
    with pytest.raises(InvalidMessageError, match="tenant"):
        await connect(server.url, tenant="*")
    with pytest.raises(InvalidMessageError, match="prefix"):
        await connect(server.url, prefix="a..b")
    with pytest.raises(InvalidMessageError, match="worker"):
        await anext(client.metrics("a.b"))


async def test_the_client_method_info_raises_an_error_if_the_worker_does_not_answer_in_time(
    server: NatsServer, worker: FakeWorker
) -> None:
    async def ignore(message: Msg) -> None:
        """Send no reply."""

    await worker.nats.subscribe(SUBJECTS.of(KEY, "ctl"), cb=ignore)
    await heard(worker.nats)
    async with connect(server.url, control_timeout_s=0.1) as client:
        with pytest.raises(NoAnswerError, match=r"within 0\.1 s"):
            await client.session("s1").info()


@pytest.mark.parametrize("goes_on", [True, False], ids=["another worker takes over", "no other worker"])
async def test_the_client_sends_a_control_request_again_that_a_worker_received_just_before_its_death(
    server: NatsServer, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """The next worker answers it; without one it fails at once, as any request does."""
    monkeypatch.setattr(session, "AGAIN_S", 0.1)

    async def die(_: Msg) -> None:
        await dying.unsubscribe()
        if goes_on:
            await worker.nats.subscribe(SUBJECTS.of(KEY, "ctl"), cb=answer)

    async def answer(message: Msg) -> None:
        await message.respond(encode(Cancelled(id="g1", was="running")))

    dying = await worker.nats.subscribe(SUBJECTS.of(KEY, "ctl"), cb=die)
    await heard(worker.nats)
    async with connect(server.url, control_timeout_s=60) as client, asyncio.timeout(10):
        if goes_on:
            assert (await client.session("s1").cancel("g1")).was == "running"
        else:
            with pytest.raises(NoAnswerError, match="no worker serves"):
                await client.session("s1").cancel("g1")


async def test_iterating_over_metrics_skips_undecodable_messages_and_ends_when_the_client_is_closed(
    client: Client, worker: FakeWorker
) -> None:
    seen = asyncio.Event()

    async def watch() -> None:
        async for each in client.metrics():
            assert each.worker == "w1"
            seen.set()

    watching = asyncio.create_task(watch())
    while not seen.is_set():
        await worker.nats.publish(SUBJECTS.metrics("w1"), b"junk")
        await worker.nats.publish(SUBJECTS.metrics("w1"), encode(metrics("w1")))
        await asyncio.sleep(0.02)
    await client.close()
    await asyncio.wait_for(watching, 5)


@pytest.mark.parametrize("num_pongs", [1, 2])
async def test_a_cancel_during_the_arrival_of_a_nats_pong_still_ends_the_iteration_over_metrics(
    client: Client, monkeypatch: pytest.MonkeyPatch, num_pongs: int
) -> None:
    """`wait_for` of Python 3.11 returns and loses the cancel if its result arrives at the same moment."""
    came = 0

    async def watch() -> None:
        async for _ in client.metrics():
            pass

    async def process_pong(nats: Nats) -> None:
        nonlocal came
        await real(nats)
        came += 1
        if came == num_pongs:
            watching.cancel()

    real = Nats._process_pong
    monkeypatch.setattr(Nats, "_process_pong", process_pong)
    watching = asyncio.create_task(watch())
    await asyncio.wait([watching], timeout=5)
    ended = watching.cancelled()
    watching.cancel()
    assert (came, ended) == (num_pongs, True)


async def test_the_nats_pong_for_a_cancelled_flush_does_not_end_the_connection(server: NatsServer) -> None:
    errors: list[Exception] = []

    async def note(error: Exception) -> None:
        errors.append(error)

    nc = Nats()
    await nc.connect(server.url, error_cb=note)
    flushing = asyncio.create_task(nc.flush())
    await asyncio.sleep(0)
    nc._pongs[0].cancel()
    await asyncio.wait([flushing])
    await nc.flush()
    assert (errors, nc.stats["reconnects"]) == ([], 0)
    await nc.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "no-such-host.invalid"])
async def test_connecting_without_a_nats_server_fails_at_once_with_one_line_that_hides_the_password(
    host: str,
) -> None:
    """At once: the connect timeout, one hour, is longer than a test may take."""
    url = f"nats://user:secret@{host}:{free_port()}"
    with pytest.raises(NoServerError) as caught:
        await connect(url, connect_timeout_s=3600)
    why = "the host name is not known" if host.endswith("invalid") else "connection refused"
    assert str(caught.value) == f"no NATS server at {url.replace('user:secret@', '')}: {why}"


async def test_an_unreachable_nats_server_raises_noservererror_which_is_also_a_connectionerror(
    client: Client, worker: FakeWorker, server: NatsServer
) -> None:
    """It is a `NoWorkerError` like those for a closed client or no answer, which are no `ConnectionError`."""
    with pytest.raises(ConnectionError):
        await connect(f"nats://127.0.0.1:{free_port()}")
    server.kill()
    await until(lambda: not client.connected)
    with pytest.raises(NoServerError, match="could not be read"):
        await client.log()
    client._control_timeout_s = 0.1
    with pytest.raises(NoServerError, match="the connection to the NATS server is lost"):
        await client.session("s1").info()
    with pytest.raises(NoServerError, match="the connection to the NATS server is lost"):
        await client.ask("s1", text="a", timeout_s=0.1)
    server.start()
    for reason in (ClientClosedError, NoServerError, NoAnswerError):
        assert issubclass(reason, NoWorkerError)
        assert issubclass(reason, ConnectionError) == (reason is NoServerError)


async def answers_late(worker: FakeWorker, seq: int, request: Request) -> None:
    await asyncio.sleep(0.5)
    await worker.result(plain_result(seq, request))


async def test_a_client_call_and_its_open_request_use_the_timeout_of_the_call_or_else_of_the_client(
    server: NatsServer, worker: FakeWorker
) -> None:
    worker.script = answers_late
    async with connect(server.url, timeout_s=0.3) as client:
        session = client.session("s1")
        with pytest.raises(ResultTimeoutError, match=r"no answer for 0\.3 s"):
            await session.append(text="a")
        assert (await session.append(text="a", timeout_s=60)).tokens == 3
        assert (await session.append(text="a", timeout_s=math.inf)).tokens == 3
        for timeout_s in (10.0, math.inf):
            cached = client.session("s1", cache={"policy": "full"})
            assert (await cached.append(text="a", timeout_s=timeout_s)).tokens == 3
        worker.script = silent
        with pytest.raises(ResultTimeoutError, match=r"no answer for 0\.5 s"):
            await client.session("s1", cache={"policy": "full"}).append(text="a", timeout_s=0.5)


async def test_ask_embed_and_rerank_use_the_timeout_of_the_call_or_else_of_the_client(
    server: NatsServer,
) -> None:
    async with await nats.connect(server.url) as silent_worker, connect(server.url, timeout_s=0.3) as client:
        await silent_worker.subscribe(f"{client.subjects.prefix}.>")
        await confirm_subscriptions(silent_worker)
        calls: list[Callable[..., Awaitable[object]]] = [
            partial(client.ask, "s", text="a"),
            partial(client.embed, ["a"]),
            partial(client.rerank, "a", ["b"]),
        ]
        for call in calls:
            with pytest.raises(NoAnswerError, match=r"within 0\.3 s"):
                await call()
            with pytest.raises(NoAnswerError, match=r"within 0\.1 s"):
                await call(timeout_s=0.1)


async def test_ask_embed_and_rerank_are_sent_again_if_their_worker_ends_and_another_one_starts(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LOOK_S", 0.05)
    replies = {
        "metrics": metrics("w1", uptime_s=0.0),
        "generate": generated(1, Append(id="a", text="a")),
        "embed": Embedded(vectors=(bytes(4),), tokens=(1,), model="m"),
        "rerank": Reranked(scores=(0.5,), tokens=(1,), model="m"),
    }
    asked: list[str] = []

    async def second_worker(message: Msg) -> None:
        kind = msgspec.json.decode(message.data)["type"]
        if kind in asked or kind == "metrics":  # the first worker has ended with the first one
            await message.respond(encode(replies[kind]))
        asked.append(kind)

    async with await nats.connect(server.url) as workers, connect(server.url, timeout_s=20) as client:
        await workers.subscribe(f"{client.subjects.prefix}.>", cb=second_worker)
        await confirm_subscriptions(workers)
        assert (await client.ask("s", text="a")).tokens == TOKENS
        assert (await client.embed(["a"])).tokens == (1,)
        assert (await client.rerank("a", ["b"])).scores == (0.5,)
    assert [asked.count(kind) for kind in ("generate", "embed", "rerank")] == [2, 2, 2]


async def test_embed_is_sent_once_to_a_model_that_is_not_loaded_however_long_the_loading_takes(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LOOK_S", 0.05)
    unloaded = msgspec.structs.replace(metrics("w1", uptime_s=0.0), device=UNLOADED)
    embedded = Embedded(vectors=(bytes(4),), tokens=(1,), model="m")
    kept: list[Msg] = []
    num_looks = 0

    async def loading(message: Msg) -> None:
        nonlocal num_looks
        if msgspec.json.decode(message.data)["type"] == "embed":
            kept.append(message)
            return
        num_looks += 1
        await message.respond(encode(unloaded))
        if num_looks == 4:
            await kept[0].respond(encode(embedded))

    async with await nats.connect(server.url) as supervisor, connect(server.url, timeout_s=20) as client:
        await supervisor.subscribe(f"{client.subjects.prefix}.>", cb=loading)
        await confirm_subscriptions(supervisor)
        assert (await client.embed(["a"])).tokens == (1,)
    assert len(kept) == 1


@pytest.mark.parametrize(("attempts", "num_failures"), [(3, 2), (2, 2)])
async def test_the_retry_function_repeats_a_retryable_failure_under_new_request_ids(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, attempts: int, num_failures: int
) -> None:
    monkeypatch.setattr(retrying, "FIRST_PAUSE_S", 0.01)

    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        await (refuse if len(worker.requests) <= num_failures else answer)(worker, seq, request)

    worker.script = script
    session = client.session("s1")
    sending = retry(lambda: session.generate(text="hi"), attempts=attempts)
    if attempts > num_failures:
        assert (await sending).tokens == TOKENS
    else:
        with pytest.raises(RequestFailedError, match="4 requests wait"):
            await sending
    assert len({request.id for _, request in worker.requests}) == attempts


async def test_the_retry_function_does_not_repeat_a_failure_that_is_not_retryable(
    client: Client, worker: FakeWorker
) -> None:
    async def script(worker: FakeWorker, seq: int, request: Request) -> None:
        await worker.result(
            Failed(id=request.id, seq=seq, code="context_exceeded", message="too long", retryable=False)
        )

    worker.script = script
    with pytest.raises(RequestFailedError, match="too long"):
        await retry(lambda: client.session("s1").append(text="hi"))
    assert len(worker.requests) == 1


async def test_a_client_lists_all_sessions_even_if_one_reply_of_the_nats_server_cannot_hold_them(
    client: Client, worker: FakeWorker
) -> None:
    names = [f"n{number}" for number in range(1030)]
    worker.script = silent
    assert await client.sessions() == []
    for name in names:
        await worker.nats.publish(f"turnkeep.default.{name}.in", encode(Append(id="a", text="a")))
    await worker.nats.publish("turnkeep.other.n0.in", encode(Append(id="a", text="a")))
    await until(lambda: len(worker.requests) == len(names) + 1)
    found = await client.sessions()
    assert [one.name for one in found] == names[::-1]
    assert all((one.is_waiting, one.position, one.is_closed) == (True, None, False) for one in found)


async def test_a_client_that_reads_many_large_sessions_concurrently_is_not_disconnected_by_the_nats_server(
    tmp_path: Path,
) -> None:
    """As a gateway does when it starts. The server has room for a fifth of what it has by default."""
    (tmp_path / "conf").write_text("max_pending: 14MB\n")
    server = NatsServer(tmp_path / "js", ("-c", str(tmp_path / "conf")))
    server.start()
    nc = await nats.connect(server.url)
    js = nc.jetstream()
    await js.add_stream(
        StreamConfig(name=SUBJECTS.log_stream, subjects=[SUBJECTS.every("out")], allow_direct=True)
    )
    keys = [SessionKey("default", f"s{number}") for number in range(5)]
    for key in keys:
        stored = (js.publish(SUBJECTS.of(key, "out"), b"x" * 100_000, timeout=30) for _ in range(100))
        await asyncio.gather(*stored)
    async with connect(server.url) as client:

        async def read(key: SessionKey) -> int:
            return len([one async for one in client.stored.every(key, "out")])

        assert await asyncio.gather(*map(read, keys)) == [100] * 5
        assert client._wire._nats.stats["reconnects"] == 0
    await nc.close()
    server.kill()


async def test_a_client_connects_if_one_of_two_servers_answers(server: NatsServer) -> None:
    nobody, none = (f"nats://127.0.0.1:{free_port()}" for _ in range(2))
    for urls in (f"{nobody},{server.url}", f"{server.url},{nobody}"):
        async with connect(urls) as client:
            assert client.connected
    with pytest.raises(NoServerError, match="connection refused"):
        await connect(f"{nobody},{none}", connect_timeout_s=3600)


def leaderless(folder: Path) -> NatsServer:
    """Start one of a cluster's servers, which has no leader without the others."""
    own, other = (f"nats://127.0.0.1:{free_port()}" for _ in range(2))
    server = NatsServer(folder, ("--cluster", own, "--cluster_name", "c", "--routes", other, "-n", "n"))
    server.start()
    return server


async def test_a_client_request_waits_while_the_nats_cluster_elects_a_leader_and_is_then_answered(
    tmp_path: Path,
) -> None:
    """Until there is a leader no server answers for the log's stream, as if there were no stream."""
    server = leaderless(tmp_path)
    async with connect(server.url) as client:
        sending = asyncio.create_task(client.submit(KEY, Append(id="a", text="a")))
        await asyncio.sleep(1.5)
        leader = await nats.connect(server.url)
        asked = await leader.subscribe(SUBJECTS.of(KEY, "in"))
        message = await asked.next_msg(timeout=5)
        await message.respond(b'{"stream": "turnkeep_log", "seq": 7}')
        assert (await sending).seq == 7
        await leader.close()
    server.kill()


async def test_a_request_to_a_nats_cluster_without_quorum_raises_an_error_that_says_too_few_servers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnkeep_client.wire.NUM_TRIES_OF_SEVERAL", 2)
    server = leaderless(tmp_path)
    async with connect(server.url) as client:
        with pytest.raises(NoAnswerError, match="too few servers of the NATS cluster run, or no worker"):
            await client.session("s1").append(text="a")
    server.kill()


def lose_ack(
    client: Client, monkeypatch: pytest.MonkeyPatch, later: Callable[[int], Exception | None]
) -> None:
    """Have the log store what is published first without an acknowledgement; `later(n)` fails attempt n."""
    publish, num = client._wire._jetstream.publish, 0

    async def failing(*given: Any, **named: Any) -> Any:
        nonlocal num
        num += 1
        if num == 1:
            await publish(*given, **named)
            raise nats.errors.TimeoutError
        if (error := later(num)) is not None:
            raise error
        return await publish(*given, **named)

    monkeypatch.setattr(client._wire._jetstream, "publish", failing)


async def test_a_request_without_acknowledgement_is_published_again_until_a_nats_server_acknowledges_it(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster elects a leader meanwhile; the log may have the request, so no error may say otherwise."""
    monkeypatch.setattr("turnkeep_client.wire.TRY_PAUSE_S", 0.01)
    lose_ack(client, monkeypatch, lambda num: NoStreamResponseError() if num < 10 else None)
    assert (await client.submit(KEY, Append(id="a", text="a"))).seq > 1, "not the first one"


async def test_a_request_that_is_perhaps_in_the_log_is_not_sent_under_another_id_when_a_repeat_is_refused(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first attempt may be executed already, and have left the queue."""
    full = APIError(code=503, err_code=10077, description="maximum bytes exceeded")
    lose_ack(client, monkeypatch, lambda _: full)

    async def nothing(*_: Any) -> list[Stored]:
        return []

    async def send() -> None:
        nonlocal num_sent
        num_sent += 1
        await client.session("s1").append(text="a")

    monkeypatch.setattr(client._wire, "read", nothing)
    num_sent = 0
    with pytest.raises(RequestFailedError, match="may have stored it: send it again under the same id"):
        await retry(send)
    assert num_sent == 1


async def test_the_clients_error_names_another_nats_stream_that_has_taken_the_subjects_of_the_log(
    client: Client, server: NatsServer
) -> None:
    connection = await nats.connect(server.url)
    await connection.jetstream().add_stream(StreamConfig(name="everything", subjects=["turnkeep.>"]))
    await connection.close()
    with pytest.raises(NoWorkerError, match="'everything', which is not a worker's"):
        await client.session("s1").append(text="a")


async def test_a_request_that_a_killed_nats_server_did_not_store_is_sent_again_upon_reconnection(
    client: Client, worker: FakeWorker, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No later connection brings its acknowledgement; while it waited, the log seemed to store nothing."""
    monkeypatch.setattr("turnkeep_client.wire.FIRST_ACK_S", 60.0)
    server.pause()
    appending = asyncio.create_task(client.session("s1").append(text="a"))
    await asyncio.sleep(0.2)
    assert not appending.done()
    server.kill()
    server.start()
    async with asyncio.timeout(20):
        assert (await appending).tokens == 3


async def test_a_client_request_above_the_size_limit_of_the_nats_server_or_the_log_is_refused(
    client: Client, worker: FakeWorker
) -> None:
    with pytest.raises(InvalidMessageError, match=r"\d+ bytes, the NATS server accepts 1048576 at most"):
        await client.session("s1").append(text="x" * 2**20)
    with pytest.raises(InvalidMessageError, match="1048576 at most"):
        await client.ask("s1", text="x" * 2**20)
    # The server counts headers, and ends the connection of a client that sends too much.
    headers = {"traceparent": "x" * 2**15}
    with pytest.raises(InvalidMessageError, match="1048576 at most"):
        await client.session("s1").append(text="x" * (2**20 - 2**15), headers=headers, timeout_s=5)
    assert (await client.session("s1").append(text="a", headers=headers)).tokens == 3
    config = (await worker.js.stream_info(SUBJECTS.log_stream)).config
    config.max_msg_size = 1000
    await worker.js.update_stream(config)
    with pytest.raises(InvalidMessageError, match="larger than the log accepts"):
        await client.session("s1").append(text="x" * 1000)
    assert (await client.session("s1").append(text="a")).tokens == 3


async def test_publishing_for_another_tenant_or_with_wrong_credentials_raises_a_notpermittederror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnkeep_client.wire.FIRST_ACK_S", 0.2)
    config = tmp_path / "permissions.conf"
    config.write_text(
        """
        authorization { users = [{
            user: alice, password: a, permissions: {
                publish: ["turnkeep.alice.*.in", "turnkeep.alice.*.ctl", "$JS.API.DIRECT.GET.>"],
                subscribe: ["_INBOX.>", "turnkeep.alice.>"] } }] }
        """
    )
    server = NatsServer(tmp_path / "js", ("-c", str(config)))
    server.start()
    try:
        async with connect(server.url, tenant="bob", user="alice", password="a") as client:
            with pytest.raises(NotPermittedError, match=r"may not publish on turnkeep\.bob\.s1\.in"):
                await client.session("s1").append(text="a")
        with pytest.raises(NotPermittedError, match="refuses the credentials"):
            await connect(server.url, user="alice", password="wrong", connect_timeout_s=60)
    finally:
        server.kill()
