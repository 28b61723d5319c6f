"""Health: what a worker that loads, serves, lacks NATS, hangs or stops reports, and the answers over HTTP."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from tests.commands.command_runs import command, where
from tests.parts import LocalWorker, NatsServer, WorkerProcess, free_port
from turnkeep_client import writes
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.log import with_remedy
from worker import app as app_module
from worker import model_process
from worker.app import App
from worker.device.runner import Runner
from worker.models import model
from worker.observe import health as health_module
from worker.observe.health import HealthServer
from worker.process.datadir import DataDir
from worker.process.setting_kinds import Endpoint
from worker.process.settings import Settings
from worker.supervisor import Supervisor
from worker.wire.broker import EmbeddedServer
from worker.wire.log_room import LIMIT_NOTE

pytestmark = pytest.mark.process

WAIT_S = 30.0
NO_LEADER = "no server leads the stream, as in a cluster of which too few servers run"


async def exchange(endpoint: Endpoint, *parts: bytes) -> bytes:
    """Send bytes; return all bytes received until the server closes the connection."""
    reader, writer = await asyncio.open_connection(*endpoint)
    with contextlib.suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
    answer = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(4096):
            answer += piece
    writer.close()
    return bytes(answer)


async def get(endpoint: Endpoint, path: str) -> tuple[int, str]:
    answer = (await exchange(endpoint, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())).decode()
    head, _, body = answer.partition("\r\n\r\n")
    assert f"Content-Length: {len(body)}\r\n" in head
    assert body.endswith("\n")
    assert body.count("\n") == 1
    return int(head.split()[1]), body.strip()


async def until(endpoint: Endpoint, path: str, says: tuple[int, str]) -> None:
    async with asyncio.timeout(WAIT_S):
        while await get(endpoint, path) != says:  # noqa: ASYNC110  # a state of the worker
            await asyncio.sleep(0.05)


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


@pytest.fixture
async def health(endpoint: Endpoint) -> AsyncIterator[HealthServer]:
    """Answer probes: a worker that serves and does not hang."""
    server = HealthServer(endpoint, {"/livez": list, "/readyz": list})
    await server.open()
    serving = asyncio.create_task(server.serve())
    yield server
    serving.cancel()


async def unready(worker: App, *reasons: str) -> None:
    """Wait until a worker that does not hang reports these reasons for not answering."""
    async with asyncio.timeout(WAIT_S):
        while worker.state().unready != reasons:  # noqa: ASYNC110  # a state of the worker
            await asyncio.sleep(0.05)
    assert worker.state().hangs == ()


async def test_the_ready_probe_fails_while_a_worker_is_loading_its_model(
    tmp_path: Path, tiny_model: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = threading.Event()
    as_ever = model.load

    def slow(*args: object, **named: object) -> object:
        assert may_load.wait(WAIT_S)
        return as_ever(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "load", slow)
    prefix = f"t{time.monotonic_ns()}"
    app = App(Settings(data_dir=tmp_path / "data", nats=nats_url, prefix=prefix, model=str(tiny_model)))
    running = asyncio.create_task(app.run())
    await asyncio.sleep(0)
    try:
        await unready(app, "loading the model")
    finally:
        may_load.set()
    await unready(app)
    app.stop()
    await unready(app, "stopping")
    await running


async def test_the_ready_probe_fails_while_nats_is_away_and_succeeds_when_nats_is_back(
    local_worker: Callable[..., Awaitable[LocalWorker]], tmp_path: Path
) -> None:
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        worker = await local_worker(nats=server.url)
        server.kill()
        await unready(worker.app, "no connection to NATS")
        server.start()
        await unready(worker.app)
        await worker.stop()
    finally:
        server.kill()


async def test_a_worker_reconnected_after_a_nats_outage_does_not_report_that_the_nats_server_stores_nothing(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waited for the server meanwhile is stored only some seconds later."""
    writes_of = worker.app._parts.journal.writes  # type: ignore[union-attr]
    monkeypatch.setattr(writes, "UNSTORED_S", 0.5)
    with contextlib.suppress(TimeoutError), writes_of.waiting():
        await unready(worker.app, f"the NATS server stores nothing; {writes.LIKELY}")
        await worker.app._reconnected()
        assert writes_of.are_stored
        raise TimeoutError


