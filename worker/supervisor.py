"""Serves several models, each in a worker process of its own, within one budget of memory.

The first request for a model starts its worker. A worker ends when it has been idle for a while, or when
another model needs its memory. Its sessions stay in the log and on SSD. Runs the NATS server for all workers,
and never imports MLX.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import signal
import subprocess
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import msgspec
import structlog
from anyio import EndOfStream, Event, current_time, move_on_after, sleep

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Made  # noqa: TC001  # msgspec reads the annotations
from turnkeep_client.subjects import Subjects
from worker.wire.broker import EmbeddedServer
from worker.wire.connection import connect
from worker.wire.credentials import over_tls, worker_options

from .metrics_message import unloaded
from .observe.health import HealthServer
from .process.children import PROGRAM, child
from .process.concurrency import background, shielded, task_group
from .process.constants import CONSTANTS
from .process.datadir import DataDir
from .process.formatting import size
from .process.settings import word
from .wire.activator import Activator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from anyio.abc import Process

    from turnkeep_client.messages import Metrics

    from .process.settings import Settings

log = structlog.get_logger()

VERSION: Final = importlib.metadata.version("turnkeep")
#: How many models are measured at the same time.
_AT_ONCE: Final = 2
#: The pause between two checks of whether a model is still in use, and the longest one.
_LOOK_S: Final = 0.5
_LONG_LOOK_S: Final = 5.0
#: How long a model keeps memory that another one waits for: `_GRACE_S` after its last request, and `_TURN_S`
#: while it is in use. After `_TURN_S` its unfinished answers wait until it is loaded again.
_GRACE_S: Final = 1.0
_TURN_S: Final = 60.0
#: How long a worker may take to end.
_STOP_S: Final = 30.0
#: The first and the longest pause before a crashed worker is restarted; after a run of `_STABLE_S` the pause
#: is the first one again.
_PAUSES_S: Final = (0.5, 30.0)
_STABLE_S: Final = 30.0


class SupervisorError(TurnkeepError):
    """The models cannot be served; the message is one line."""


class Needs(msgspec.Struct, frozen=True):
    """A model's memory needs and defaults, which `turnkeep serve --weigh` prints before the first load.

    `least_bytes` of device memory suffice to load it; `usual_bytes` also hold the KV of a long session.
    `memory_bytes` is the memory that this machine has for models.
    """

    folder: str
    model: str
    context_tokens: int
    sampling: dict[str, int | float]
    reasoning: bool
    makes: tuple[Made, ...]
    weight_bytes: int
    model_changed_s: float
    least_bytes: int
    usual_bytes: int
    memory_bytes: int
    draft_folder: str | None = None


class InMemory(NamedTuple):
    """A loaded model that may be unloaded: when it was last used, by the event loop's clock, and its size."""

    used_s: float
    size_bytes: int
    name: str


def leaving(lacking_bytes: int, idle: Iterable[InMemory]) -> list[str]:
    """Choose the least recently used models until they free `lacking_bytes`; none if all free less."""
    chosen: list[str] = []
    for one in sorted(idle):
        if lacking_bytes <= 0:
            break
        chosen.append(one.name)
        lacking_bytes -= one.size_bytes
    return chosen if lacking_bytes <= 0 else []


class _Model:
    """One model: its worker process, if one runs, and the activator that notices requests for it."""

    activator: Activator
    needs: Needs
    size_bytes = 0

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.worker = f"{settings.worker}-{word(name)}"[:64]
        self.process: Process | None = None
        self.began_s = 0.0
        self.loaded_s = math.inf
        #: Whether the worker must read its settings again once it is ready.
        self.must_reload = False
        #: `wanted`: the model has requests. `leave`: it must be unloaded.
        self.wanted = Event()
        self.leave = Event()

    def wake(self) -> None:
        self.wanted.set()

    @property
    def is_loaded(self) -> bool:
        """Whether the model's worker runs and is ready."""
        return self.process is not None and self.loaded_s < math.inf

    @property
    def unused_s(self) -> float:
        """The seconds since the model was loaded, or since the activator's last request, if that is later."""
        return current_time() - max(self.activator.used_s, self.loaded_s)

    def metrics(self) -> Metrics:
        """Return the metrics message of the model while it has no worker."""
        return unloaded(
            worker=self.worker,
            version=VERSION,
            model=self.needs.model,
            sampling=self.needs.sampling,
            reasoning=self.needs.reasoning,
            makes=self.needs.makes,
            weight_bytes=self.needs.weight_bytes,
            model_changed_s=self.needs.model_changed_s,
            context_tokens=self.needs.context_tokens,
            interval_s=CONSTANTS.metrics_interval_s,
            max_message_bytes=self.settings.max_message_bytes,
        )


