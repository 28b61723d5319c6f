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
import sqlite3
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import structlog
from anyio import Event, current_time, move_on_after, sleep, sleep_forever, to_thread
from msgspec import structs

from cache.names.errors import CacheError
from cache.store import Store, may_hold
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import FEATURES
from turnkeep_client.messages import VERSION as PROTOCOL
from turnkeep_client.redact import shown
from turnkeep_client.subjects import Subjects
from worker.cluster.endpoints import Endpoints
from worker.cluster.members import Members
from worker.cluster.overheard import Overheard
from worker.cluster.owners import Owners
from worker.cluster.routing import Routing
from worker.engine.admission import Ledger
from worker.engine.engine import Engine
from worker.models import model
from worker.models.model_files import text_config
from worker.models.pooling import is_encoder, judging, no_embeddings
from worker.process.rotation import Rotation
from worker.process.wakefulness import keep_awake
from worker.sessions.control import Control
from worker.sessions.embedding import Embedder
from worker.sessions.fold import Fold
from worker.sessions.formats import Formats
from worker.sessions.history import digests_of
from worker.sessions.limits import Limits
from worker.sessions.services import Services
from worker.sessions.sessions import Sessions
from worker.sessions.shares import Shares
from worker.wire import streams
from worker.wire.asks import Asks
from worker.wire.connection import BrokerError, connect, loses_entries, server_version, small_payload
from worker.wire.credentials import over_tls, worker_options
from worker.wire.discovery import Discovery
from worker.wire.erasures import Erasures
from worker.wire.intake import Intake
from worker.wire.journal import Journal
from worker.wire.outbox import Outbox
from worker.wire.retention import Retention
from worker.wire.undelivered import Undelivered

from .metrics_message import collect
from .model_start import ModelStart, WorkerError
from .observe.counters import Telemetry
from .observe.tracing import start_traces
from .process.concurrency import SharedLock, in_thread, shielded, step_in_thread, task_group
from .process.constants import CONSTANTS
from .process.datadir import DataDir
from .process.keys import cache_codec, remote_tier
from .reports import Needs, State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from anyio.abc import TaskGroup
    from nats.aio.client import Client
    from nats.js import JetStreamContext

    from cache.store import Codec, Tier
    from turnkeep_client.messages import Metrics
    from worker.models.model import LoadedModel, Progress
    from worker.wire.erasures import Copies
    from worker.wire.streams import Streams

    from .observe.otlp import Traces
    from .process.constants import Constants
    from .process.settings import Settings

log = structlog.get_logger()

P = ParamSpec("P")
T = TypeVar("T")

VERSION = importlib.metadata.version("turnkeep")

#: The settings that a reload may change.
_RELOADED = frozenset({"max_disk", "min_free_disk"})

#: Limit of session logs that are read at the same time: each takes memory for a page or two of its log.
_MAX_READINGS = 4

#: Limit of threads for work that would block the event loop, tokenising above all.
_MAX_THREADS = 6

#: A device step that takes longer counts as hanging. Steps are planned to take `max_stall_s`; only the step
#: of a single prompt may take seconds, on the slowest machine.
_STUCK_S = 120.0

