"""Draws the screen of `turnkeep top`: a table of the workers, and below it the gateways. Pure.

A worker that is the only one has its figures below the table. A narrow table omits columns, and figures have
few characters, for a screen of 80 columns.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .figures import Figures, listed, mean, percentile, share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from turnkeep_client.messages import GatewayMetrics, Histogram, Metrics

    from .fleet import Sighting

#: The columns of numbers, and those that a narrow terminal omits.
_NUMBERS: Final = ("up", "sess", "run", "wait", "tok/s", "first", "found", "KV", "disk", "drop")
_SELDOM: Final = ("sess", "disk", "drop")
_WIDE: Final = 100


def draw(
    sightings: Sequence[Sighting], gateways: Sequence[GatewayMetrics], *, columns: int, title: str
) -> RenderableType:
    """Return the screen for a terminal of `columns` columns; only a single worker has lines of figures."""
    lines = worker_lines(sightings[0]) if len(sightings) == 1 else []
    if not sightings:
        lines = [("", "no worker has published metrics yet")]
    details = Table.grid(padding=(0, 2, 0, 0))
    details.add_column(style="cyan", no_wrap=True)
    for label, value in [*lines, *gateway_lines(gateways)]:
        details.add_row(label, Text(_clean(value)))
    heading = Text(_clean(_heading(title, sightings)), style="bold", no_wrap=True, overflow="ellipsis")
    return Group(heading, _table(sightings, columns), Text(""), details)


def _heading(title: str, sightings: Sequence[Sighting]) -> str:
    num_silent = sum(not one.up for one in sightings)
    heading = f"{title}  {len(sightings)} worker" + ("s" if len(sightings) != 1 else "")
    heading += f", {num_silent} silent" if num_silent else ""
    up = [one.metrics for one in sightings if one.up]
    if len(up) > 1:  # no session or returned request is counted at two of them
        heading += f", {sum(one.running for one in up)} run, {sum(one.waiting for one in up)} wait"
        heading += f", {sum(one.returned for one in up)} returned"
    return heading


def _table(sightings: Sequence[Sighting], columns: int) -> RenderableType:
    shown = [name for name in _NUMBERS if columns >= _WIDE or name not in _SELDOM]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, width=columns, header_style="dim")
    for name in ("worker", "model"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
    for name in shown:
        table.add_column(name, no_wrap=True, justify="right")
    for one in sightings:
        figures = _figures(one) if one.up else {"up": "silent"}
        names = (Text(_clean(one.metrics.worker)), Text(_clean(one.metrics.model)))
        cells = (figures.get(name, "") for name in shown)
        table.add_row(*names, *cells, style="" if one.up else "red")
    return table


def _figures(one: Sighting) -> dict[str, str]:
    """Return a worker's cells of the columns `_NUMBERS`."""
    now, own = one.metrics, Figures(one)
    return {
        "up": "drains" if now.drains else span(now.uptime_s),
        "sess": count(now.sessions),
        "run": count(now.running),
        "wait": count(now.waiting),
        "tok/s": count(own.generated_per_s),
        "first": seconds(percentile(own.first_token, 0.5)),
        "found": percent(own.cached_share),
        "KV": percent(own.kv_share),
        "disk": percent(own.disk_share),
        "drop": count(own.num_drops),
    }


def worker_lines(one: Sighting) -> list[tuple[str, str]]:
    """Return lines about a worker, each a label and a text; about a silent one, only its name and silence."""
    now, own = one.metrics, Figures(one)
    about = f"{now.model} on {now.device}, turnkeep {now.version}"
    if not one.up:
        silent = f"for {span(one.age_s)}; its last figures are not shown"
        return [("worker", f"{now.worker}: {about}"), ("silent", silent)]
    drains = ", gives its sessions away" if now.drains else ""
    about = f"{now.worker}: {about}, up {span(now.uptime_s)}{drains}"
    return [("worker", about), *_work(now, own), *_room(now, own)]


def _work(now: Metrics, own: Figures) -> list[tuple[str, str]]:
    """Describe a worker's sessions, requests and speeds in lines."""
    of_log = f", log {amount(now.log_bytes)} of {amount(now.log_max_bytes)}" if now.log_max_bytes else ""
    policies = listed(now.sessions_by_policy)
    return [
        (
            "sessions",
            f"{now.sessions} in use, {now.resident_sessions} with KV on the device" + _also(policies),
        ),
        (
            "queue",
            (
                f"{now.running} run, {now.waiting} wait, {now.waiting_for_memory} of them for memory,"
                f" {now.returned} returned{of_log}"
            ),
        ),
        ("waited", f"{spread(own.queue_time)}; first token {spread(own.first_token)}"),
        (
            "answers",
            (
                f"{count(own.generated_per_s)} tokens/s, batch {number(mean(own.batch))},"
                f" a token {spread(own.per_token)}"
            ),
        ),
        (
            "prompts",
            (
                f"{count(own.prefilled_per_s)} tokens/s, {percent(own.cached_share)} found in the cache;"
                f" drafts {percent(own.accepted_share)} right, {number(own.draft_gain)} times as fast"
            ),
        ),
    ]