async def test_the_ready_probe_fails_if_the_worker_cannot_renew_its_cluster_membership_record(
    worker: LocalWorker,
) -> None:
    """For example, the membership stream has no leader; then another worker could take the name."""
    bucket = f"KV_{worker.app._subjects.workers_bucket}"
    js = worker.app._nc.jetstream()  # type: ignore[union-attr]
    config = (await js.stream_info(bucket)).config
    await js.update_stream(config.evolve(subjects=["nobody.$KV.x"]))  # where renewals do not arrive
    await unready(worker.app, "this worker is not recorded on the prefix")
    assert not (await worker.client.worker_metrics()).recorded
    assert f"stores nothing; {NO_LEADER}" in (await command("info", *where(worker))).stdout
    await js.update_stream(config)
    await unready(worker.app)
    assert (await worker.client.worker_metrics()).recorded
    assert "stores nothing" not in (await command("info", *where(worker))).stdout


@pytest.mark.parametrize("stream", ["log_stream", "token_stream"])
async def test_the_ready_probe_fails_and_the_metrics_say_so_while_a_stream_acknowledges_no_write(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """As on a full disk. The record is still renewed then, as it is in the server's memory."""
    js = worker.app._nc.jetstream()  # type: ignore[union-attr]
    config = (await js.stream_info(getattr(worker.client.subjects, stream))).config
    monkeypatch.setattr(writes, "UNSTORED_S", 0.5)
    generation = worker.client.session("s").generate(text="a", max_tokens=1)
    if stream == "token_stream":
        await js.update_stream(config.evolve(no_ack=True))
    await generation.send()
    if stream == "log_stream":
        await js.update_stream(config.evolve(no_ack=True))
    await unready(worker.app, f"the NATS server stores nothing; {writes.LIKELY}")
    assert not (await worker.client.worker_metrics()).recorded
    assert writes.LIKELY in (await command("info", *where(worker))).stdout
    await js.update_stream(config)
    await generation
    await unready(worker.app)
    assert (await worker.client.worker_metrics()).recorded


async def told(worker: LocalWorker, refusal: str) -> None:
    """Wait until a worker's probe says that nothing is stored, with this reason; so do its metrics."""
    await unready(worker.app, f"the NATS server stores nothing: {refusal}")
    assert (await worker.client.worker_metrics()).refusal == refusal


async def test_the_ready_probe_and_the_metrics_say_why_jetstream_stores_neither_chunks_nor_results(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither stream has a leader, then the log has used up its reserve."""
    js = worker.app._nc.jetstream()  # type: ignore[union-attr]
    monkeypatch.setattr(writes, "UNSTORED_S", 0.5)
    tokens = (await js.stream_info(worker.client.subjects.token_stream)).config
    await js.update_stream(tokens.evolve(subjects=["nobody.x"]))
    generation = worker.client.session("s").generate(text="a", max_tokens=1)
    await generation.send()
    await told(worker, NO_LEADER)
    info = await js.stream_info(worker.client.subjects.log_stream)
    size = info.state.bytes
    limited = {**(info.config.metadata or {}), LIMIT_NOTE: str(size)}
    await js.update_stream(info.config.evolve(max_bytes=size, metadata=limited))
    await js.update_stream(tokens)
    await told(worker, with_remedy(10077, "maximum bytes exceeded"))
    await js.update_stream(info.config.evolve(subjects=["nobody.y"]))
    await told(worker, NO_LEADER)
    await js.update_stream(info.config)
    await generation
    await unready(worker.app)
    assert not (await worker.client.worker_metrics()).refusal


async def test_the_ready_probe_fails_with_the_reason_if_the_workers_device_thread_hangs(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    as_ever = Runner.step

    def hang(self: Runner, *, undisturbed: bool) -> float | None:
        assert goes_on.wait(WAIT_S)
        return as_ever(self, undisturbed=undisturbed)

    monkeypatch.setattr(Runner, "step", hang)
    monkeypatch.setattr(app_module, "_STUCK_S", 0.2)
    await asyncio.sleep(0.5)
    assert worker.app.state().hangs == (), "a thread with nothing to do does not hang"
    appending = asyncio.create_task(worker.client.session("s").append(text="hello"))
    try:
        async with asyncio.timeout(WAIT_S):
            while not (state := worker.app.state()).hangs:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert state.hangs == state.unready == ("the device has been at one step for 0 s",)
    finally:
        goes_on.set()
    await appending
    await unready(worker.app)


async def test_serve_is_ready_only_while_its_worker_answers_and_stays_live_while_the_worker_restarts(
    worker_process: Callable[..., WorkerProcess], endpoint: Endpoint
) -> None:
    process = worker_process("--health", str(endpoint))
    process.start()
    async with asyncio.timeout(WAIT_S):
        while '"ready"' not in process.log:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await until(endpoint, "/readyz", (200, "ok"))
    os.kill(process.worker_pid, signal.SIGKILL)
    await until(endpoint, "/readyz", (503, "loading the model"))
    assert await get(endpoint, "/livez") == (200, "ok")
    await until(endpoint, "/readyz", (200, "ok"))
    assert process.stop() == 0
    with pytest.raises(ConnectionError):
        await get(endpoint, "/livez")
    told = Supervisor(Settings(), {})
    assert told._hangs() == []
    told._models[0].reported_s = anyio.current_time() - model_process._SILENT_S - 1
    assert told._hangs() == ["the worker does not report"]


async def test_the_ready_probe_of_serve_fails_while_its_embedded_nats_server_stores_nothing(
    tmp_path: Path,
) -> None:
    """As on a full disk; a load balancer then asks another worker."""
    settings = Settings(data_dir=tmp_path)
    supervisor = Supervisor(settings, {})
    supervisor.ready.set()
    with DataDir.open(tmp_path) as directory:
        supervisor._server = EmbeddedServer(directory, settings)
    assert supervisor._unready() == []
    supervisor._server.problem = "no space left on device"
    assert supervisor._unready() == ["the NATS server is not healthy: no space left on device"]


MALFORMED = {
    b"GET / HTTP/1.1\r\n\r\n": 404,
    b"GET /readyz/x HTTP/1.1\r\n\r\n": 404,
    b"GET http://x/readyz HTTP/1.1\r\n\r\n": 404,
    b"GET /\xff\xfe HTTP/1.1\r\n\r\n": 404,
    b"POST /readyz HTTP/1.1\r\nContent-Length: 0\r\n\r\n": 405,
    b"GET /readyz HTTP/9.9\r\n\r\n": 400,
    b"GET /readyz\r\n\r\n": 400,
    b"\r\n\r\n": 400,
    bytes(range(256)) + b"\r\n\r\n": 400,
    b"GET /readyz HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n": 431,
    b"a" * 100_000: 431,
}


async def test_the_health_port_refuses_malformed_requests_and_disconnects_incomplete_ones(
    health: HealthServer, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "_PATIENCE_S", 0.5)
    for request, status in MALFORMED.items():
        assert (await exchange(endpoint, request)).startswith(b"HTTP/1.1 %d " % status), request[:40]
    assert await exchange(endpoint, b"GET /read") == b"", "the rest of it never comes"
    reset = socket.create_connection(endpoint)
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    reset.close()
    head = await exchange(endpoint, b"HEAD /readyz?full HTTP/1.0\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert head.endswith(b"\r\n\r\n")
    assert await get(endpoint, "/readyz") == (200, "ok")


async def test_idle_connections_to_the_health_port_delay_no_probe_and_beyond_64_the_oldest_are_closed(
    health: HealthServer, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_module, "_PATIENCE_S", WAIT_S)
    idle = [await asyncio.open_connection(*endpoint) for _ in range(70)]
    assert await get(endpoint, "/livez") == (200, "ok")
    for reader, _ in idle[:7]:
        assert await reader.read() == b"", "beyond 64 the oldest connections are closed"
    idle[-1][1].write(b"GET /livez HTTP/1.1\r\n\r\n")
    assert (await idle[-1][0].read()).endswith(b"\r\n\r\nok\n")
    for _, writer in idle:
        writer.close()


async def test_serve_whose_health_port_is_in_use_fails_before_it_makes_a_data_directory(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    with socket.create_server(endpoint), pytest.raises(TurnkeepError) as refused:
        await Supervisor(Settings(health=endpoint, data_dir=tmp_path / "new" / "data"), {}).run()
    assert str(refused.value) == (
        f"health: cannot listen on {endpoint} (Address already in use); choose another --health"
    )
    assert not (tmp_path / "new").exists()