#: Time for sessions to end; after it, commits that wait for an unreachable log are cancelled.
_STOP_S = 10.0

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
        progress: Progress | None = None,
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
        self._intake: Intake | None = None
        self._fatal = ""
        self._nc: Client | None = None
        self._members: Members
        self.ready = Event()

    def stop(self) -> None:
        """Make `run` stop the worker and return. Event loop only."""
        self._stop.set()

    def reload(self, settings: Settings) -> None:
        """Apply the settings that may change while the worker runs: the disk limits. Event loop only."""
        changed = {
            field.name
            for field in dataclasses.fields(settings)
            if getattr(settings, field.name) != getattr(self._settings, field.name)
        }
        if changed - _RELOADED:
            log.warning("these settings need a restart", settings=sorted(changed - _RELOADED))
        news = {name: getattr(settings, name) for name in _RELOADED}
        self._settings = dataclasses.replace(self._settings, **news)
        if self._store is not None:
            self._store.quota.set_limits(max_bytes=settings.max_disk, min_free_bytes=settings.min_free_disk)
        log.info("read the settings again", changed=sorted(changed & _RELOADED))

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
            names = await streams.ensure(js, self._subjects, settings, self._constants)
            self._maker = await self._model.name()
            await self._members.name_model(digests_of(self._maker))
            await self._open_store(directory, codec, tier, stack)
            if self._store is None:
                self._has_unopened = await in_thread(may_hold, directory.snapshots)
            await self._serve(nc, js, names)

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

    async def _open_store(
        self,
        directory: DataDir,
        codec: Codec,
        tier: Tier | None,
        stack: contextlib.AsyncExitStack,
    ) -> None:
        """Open the store of snapshots on disk; if this fails, the worker serves without snapshots."""
        settings, device = self._settings, self._model.device
        if settings.snapshots == "off":
            log.info("snapshots are off")
            return
        if device.unsupported_cache is not None:
            log.warning(
                "serving without snapshots: this model has a kind of cache that cannot be kept on SSD",
                cache_class=device.unsupported_cache,
            )
            return
        identity = await self._model.identity()
        try:
            self._store = await Store.open(
                directory.snapshots,
                identity=identity,
                layout=device.layout,
                max_bytes=settings.max_disk,
                queue_bytes=self._constants.writer_queue,
                min_free_bytes=settings.min_free_disk,
                model=self._model.loaded.name,
                codec=codec,
                tier=tier,
            )
        except (OSError, CacheError, sqlite3.Error) as error:
            log.error("serving without snapshots: they cannot be opened", reason=str(error))  # noqa: TRY400
            return
        discard = settings.snapshots == "temporary"
        if discard and not await self._store.eraser.clear():
            log.warning("snapshots of an earlier run are still being removed")
        stack.push_async_callback(shielded, self._store.close, discard=discard)
        device.cut_snapshots(self._store.queue.vacant_bytes)

    async def _serve(self, nc: Client, js: JetStreamContext, names: Streams) -> None:
        """Serve requests until `stop` is called. Raises `WorkerError` if a part of the worker ends earlier.

        The task groups end from the innermost outwards, in the order in which the parts must stop.
        """
        async with task_group() as parts:
            async with task_group() as asides:
                async with task_group() as work:
                    endpoints, intake, sessions = self._build(nc, js, names, work=work, asides=asides)
                    await endpoints.open()
                    await self._routing.open()
                    discovery = self._make_discovery(nc)
                    self._start_parts(parts, nc, js, intake, sessions)
                    async with self._background("intake", partial(intake.pull, self._routing.receive)):
                        await discovery.open()
                        self._log_ready(nc)
                        self.ready.set()
                        await self._stop.wait()
                        log.info("stopping")
                        await discovery.close()
                        self._routing.close()
                    self._engine.stop()
                    sessions.stop()
                    work.cancel_scope.deadline = current_time() + _STOP_S
                await endpoints.close()
                asides.cancel_scope.cancel()
            with move_on_after(_NOTES_S):
                unbegun = self._routing.first_routed() | intake.first_returned()
                await sessions.excuse(unbegun, intake.at_work)
            await self._members.leave()
            await self._routing.return_routed()
            await intake.return_anchors()
            await self._engine.save_all(0 if self._settings.snapshots == "temporary" else _STORE_S)
            parts.cancel_scope.cancel()  # last: until here the keep-alive prevents redelivery
        await self._close_store()
        if self._fatal:
            raise WorkerError(self._fatal)

    async def _close_store(self) -> None:
        """Write what still waits for the disk, and log what is left; temporary snapshots are only removed."""
        if self._store is not None and self._settings.snapshots != "temporary":
            await shielded(self._store.close)
            self._engine.log_unstored()

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

    def _make_discovery(self, nc: Client) -> Discovery:
        names = {
            "worker": self._settings.worker,
            "prefix": self._subjects.prefix,
            "model": self._model.loaded.name,
        }
        names |= {"protocol": str(PROTOCOL), "features": " ".join(FEATURES)}
        outbox = Outbox(nc, self._subjects)
        return Discovery(nc, self._subjects, outbox, self._telemetry, version=VERSION, metadata=names)

    async def _keep_streams(self, js: JetStreamContext) -> None:
        try:
            await streams.keep(js, self._subjects, self._settings, self._constants)
        except BrokerError as error:
            self._fail(str(error))
            await sleep_forever()

    def _start_parts(
        self, parts: TaskGroup, nc: Client, js: JetStreamContext, intake: Intake, sessions: Sessions
    ) -> None:
        """Start the background parts, which run until all requests have ended."""
        for name, part in (
            ("keep-alive", intake.keep_alive),
            ("sweep", sessions.sweep),
            ("retention", self._retention.run),
            ("erasures", partial(self._erasures.run, sessions.let_go, lambda: self._members.is_first)),
            ("undelivered", self._undelivered.run),
            ("overheard", self._overheard.run),
            ("streams", partial(self._keep_streams, js)),
            ("saving", self._engine.save),
            ("loop-lag", self._telemetry.watch_loop),
            ("metrics", partial(self._publish_metrics, Outbox(nc, self._subjects), intake)),
        ):
            parts.start_soon(self._run_part, name, part)
        if sys.platform == "darwin":
            parts.start_soon(self._run_part, "keep-awake", partial(keep_awake, self._is_busy))

    def _is_busy(self) -> bool:
        return self._engine.num_running + self._engine.num_waiting > 0

    def _build(
        self, nc: Client, js: JetStreamContext, names: Streams, *, work: TaskGroup, asides: TaskGroup
    ) -> tuple[Endpoints, Intake, Sessions]:
        """Build the parts that serve requests.

        The task group `work` runs the tasks of sessions; the group `asides` runs side tasks, which are
        cancelled once all sessions have ended.
        """
        settings, constants = self._settings, self._constants
        subjects = self._subjects
        self._engine = self._make_engine()
        members, outbox = self._members, Outbox(nc, subjects)
        journal = Journal(nc, js, subjects, is_alone=lambda: members.is_alone, model=digests_of(self._maker))
        intake = self._intake = self._make_intake(nc, names, journal)
        owners = self._owners = Owners(nc, members, journal, intake)
        self._retention = Retention(
            journal,
            closed_ttl_s=settings.closed_ttl_s,
            max_bytes=settings.log_max_bytes,
            is_first=lambda: members.is_first,
        )
        self._erasures = Erasures(journal, members.me.directory, self._copies)
        services = self._services(journal, outbox, intake, asides)
        self._sessions = Sessions(services, work, idle_timeout_s=constants.idle_timeout_s)
        embedder = self._embedder(services)
        control = Control(
            *(services, self._sessions, self._store, subjects, embedder),
            metrics=lambda: self._metrics(intake),
        )
        self._overheard = Overheard(nc, members)
        asks = Asks(nc, js, journal, subjects, timeout_s=constants.token_ttl_s)
        endpoints = Endpoints(
            *(nc, subjects, asks, control.answer, owners, self._overheard, outbox, self._telemetry, asides)
        )
        routing = self._routing = Routing(
            *(nc, subjects, members, owners, journal, intake, asides),
            ring=self._sessions.ring,
            control=endpoints.control,
            erase=self._sessions.erase,
        )
        self._undelivered = Undelivered(
            *(journal, intake, routing.wake, lambda: members.is_first), ack_wait_s=constants.ack_wait_s
        )
        return endpoints, intake, self._sessions

    def _make_intake(self, nc: Client, names: Streams, journal: Journal) -> Intake:
        settings = self._settings
        return Intake(
            nc,
            names,
            self._telemetry,
            journal,
            ack_wait_s=self._constants.ack_wait_s,
            max_sessions=self._constants.max_waiting,
            max_sessions_per_tenant=settings.tenants.sessions,
            max_message_bytes=settings.max_message_bytes,
        )

    @property
    def _copies(self) -> Copies | None:
        return None if self._store is None else self._store.eraser

    def _embedder(self, services: Services) -> Embedder:
        loaded = self._model.loaded
        told = loaded.config, loaded.folder
        return Embedder(
            services,
            refusal=no_embeddings(loaded.model, *told),
            judging=judging(loaded.tokenizer, *told),
            size=text_config(loaded.config).get("hidden_size") or 0,
        )

    def _make_engine(self) -> Engine:
        return Engine(
            self._model.device,
            Ledger(self._model.kv_bytes),
            self._store,
            self._telemetry,
            kv=self._model.device.estimator.kv,
            piece_tokens=self._constants.block_tokens,
            max_tenant_bytes=self._settings.tenants.memory,
            has_unopened=self._has_unopened,
        )

    def _services(self, journal: Journal, outbox: Outbox, intake: Intake, asides: TaskGroup) -> Services:
        """Collect the services that all sessions share."""
        settings, loaded, members = self._settings, self._model.loaded, self._members
        goes_on = settings.other_model == "continue"
        fold = Fold(loaded.tokenizer, settings.cache_policy, self._maker, takes_over=goes_on)
        return Services(
            journal=journal,
            outbox=outbox,
            engine=self._engine,
            fold=fold,
            formats=Formats(loaded.tokenizer),
            limits=Limits(
                self._engine,
                fold.policy,
                context_tokens=self._model.context_tokens,
                block_tokens=self._constants.block_tokens,
                vocab_size=loaded.vocab_size,
                max_result_bytes=settings.max_message_bytes,
                refusal=loaded.no_answers if is_encoder(loaded.config) else None,
                no_answers=loaded.no_answers,
            ),
            telemetry=self._telemetry,
            asides=asides,
            max_attempts=self._constants.max_attempts,
            boot=members.me.boot,
            runs=members.runs,
            num_busy=self._owners.num_busy,
            retention=self._retention,
            device_lock=SharedLock(),
            shares=Shares(settings.max_batch),
            reading=Rotation(_MAX_READINGS),
            ack=intake.ack,
            is_elsewhere=self._owners.is_elsewhere,
            give_back=intake.give_back,
            erase_elsewhere=self._owners.erase,
            erasures=self._erasures,
            directory=members.me.directory,
            own_sampling=loaded.sampling,
            token_ttl_s=self._constants.token_ttl_s,
            model=loaded.name,
            worker=settings.worker,
            build=self._describe(loaded),
            traces=self._traces,
        )

    def _describe(self, loaded: LoadedModel) -> str:
        """Return the text of a result's header: worker, version, and what else can change the tokens."""
        build = {
            "worker": self._settings.worker,
            "version": VERSION,
            "dtype": model.dtype_name(loaded.config) if self._model.dtype == "keep" else self._model.dtype,
            "device": self._model.device.name,
            "kv": f"{self._settings.kv_bits}-bit" if self._settings.kv_bits else "full",
        }
        return " ".join(f"{name}={value}" for name, value in build.items())

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
        self._loop.call_soon_threadsafe(self._fail, why)

    async def _reconnected(self) -> None:
        """Resume pulling requests after a reconnect; stop if the server's message limit is now too small."""
        if self._nc is not None and (url := self._nc.connected_url) is not None:
            why = small_payload(self._nc, self._settings.max_message_bytes, shown(url.geturl()))
            if why is not None:
                self._fail(why)
        if self._intake is not None:
            await self._intake.pull_again()
            self._overheard.forget()
            self._owners.forget()

    async def _closed(self) -> None:
        """Stop the worker because NATS closed the connection for good. Also called during a normal stop."""
        self._fail("the NATS server has closed the connection; its log says why")

    def state(self) -> State:
        """Return whether the worker needs a restart, and whether it answers now."""
        return State(
            tuple(self._hangs()), tuple(self._unready()), self._nc is None or not self._members.others
        )

    def described(self) -> Needs:
        """Return what the worker serves. Call once it is `ready`."""
        loaded = self._model.loaded
        return Needs(
            folder=str(loaded.folder.absolute()),
            model=loaded.name,
            context_tokens=self._model.context_tokens,
            sampling=loaded.sampling,
            reasoning=loaded.tokenizer.markup.has_reasoning,
            makes=self._model.makes,
            weight_bytes=loaded.weight_bytes,
            model_changed_s=loaded.changed_s,
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
        elif not self._members.is_held:
            reasons.append("this worker is not recorded on the prefix")
        if self._stop.is_set():
            reasons.append("stopping")
        elif not (reasons or self.ready.is_set()):
            reasons.append("starting")
        return reasons

    def _fail(self, why: str) -> None:
        """Stop the worker because of a fault; `run` then raises an error with the first reason `why`."""
        self._fatal = self._fatal or why
        self._stop.set()

    async def _publish_metrics(self, outbox: Outbox, intake: Intake) -> None:
        while True:
            tenants = self._telemetry.tenants.figures(intake.sessions_by_tenant)
            # Only here: tenants read the worker's metrics in `info`, and must not learn of each other.
            await outbox.metrics(structs.replace(self._metrics(intake), by_tenant=tenants))
            await sleep(self._constants.metrics_interval_s)

    def _metrics(self, intake: Intake) -> Metrics:
        return collect(
            telemetry=self._telemetry,
            model=self._model,
            engine=self._engine,
            store=self._store,
            sessions=self._sessions,
            intake=intake,
            retention=self._retention,
            members=self._members,
            settings=self._settings,
            constants=self._constants,
            version=VERSION,
        )