def _room(now: Metrics, own: Figures) -> list[tuple[str, str]]:
    """Describe a worker's memory, disk and snapshots, and its results since the start, in lines."""
    saved, ignored = now.snapshots, listed(now.ignored)
    results = "; ".join(f"{kind} {listed(outcomes)}" for kind, outcomes in now.requests.items())
    return [
        (
            "memory",
            (
                f"{bar(own.kv_share)} KV {amount(now.resident_kv_bytes)} of {amount(now.kv_limit_bytes)};"
                f" MLX {amount(now.mlx_active_bytes)}, process {amount(now.process_bytes)}"
            ),
        ),
        (
            "disk",
            (
                f"{bar(own.disk_share)} {amount(saved.stored_bytes)} of {amount(saved.capacity_bytes)},"
                f" {amount(saved.held_bytes)} of it in use, free {amount(max(saved.free_bytes, 0))}"
            ),
        ),
        (
            "snapshots",
            (
                f"{saved.stored} stored, {saved.in_flight} in flight ({amount(saved.in_flight_bytes)}),"
                f" {saved.evicted} evicted"
            ),
        ),
        ("drops", (listed(saved.dropped) or "none") + f"; {saved.failed} failed, {saved.rejected} rejected"),
        ("results", (results or "none") + (f"; ignored {ignored}" if ignored else "")),
    ]


def gateway_lines(gateways: Sequence[GatewayMetrics]) -> list[tuple[str, str]]:
    """Return one line, a label and a text, about all gateways' counts together; none without a gateway."""
    if not gateways:
        return []
    found, tokens, num_requests = Counter[str](), Counter[str](), 0
    for one in gateways:
        found.update(one.answers)
        tokens.update(one.tokens)
        num_requests += sum(one.requests.values())
    reused = share(tokens["reused"], tokens["reused"] + tokens["prefilled"])
    num_running, num_resumed = sum(one.running for one in gateways), sum(one.resumed for one in gateways)
    return [
        (
            "gateways" if len(gateways) > 1 else "gateway",
            (
                f"{count(num_requests)} requests, {num_running} run; answers {listed(found) or 'none'},"
                f" {num_resumed} outlived a worker; {percent(reused)} of prompts reused"
            ),
        )
    ]


def _also(text: str) -> str:
    return f"; {text}" if text else ""


def _clean(text: str) -> str:
    """Replace control characters, so that nobody who publishes metrics can control the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def spread(histogram: Histogram | None) -> str:
    """Format the median and the 95th percentile of a histogram of seconds; `-` without one."""
    if histogram is None:
        return "-"
    return f"{seconds(percentile(histogram, 0.5))} (p95 {seconds(percentile(histogram, 0.95))})"


_BAR_CELLS: Final = 12


def bar(part: float | None) -> str:
    """Draw a share (0 to 1, None as 0) as a bar of 12 characters."""
    num_full = round(min(max(part or 0.0, 0.0), 1.0) * _BAR_CELLS)
    return "█" * num_full + "░" * (_BAR_CELLS - num_full)


def count(value: float | None) -> str:
    """Format a number in at most five characters: `31`, `4200`, `12k`, `3M`; None is `-`."""
    if value is None:
        return "-"
    for limit, unit, name in ((1e4, 1, ""), (1e7, 1e3, "k")):
        if value < limit:
            return f"{value / unit:.0f}{name}"
    return f"{value / 1e6:.0f}M"


def number(value: float | None) -> str:
    """Format a number with one decimal place; None is `-`."""
    return "-" if value is None else f"{value:.1f}"


def percent(part: float | None) -> str:
    """Format a share (0 to 1) as a percentage; None is `-`."""
    return "-" if part is None else f"{100 * part:.0f}%"


def seconds(value_s: float | None) -> str:
    """Format a short time: `12ms`, `1.3s`, `45s`; None is `-`."""
    if value_s is None:
        return "-"
    if value_s < 1:
        return f"{1000 * value_s:.0f}ms"
    return f"{value_s:.1f}s" if value_s < 10 else f"{value_s:.0f}s"


def span(value_s: float) -> str:
    """Format a long time in the largest unit that fits: `45s`, `3m`, `2h`, `5d`."""
    for unit_s, name in ((2 * 86400, "d"), (3600, "h"), (60, "m")):
        if value_s >= unit_s:
            return f"{value_s / min(unit_s, 86400):.0f}{name}"
    return f"{value_s:.0f}s"


def amount(size_bytes: float) -> str:
    """Format a size: `512B`, `13M`, `1.5G`."""
    for unit in ("B", "K", "M"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f}{unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f}G"
