"""Draws the screen of `turnkeep top`, and changes its state by keys. Pure; `top` owns the terminal.

The screen fits 80 x 24: a table of the workers, and below it the selected worker, or an opened session. On a
narrower terminal, lines are wrapped, and the table omits columns whose values are also below the table.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .figures import Figures, listed, mean, percentile, share
from .formatting import amount, bar, count, number, percent, seconds, span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from turnkeep_client.messages import GatewayMetrics, Histogram, Metrics, SessionInfo

    from .fleet import Sighting

#: Lines besides the table's rows, the details and the keys: title, column heads, a gap.
_OTHER_LINES: Final = 3
_DETAIL_LINES: Final = 11
_MIN_ROWS: Final = 3
_LABEL: Final = 10
_KEYS: Final = ("q quit", "s sort", "r reverse", "/ filter", "↑↓ worker", "i open a session", "Esc back")
_NO_BREAK: Final = "\u00a0"


class Mode(Enum):
    """What typed keys mean: commands, the text of the filter, or a session's name."""

    WATCH = "watch"
    FILTER = "filter"
    SESSION = "session"


@dataclass(frozen=True)
class _Column:
    head: str
    cell: Callable[[Sighting, Figures], str]
    #: The sort key of the rows: the largest value comes first, except for names.
    order: Callable[[Sighting, Figures], Any]


def _up(one: Sighting, _: Figures) -> str:
    if not one.up:
        return "silent"
    return "drains" if one.metrics.drains else span(one.metrics.uptime_s)


_COLUMNS: Final = (
    _Column("worker", lambda one, _: one.metrics.worker, lambda one, _: one.metrics.worker),
    _Column("model", lambda one, _: one.metrics.model, lambda one, _: one.metrics.model),
    _Column(
        "up",
        _up,
        lambda one, _: one.metrics.uptime_s if one.up else -one.age_s,
    ),
    _Column("sess", lambda one, _: count(one.metrics.sessions), lambda one, _: one.metrics.sessions),
    _Column("run", lambda one, _: count(one.metrics.running), lambda one, _: one.metrics.running),
    _Column("wait", lambda one, _: count(one.metrics.waiting), lambda one, _: one.metrics.waiting),
    _Column("tok/s", lambda _, own: count(own.generated_per_s), lambda _, own: own.generated_per_s or 0),
    _Column(
        "first",
        lambda _, own: seconds(percentile(own.first_token, 0.5)),
        lambda _, own: percentile(own.first_token, 0.5) or 0,
    ),
    _Column("found", lambda _, own: percent(own.cached_share), lambda _, own: own.cached_share or 0),
    _Column("KV", lambda _, own: percent(own.kv_share), lambda _, own: own.kv_share or 0),
    _Column("disk", lambda _, own: percent(own.disk_share), lambda _, own: own.disk_share or 0),
    _Column("drop", lambda _, own: count(own.num_drops), lambda _, own: own.num_drops),
)
_NAMES: Final = 2  # number of leading columns with names, which are shortened if there is no room
#: The least characters to show of a worker's name, and of a model's.
_MIN_NAMES: Final = (16, 8)
#: The columns in the order in which they are omitted while names would be shorter than `_MIN_NAMES`.
_LEAST: Final = ("model", "drop", "disk", "sess", "found", "KV", "first", "tok/s")


