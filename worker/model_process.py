"""A model that the supervisor serves: its settings, its worker process, and the requests for it."""

from __future__ import annotations

import importlib.metadata
import math
from typing import TYPE_CHECKING, Final

from anyio import Event, current_time
from msgspec import structs

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Metrics

from .metrics_collector import unloaded_metrics
from .process.constants import CONSTANTS
from .process.settings import word
from .reports import Needs, Refusal, State

if TYPE_CHECKING:
    from pathlib import Path

    from anyio.abc import Process

    from .process.datadir import DataDir
    from .process.settings import Settings
    from .wire.activator import Activator
    from .wire.retention import Retention

VERSION: Final = importlib.metadata.version("turnkeep")
#: A worker that has reported nothing for this time hangs.
_SILENT_S: Final = 30.0


class SupervisorError(TurnkeepError):
    """The models cannot be served; the message is one line."""


#: The needs of a model that was not measured, and has not served yet.
UNKNOWN: Final = Needs("", "", 0, {}, False, False, (), 0, 0.0)


def place_of(settings: Settings, model: str) -> tuple[Path, str]:
    """Return the data directory and the name of the worker of one of several models."""
    return settings.data_dir / "workers" / settings.prefix, f"{settings.worker}-{word(model)}"[:64]


class ModelProcess:
    """One model: its worker process, if one runs, and the activator that notices requests for it."""

    activator: Activator
    #: Removes from the log what need not stay, while no worker runs.
    retention: Retention
    #: Its own data directory, if it is one of several models.
    directory: DataDir | None = None
    size_bytes = 0

    def __init__(self, name: str | None, settings: Settings) -> None:
        """Take the name of one of several models; None if there is only one, which is never unloaded."""
        self.name = name
        #: The settings that its next worker gets; and as they were first read.
        self.settings = self.given = settings
        #: The draft model that was asked for; another model may have no use for it.
        self.draft_model = settings.draft_model
        #: How long it stays loaded without requests.
        self.stays_s = math.inf if name is None else settings.unload_after_s or math.inf
        self.needs: Needs | None = None
        self.process: Process | None = None
        self.began_s = 0.0
        self.loaded_s = math.inf
        self.reported_s = math.inf
        self.state = State((), ("starting",), is_alone=True)
        self.refused: Refusal | None = None
        #: Why its worker did not get ready the last time; empty if it did, or was not tried.
        self.unloadable = ""
        #: `wanted`: the model has requests. `leave`: it must be unloaded.
        self.wanted = Event()
        self.leave = Event()

    def wake(self) -> None:
        """Ask for the model to be loaded, if it is not; returns at once."""
        self.wanted.set()

    def let_go(self) -> None:
        """Ask for the model to be unloaded; whoever wants it from now on wakes it again."""
        self.leave.set()
        if self.wanted.is_set():  # else somebody waits for this very event
            self.wanted = Event()

    @property
    def is_loaded(self) -> bool:
        """Whether the model's worker runs and is ready."""
        return self.process is not None and self.loaded_s < math.inf

    @property
    def unused_s(self) -> float:
        """The seconds since the model was loaded, or since the activator's last request, if that is later.

        Minus infinity while the model is not loaded.
        """
        return current_time() - max(self.activator.used_s, self.loaded_s)

    def hangs(self) -> list[str]:
        """Return the faults of the worker that only a restart fixes."""
        if current_time() - self.reported_s > _SILENT_S:
            return ["the worker does not report"]
        return [*self.state.hangs]

    def metrics(self) -> Metrics:
        """Return the metrics message of the model while it has no worker."""
        needs = structs.asdict(self.needs or UNKNOWN)
        return unloaded_metrics(
            **{name: one for name, one in needs.items() if name in Metrics.__struct_fields__},
            worker=self.settings.worker,
            version=VERSION,
            refusal=self.unloadable,
            interval_s=CONSTANTS.metrics_interval_s,
            max_message_bytes=self.settings.max_message_bytes,
            log_bytes=self.retention.num_bytes,
            log_max_bytes=self.retention.max_bytes,
        )

    @property
    def log_fields(self) -> dict[str, str]:
        """The field `model`, with which log lines name one of several models; empty if there is only one."""
        return {} if self.name is None else {"model": self.name}
