"""One self-contained HTML page per report: tables as text, plots as inline SVG."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import jinja2

from .checks import Verdict
from .plots import draw
from .report import Report
from .spec import AnyBench
from .tables import about, machine, tables

TEMPLATE: Final = Path(__file__).with_name("page.html")


def render(bench: AnyBench, report: Report, *, warn: Callable[[str], None]) -> str | None:
    """Return the page as HTML; None, after a warning, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        python = os.path.relpath(sys.executable)
        warn(
            "no page is made of the report: matplotlib is missing;"
            f" {python} -m pip install 'turnkeep[bench]' brings it"
        )
        return None
    findings = bench.findings(report)
    templates = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    counts = {verdict: sum(one.outcome is verdict for one in report.checks) for verdict in Verdict}
    return templates.from_string(TEMPLATE.read_text("utf-8")).render(
        bench=bench,
        report=report,
        machine=machine(report),
        warnings=report.warnings(),
        counts=", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number),
        notes=list(bench.notes(findings.plan)),
        tables=tables(findings),
        plots=[(plot, svg) for plot in bench.plots if (svg := draw(plot, findings))],
        about=about(report),
    )