@dataclass
class State:
    """What the user has set by keys. `session` is the opened session; `left` is set when the user quits."""

    mode: Mode = Mode.WATCH
    sort: int = 0
    reverse: bool = False
    filter: str = ""
    typed: str = ""
    selected: str = ""
    session: str = ""
    left: bool = False

    def press(self, key: str, shown: Sequence[str]) -> None:
        """Update the state after a key; `shown` has the names of the workers in the table's order."""
        if self.mode is not Mode.WATCH:
            self._type(key)
            return
        match key:
            case "q":
                self.left = True
            case "s":
                self.sort = (self.sort + 1) % len(_COLUMNS)
            case "S":
                self.sort = (self.sort - 1) % len(_COLUMNS)
            case "r":
                self.reverse = not self.reverse
            case "/":
                self.mode, self.typed = Mode.FILTER, self.filter
            case "i":
                self.mode, self.typed = Mode.SESSION, ""
            case "escape":
                self.session = self.filter = ""
            case "up" | "k":
                self._move(-1, shown)
            case "down" | "j":
                self._move(1, shown)

    def _type(self, key: str) -> None:
        match key:
            case "enter":
                if self.mode is Mode.SESSION:
                    self.session = self.typed.strip()
                self.mode = Mode.WATCH
            case "escape":
                self.mode, self.typed = Mode.WATCH, ""
                self.filter = self.filter if self.session else ""
            case "backspace":
                self.typed = self.typed[:-1]
            case _ if len(key) == 1:
                self.typed += key
        if self.mode is Mode.FILTER:
            self.filter = self.typed

    def _move(self, by: int, shown: Sequence[str]) -> None:
        if shown:
            place = shown.index(self.selected) + by if self.selected in shown else 0
            self.selected = shown[min(max(place, 0), len(shown) - 1)]
            self.session = ""

    def rows(self, sightings: Sequence[Sighting]) -> list[tuple[Sighting, Figures]]:
        """Return the table's rows: the workers that match the filter, sorted; at equal values by name."""
        wanted = self.filter.lower()
        found = [
            (one, Figures(one))
            for one in sightings
            if wanted in f"{one.metrics.worker} {one.metrics.model} {'' if one.up else 'silent'}".lower()
        ]
        order = _COLUMNS[self.sort].order
        found.sort(key=lambda row: order(*row), reverse=self.reverse == (self.sort < _NAMES))
        return found


def names(rows: Sequence[tuple[Sighting, Figures]]) -> list[str]:
    """Return the names of the workers in these rows."""
    return [one.metrics.worker for one, _ in rows]


