"""Builds the parts of a worker that serve requests, once its model, store and connection are there.

`app` starts these parts and stops them in order; nothing else builds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from turnkeep_client.messages import FEATURES
from turnkeep_client.messages import VERSION as PROTOCOL
from worker.cluster.endpoints import Endpoints
from worker.cluster.overheard import OverheardRequests
from worker.cluster.owners import Owners
from worker.cluster.routing import Routing
from worker.models.model_files import dtype_name, text_config
from worker.models.pooling import is_encoder, judging, no_embeddings
from worker.process.concurrency import Rotation, SharedLock
from worker.sessions.control import Control
from worker.sessions.embedding import Embedder
from worker.sessions.fold import Fold
from worker.sessions.formats import Formats
from worker.sessions.history import digests_of
from worker.sessions.limits import RequestLimits
from worker.sessions.services import Services
from worker.sessions.sessions import Sessions
from worker.sessions.shares import Shares
from worker.wire.asks import Asks
from worker.wire.discovery import Discovery
from worker.wire.erasures import TIER, Erasures
from worker.wire.intake import Intake
from worker.wire.journal import Journal
from worker.wire.outbox import Outbox
from worker.wire.retention import Retention
from worker.wire.undelivered import UndeliveredRequests

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskGroup
    from nats.aio.client import Client

    from cache.store import Store
    from turnkeep_client.messages import Metrics, Model
    from turnkeep_client.subjects import SessionKey, Subjects
    from worker.cluster.liveness import Members
    from worker.engine.engine import Engine
    from worker.models.model import LoadedModel
    from worker.wire.erasures import Copies

    from .model_start import ModelStart
    from .observe.otlp import Traces
    from .observe.telemetry import Telemetry
    from .process.constants import Constants
    from .process.settings import Settings

#: Limit of session logs that are read at the same time: each takes memory for a page or two of its log.
_MAX_READINGS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Groundwork:
    """What a worker has before its parts are built: its connection, model, store, and record of itself."""

    #: The version of Turnkeep.
    version: str
    settings: Settings
    constants: Constants
    subjects: Subjects
    nc: Client
    members: Members
    model: ModelStart
    #: The name and the digests of the model, for results.
    maker: Model
    #: None if the worker serves without snapshots; `copies` then has none to remove.
    store: Store | None
    copies: Copies | None
    telemetry: Telemetry
    traces: Traces | None


class Parts:
    """The parts of one worker that serve requests. Event loop only."""

    def __init__(
        self,
        ground: Groundwork,
        engine: Engine,
        metrics: Callable[[Parts], Metrics],
        *,
        work: TaskGroup,
        asides: TaskGroup,
    ) -> None:
        """Build the parts; `metrics` makes the metrics message from them.

        The task group `work` runs the tasks of sessions; the group `asides` runs side tasks, which are
        cancelled once all sessions have ended.
        """
        self.ground = ground
        nc, subjects, members = ground.nc, ground.subjects, ground.members
        settings, constants = ground.settings, ground.constants
        self.engine = engine
        self.metrics = partial(metrics, self)
        self.outbox = Outbox(nc, subjects)
        self.journal = Journal(nc, subjects, model=digests_of(ground.maker))
        self.intake = self._make_intake()
        self.owners = Owners(nc, members, self.journal, self.intake)
        self.retention = Retention(
            self.journal,
            closed_ttl_s=settings.closed_ttl_s,
            max_bytes=settings.log_max_bytes,
            sync_s=settings.sync_s,
            is_first=lambda: members.is_first,
        )
        self.erasures = Erasures(self.journal, members.me.boot, ground.copies)
        remote = ground.store.remote if ground.store is not None else None
        self.tier_erasures = None if remote is None else Erasures(self.journal, TIER, remote.eraser)
        if remote is not None:
            remote.eraser.doubt()
        services = self._services(asides)
        self.sessions = Sessions(services, work, history_idle_timeout_s=constants.history_idle_timeout_s)
        self.overheard = OverheardRequests(nc, members)
        self.endpoints = self._make_endpoints(services, asides)
        self.routing = Routing(
            *(nc, subjects, members, self.owners, self.journal, self.intake, asides),
            ring=self.sessions.ring,
            control=self.endpoints.control,
            erase=self.sessions.erase,
        )
        self.undelivered = UndeliveredRequests(
            *(self.journal, self.intake, self.routing.wake, lambda: members.is_first),
            ack_wait_s=constants.ack_wait_s,
        )
        self.discovery = self._make_discovery()

    def _make_intake(self) -> Intake:
        ground = self.ground
        settings, constants = ground.settings, ground.constants
        return Intake(
            ground.nc,
            ground.subjects,
            ground.telemetry,
            self.journal,
            ack_wait_s=constants.ack_wait_s,
            max_sessions=constants.max_waiting,
            max_sessions_per_tenant=settings.tenants.sessions,
            max_message_bytes=settings.max_message_bytes,
        )

    def _make_endpoints(self, services: Services, asides: TaskGroup) -> Endpoints:
        """Build what answers requests on `ctl` and `ask`."""
        ground = self.ground
        nc, subjects = ground.nc, ground.subjects
        embedder = self._embedder(services)
        control = Control(services, self.sessions, ground.store, subjects, embedder, metrics=self.metrics)
        asks = Asks(nc, self.journal, subjects, timeout_s=ground.constants.token_ttl_s)
        return Endpoints(
            *(nc, subjects, asks, control.answer, self.owners, self.overheard, self.outbox),
            *(ground.telemetry, asides),
        )

    def _embedder(self, services: Services) -> Embedder:
        loaded = self.ground.model.loaded
        told = loaded.config, loaded.folder
        return Embedder(
            services,
            refusal=no_embeddings(loaded.model, *told),
            judging=judging(loaded.tokenizer, *told),
            size=text_config(loaded.config).get("hidden_size") or 0,
        )

    def _make_discovery(self) -> Discovery:
        ground = self.ground
        names = {
            "worker": ground.settings.worker,
            "prefix": ground.subjects.prefix,
            "model": ground.model.loaded.name,
            "protocol": str(PROTOCOL),
            "features": " ".join(FEATURES),
        }
        return Discovery(
            *(ground.nc, ground.subjects, self.outbox, ground.telemetry),
            version=ground.version,
            metadata=names,
        )

    def _services(self, asides: TaskGroup) -> Services:
        """Collect the services that all sessions share."""
        ground = self.ground
        settings, loaded, members = ground.settings, ground.model.loaded, ground.members
        constants, owners = ground.constants, self.owners
        goes_on = settings.other_model == "continue"
        fold = Fold(loaded.tokenizer, settings.cache_policy, ground.maker, takes_over=goes_on)
        return Services(
            journal=self.journal,
            outbox=self.outbox,
            engine=self.engine,
            fold=fold,
            formats=Formats(loaded.tokenizer),
            limits=self._limits(fold),
            telemetry=ground.telemetry,
            asides=asides,
            max_attempts=constants.max_attempts,
            boot=members.me.boot,
            runs=members.runs,
            num_busy=owners.num_busy,
            retention=self.retention,
            device_lock=SharedLock(),
            shares=Shares(settings.max_batch),
            reading=Rotation(_MAX_READINGS),
            ack=self.intake.ack,
            is_elsewhere=owners.is_elsewhere,
            hand_over=self._hand_over,
            erase_elsewhere=owners.erase,
            erasures=self.erasures,
            erases=(members.me.boot,) if self.tier_erasures is None else (members.me.boot, TIER),
            own_sampling=loaded.sampling,
            token_ttl_s=constants.token_ttl_s,
            model=loaded.name,
            worker=settings.worker,
            build=self._describe(loaded),
            traces=ground.traces,
        )

    async def _hand_over(self, key: SessionKey) -> None:
        await self.routing.hand_over(key)  # which is built after the sessions, as it wakes them

    def _limits(self, fold: Fold) -> RequestLimits:
        model_start, constants = self.ground.model, self.ground.constants
        loaded = model_start.loaded
        return RequestLimits(
            self.engine,
            fold.policy,
            context_tokens=model_start.context_tokens,
            block_tokens=constants.block_tokens,
            vocab_size=loaded.vocab_size,
            max_result_bytes=self.ground.settings.max_message_bytes,
            refusal=loaded.no_answers if is_encoder(loaded.config) else None,
            no_answers=loaded.no_answers,
        )

    def _describe(self, loaded: LoadedModel) -> str:
        """Return the text of a result's header: worker, version, and what else can change the tokens."""
        settings, started = self.ground.settings, self.ground.model
        build = {
            "worker": settings.worker,
            "version": self.ground.version,
            "dtype": dtype_name(loaded.config) if started.dtype == "keep" else started.dtype,
            "device": started.device.name,
            "kv": f"{settings.kv_bits}-bit" if settings.kv_bits else "full",
        }
        return " ".join(f"{name}={value}" for name, value in build.items())
