"""What every page says of its run: on what it was made, where and how, and whether it came to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .page import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .report import Report


def subject(report: Report) -> str:
    """Say what was measured: the model and its device."""
    return f"{report.worker.model} on {report.worker.device}" if report.worker else "no worker"


def endings(report: Report) -> list[str]:
    """Return the note of a report that is not complete."""
    return [] if report.complete else [f"This report is not complete: {report.ending}."]


def about(report: Report, more: Sequence[tuple[str, str]] = ()) -> Rows:
    """List where and how a report was made, and `more`."""
    machine, worker, source = report.environment, report.worker, report.source
    load = "-" if machine.load_average is None else " ".join(f"{load:.2f}" for load in machine.load_average)
    rows = [
        ("measured", report.target),
        ("platform", machine.platform),
        ("processor", f"{machine.processor}, {machine.cpus} CPUs, {machine.memory_bytes / 2**30:.1f} GiB"),
        ("load average at the start", load),
        ("Python", machine.python),
        ("packages", ", ".join(f"{name} {version}" for name, version in machine.packages.items())),
        ("commit", machine.commit or "not a checkout"),
        *(
            (f"setting {name}", "-" if value is None else f"{value}")
            for name, value in report.settings.items()
        ),
    ]
    if worker is not None:
        limit = f"{worker.max_memory_bytes / 2**20:,.0f} MiB for KV"
        rows.append(("worker", f"{worker.worker}, version {worker.version}, {limit}"))
    if source is not None:
        rows.append(("input", f"{source.description}; {source.name} {source.version}, {source.licence}"))
    rows += more
    return Rows("The run", ("", ""), rows, numbers=False)
