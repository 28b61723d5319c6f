"""Serves models, each in a worker process of its own: what `turnkeep serve` runs.

Owns the data directory, the NATS server and the worker processes, and never imports MLX. A single model is
loaded at the start. Of several, which share a budget of memory, the first request for a model starts its
worker; the worker ends when it has been idle for a while, or when another model needs its memory. A model
that was unloaded is loaded by its next request. A worker that crashes is started again at once.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import structlog
from anyio import BrokenResourceError, Event, IncompleteRead, current_time, move_on_after, sleep
from anyio.streams.buffered import BufferedByteReceiveStream

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import UnloadRequest
from turnkeep_client.subjects import Subjects
from worker.wire.broker import EmbeddedServer
from worker.wire.connection import connect
from worker.wire.credentials import over_tls, worker_options

from .metrics_message import unloaded
from .models.blas import computes_on_linux_cpu
from .observe.health import HealthServer
from .process.children import ending, start
from .process.concurrency import background, shielded, task_group
from .process.constants import CONSTANTS
from .process.datadir import DataDir
from .process.formatting import size
from .process.settings import SettingsError, word
from .reports import Line, Needs, Order, Refused, State, decode_report, encode
from .wire.activator import Activator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping

    from anyio.abc import Process

    from turnkeep_client.messages import Metrics, ServeRequest

    from .process.settings import Settings
    from .reports import Report

log = structlog.get_logger()

VERSION: Final = importlib.metadata.version("turnkeep")
#: The command of a worker's process; the size of its spare memory follows.
_WORKER: Final = (sys.executable, "-P", "-m", "worker.main")
#: Freed memory that a worker keeps for reuse, and prepares at its start; on a Linux CPU only.
_SPARE_BYTES: Final = 2**28
#: How many models are measured at the same time.
_AT_ONCE: Final = 2
#: The pause between two checks of whether a model is still in use, and the longest one.
_LOOK_S: Final = 0.5
_LONG_LOOK_S: Final = 5.0
#: The pause between two checks of whether a worker has ended.
_ENDED_S: Final = 0.05
#: How long a model keeps memory that another one waits for: `_GRACE_S` after its last request, and `_TURN_S`
#: while it is in use. After `_TURN_S` its unfinished answers wait until it is loaded again.
_GRACE_S: Final = 1.0
_TURN_S: Final = 60.0
#: After this time a loaded model gets a process that waits to take over: its imports must not delay answers.
_HIRE_S: Final = 2.0
#: How long a worker may take to end.
_STOP_S: Final = 30.0
#: The pauses before a crashed worker is restarted: none, then from the first to the longest one; if it has
#: served for `_STABLE_S` there is none again. A prompt that crashes workers is given up after some attempts.
_PAUSES_S: Final = (0.5, 30.0)
_STABLE_S: Final = 3.0
#: After so many short runs in a row, the last of which did not get ready, a model counts as failed.
_MAX_TRIES: Final = 5
#: A worker that has reported nothing for this time hangs.
_SILENT_S: Final = 30.0
_MAX_REPORT_BYTES: Final = 2**24


class SupervisorError(TurnkeepError):
    """The models cannot be served; the message is one line."""


#: Of a model that was not measured, and has not served yet.
_UNKNOWN: Final = Needs("", "", 0, {}, False, (), 0, 0.0)


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
    directory: DataDir
    size_bytes = 0

    def __init__(self, name: str | None, settings: Settings) -> None:
        """Take the name of one of several models; None if there is only one, which stays loaded."""
        self.name = name
        self.settings = settings
        #: The draft model that was asked for; another model may have no use for it.
        self.draft_model = settings.draft_model
        self.stays_s = math.inf if name is None else settings.unload_after_s or math.inf
        self.needs: Needs | None = None
        self.process: Process | None = None
        self.began_s = 0.0
        self.loaded_s = math.inf
        self.reported_s = math.inf
        self.state = State((), ("starting",), is_alone=True)
        self.refused: Refused | None = None
        #: `wanted`: the model has requests. `leave`: it must be unloaded.
        self.wanted = Event()
        self.leave = Event()

    def wake(self) -> None:
        self.wanted.set()

    def let_go(self) -> None:
        """Unload the model; whoever wants it from now on wakes it again."""
        self.leave.set()
        self.wanted = Event()

    @property
    def is_loaded(self) -> bool:
        """Whether the model's worker runs and is ready."""
        return self.process is not None and self.loaded_s < math.inf

    @property
    def unused_s(self) -> float:
        """The seconds since the model was loaded, or since the activator's last request, if that is later."""
        return current_time() - max(self.activator.used_s, self.loaded_s)

    def hangs(self) -> list[str]:
        """Return the faults of the worker that only a restart fixes."""
        if current_time() - self.reported_s > _SILENT_S:
            return ["the worker does not report"]
        return [*self.state.hangs]

    def metrics(self) -> Metrics:
        """Return the metrics message of the model while it has no worker."""
        needs = self.needs or _UNKNOWN
        return unloaded(
            worker=self.settings.worker,
            version=VERSION,
            model=needs.model,
            sampling=needs.sampling,
            reasoning=needs.reasoning,
            makes=needs.makes,
            weight_bytes=needs.weight_bytes,
            model_changed_s=needs.model_changed_s,
            context_tokens=needs.context_tokens,
            interval_s=CONSTANTS.metrics_interval_s,
            max_message_bytes=self.settings.max_message_bytes,
        )


