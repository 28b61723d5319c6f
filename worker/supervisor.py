"""Serves models, each in a worker process of its own: what `turnkeep serve` runs.

Owns the data directory, the NATS server and the worker processes, and never imports MLX. A single model is
loaded at the start. Of several, which share a budget of memory, the first request for a model starts its
worker; the worker ends when it has been idle for a while, or when another model needs its memory. A model
that was unloaded is loaded by its next request. A worker that crashes is started again at once.
"""

from __future__ import annotations

import contextlib
import math
import os
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio
import structlog
from anyio import Event, current_time, move_on_after, sleep

from turnkeep_client.messages import UnloadRequest
from turnkeep_client.subjects import Subjects
from worker.model_process import UNKNOWN, ModelProcess, SupervisorError, place_of
from worker.wire.broker import EmbeddedServer
from worker.wire.connection import connect
from worker.wire.credentials import over_tls, worker_options

from .model_memory import MemoryBudget, share_of
from .observe.health import HealthServer
from .process.children import ending
from .process.concurrency import background, shielded, task_group
from .process.constants import CONSTANTS
from .process.datadir import DataDir
from .process.formatting import size
from .process.limits import limits_of
from .process.settings import RELOADED, SettingsError, changed_names
from .reports import Needs, Order, Refusal, ReportLine, State
from .standby import Standby, reports, send_order
from .wire.activator import Activator
from .wire.journal import Journal
from .wire.retention import Retention

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from anyio.abc import Process
    from nats.aio.client import Client

    from turnkeep_client.errors import TurnkeepError
    from turnkeep_client.messages import ServeRequest

    from .process.setting_kinds import Endpoint
    from .process.settings import Settings
    from .reports import Report

log = structlog.get_logger()

#: How many models are measured at the same time.
_AT_ONCE: Final = 2
#: The pause between two checks of whether a model is still in use, and the longest one.
_LOOK_S: Final = 0.5
_LONG_LOOK_S: Final = 5.0
#: The pause between two checks of whether a worker has ended.
_ENDED_S: Final = 0.05
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


