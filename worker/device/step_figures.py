"""Measures the device's steps, in seconds and bytes, and makes their reports. Device thread only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import mlx.core as mx

from .turn import StepReport

if TYPE_CHECKING:
    from worker.batch.speculation import Speculation

    from .step_chooser import ChosenStep
    from .turn import Event


class StepFigures:
    """The figures of the current step, and the highest ones since the start."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._began_s = 0.0
        self._active_bytes = 0
        self._peak_bytes = 0
        self._highest = (0, 0)
        #: Tokens drawn by answers since the last report.
        self.num_decoded = 0

    def begin(self) -> None:
        """Begin to measure a step."""
        self._peak_bytes = max(self._peak_bytes, mx.get_peak_memory())  # perhaps a restore between two steps
        mx.reset_peak_memory()
        self._began_s, self._active_bytes = time.perf_counter(), mx.get_active_memory()

    @property
    def step_s(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._began_s

    def measured_bytes(self) -> int:
        """Return the most bytes that MLX has held since the step began, besides weights and KV."""
        return mx.get_peak_memory() - max(self._active_bytes, mx.get_active_memory())

    def report(
        self, events: list[Event], choice: ChosenStep | None = None, step_s: float = 0.0, measured: int = 0
    ) -> StepReport:
        """Make a report of `events`, and of a step if one was chosen.

        The step took `step_s`, and `measured` bytes besides weights and KV.
        """
        active = mx.get_active_memory()
        self._peak_bytes = max(self._peak_bytes, mx.get_peak_memory(), active)
        estimated = 0 if choice is None else choice.scratch_bytes
        if measured > self._highest[1]:
            self._highest = estimated, measured
        num_decoded, self.num_decoded = self.num_decoded, 0
        return StepReport(
            tuple(events),
            num_rows=0 if choice is None else len(choice.step.decode),
            num_decoded=num_decoded,
            step_s=step_s,
            active_bytes=active,
            peak_bytes=self._peak_bytes,
            estimated_bytes=estimated,
            measured_bytes=measured,
            highest_bytes=self._highest,
            num_drafted=self._speculation.num_drafted,
            num_accepted=self._speculation.num_accepted,
            saved_s=self._speculation.saved_s,
        )
