"""Fixtures: tiny random models with every kind of cache, and a device thread that tests call directly."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import engine_process
import pytest
from engine_process import Process
from tiny_models import BLOCK, WIDE, build, loaded

from turnkeep_client.messages import Chunk
from worker.device.device import Device
from worker.device.served_model import DeviceOptions
from worker.device.turn import (
    DeviceTurn,
    DroppedKv,
    Event,
    FaultedTurn,
    FinishedTurn,
    PrefilledPiece,
    SampledTokens,
    SnapshotCut,
    Starvation,
    StepReport,
)
from worker.models.quantised import quantise_kv


@pytest.fixture(scope="session")
def build_model() -> Callable[..., Any]:
    """Return a function that builds a small model of an architecture, with changed configuration fields."""

    return build


@pytest.fixture(scope="session")
def make_model(build_model) -> Callable[..., Any]:
    """Return a function that builds a small model of an architecture, once for the whole test run.

    With `kv_bits` the model's heads have a size that can be quantised, and its KV is quantised.
    """
    made: dict[tuple[str, int | None], Any] = {}

    def make(kind: str, kv_bits: int | None = None) -> Any:
        if (kind, kv_bits) not in made:
            model = build_model(kind, **(WIDE if kv_bits else {}))
            if kv_bits is not None:
                quantise_kv(model, kv_bits)
            made[kind, kv_bits] = model
        return made[kind, kv_bits]

    return make


@pytest.fixture(scope="session")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for the results of model trials (how rows can run together), kept for the whole test run."""
    return tmp_path_factory.mktemp("trials") / "trials.json"


@pytest.fixture
def open_process(trials: Path, tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Process]]:
    """Return a function that runs a `Process` of a model, on one of the test's snapshot directories."""

    def open_(model: Any, folder: str = "kv", **options: Any) -> AbstractAsyncContextManager[Process]:
        return engine_process.open_process(model, tmp_path / folder, trials=trials, **options)

    return open_


class Rig:
    """A device thread and its reports."""

    def __init__(self, model: Any, *, room: Callable[[], int] | None, **options: Any) -> None:
        self._reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self.deaths: list[BaseException] = []
        self.steps: list[tuple[int, int]] = []  # bytes besides weights and KV: estimated, measured
        self.device = Device(lambda: loaded(model), self.deaths.append, DeviceOptions(**options))
        self.device.listen(self._reports.put)
        self.device.start()
        if room is not None:
            self.device.cut_snapshots(room)
        self.events: list[Event] = []
        self._of: defaultdict[DeviceTurn, list[Event]] = defaultdict(list)
        self.peak = 0

    @property
    def dropped(self) -> list[str]:
        """The sessions that have lost their KV since memory was short, in order."""
        drops = [event for event in self.events if isinstance(event, DroppedKv)]
        return [key.session for event in drops for key in event.keys]

    def wait(self, done: Callable[[list[Event]], bool]) -> None:
        """Collect reported events until `done(events)` is true."""
        while not done(self.events):
            report = self._reports.get(timeout=60)
            self.peak = max(self.peak, report.peak_bytes)
            self.steps.append((report.estimated_bytes, report.measured_bytes))
            self.events += report.events
            for event in report.events:
                if not isinstance(event, DroppedKv | Starvation):
                    self._of[event.turn].append(event)

    def finish(self, *turns: DeviceTurn) -> None:
        """Wait until these turns have ended."""
        self.wait(lambda _: all(self.end(turn) is not None for turn in turns))

    def run(self, *turns: DeviceTurn) -> None:
        """Submit turns and wait until they have ended."""
        for turn in turns:
            self.device.submit(turn)
        self.finish(*turns)

    def end(self, turn: DeviceTurn) -> FinishedTurn | FaultedTurn | None:
        ends = [event for event in self.of(turn) if isinstance(event, FinishedTurn | FaultedTurn)]
        assert len(ends) < 2
        return ends[0] if ends else None

    def of(self, turn: DeviceTurn) -> list[Event]:
        return self._of[turn]

    def tokens(self, turn: DeviceTurn) -> list[int]:
        return [token for chunk in self.chunks(turn) for token in chunk.tokens]

    def chunks(self, turn: DeviceTurn) -> list[Chunk]:
        return [event.chunk for event in self.of(turn) if isinstance(event, SampledTokens)]

    def chunk_ends(self, turn: DeviceTurn) -> list[int]:
        return [event.num_cached for event in self.of(turn) if isinstance(event, PrefilledPiece)]

    def cuts(self, turn: DeviceTurn) -> list[tuple[int, int]]:
        return [
            (event.span.start, event.span.end) for event in self.of(turn) if isinstance(event, SnapshotCut)
        ]


@pytest.fixture
def make_rig(trials: Path) -> Iterator[Callable[..., Rig]]:
    """Return a function that starts a device thread for a model; the threads are stopped after the test."""
    rigs: list[Rig] = []

    def make(
        model: Any,
        *,
        block_tokens: int = BLOCK,
        max_batch: int = 8,
        room: Callable[[], int] | None = None,
        stall_s: float = 0.25,
        limit_bytes: int | None = None,
    ) -> Rig:
        own = type(model).__module__.startswith("mlx_lm.")  # else a test's, which may be made to fail a trial
        rigs.append(
            Rig(
                model,
                block_tokens=block_tokens,
                max_batch=max_batch,
                room=room,
                stall_s=stall_s,
                limit_bytes=limit_bytes,
                trials=trials if own else None,
            )
        )
        return rigs[-1]

    yield make
    for rig in rigs:
        assert rig.device.stop(60)