class Supervisor:
    """Serves one model or several. `run` serves until `stop` is called."""

    def __init__(
        self,
        settings: Settings,
        models: Mapping[str, Settings],
        *,
        kept: Callable[[str], object] | None = None,
        step: Callable[[str], object] | None = None,
        gateway: int | None = None,
    ) -> None:
        """Take the settings, and those of each of several models; without any, `settings` has the only one.

        `kept` gets each line of the workers' logs, and `step` the steps of their starts, which are otherwise
        logged. `gateway` is the port of a gateway that runs beside, which the data directory notes.
        """
        self._models = [ModelProcess(*one) for one in models.items()] or [ModelProcess(None, settings)]
        #: The settings that all models share; the NATS server must take the largest messages of any model.
        self._settings = replace(
            settings, max_message_bytes=max(one.settings.max_message_bytes for one in self._models)
        )
        self._kept = kept
        self._step = step
        self._gateway = gateway
        self._are_several = bool(models)
        self._standby = Standby()
        self._memory = MemoryBudget()
        self._stop = Event()
        self._fatal: TurnkeepError | None = None
        #: The data directory: of several models each has one more.
        self._directory: DataDir | None = None
        #: The NATS server of this process; None if it runs elsewhere, or not yet.
        self._server: EmbeddedServer | None = None
        self.ready = Event()

    def stop(self) -> None:
        """Make `run` end. Event loop only."""
        self._stop.set()

    async def reload(self, settings: Settings, models: Mapping[str, Settings]) -> None:
        """Give the workers, also those to come, the disk limits of settings that were read again.

        Logs which other settings have changed, and which models were added or removed: they need a restart.
        """
        if other := {one.name for one in self._models if one.name is not None} ^ models.keys():
            tables = sorted(f"models.{name}" for name in other)
            log.warning("these settings need a restart", settings=tables)
        if self._directory is not None:
            self._directory.note_limits(limits_of(_reloaded(self._settings, settings)))
        for model in self._models:
            told = settings if model.name is None else models.get(model.name)
            if told is None:
                continue
            if lasting := changed_names(model.given, told) - RELOADED:
                log.warning("these settings need a restart", **model.log_fields, settings=sorted(lasting))
            model.settings = _reloaded(model.settings, told)
            if model.directory is not None:
                model.directory.note_limits(limits_of(model.settings))
            if model.process is not None:
                await send_order(model.process, model.settings)

    @asynccontextmanager
    async def _health(self, endpoint: Endpoint) -> AsyncIterator[None]:
        """Answer health probes until the block ends."""
        health = HealthServer(endpoint, {"/livez": self._hangs, "/readyz": self._unready})
        await health.open()
        async with background(health.serve):
            yield

    async def run(self) -> None:
        """Serve until `stop` is called. Raises `TurnkeepError` for errors that a user can fix."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            if settings.health is not None:  # first, as loading or downloading models may take long
                await stack.enter_async_context(self._health(settings.health))
            self._directory = directory = stack.enter_context(
                DataDir.open(
                    *(settings.data_dir, settings.worker, settings.nats_place, limits_of(settings)),
                    gateway=self._gateway,
                )
            )
            url, options = over_tls(settings, settings.nats or ""), worker_options(settings)
            server = None if settings.nats else EmbeddedServer(directory, settings)
            if server is not None:
                server.check()
            stack.push_async_callback(shielded, self._standby.dismiss)
            await self._standby.hire()
            if self._are_several:
                await self._weigh()
            if server is not None:
                url, options = await self._start(server, stack)
            for model in self._models:
                if server is None:
                    model.settings = replace(model.settings, sync_interval=model.settings.nats_sync_interval)
                self._place(model, stack)
            nc = await connect(
                url,
                name=f"turnkeep serve {settings.worker}",
                min_payload_bytes=settings.max_message_bytes,
                on_reconnected=self._look_again,
                on_closed=self._closed,
                **options,
            )
            stack.push_async_callback(shielded, nc.close)
            await self._activate(nc)
            await self._serve()
        if self._fatal is not None:
            raise self._fatal

    async def _activate(self, nc: Client) -> None:
        """Let requests for a model that has no process start it."""
        for model in self._models:
            subjects = Subjects(model.settings.prefix)
            asked = partial(self._asked, model)
            model.activator = Activator(nc, subjects, model.metrics, model.wake, asked)
            await model.activator.open(model.settings, all_requests=self._are_several)
            model.retention = Retention(
                Journal(nc, subjects),
                closed_ttl_s=model.settings.closed_ttl_s,
                max_bytes=model.settings.log_max_bytes,
                sync_s=model.settings.sync_s,
            )

    async def _start(self, server: EmbeddedServer, stack: AsyncExitStack) -> tuple[str, dict[str, Any]]:
        """Start this machine's NATS server, for all models; return its URL and the options of connections."""
        self._server = server
        stack.push_async_callback(shielded, server.stop)
        await server.start()
        await stack.enter_async_context(background(server.supervise))
        for model in self._models:
            url = server.url.replace("://", f"://{server.token}@")
            model.settings = replace(model.settings, nats=url)
        return server.url, {"token": server.token}

    def _place(self, model: ModelProcess, stack: AsyncExitStack) -> None:
        """Set the data directory of one of several models, and the settings that its worker gets."""
        if model.name is None:
            return
        settings, needs = model.settings, model.needs or UNKNOWN
        path, name = place_of(settings, model.name)
        model.directory = stack.enter_context(DataDir.open(path, name, limits=limits_of(settings)))
        model.settings = replace(
            settings,
            worker=name,
            data_dir=path,
            model=needs.folder,
            device_memory=model.size_bytes,
            # By its name a worker would look for it in its own data directory.
            draft_model=needs.draft_folder,
        )

    async def _serve(self) -> None:
        async with task_group() as tasks:
            for model in self._models:
                tasks.start_soon(self._keep, model)
                tasks.start_soon(self._publish_metrics, model)
            if self._are_several:
                for model in self._models:
                    await model.activator.begin()
                log.info("ready", memory=size(self._memory.size_bytes))
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

        async def weigh(model: ModelProcess) -> None:
            async with limit:
                weighed = await self._weighed(model.settings)
            if isinstance(weighed, Refusal):
                raise SupervisorError(f"the model {model.name} cannot be served: {weighed.reason}")
            model.needs = weighed

        async with task_group() as tasks:
            for model in self._models:
                tasks.start_soon(weigh, model)
        weighed = [(model, model.needs) for model in self._models if model.needs is not None]
        memory = self._settings.memory or min(needs.memory_bytes for _, needs in weighed)
        for model, needs in weighed:
            model.size_bytes = share_of(model.name or "", model.settings.device_memory, needs, memory)
        self._memory.size_bytes = memory

    async def _weighed(self, settings: Settings) -> Needs | Refusal:
        """Measure a model in a process of its own."""
        found: Needs | Refusal = Refusal("its process has ended; the worker's log says why", is_setting=False)
        async with ending(await self._standby.take(), 0) as process:
            await send_order(process, Order(settings, weighs=True))
            async for report in reports(process):
                if isinstance(report, ReportLine):
                    self._say(report)
                elif isinstance(report, Needs | Refusal):
                    found = report
        return found

    async def _asked(self, model: ModelProcess, request: ServeRequest) -> str:
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

    async def _change(self, model: ModelProcess, name: str) -> str:
        """Serve another model on the prefix of the single one; return what happens."""
        if model.name is not None:
            raise SupervisorError(
                "the models of turnkeep.toml are loaded by their requests; add this one there"
            )
        drafted = replace(model.settings, model=name, draft_model=model.draft_model)
        alone = replace(drafted, draft_model=None)
        settings, weighed = drafted, await self._fitting(drafted)
        if isinstance(weighed, Refusal) and drafted != alone:
            settings, weighed = alone, await self._fitting(alone)
        if isinstance(weighed, Refusal):
            raise SupervisorError(f"{name} cannot be served: {weighed.reason}")
        worker = model.process
        # Before the worker ends: requests that come meanwhile start the next one, at once.
        model.settings, model.needs, model.unloadable = settings, weighed, ""
        model.let_go()
        while worker is not None and model.process is worker:  # noqa: ASYNC110  # it tells nobody
            await sleep(_ENDED_S)
        model.wake()
        without = ", without the draft model" if settings.draft_model != drafted.draft_model else ""
        return f"the worker restarts with {name}{without}; conversations go on with it"

    async def _fitting(self, settings: Settings) -> Needs | Refusal:
        """Measure a model; refuse it if this machine has too little memory for it."""
        weighed = await self._weighed(settings)
        if isinstance(weighed, Needs) and weighed.least_bytes > weighed.memory_bytes:
            least, there = size(weighed.least_bytes), size(weighed.memory_bytes)
            return Refusal(f"it needs {least} of memory, and this machine has {there} for models", False)
        return weighed

    def _say(self, line: ReportLine) -> None:
        if not line.is_step:
            if self._kept is not None:
                self._kept(line.text)
        elif self._step is not None:
            self._step(line.text)
        else:
            log.info(line.text)

    async def _keep(self, model: ModelProcess) -> None:
        """Run the model's worker whenever the model has requests, forever."""
        while True:
            # As the model's worker does: closed sessions must leave the log, and forgotten ones soon.
            async with background(model.retention.run):
                await model.wanted.wait()
            is_left = True
            if model.wanted.is_set():  # else it was asked to leave since
                model.leave = Event()
                async with self._memory.reserve(model):
                    is_left = await self._run_until_left(model)
            if is_left and await model.activator.has_work():
                model.wake()

    async def _run_until_left(self, model: ModelProcess) -> bool:
        """Run the model's worker, again and again if it crashes, until the model must leave.

        Returns False if the worker never gets ready. A single model then ends `run`, unless one has served
        before: then it is tried for ever.
        """
        num_short, pause_s = 0, 0.0
        while True:
            code = await self._run_worker(model)
            if model.leave.is_set():
                log.info("unloaded", **model.log_fields)
                return True
            num_short = 0 if current_time() - model.loaded_s > _STABLE_S else num_short + 1
            is_failing = num_short >= _MAX_TRIES and model.loaded_s == math.inf
            refused = model.refused
            if model.needs is None and (is_failing or refused is not None):
                self._give_up(refused or Refusal(_never_ready(code), is_setting=False))
                return False
            reason = refused.reason if refused is not None else _never_ready(code) if is_failing else None
            if is_failing:
                model.unloadable = (
                    f"the model {model.name or model.settings.model} cannot be loaded: {reason}"
                )
                await model.activator.refuse(model.unloadable)
            if is_failing and self._are_several:
                log.error(
                    "a model cannot be loaded until its next request", **model.log_fields, reason=reason
                )
                model.let_go()
                return False
            pause_s = min(max(2 * pause_s, _PAUSES_S[0]), _PAUSES_S[1]) if num_short > 1 else 0.0
            more = {} if reason is None else {"reason": reason}
            log.error("a worker has ended", **model.log_fields, code=code, pause_s=pause_s, **more)
            with move_on_after(pause_s):
                await model.leave.wait()
                return True

    def _give_up(self, refused: Refusal) -> None:
        """End `run` with the reason why the only model cannot be served."""
        kind = SettingsError if refused.is_setting else SupervisorError
        self._fatal = kind(refused.reason)
        self.stop()

    async def _run_worker(self, model: ModelProcess) -> int:
        """Run a model's worker until it ends; return its exit code, or `EX_OSERR` if it cannot be started."""
        model.began_s, model.loaded_s, model.refused = current_time(), math.inf, None
        model.state = State((), ("loading the model",), model.state.is_alone)
        try:
            process = await self._standby.take()
        except OSError as error:
            model.refused = Refusal(f"no process can be started: {error}", is_setting=False)
            return os.EX_OSERR
        async with ending(process, _STOP_S) as model.process, task_group() as tasks:
            if self._are_several:
                log.info("loading", **model.log_fields, memory=size(model.size_bytes))
            order = Order(
                model.settings,
                model.name,
                tells_log=self._kept is not None,
                tells_steps=self._step is not None,
            )
            await send_order(model.process, order)
            tasks.start_soon(self._watch, model, model.process)
            async for report in reports(model.process):
                await self._hear(model, report)
            code = await model.process.wait()
            tasks.cancel_scope.cancel()
        model.process, model.reported_s = None, math.inf
        model.state = State((), ("the worker has ended",), model.state.is_alone)
        if model.needs is not None and (model.leave.is_set() or model.state.is_alone):
            await model.activator.begin()
        return code

    async def _hear(self, model: ModelProcess, report: Report) -> None:
        """Take a worker's report; once it serves, let it answer its requests."""
        match report:
            case ReportLine():
                self._say(report)
            case State():
                model.state, model.reported_s = report, current_time()
            case Refusal():
                model.refused = report
            case Needs():
                if not self._are_several:
                    model.needs = report
                model.unloadable = ""
                await model.activator.end()
                model.loaded_s = current_time()
                if self._are_several:
                    seconds = round(model.loaded_s - model.began_s, 1)
                    log.info("loaded", **model.log_fields, seconds=seconds)
                self.ready.set()

    async def _watch(self, model: ModelProcess, worker: Process) -> None:
        """End the model's worker when the model is idle or must leave."""
        pause_s = min(max(model.stays_s / 100, _LOOK_S), _LONG_LOOK_S)
        while not model.leave.is_set():
            if await self._is_idle(model):
                model.let_go()
            elif model.is_loaded and current_time() - model.loaded_s > _HIRE_S:
                with contextlib.suppress(OSError):  # it is tried again, and a restart does without
                    await self._standby.hire()
            with move_on_after(pause_s):
                await model.leave.wait()
        if model.needs is not None:
            await model.activator.begin()
        with contextlib.suppress(ProcessLookupError):
            worker.terminate()
            await sleep(_STOP_S)
            worker.kill()

    async def _is_idle(self, model: ModelProcess) -> bool:
        if not model.is_loaded or model.stays_s == math.inf:
            return False
        if await model.activator.has_work():  # asked each time, as an answer may take nearly `after_s`
            model.activator.used_s = current_time()
        return model.unused_s >= model.stays_s

    async def _publish_metrics(self, model: ModelProcess) -> None:
        while True:
            if model.needs is not None and not model.is_loaded:  # no worker publishes its own yet
                await model.activator.publish_metrics()
            await sleep(CONSTANTS.metrics_interval_s)

    async def _look_again(self) -> None:
        """Load each model whose log has unanswered requests: some may have come during a disconnection."""
        for model in self._models:
            if self.ready.is_set() and await model.activator.has_work():
                model.wake()

    async def _closed(self, why: str) -> None:
        if not self._stop.is_set():
            self._fatal = SupervisorError(why)
            self._stop.set()

    def _hangs(self) -> list[str]:
        return [reason for model in self._models for reason in model.hangs()]

    def _unready(self) -> list[str]:
        """Return the reasons why requests are not answered now; one that loads its model is answered."""
        if self._stop.is_set():
            return ["stopping"]
        if self._server is not None and self._server.problem is not None:
            return [f"the NATS server is not healthy: {self._server.problem}"]
        if not self.ready.is_set() or (not self._are_several and self._models[0] in self._memory.loaded):
            return [*self._models[0].state.unready]
        return []


def _never_ready(code: int) -> str:
    return f"its worker has ended {_MAX_TRIES} times in a row, before it was ready (code {code}); see the log"


def _reloaded(settings: Settings, told: Settings) -> Settings:
    """Return the settings with what a reload may change of those that were read again."""
    return replace(settings, **{name: getattr(told, name) for name in RELOADED})