class Supervisor:
    """Serves several models. `run` serves until `stop` is called."""

    def __init__(self, models: Mapping[str, Settings], options: Sequence[str]) -> None:
        """Take each model's settings, and the command-line `options` of its worker.

        With these options, `turnkeep serve` in the worker's process loads the same settings.
        """
        self._models = [_Model(name, settings) for name, settings in models.items()]
        #: The first model's settings, of which those that all models share are read here; the NATS server
        #: must take the largest messages of any model.
        self._settings = replace(
            self._models[0].settings,
            max_message_bytes=max(one.max_message_bytes for one in models.values()),
        )
        self._options = options
        self._environment = dict(os.environ)
        self._memory_bytes = 0
        self._running: list[_Model] = []
        self._turn = anyio.Lock()
        self._freed = Event()
        self._stop = Event()
        self._fatal = ""
        self.ready = Event()

    def stop(self) -> None:
        """Make `run` end. Event loop only."""
        self._stop.set()

    def reload(self) -> None:
        """Make the running workers reload their settings; one that is being started, once it is ready."""
        for model in self._models:
            model.must_reload = not model.is_loaded  # SIGHUP ends a process that does not handle it yet
            if model.process is not None and model.is_loaded:
                with contextlib.suppress(ProcessLookupError):
                    model.process.send_signal(signal.SIGHUP)

    def unload(self, name: str) -> None:
        """Unload a model. Its next request, or one still unanswered, loads it again. Event loop only."""
        for model in self._models:
            if model.name == name:
                model.leave.set()

    async def run(self) -> None:
        """Serve until `stop` is called. Raises `TurnkeepError` for errors that a user can fix."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            if settings.health is not None:  # first, as measuring or downloading models may take long
                health = HealthServer(settings.health, {"/livez": list, "/readyz": self._unready})
                await health.open()
                await stack.enter_async_context(background(health.serve))
            directory = stack.enter_context(
                DataDir.open(settings.data_dir, settings.worker, settings.nats_place)
            )
            options = worker_options(settings)
            server = None if settings.nats else EmbeddedServer(directory, settings)
            if server is not None:
                server.check()
            await self._weigh()
            if server is None:
                url = over_tls(settings, settings.nats or "")
            else:
                stack.push_async_callback(shielded, server.stop)
                await server.start()
                await stack.enter_async_context(background(server.supervise))
                url, options = server.url, {"token": server.token}
                self._environment["TURNKEEP_NATS"] = url.replace("://", f"://{server.token}@")
            nc = await connect(
                url,
                name=f"turnkeep {settings.worker}",
                min_payload_bytes=settings.max_message_bytes,
                on_reconnected=self._look_again,
                on_closed=self._closed,
                **options,
            )
            stack.push_async_callback(shielded, nc.close)
            for model in self._models:
                model.activator = Activator(nc, Subjects(model.settings.prefix), model.metrics, model.wake)
                await model.activator.open(model.settings)
            await self._serve()
        if self._fatal:
            raise SupervisorError(self._fatal)

    async def _serve(self) -> None:
        async with task_group() as tasks:
            for model in self._models:
                tasks.start_soon(self._keep, model)
                tasks.start_soon(self._publish_metrics, model)
            log.info("ready", memory=size(self._memory_bytes))
            self.ready.set()
            await self._look_again()
            await self._stop.wait()
            log.info("stopping")
            tasks.cancel_scope.cancel()

    async def _weigh(self) -> None:
        """Measure each model in a child process, and set the memory that its worker may use.

        Raises `SupervisorError`.
        """
        log.info("measuring the models", models=[model.name for model in self._models])
        limit = anyio.CapacityLimiter(_AT_ONCE)

        async def weigh(model: _Model) -> None:
            arguments = ["serve", *self._options, "--of", model.name, "--weigh"]
            async with limit:  # its errors and progress go to this process's standard error
                done = await anyio.run_process(
                    [*PROGRAM, *arguments], stderr=None, check=False, start_new_session=True
                )
            if done.returncode:
                raise SupervisorError(f"the model {model.name} cannot be served, for the reason above")
            model.needs = msgspec.json.decode(done.stdout, type=Needs)

        async with task_group() as tasks:
            for model in self._models:
                tasks.start_soon(weigh, model)
        memory = self._settings.memory or min(model.needs.memory_bytes for model in self._models)
        for model in self._models:
            model.size_bytes = _share(model.name, model.settings.device_memory, model.needs, memory)
        self._memory_bytes = memory

    async def _keep(self, model: _Model) -> None:
        """Run the model's worker whenever the model has requests, forever; restart it after a crash."""
        pause_s = _PAUSES_S[0]
        while True:
            await model.wanted.wait()
            async with self._room(model):
                code = await self._run_worker(model)
            model.wanted = Event()
            if await model.activator.has_work():
                model.wake()
            if code is None:
                continue
            if current_time() - model.began_s > _STABLE_S:
                pause_s = _PAUSES_S[0]
            log.error("a model's worker has ended", model=model.name, code=code, pause_s=pause_s)
            await sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    @asynccontextmanager
    async def _room(self, model: _Model) -> AsyncIterator[None]:
        """Reserve a model's memory until the block ends. Waits until it is free; first come, first served."""
        async with self._turn:
            since_s = current_time()
            while (lacking := model.size_bytes - self._free_bytes) > 0:
                await self._make_room(lacking, since_s)
                with move_on_after(_LOOK_S):
                    await self._freed.wait()
            self._running.append(model)
        try:
            yield
        finally:
            self._running.remove(model)
            self._freed.set()
            self._freed = Event()

    @property
    def _free_bytes(self) -> int:
        return self._memory_bytes - sum(one.size_bytes for one in self._running)

    async def _make_room(self, lacking_bytes: int, since_s: float) -> None:
        """Free `lacking_bytes`: unload models that are idle, or were loaded for `_TURN_S` since `since_s`."""
        idle: list[InMemory] = []
        for one in [*self._running]:
            had_turn = current_time() - max(since_s, one.loaded_s) > _TURN_S
            if one.leave.is_set():
                lacking_bytes -= one.size_bytes
            elif had_turn or (one.unused_s > _GRACE_S and not await one.activator.has_work()):
                idle.append(InMemory(one.activator.used_s, one.size_bytes, one.name))
        chosen = leaving(lacking_bytes, idle)
        for one in self._running:
            if one.name in chosen:
                one.leave.set()

    async def _run_worker(self, model: _Model) -> int | None:
        """Run a model's worker until it ends; return its exit code, None if the supervisor ended it."""
        model.began_s, model.loaded_s, model.leave = current_time(), math.inf, Event()
        model.must_reload = False
        own = (
            *("--of", model.name, "--model", model.needs.folder, "--worker", model.worker),
            *("--data-dir", str(self._settings.data_dir / "workers" / model.settings.prefix)),
            *("--device-memory", str(model.size_bytes), "--health", "off"),
        )
        draft = model.needs.draft_folder  # by its name a worker would look for it in its own data directory
        drafting = ("--draft-model", draft) if draft is not None else ()
        arguments = ["serve", *self._options, *own, *drafting]
        log.info("loading", model=model.name, memory=size(model.size_bytes))
        running = child(arguments, self._environment, patience_s=_STOP_S, stdout=subprocess.PIPE)
        async with running as model.process, task_group() as tasks:
            tasks.start_soon(self._watch, model, model.process)
            code = await model.process.wait()
            tasks.cancel_scope.cancel()
        model.process = None
        await model.activator.begin()
        log.info("unloaded", model=model.name)
        return None if model.leave.is_set() else code

    async def _watch(self, model: _Model, worker: Process) -> None:
        """Let a worker answer its requests once it is ready; end it when its model is idle or must leave."""
        try:
            await worker.stdout.receive()  # type: ignore[union-attr]  # a pipe
        except EndOfStream:
            return
        await model.activator.end()
        model.loaded_s = current_time()
        log.info("loaded", model=model.name, seconds=round(model.loaded_s - model.began_s, 1))
        if model.must_reload:
            worker.send_signal(signal.SIGHUP)
        pause_s = min(max((model.settings.unload_after_s or 0.0) / 100, _LOOK_S), _LONG_LOOK_S)
        while not (model.leave.is_set() or await self._is_idle(model)):
            with move_on_after(pause_s):
                await model.leave.wait()
        model.leave.set()
        await model.activator.begin()
        await worker.stdin.aclose()  # type: ignore[union-attr]  # which ends the worker
        await sleep(_STOP_S)
        worker.kill()

    async def _is_idle(self, model: _Model) -> bool:
        after_s = model.settings.unload_after_s
        if after_s is None:
            return False
        if await model.activator.has_work():  # asked each time, as an answer may take nearly `after_s`
            model.activator.used_s = current_time()
        return model.unused_s >= after_s

    async def _publish_metrics(self, model: _Model) -> None:
        while True:
            if not model.is_loaded:  # no worker publishes its own yet
                await model.activator.publish_metrics()
            await sleep(CONSTANTS.metrics_interval_s)

    async def _look_again(self) -> None:
        """Load each model whose log has unanswered requests: some may have come during a disconnection."""
        for model in self._models:
            if self.ready.is_set() and await model.activator.has_work():
                model.wake()

    async def _closed(self) -> None:
        if not self._stop.is_set():
            self._fatal = "the NATS server has closed the connection; its log says why"
            self._stop.set()

    def _unready(self) -> list[str]:
        return [] if self.ready.is_set() else ["starting"]


def _share(name: str, wanted_bytes: int | None, needs: Needs, memory_bytes: int) -> int:
    """Return the bytes that a model's worker may use. Raises `SupervisorError` if it can never be loaded."""
    least = size(needs.least_bytes)
    if wanted_bytes is not None and wanted_bytes < needs.least_bytes:
        raise SupervisorError(
            f"device_memory of the model {name} is {size(wanted_bytes)}, and it needs {least}: raise it"
        )
    if (wanted_bytes or needs.least_bytes) > memory_bytes:
        needed = least if wanted_bytes is None else f"device_memory of {size(wanted_bytes)}"
        raise SupervisorError(
            f"the model {name} can never be loaded: it needs {needed}, and memory is {size(memory_bytes)};"
            " raise memory, or take a smaller model"
        )
    return wanted_bytes or min(needs.usual_bytes, memory_bytes)
