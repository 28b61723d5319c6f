"""The composition root: builds all parts of the worker, runs them, and stops them in the right order.

Start: data directory, NATS, model, streams, snapshots, requests. Stop, in reverse order: no new requests;
running turns end, and their KV is saved; the snapshot writer ends; NATS is last. Unanswered requests stay in
the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import os
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import structlog
from anyio import Event, current_time, move_on_after, sleep, sleep_forever, to_thread
from msgspec import structs

from cache.store import Store, may_hold
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import FEATURES
from turnkeep_client.messages import VERSION as PROTOCOL
from turnkeep_client.redact import shown
from turnkeep_client.subjects import Subjects
from turnkeep_client.writes import unstored
from worker.cluster.liveness import Members
from worker.engine.engine import Engine
from worker.engine.ledger import Ledger
from worker.models.model_files import silent
from worker.process.cache_parts import cache_codec, remote_tier
from worker.process.wakefulness import keep_awake
from worker.sessions.history import digests_of
from worker.wire import streams
from worker.wire.connection import BrokerError, connect, loses_entries, server_version, small_payload
from worker.wire.credentials import over_tls, worker_options

from .metrics_collector import collect
from .model_start import ModelStart, WorkerError
from .observe.telemetry import Telemetry
from .observe.tracing import start_traces
from .parts import Groundwork, Parts
from .process.concurrency import in_thread, shielded, step_in_thread, task_group
from .process.constants import CONSTANTS
from .process.datadir import DataDir
from .process.settings import RELOADED, changed_names
from .reports import Needs, State
from .store_start import open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anyio.abc import TaskGroup
    from nats.aio.client import Client
    from nats.js import JetStreamContext

    from turnkeep_client.subjects import SessionKey
    from worker.models.model_files import Progress

    from .observe.otlp import Traces
    from .process.constants import Constants
    from .process.settings import Settings

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")

VERSION = importlib.metadata.version("turnkeep")

#: Limit of threads for work that would block the event loop, tokenising above all.
_MAX_THREADS = 6

#: A device step that takes longer counts as hanging. Steps are planned to take `max_stall_s`; only the step
#: of a single prompt may take seconds, on the slowest machine.
_STUCK_S = 120.0

#: Time for sessions to end; after it, commits that wait for an unreachable log are cancelled.
_STOP_S = 10.0

#: The same if the device thread has ended: its turns never end, and results of others take milliseconds.
_LOST_S = 0.5

#: Time after that to store which requests no worker has begun; else these count one attempt more.
_NOTES_S = 5.0

#: Time after that to save KV whose snapshots are missing, and to write it; then the store closes.
_STORE_S = 5.0


class App:
    """One worker. `run` starts it, serves until `stop` is called, and stops all parts."""

    def __init__(
        self,
        settings: Settings,
        directory: DataDir | None = None,
        *,
        constants: Constants = CONSTANTS,
        progress: Progress = silent,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """Take an open data directory, if another process keeps it locked, and two callbacks.

        `progress(done, total, what)`, called on any thread, reports the long steps; `loaded()` is called once
        the weights are in memory.
        """
        self._settings = settings
        self._constants = constants
        self._directory = directory
        self._progress = progress
        self._weights_loaded = loaded
        self._subjects = Subjects(settings.prefix)
        self._telemetry = Telemetry(settings.tenants.metrics)
        self._stop = Event()
        self._starting: TaskGroup
        self._model: ModelStart
        self._store: Store | None = None
        self._traces: Traces | None = None
        self._has_unopened = False
        self._parts: Parts | None = None
        self._fatal = ""
        self._stop_s = _STOP_S
        self._nc: Client | None = None
        self._members: Members
        self.ready = Event()

    def stop(self) -> None:
        """Make `run` stop the worker and return. Event loop only."""
        self._stop.set()

    def reload(self, settings: Settings) -> None:
        """Apply the settings that may change while the worker runs (`RELOADED`). Event loop only."""
        before, news = self._settings, {name: getattr(settings, name) for name in RELOADED}
        self._settings = dataclasses.replace(before, **news)
        self._set_disk_limits()
        log.info("read the settings again", changed=sorted(changed_names(before, self._settings)))

    def _set_disk_limits(self) -> None:
        if self._store is not None:
            settings = self._settings
            self._store.quota.set_limits(max_bytes=settings.max_disk, min_free_bytes=settings.min_free_disk)

    async def run(self) -> None:
        """Start, and serve until `stop` is called. Raises `TurnkeepError` for errors that a user can fix."""
        settings = self._settings
        to_thread.current_default_thread_limiter().total_tokens = _MAX_THREADS
        async with task_group() as self._starting, contextlib.AsyncExitStack() as stack:
            self._loop = asyncio.get_running_loop()
            self._model = ModelStart(
                settings,
                self._constants,
                self._starting,
                progress=self._progress,
                weights_loaded=self._weights_loaded,
            )
            await self._start_traces(stack)
            codec = cache_codec(settings)
            tier = await step_in_thread(self._starting, remote_tier, settings, codec)
            directory = self._directory or DataDir.open(
                settings.data_dir, settings.worker, settings.nats_place
            )
            stack.push(directory)
            # Download no model for a server that does not answer, and make no stream for a model that cannot
            # be loaded.
            nc = await self._connect(directory, stack)
            js = nc.jetstream()
            taken_back = self._starting.start_soon(self._take_back, js)
            await self._model.load(directory, stack, self._device_died)
            await taken_back
            await streams.ensure(js, self._subjects, settings, self._constants)
            self._maker = await self._model.name()
            await self._members.name_model(digests_of(self._maker))
            given = self._settings
            self._store = await open_store(given, self._constants, self._model, directory, codec, tier, stack)
            if self._settings != given:  # a reload has changed them meanwhile
                self._set_disk_limits()
            if self._store is None:
                self._has_unopened = await in_thread(may_hold, directory.snapshots)
            await self._serve(nc)

    async def _start_traces(self, stack: contextlib.AsyncExitStack) -> None:
        named = {"service.version": VERSION, "service.instance.id": self._settings.worker}
        start = partial(start_traces, self._settings.otlp_endpoint, os.environ, **named)
        self._traces = await step_in_thread(self._starting, start)
        if self._traces is not None:
            stack.push_async_callback(shielded, partial(in_thread, self._traces.stop))

    async def _connect(self, directory: DataDir, stack: contextlib.AsyncExitStack) -> Client:
        """Connect to NATS, and record this worker among the workers of its prefix (`Members`)."""
        nc = self._nc = await connect(
            over_tls(self._settings, self._settings.nats or ""),
            name=f"turnkeep {self._settings.worker}",
            min_payload_bytes=self._settings.max_message_bytes,
            on_reconnected=self._reconnected,
            on_closed=self._closed,
            **worker_options(self._settings),
        )
        stack.push_async_callback(shielded, nc.close)
        if fault := loses_entries(version := server_version(nc)):
            log.warning(fault, version=version)
        members = self._members = Members(
            nc,
            self._subjects,
            worker=self._settings.worker,
            directory=directory.name,
            replicas=self._settings.log_replicas,
            lost=self._fail,
        )
        stack.push_async_callback(shielded, members.leave)
        await members.join()
        await stack.enter_async_context(self._background("members", members.keep))
        await stack.enter_async_context(self._background("watch", members.watch))
        return nc

    async def _take_back(self, js: JetStreamContext) -> None:
        if not self._members.others:
            await streams.take_back(js, self._subjects)

    async def _serve(self, nc: Client) -> None:
        """Serve requests until `stop` is called. Raises `WorkerError` if a part of the worker ends earlier.

        The task groups end from the innermost outwards, in the order in which the parts must stop.
        """
        ground = self._groundwork(nc)
        async with task_group() as background:
            async with task_group() as asides:
                async with task_group() as work:
                    parts = self._parts = self._build(ground, work=work, asides=asides)
                    await parts.erasures.catch_up(parts.sessions.let_go)
                    if parts.tier_erasures is not None:
                        with move_on_after(_NOTES_S):  # until it answers, nothing is fetched from it
                            await parts.tier_erasures.catch_up(_no_sessions)
                    await parts.endpoints.open()
                    await parts.routing.open()
                    self._start_background(background, parts)
                    pull = partial(parts.intake.pull, parts.routing.receive)
                    async with self._background("intake", pull):
                        await parts.discovery.open()
                        self._log_ready(nc)
                        self.ready.set()
                        await self._stop.wait()
                        log.info("stopping")
                        await parts.discovery.close()
                        parts.routing.close()
                    parts.engine.stop()
                    parts.sessions.stop()
                    work.cancel_scope.deadline = current_time() + self._stop_s
                await parts.endpoints.close()
                asides.cancel_scope.cancel()
            await self._hand_over(parts)
            background.cancel_scope.cancel()  # last: until here the keep-alive prevents redelivery
        await self._close_store(parts.engine)
        if self._fatal:
            raise WorkerError(self._fatal)

    async def _hand_over(self, parts: Parts) -> None:
        """Give back what this worker does not answer any more, and save the KV that is not on disk."""
        with move_on_after(_NOTES_S):
            unbegun = parts.routing.first_routed() | parts.intake.first_returned()
            await parts.sessions.excuse(unbegun, parts.intake.at_work)
        await self._members.leave()
        await parts.routing.return_routed()
        await parts.intake.return_anchors()
        await parts.engine.save_all(0 if self._settings.snapshots == "temporary" else _STORE_S)

    async def _close_store(self, engine: Engine) -> None:
        """Write what still waits for the disk, and log what is left; temporary snapshots are only removed."""
        if self._store is not None and self._settings.snapshots != "temporary":
            await shielded(self._store.close)
            engine.log_unstored()

    def _log_ready(self, nc: Client) -> None:
        url = nc.connected_url
        log.info(
            "ready",
            worker=self._settings.worker,
            pid=os.getpid(),
            nats=shown(url.geturl()) if url else None,
            protocol=PROTOCOL,
            features=" ".join(FEATURES),
        )

    async def _keep_streams(self, js: JetStreamContext) -> None:
        try:
            await streams.keep(js, self._subjects, self._settings, self._constants)
        except BrokerError as error:
            self._fail(str(error))
            await sleep_forever()

    def _start_background(self, background: TaskGroup, parts: Parts) -> None:
        """Start the tasks that run until all requests have ended."""
        if parts.tier_erasures is not None:
            erase = partial(parts.tier_erasures.run, _no_sessions, lambda: False)
            background.start_soon(self._run_part, "tier-erasures", erase)
        running: dict[str, Callable[[], Awaitable[None]]] = {
            "keep-alive": parts.intake.keep_alive,
            "sweep": parts.sessions.sweep,
            "retention": parts.retention.run,
            "erasures": partial(parts.erasures.run, parts.sessions.let_go, lambda: self._members.is_first),
            "undelivered": parts.undelivered.run,
            "overheard": parts.overheard.run,
            "streams": partial(self._keep_streams, parts.ground.nc.jetstream()),
            **parts.engine.chores,
            "loop-lag": self._telemetry.watch_loop,
            "metrics": partial(self._publish_metrics, parts),
        }
        for name, part in running.items():
            background.start_soon(self._run_part, name, part)
        if sys.platform == "darwin":
            is_busy = partial(_is_busy, parts.engine)
            background.start_soon(self._run_part, "keep-awake", partial(keep_awake, is_busy))

    def _groundwork(self, nc: Client) -> Groundwork:
        return Groundwork(
            version=VERSION,
            settings=self._settings,
            constants=self._constants,
            subjects=self._subjects,
            nc=nc,
            members=self._members,
            model=self._model,
            maker=self._maker,
            store=self._store,
            copies=None if self._store is None else self._store.eraser,
            telemetry=self._telemetry,
            traces=self._traces,
        )

    def _build(self, ground: Groundwork, *, work: TaskGroup, asides: TaskGroup) -> Parts:
        device = ground.model.device
        engine = Engine(
            device,
            Ledger(ground.model.kv_bytes),
            ground.store,
            ground.telemetry,
            piece_tokens=ground.constants.block_tokens,
            max_tenant_bytes=ground.settings.tenants.memory,
            has_unopened=self._has_unopened,
        )
        return Parts(ground, engine, collect, work=work, asides=asides)

    @asynccontextmanager
    async def _background(self, name: str, part: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Run `part` in the background until the block ends; stop the worker if it ends earlier."""
        async with task_group() as tasks:
            tasks.start_soon(self._run_part, name, part)
            yield
            tasks.cancel_scope.cancel()

    async def _run_part(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        """Run a part until it is cancelled; if the part ends by itself, stop the worker with an error."""
        why: Exception | None = None
        try:
            await part()
        except Exception as error:
            log.exception("a part of the worker has failed", part=name)
            why = error
        self._fail(f"the {name} task ended: {why!r}")

    def _device_died(self, error: BaseException) -> None:
        """Stop the worker because the device thread ended. Called on the device thread."""
        why = str(error) if isinstance(error, TurnkeepError) else f"the device thread ended: {error!r}"
        self._loop.call_soon_threadsafe(self._lose_device, why)

    def _lose_device(self, why: str) -> None:
        self._stop_s = _LOST_S
        self._fail(why)

    async def _reconnected(self) -> None:
        """Resume pulling requests after a reconnect; stop if the server's message limit is now too small."""
        if self._nc is not None and (url := self._nc.connected_url) is not None:
            why = small_payload(self._nc, self._settings.max_message_bytes, shown(url.geturl()))
            if why is not None:
                self._fail(why)
        if self._parts is not None:
            self._parts.journal.writes.restart()
            await self._parts.intake.pull_again()
            self._parts.overheard.forget()
            self._parts.owners.reconnected()
            self._members.reconnected()

    async def _closed(self, why: str) -> None:
        """Stop the worker because NATS closed the connection for good. Also called during a normal stop."""
        self._fail(why)

    def state(self) -> State:
        """Return whether the worker needs a restart, and whether it answers now."""
        return State(
            tuple(self._hangs()), tuple(self._unready()), self._nc is None or not self._members.others
        )

    def described(self) -> Needs:
        """Return what the worker serves, for a report. Call once it is `ready`."""
        loaded = self._model.loaded
        return Needs(
            folder=str(loaded.folder.absolute()),
            context_tokens=self._model.context_tokens,
            **self._model.described,
        )

    def _hangs(self) -> list[str]:
        """Return the faults that only a restart fixes: a device step that takes too long."""
        busy_s = self._model.device.busy_s if self._model.is_loaded else 0.0
        return [f"the device has been at one step for {busy_s:.0f} s"] if busy_s > _STUCK_S else []

    def _unready(self) -> list[str]:
        """Return the reasons why requests are not answered now."""
        reasons = self._hangs()
        if not self._model.is_loaded:
            reasons.append("loading the model")
        if self._nc is None or not self._nc.is_connected:
            reasons.append("no connection to NATS")
        elif not self._members.has_record:
            reasons.append("this worker is not recorded on the prefix")
        elif self._parts is not None and not self._parts.journal.writes.are_stored:
            reasons.append(unstored(self._parts.journal.writes.refusal))
        if self._stop.is_set():
            reasons.append("stopping")
        elif not (reasons or self.ready.is_set()):
            reasons.append("starting")
        return reasons

    def _fail(self, why: str) -> None:
        """Stop the worker because of a fault; `run` then raises an error with the first reason `why`."""
        self._fatal = self._fatal or why
        self._stop.set()

    async def _publish_metrics(self, parts: Parts) -> None:
        while True:
            tenants = self._telemetry.tenants.figures(parts.intake.sessions_by_tenant)
            # Only here: tenants read the worker's metrics in `info`, and must not learn of each other.
            await parts.outbox.metrics(structs.replace(parts.metrics(), by_tenant=tenants))
            await sleep(self._constants.metrics_interval_s)


def _is_busy(engine: Engine) -> bool:
    return engine.num_running + engine.num_waiting > 0


def _no_sessions(_: Callable[[SessionKey], bool]) -> set[SessionKey]:
    """Let go of no session: what is erased in the remote tier concerns no memory."""
    return set()
