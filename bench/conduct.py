"""Runs a bench and saves its report, even if the run is interrupted.

The report's page is one self-contained HTML file: tables as text, plots as inline SVG.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import jinja2
from msgspec.structs import replace

from .checks import Verdict
from .faults import ReportError
from .figures import number
from .plan import CommonOptions
from .plots import draw
from .report import Report, write
from .run import BenchRun
from .spec import AnyBench
from .tables import print_report, printing, tables

TEMPLATE: Final = Path(__file__).with_name("page.html")


async def conduct(bench: AnyBench, plan: Any, where: CommonOptions) -> Report:
    """Run a bench; save its report and page, print its tables and checks, and return the report.

    After a cancellation or a fault the partial report is saved, marked as not complete. Raises `ReportError`,
    and whatever the bench raises.
    """
    run = BenchRun(bench.name, plan, where)
    run.report_file.save(run.report("running"))  # fails before the run if the folder is not writable
    ending = "interrupted"
    try:
        await run.measure(bench.measure)
        ending = "done"
    except Exception as error:
        ending = f"fault: {error}"
        raise
    finally:
        report = run.report(ending)
        with contextlib.suppress(ReportError):  # raised again below, once the figures are printed
            run.report_file.save(report)  # saved first: the checks may raise
        report = replace(report, checks=bench.checked(bench.findings(report), run.lags_s))
        _publish(bench, report, run)
    return report


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
        counts=", ".join(f"{times} {verdict}" for verdict, times in counts.items() if times),
        notes=bench.notes.format(plan=findings.plan),
        tables=tables(findings),
        plots=[(plot, svg) for plot in bench.plots if (svg := draw(plot, findings))],
        number=number,
    )


def _publish(bench: AnyBench, report: Report, run: BenchRun[Any]) -> None:
    """Print the report and write its file and page; delete the file if nothing was measured."""
    path = run.report_file.path
    if not report.complete and not report.turns and not report.samples:
        if path is not None:
            path.unlink(missing_ok=True)
        return
    print_report(bench, report)
    if path is not None:
        page = render(bench, report, warn=run.warn)
        run.report_file.save(report)
        kind = "report" if report.complete else "partial report"
        printing().print(f"{kind}: {path}", soft_wrap=True)
        if page is not None:
            write(path.with_suffix(".html"), page.encode())
            printing().print(f"page: {path.with_suffix('.html')}", soft_wrap=True)


def until_stopped(work: Coroutine[Any, Any, Report]) -> Report:
    """Run `work` and return its report. Ctrl-C, SIGTERM and SIGHUP cancel `work`.

    Once a cancelled `work` has cleaned up, raises KeyboardInterrupt, or a `ReportError` of the cleanup; other
    faults of the cleanup are dropped.
    """

    async def guarded() -> Report | None:
        task = asyncio.create_task(work)
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(ending, task.cancel)
        try:
            return await task
        except ReportError:
            raise
        except (asyncio.CancelledError, Exception):
            if task.cancelling():
                return None
            raise

    report = asyncio.run(guarded())
    if report is None:
        raise KeyboardInterrupt
    return report
