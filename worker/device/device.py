"""Owns the device thread, the only thread that calls MLX.

The event loop sends commands; the thread runs a `runner.Runner` and returns one report per step. The thread
knows nothing of NATS or the log, and knows sessions only by their keys.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeAlias

import mlx.core as mx

from worker.batch import metal

from . import machine
from .runner import Runner
from .turn import SnapshotCut

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.kv.size import KvSize
    from cache.names.policy import Policy
    from worker.models.model import LoadedModel

    from .served_model import DeviceOptions, ServedModel
    from .turn import StepReport

P = ParamSpec("P")

#: A function that the device thread calls with its runner; None stops the thread.
_Command: TypeAlias = "Callable[[Runner], object] | None"


def _queued(command: Callable[Concatenate[Runner, P], object]) -> Callable[Concatenate[Device, P], None]:
    """Return a method of `Device` that queues a call of the runner's method `command`."""

    def queue_call(device: Device, /, *args: P.args, **kwargs: P.kwargs) -> None:
        device.commands.put(lambda runner: command(runner, *args, **kwargs))

    return queue_call


class Device:
    """The device thread and its command queue. Public methods may be called from any thread."""

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        died: Callable[[BaseException], None],
        options: DeviceOptions,
    ) -> None:
        """The thread calls `load` to load the model, and `died` if an error ends the thread after that."""
        self._load = load
        self._died = died
        self._options = options
        self._report: Callable[[StepReport], object]  # set by `listen`, before the first turn
        #: What the thread is to do; only the methods made by `_queued`, and `stop`, put something in.
        self.commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[LoadedModel | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._busy_since: float | None = None  # None while the thread loads, or waits for a command
        #: The model, of which no other thread may use the batch, and the device's name; set once `start` has
        #: returned.
        self.served: ServedModel
        self.name = ""

    def kv(self, policy: Policy) -> KvSize:
        """Return the `KvSize` that computes the bytes of a session's KV under a cache policy."""
        return self.served.estimator.kv.under(policy)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. After a fault of the program it does not, and no turn ends any more."""
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """Seconds that the thread has spent on its current step or command; 0 while it is idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> LoadedModel:
        """Start the thread and wait until the model is loaded. Raises the load's error if it fails."""
        self._thread.start()
        loaded = self._loaded.get()
        if isinstance(loaded, BaseException):
            self._thread.join()
            raise loaded
        return loaded

    def listen(self, report: Callable[[StepReport], object]) -> None:
        """Set the function that the thread calls with a report, now and after each step.

        It must return at once.
        """
        self._report = report
        self.commands.put(Runner.report)

    def cut_snapshots(self, room: Callable[[], int], queue_bytes: int = sys.maxsize) -> None:
        """Start copying KV into snapshots of up to `room()` bytes; the device thread calls `room`.

        It returns the free bytes of a queue of `queue_bytes`; `take` says which snapshots are counted there.
        """
        self._runner.cutter.room, self._runner.cutter.queue_bytes = room, queue_bytes

    def take(self, report: StepReport) -> None:
        """Note that the event loop has queued or dropped a report's snapshots, at the end of handling it."""
        cuts = [event for event in report.events if isinstance(event, SnapshotCut)]
        self._runner.cutter.taken_bytes += sum(cut.size_bytes for cut in cuts)

    # Commands: each queues a call of the runner's method, where it is described, and returns at once.
    submit = _queued(Runner.submit)
    copy = _queued(Runner.copy)
    cancel = _queued(Runner.cancel)
    grant = _queued(Runner.grant)
    give = _queued(Runner.give)
    show = _queued(Runner.show)
    drop = _queued(Runner.drop)
    forget_images = _queued(Runner.forget_images)
    reserve_room = _queued(Runner.reserve_room)
    release_room = _queued(Runner.release_room)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the thread after the running step; return False if it did not end within `timeout_s`."""
        self.commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Everything below runs on the device thread.

    def _hand_over(self, report: StepReport) -> None:
        self._report(report)

    def _run(self) -> None:
        try:
            self._live()
        finally:
            # Streams that outlive their thread sometimes abort the process at its exit ("terminate called
            # without an active exception"): 4 of 60 runs of MLX 0.32.4 that ended right after the thread.
            mx.clear_streams()

    def _live(self) -> None:
        try:
            loaded = self._load()
            runner = self._runner = Runner(loaded, self._hand_over, self._options)
            self.served, self.name = runner.served, machine.name()
        except BaseException as error:  # noqa: BLE001  # start() raises it on its caller's thread
            lost = machine.DeviceError(f"the GPU has failed: {error}; start the worker again")
            self._loaded.put(lost if metal.has_failed(error) and isinstance(error, RuntimeError) else error)
            return
        self._loaded.put(loaded)
        try:
            pause_s = 0.0
            while self._apply_commands(runner, pause_s):
                pause_s = runner.step(undisturbed=self.commands.empty())
        except BaseException as error:  # noqa: BLE001  # else the thread would end unnoticed
            self._died(error)

    def _apply_commands(self, runner: Runner, pause_s: float) -> bool:
        """Apply the queued commands; wait for one if no turn can run. Return False at the stop command."""
        while True:
            runner.serve_waiting()
            self._busy_since = None
            try:
                command = self.commands.get(timeout=pause_s if runner.is_busy else None)
            except queue.Empty:
                return True
            finally:
                self._busy_since = time.monotonic()
            pause_s = 0.0
            if command is None:
                return False
            command(runner)
