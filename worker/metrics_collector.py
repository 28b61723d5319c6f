"""Builds the metrics message, which the worker publishes every few seconds and sends on request.

A figure is first a field in `turnkeep_client.metrics`, which also says how Prometheus gets it. Counters that
are fields of `Totals` there are in the message without a line here. Each part has its own counters;
`observe/telemetry.py` has those of the worker as a whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

import psutil
from msgspec import structs

from turnkeep_client.messages import UNLOADED, Metrics, SnapshotCounters

from .observe.telemetry import Telemetry

if TYPE_CHECKING:
    from typing import Any

    from .parts import Parts


def collect(parts: Parts) -> Metrics:
    """Build the message of a running worker from the parts' current counters. Event loop only."""
    ground, engine, intake = parts.ground, parts.engine, parts.intake
    model, store = ground.model, ground.store
    num_running = engine.num_running - engine.num_unplaced
    recorded = ground.members.has_record and parts.journal.writes.are_stored
    return Metrics(
        worker=ground.settings.worker,
        version=ground.version,
        **model.described,
        context_tokens=model.context_tokens,
        device=model.device.name,
        others=tuple(sorted(ground.members.others)),
        drains=ground.members.me.drains,
        recorded=recorded,
        refusal="" if recorded else ground.members.refusal or parts.journal.writes.refusal,
        waiting=max(intake.num_sessions - num_running, 0),
        waiting_for_memory=engine.num_waiting,
        returned=intake.num_returned,
        log_bytes=parts.retention.num_bytes,
        log_max_bytes=parts.retention.max_bytes,
        max_message_bytes=ground.settings.max_message_bytes,
        running=num_running,
        sessions=len(parts.sessions),
        sessions_by_policy=parts.sessions.by_policy(),
        resident_sessions=engine.ledger.num_resident,
        **ground.telemetry.figures(),
        interval_s=ground.constants.metrics_interval_s,
        resident_kv_bytes=engine.ledger.used_bytes,
        kv_limit_bytes=engine.ledger.max_bytes,
        device_memory_bytes=model.device.served.estimator.limit_bytes,
        mlx_active_bytes=engine.report.active_bytes,
        mlx_peak_bytes=engine.report.peak_bytes,
        estimated_scratch_bytes=engine.report.highest_bytes[0],
        measured_scratch_bytes=engine.report.highest_bytes[1],
        process_bytes=_own_bytes(),
        snapshots=SnapshotCounters(**dataclasses.asdict(store.stats())) if store else SnapshotCounters(),
    )


def _own_bytes() -> int:
    """Return the memory of this process; 0 if psutil cannot open a file, as too many are open."""
    with contextlib.suppress(OSError):
        return psutil.Process().memory_info().rss
    return 0


def unloaded_metrics(**known: Any) -> Metrics:
    """Build the message for a model that no worker serves now: the given fields, and zero for the rest."""
    known |= Telemetry().figures() | {"device": UNLOADED, "uptime_s": 0.0}
    needed = {field.name: field.type for field in structs.fields(Metrics) if field.required}
    return Metrics(**known, **{name: kind() for name, kind in needed.items() if name not in known})
