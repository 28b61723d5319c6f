"""Fixtures: workers, raw NATS connections to test them, and models with other chat templates.

Tests with the mark `simulated` and without `real` run in the simulation of `tests/simulation`: in virtual
time, with a NATS server in memory, and a device whose next token is a hash of the tokens before it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest
from raw_wire import Start, Wire
from session_world import World, make_often

import turnkeep_client.wire
from tests.parts import BLOCK, TINY_CONTEXT, LocalWorker, split, until
from tests.simulation import device, history, loop
from tests.simulation.world import Server
from turnkeep_client.client import Client, connect
from worker.models.tokenizer import Tokenizer

StartWorker = Callable[..., Awaitable[LocalWorker]]

URL = "nats://world:4222"


class SimulatedWorker(LocalWorker):
    """A worker in a simulated process, which can be killed."""

    process: loop.Process

    @property
    def is_dead(self) -> bool:
        return self.process.is_dead


class SimulatedRunner:
    """Runs async tests and fixtures as pytest-asyncio's runner does, on a simulation's event loop."""

    def __init__(self, world_loop: loop.Loop, server: Server) -> None:
        self._loop = world_loop
        self.server = server

    def get_loop(self) -> loop.Loop:
        return self._loop

    def run(self, coroutine: Coroutine[Any, Any, Any], *, context: Context | None = None) -> Any:
        return self._loop.run_until_complete(self._loop.create_task(coroutine, context=context))


def is_simulated(test: pytest.Item) -> bool:
    simulated, real = map(test.get_closest_marker, ("simulated", "real"))
    return simulated is not None and real is None


@pytest.fixture
def _function_scoped_runner(
    request: pytest.FixtureRequest, _function_scoped_runner: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Replace the runner with which pytest-asyncio runs each test, if the test is simulated."""
    if not is_simulated(request.node):
        yield _function_scoped_runner
        return
    outcome, next_token = history.Outcome(7, []), device.next_token
    monkeypatch.setattr(device, "CONTEXT", TINY_CONTEXT)
    monkeypatch.setattr(device, "_DISK_FAILS", 0.0)
    monkeypatch.setattr(device, "next_token", lambda *seen: max(next_token(*seen), 3))
    with loop.simulated(outcome.seed) as found, history.world(found, outcome, tell=True) as (server, _):
        found.most_handles = 3_000_000
        yield SimulatedRunner(found, server)
        print(*outcome.story, sep="\n")
        assert found.faults == []


@pytest.fixture
def local_worker(request: pytest.FixtureRequest) -> StartWorker:
    """Start workers in this process; keyword arguments are settings. They are stopped after the test."""
    name = "simulated_worker" if is_simulated(request.node) else "local_worker"
    start: StartWorker = request.getfixturevalue(name)
    return start


@pytest.fixture
async def simulated_worker(
    _function_scoped_runner: SimulatedRunner, tmp_path: Path
) -> AsyncIterator[StartWorker]:
    """Start simulated workers, one after the other on the same simulated disk."""
    found, started, disk = _function_scoped_runner.get_loop(), list[SimulatedWorker](), device.Disk()

    async def start(**changes: Any) -> LocalWorker:
        values: dict[str, Any] = {"data_dir": tmp_path, "nats": URL, "worker": "test", "block_tokens": BLOCK}
        settings, constants = split({**values, "metrics_interval_s": 0.2, **changes})
        process = loop.Process(found, f"worker {len(started)}")
        app = device.Worker(settings, found, process, constants=constants, directory="d", disk=disk)
        task = process.start(app.run())
        await until(lambda: app.ready.is_set() or task.done() or process.is_dead)
        if task.done():
            await task
        started.append(SimulatedWorker(app, task, settings, await connect(URL, prefix=settings.prefix)))
        started[-1].process = process
        return started[-1]

    yield start
    for worker in started:
        if not worker.is_dead and not worker.task.done():
            await worker.come_to_rest()
            await worker.stop()
        await worker.client.close()


@pytest.fixture
async def client(local_worker: StartWorker, endless_model: Path) -> Client:
    """A client of a worker whose model never draws an end token: answers have all `max_tokens` tokens."""
    return (await local_worker(model=str(endless_model))).client


@pytest.fixture
def server(_function_scoped_runner: SimulatedRunner) -> Server:
    """The NATS server of a simulated test."""
    return _function_scoped_runner.server


@pytest.fixture
async def quiet_wire(local_worker: StartWorker) -> AsyncIterator[Start]:
    """Start workers with given settings, each with a `Wire` to it. The log is not checked after the test."""
    made: list[Wire] = []

    async def start(**settings: Any) -> Wire:
        worker = await local_worker(**settings)
        nc: Any = turnkeep_client.wire.Nats()  # nats-py's own stops reading at some messages of these tests
        await nc.connect([worker.settings.nats])
        made.append(Wire(nc, worker))
        await made[-1].listen()
        return made[-1]

    yield start
    for one in made:
        await one.nc.close()


@pytest.fixture
async def wire(quiet_wire: Start) -> AsyncIterator[Start]:
    """Start workers like `quiet_wire`; after the test check that each request in the log has one result."""
    made: list[Wire] = []

    async def start(**settings: Any) -> Wire:
        made.append(await quiet_wire(**settings))
        return made[-1]

    yield start
    for one in made:
        await one.check_log()


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture
def world(tokenizer: Tokenizer) -> World:
    """A session of the tiny model with its log, without server and device."""
    return World(tokenizer)


@pytest.fixture
def often() -> Iterator[None]:
    """Let sessions store checkpoints often, in small messages."""
    with pytest.MonkeyPatch.context() as patch:
        make_often(patch)
        yield


@pytest.fixture
def strict_model(model_with_template: Callable[[str, str], Path]) -> Path:
    """A model whose template refuses all roles but user and assistant, and messages with the word sesame."""
    knows = "{% if m['role'] not in ['user', 'assistant'] or 'sesame' in m['content'] %}"
    refuse = "{{ raise_exception('only user and assistant may speak') }}{% endif %}"
    return model_with_template(
        "strict", "{% for m in messages %}" + knows + refuse + "{{ m['content'] }};{% endfor %}"
    )
