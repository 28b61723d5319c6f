"""Records memory, times and counts of the device's steps, for the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.device.turn import StepReport
    from worker.observe.counters import Telemetry


class StepFigures:
    """Memory figures of the steps since the start; times and counts go to `telemetry`. Event loop only."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self.active_bytes = 0
        self.peak_bytes = 0
        #: Estimated and measured bytes, besides weights and KV, of the step with the highest measurement.
        self.estimated_bytes = 0
        self.measured_bytes = 0

    def note(self, report: StepReport) -> None:
        """Add the figures of one step's report."""
        self.active_bytes, self.peak_bytes = report.active_bytes, report.peak_bytes
        if report.measured_bytes > self.measured_bytes:
            self.estimated_bytes, self.measured_bytes = report.estimated_bytes, report.measured_bytes
        if report.num_rows:
            self._telemetry.batch_size.observe(report.num_rows)
            self._telemetry.totals.decoding_s += report.step_s
            per_token_s = report.step_s * report.num_rows / max(report.num_decoded, 1)
            self._telemetry.time_per_output_token.observe(per_token_s, report.num_decoded)
        self._telemetry.totals.draft_tokens = report.num_drafted
        self._telemetry.totals.accepted_draft_tokens = report.num_accepted
        self._telemetry.totals.draft_saved_s = report.saved_s