def draw(
    state: State,
    sightings: Sequence[Sighting],
    gateways: Sequence[GatewayMetrics],
    session: SessionInfo | str,
    *,
    size: tuple[int, int],
    title: str,
) -> RenderableType:
    """Draw the screen for a terminal of `size` (columns, lines).

    `session` is the state of the opened session, or the error of the request for it.
    """
    rows = state.rows(sightings)
    shown = names(rows)
    place = shown.index(state.selected) if state.selected in shown else 0
    if state.session:
        details = session_lines(session) if not isinstance(session, str) else [("session", session)]
    elif rows:
        details = worker_lines(*rows[place])
    else:
        details = [("", "no worker fits the filter" if sightings else "no worker has published metrics yet")]
    details += gateway_lines(gateways)
    columns, lines = size
    told = [line for label, value in details for line in _detail(label, value, columns)]
    keys = _keys(state, columns)
    most = lines - _OTHER_LINES  # for rows, details and keys
    num_rows = max(most - max(len(told), _DETAIL_LINES) - len(keys), _MIN_ROWS)
    keys = keys[: max(most - num_rows, 1)]
    told = told[: max(most - num_rows - len(keys), 0)]
    first = min(max(place - num_rows // 2, 0), max(len(rows) - num_rows, 0))
    rows = rows[first : first + num_rows]
    return Group(
        Text(_clean(_heading(title, sightings, len(shown))), style="bold", no_wrap=True, overflow="ellipsis"),
        _table(state, rows, place - first, columns),
        Text(""),
        *told,
        *[Text("")] * (most - len(rows) - len(told) - len(keys)),
        *keys,
    )


def _heading(title: str, sightings: Sequence[Sighting], num_shown: int) -> str:
    num_silent = sum(not one.up for one in sightings)
    heading = f"{title}  {len(sightings)} worker" + ("s" if len(sightings) != 1 else "")
    heading += f", {num_silent} silent" if num_silent else ""
    up = [one.metrics for one in sightings if one.up]
    if len(up) > 1:  # no session or returned request is counted at two of them
        heading += f", {sum(one.running for one in up)} run, {sum(one.waiting for one in up)} wait"
        heading += f", {sum(one.returned for one in up)} returned"
    return heading + (f", {num_shown} shown" if num_shown < len(sightings) else "")


def _fitting(
    state: State, rows: Sequence[tuple[Sighting, Figures]], columns: int
) -> list[tuple[int, _Column]]:
    """Choose the columns that fit, each with its index in `_COLUMNS`. The sort column is never omitted."""
    found = list(enumerate(_COLUMNS))

    def width(index: int, column: _Column) -> int:
        width = max(len(column.head), *(len(column.cell(*row)) for row in rows), 0)
        return 1 + (min(width, _MIN_NAMES[index]) if index < _NAMES else width)

    for head in _LEAST:
        if sum(width(*one) for one in found) <= columns + 1:
            break
        found = [one for one in found if one[1].head != head or one[0] == state.sort]
    return found


def _table(
    state: State, rows: Sequence[tuple[Sighting, Figures]], place: int, columns: int
) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, width=columns, header_style="dim")
    found = _fitting(state, rows, columns)
    for index, column in found:
        head = Text(column.head, style="bold underline" if index == state.sort else "")
        if index < _NAMES:
            table.add_column(head, no_wrap=True, overflow="ellipsis", ratio=1)
        else:
            table.add_column(head, no_wrap=True, justify="right")
    for row, (one, figures) in enumerate(rows):
        style = "reverse" if row == place else "" if one.up else "red"
        cells = (column.cell(one, figures) if one.up or index <= _NAMES else "" for index, column in found)
        table.add_row(*(Text(_clean(cell)) for cell in cells), style=style)
    return table


def _detail(label: str, value: str, columns: int) -> list[Text]:
    """Format a label and its value as up to three lines, wrapped to the terminal's width."""
    folded = wrap(_clean(value), max(columns - _LABEL, 1), max_lines=3, placeholder=" …") or [""]
    return [
        Text.assemble((f"{'' if number else label:<{_LABEL}}", "cyan"), line, no_wrap=True)
        for number, line in enumerate(folded)
    ]


def _keys(state: State, columns: int) -> list[Text]:
    if state.mode is Mode.FILTER:
        return [Text(f"filter: {_clean(state.typed)}_   Enter keeps it, Esc removes it", style="bold")]
    if state.mode is Mode.SESSION:
        return [Text(f"session: {_clean(state.typed)}_   Enter opens it", style="bold")]
    keys = "  ".join(key.replace(" ", _NO_BREAK) for key in _KEYS)
    return [Text(line.replace(_NO_BREAK, " "), style="dim", no_wrap=True) for line in wrap(keys, columns)]


def worker_lines(one: Sighting, own: Figures) -> list[tuple[str, str]]:
    """Describe a worker in lines, each a pair of label and value."""
    now = one.metrics
    about = f"{now.model} on {now.device}, turnkeep {now.version}"
    if not one.up:
        return [
            ("worker", f"{now.worker}: {about}"),
            ("silent", f"for {span(one.age_s)}; its last figures are not shown"),
        ]
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
    """Describe the sums of all gateways' counts since their starts in one line; no line without a gateway."""
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


def session_lines(info: SessionInfo) -> list[tuple[str, str]]:
    """Describe a session in lines, each a pair of label and value."""
    progress = info.progress
    num_more = info.num_waiting - len(info.waiting)
    waiting = ", ".join(info.waiting) + (f" and {num_more} more" if num_more > 0 else "")
    lines = [
        ("session", f"{info.tenant}/{info.session} at {info.worker.worker}, {info.model}"),
        ("state", info.state + (f", request {info.active}" if info.active else "")),
        ("position", f"{info.position} tokens after {info.requests} requests"),
        ("KV", (amount(info.kv_live_bytes) if info.resident else "not") + " on the device"),
        ("policy", info.policy),
        ("waiting", waiting or "no request"),
    ]
    if progress:
        done = f"{progress.cached_tokens} of {progress.context_tokens} tokens have KV"
        lines.insert(2, ("progress", f"{done}, {progress.generated_tokens} new"))
    return lines


def _also(text: str) -> str:
    return f"; {text}" if text else ""


def _clean(text: str) -> str:
    """Replace control characters, so that nobody who publishes metrics can control the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def spread(histogram: Histogram | None) -> str:
    """Format the median and the 95th percentile of a distribution."""
    if histogram is None:
        return "-"
    return f"{seconds(percentile(histogram, 0.5))} (p95 {seconds(percentile(histogram, 0.95))})"