class Supervisor:
    """Serves one model or several. `run` serves until `stop` is called."""

    def __init__(
        self,
        settings: Settings,
        models: Mapping[str, Settings],
        *,
        kept: Callable[[str], object] | None = None,
        step: Callable[[str], object] | None = None,
    ) -> None:
        """Take the settings, and those of each of several models; without any, `settings` has the only one.

        `kept` gets each line of the workers' logs, and `step` the steps of their starts, which are otherwise
        logged.
        """
        self._models = [_Model(*one) for one in models.items()] or [_Model(None, settings)]
        #: The settings that all models share; the NATS server must take the largest messages of any model.
        self._settings = replace(
            settings, max_message_bytes=max(one.settings.max_message_bytes for one in self._models)
        )
        self._kept = kept
        self._step = step
        self._are_several = bool(models)
        self._standby: Process | None = None
        self._hiring = anyio.Lock()
        self._memory_bytes = 0
        self._running: list[_Model] = []
        self._turn = anyio.Lock()
        self._freed = Event()
        self._stop = Event()
        self._fatal: TurnkeepError | None = None
        self.ready = Event()

    def stop(self) -> None:
        """Make `run` end. Event loop only."""
        self._stop.set()

    async def reload(self, settings: Settings, models: Mapping[str, Settings]) -> None:
        """Give the workers, also those to come, their settings, which were read again."""
        for model in self._models:
            told = settings if model.name is None else models.get(model.name)
            if told is None:
                continue
            model.settings = replace(model.settings, max_disk=told.max_disk, min_free_disk=told.min_free_disk)
            if model.process is not None:
                await self._order(model.process, model.settings)

    async def run(self) -> None:
        """Serve until `stop` is called. Raises `TurnkeepError` for errors that a user can fix."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            if settings.health is not None:  # first, as loading or downloading models may take long
                health = HealthServer(settings.health, {"/livez": self._hangs, "/readyz": self._unready})
                await health.open()
                await stack.enter_async_context(background(health.serve))
            directory = stack.enter_context(
                DataDir.open(settings.data_dir, settings.worker, settings.nats_place)
            )
            options = worker_options(settings)
            server = None if settings.nats else EmbeddedServer(directory, settings)
            if server is not None:
                server.check()
            stack.push_async_callback(shielded, self._dismiss)
            await self._hire()
            if self._are_several:
                await self._weigh()
            url = over_tls(settings, settings.nats or "")
            if server is not None:
                stack.push_async_callback(shielded, server.stop)
                await server.start()
                await stack.enter_async_context(background(server.supervise))
                url, options = server.url, {"token": server.token}
                for model in self._models:
                    model.settings = replace(model.settings, nats=url.replace("://", f"://{server.token}@"))
            for model in self._models:
                self._place(model, directory, stack)
            nc = await connect(
                url,
                name=f"turnkeep serve {settings.worker}",
                min_payload_bytes=settings.max_message_bytes,
                on_reconnected=self._look_again,
                on_closed=self._closed,
                **options,
            )
            stack.push_async_callback(shielded, nc.close)
            for model in self._models:
                model.activator = Activator(
                    *(nc, Subjects(model.settings.prefix), model.metrics, model.wake),
                    partial(self._asked, model),
                )
                await model.activator.open(model.settings, all_requests=self._are_several)
            await self._serve()
        if self._fatal is not None:
            raise self._fatal

    def _place(self, model: _Model, directory: DataDir, stack: AsyncExitStack) -> None:
        """Set a model's data directory, and the settings that its worker gets."""
        settings = model.settings
        if model.name is None:
            model.directory = directory
        else:
            needs = model.needs or _UNKNOWN
            path = self._settings.data_dir / "workers" / settings.prefix
            name = f"{settings.worker}-{word(model.name)}"[:64]
            model.directory = stack.enter_context(DataDir.open(path, name))
            settings = replace(
                settings,
                worker=name,
                data_dir=path,
                model=needs.folder,
                device_memory=model.size_bytes,
                # By its name a worker would look for it in its own data directory.
                draft_model=needs.draft_folder,
            )
        model.settings = settings

    async def _hire(self) -> Process:
        """Make sure that a process waits for an order; return it."""
        async with self._hiring:
            if self._standby is None or self._standby.returncode is not None:
                spare_bytes = _SPARE_BYTES if computes_on_linux_cpu() else 0
                self._standby = await start([*_WORKER, str(spare_bytes)], stdout=subprocess.PIPE)
            return self._standby

    async def _take(self) -> Process:
        """Return the process that waits for an order; the caller gives it one, and ends it."""
        while (process := await self._hire()) is not self._standby:  # another model has taken it
            pass
        self._standby = None
        return process

    async def _dismiss(self) -> None:
        """End the process that waits for an order."""
        if self._standby is not None:
            self._standby.kill()
            await self._standby.aclose()

    async def _order(self, process: Process, order: Order | Settings) -> None:
        with contextlib.suppress(BrokenResourceError):  # it has just ended
            await process.stdin.send(encode(order))  # type: ignore[union-attr]  # a pipe

    async def _serve(self) -> None:
        async with task_group() as tasks:
            for model in self._models:
                tasks.start_soon(self._keep, model)
                tasks.start_soon(self._publish_metrics, model)
            if self._are_several:
                for model in self._models:
                    await model.activator.begin()
                log.info("ready", memory=size(self._memory_bytes))
                self.ready.set()
                await self._look_again()
            else:
                self._models[0].wake()
            await self._stop.wait()
            if self._are_several:
                log.info("stopping")
            tasks.cancel_scope.cancel()

    async def _weigh(self) -> None:
        """Measure each model, and set the memory that its worker may use. Raises `SupervisorError`."""
        log.info("measuring the models", models=[model.name for model in self._models])
        limit = anyio.CapacityLimiter(_AT_ONCE)

        async def weigh(model: _Model) -> None:
            async with limit:
                weighed = await self._weighed(model.settings)
            if isinstance(weighed, Refused):
                raise SupervisorError(f"the model {model.name} cannot be served: {weighed.reason}")
            model.needs = weighed

        async with task_group() as tasks:
            for model in self._models:
                tasks.start_soon(weigh, model)
        weighed = [(model, model.needs) for model in self._models if model.needs is not None]
        memory = self._settings.memory or min(needs.memory_bytes for _, needs in weighed)
        for model, needs in weighed:
            model.size_bytes = _share(model.name or "", model.settings.device_memory, needs, memory)
        self._memory_bytes = memory

    async def _weighed(self, settings: Settings) -> Needs | Refused:
        """Measure a model in a process of its own."""
        found: Needs | Refused = Refused("its process has ended; the error is above", is_setting=False)
        async with ending(await self._take(), 0) as process:
            await self._order(process, Order(settings, weighs=True))
            async for report in _reports(process):
                if isinstance(report, Line):
                    self._say(report)
                elif isinstance(report, Needs | Refused):
                    found = report
        return found

    async def _asked(self, model: _Model, request: ServeRequest) -> str:
        """Load or unload a model; return what happens. Raises `SupervisorError`."""
        if not model.state.is_alone:
            raise SupervisorError("other workers serve the prefix with this model; stop them to change it")
        served = model.name or (model.needs.model if model.needs is not None else "")
        if isinstance(request, UnloadRequest):
            model.let_go()
            return f"{served} is unloaded; its next request loads it again"
        if request.model not in {None, served}:
            return await self._change(model, request.model or "")
        model.wake()
        return f"{served} is loaded"

    async def _change(self, model: _Model, name: str) -> str:
        """Serve another model on the prefix of the single one; return what happens."""
        if model.name is not None:
            raise SupervisorError(
                "the models of turnkeep.toml are loaded by their requests; add this one there"
            )
        drafted = replace(model.settings, model=name, draft_model=model.draft_model)
        alone = replace(drafted, draft_model=None)
        settings, weighed = drafted, await self._fitting(drafted)
        if isinstance(weighed, Refused) and drafted != alone:
            settings, weighed = alone, await self._fitting(alone)
        if isinstance(weighed, Refused):
            raise SupervisorError(f"{name} cannot be served: {weighed.reason}")
        model.let_go()
        while model in self._running:  # noqa: ASYNC110  # it tells nobody
            await sleep(_ENDED_S)
        model.settings, model.needs = settings, weighed
        model.wake()
        without = ", without the draft model" if settings.draft_model != drafted.draft_model else ""
        return f"the worker restarts with {name}{without}; conversations go on with it"

    async def _fitting(self, settings: Settings) -> Needs | Refused:
        """Measure a model; refuse it if this machine has too little memory for it."""
        weighed = await self._weighed(settings)
        if isinstance(weighed, Needs) and weighed.least_bytes > weighed.memory_bytes:
            least, there = size(weighed.least_bytes), size(weighed.memory_bytes)
            return Refused(f"it needs {least} of memory, and this machine has {there} for models", False)
        return weighed

    def _say(self, line: Line) -> None:
        if not line.is_step:
            if self._kept is not None:
                self._kept(line.text)
        elif self._step is not None:
            self._step(line.text)
        else:
            log.info(line.text)

    async def _keep(self, model: _Model) -> None:
        """Run the model's worker whenever the model has requests, forever."""
        while True:
            await model.wanted.wait()
            model.leave = Event()
            async with self._room(model):
                is_left = await self._run_until_left(model)
            if is_left and await model.activator.has_work():
                model.wake()

    async def _run_until_left(self, model: _Model) -> bool:
        """Run the model's worker, again and again if it crashes, until the model must leave.

        Returns False if the worker never gets ready; a single model then ends `run`.
        """
        num_short = 0
        while True:
            code = await self._run_worker(model)
            if model.leave.is_set():
                log.info("unloaded", **_named(model))
                return True
            num_short = 0 if current_time() - model.loaded_s > _STABLE_S else num_short + 1
            is_failing = num_short >= _MAX_TRIES and model.loaded_s == math.inf
            refused = model.refused
            if model.needs is None and (is_failing or refused is not None):
                self._give_up(refused or Refused(_never_ready(code), is_setting=False))
                return False
            more = {"reason": refused.reason} if refused is not None else {}
            if is_failing and self._are_several:
                reason = more.get("reason", _never_ready(code))
                log.error("a model cannot be loaded until its next request", **_named(model), reason=reason)
                await model.activator.refuse(f"the model {model.name} cannot be loaded: {reason}")
                model.let_go()
                return False
            pause_s = min(_PAUSES_S[0] * 2 ** (num_short - 2), _PAUSES_S[1]) if num_short > 1 else 0.0
            log.error("a worker has ended", **_named(model), code=code, pause_s=pause_s, **more)
            with move_on_after(pause_s):
                await model.leave.wait()
                return True

    def _give_up(self, refused: Refused) -> None:
        """End `run` with the reason why the only model cannot be served."""
        kind = SettingsError if refused.is_setting else SupervisorError
        self._fatal = kind(refused.reason)
        self.stop()

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
                idle.append(InMemory(one.activator.used_s, one.size_bytes, one.name or ""))
        chosen = leaving(lacking_bytes, idle)
        for one in self._running:
            if one.name in chosen:
                one.let_go()

    async def _run_worker(self, model: _Model) -> int:
        """Run a model's worker until it ends; return its exit code."""
        model.began_s, model.loaded_s, model.refused = current_time(), math.inf, None
        model.state = State((), ("loading the model",), model.state.is_alone)
        async with ending(await self._take(), _STOP_S) as model.process, task_group() as tasks:
            if self._are_several:
                log.info("loading", **_named(model), memory=size(model.size_bytes))
            order = Order(
                model.settings,
                model.name,
                tells_log=self._kept is not None,
                tells_steps=self._step is not None,
            )
            await self._order(model.process, order)
            tasks.start_soon(self._watch, model, model.process)
            async for report in _reports(model.process):
                await self._hear(model, report)
            code = await model.process.wait()
            tasks.cancel_scope.cancel()
        model.process, model.reported_s = None, math.inf
        model.state = State((), ("the worker has ended",), model.state.is_alone)
        if model.needs is not None and (model.leave.is_set() or model.state.is_alone):
            await model.activator.begin()
        return code

    async def _hear(self, model: _Model, report: Report) -> None:
        """Take a worker's report; once it serves, let it answer its requests."""
        match report:
            case Line():
                self._say(report)
            case State():
                model.state, model.reported_s = report, current_time()
            case Refused():
                model.refused = report
            case Needs():
                if not self._are_several:
                    model.needs = report
                await model.activator.end()
                model.loaded_s = current_time()
                if self._are_several:
                    seconds = round(model.loaded_s - model.began_s, 1)
                    log.info("loaded", **_named(model), seconds=seconds)
                self.ready.set()

    async def _watch(self, model: _Model, worker: Process) -> None:
        """End the model's worker when the model is idle or must leave."""
        pause_s = min(max(model.stays_s / 100, _LOOK_S), _LONG_LOOK_S)
        while not model.leave.is_set():
            if await self._is_idle(model):
                model.let_go()
            elif model.is_loaded and current_time() - model.loaded_s > _HIRE_S:
                await self._hire()
            with move_on_after(pause_s):
                await model.leave.wait()
        if model.needs is not None:
            await model.activator.begin()
        with contextlib.suppress(ProcessLookupError):
            worker.terminate()
            await sleep(_STOP_S)
            worker.kill()

    async def _is_idle(self, model: _Model) -> bool:
        if not model.is_loaded or model.stays_s == math.inf:
            return False
        if await model.activator.has_work():  # asked each time, as an answer may take nearly `after_s`
            model.activator.used_s = current_time()
        return model.unused_s >= model.stays_s

    async def _publish_metrics(self, model: _Model) -> None:
        while True:
            if model.needs is not None and not model.is_loaded:  # no worker publishes its own yet
                await model.activator.publish_metrics()
            await sleep(CONSTANTS.metrics_interval_s)

    async def _look_again(self) -> None:
        """Load each model whose log has unanswered requests: some may have come during a disconnection."""
        for model in self._models:
            if self.ready.is_set() and await model.activator.has_work():
                model.wake()

    async def _closed(self) -> None:
        if not self._stop.is_set():
            self._fatal = SupervisorError("the NATS server has closed the connection; its log says why")
            self._stop.set()

    def _hangs(self) -> list[str]:
        return [reason for model in self._models for reason in model.hangs()]

    def _unready(self) -> list[str]:
        """Return the reasons why requests are not answered now; one that loads its model is answered."""
        if self._stop.is_set():
            return ["stopping"]
        if not self.ready.is_set() or (not self._are_several and self._models[0] in self._running):
            return [*self._models[0].state.unready]
        return []


def _never_ready(code: int) -> str:
    return f"its worker has ended {_MAX_TRIES} times in a row, before it was ready (code {code}); see the log"


def _named(model: _Model) -> dict[str, str]:
    """Return the field of log lines that names one of several models."""
    return {} if model.name is None else {"model": model.name}


async def _reports(process: Process) -> AsyncIterator[Report]:
    """Yield the reports of a worker's process until it has ended."""
    lines = BufferedByteReceiveStream(process.stdout)  # type: ignore[arg-type]  # a pipe
    with contextlib.suppress(anyio.EndOfStream, IncompleteRead, BrokenResourceError):
        while True:
            yield decode_report(await lines.receive_until(b"\n", _MAX_REPORT_BYTES))


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
