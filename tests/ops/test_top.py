"""`turnkeep top` and what it shares with `exporter` and `console`: metrics in memory, some of them forged."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import UNSET, structs
from rich.console import Console

from ops import fleet as fleet_module
from ops.figures import Figures, percentile, since
from ops.fleet import MAX_MESSAGES, Fleet, Gateways
from ops.history import MOST_POINTS, SERIES, FigureHistory
from ops.screen import amount, count, draw, seconds, span
from tests.commands.command_runs import Terminal, turnkeep, where
from tests.ops.test_exporter import Clock, key, page, samples
from tests.parts import LocalWorker
from tests.protocol.scripted_worker import metrics
from turnkeep_client.messages import (
    GatewayMetrics,
    Histogram,
    Metrics,
    SnapshotCounters,
    decode_metrics,
    encode,
)

NOTHING = Histogram(bounds=(1.0, 2.0), counts=(0, 0, 0), sum=0.0, count=0)


def figures(*changes: dict[str, object]) -> Figures:
    """Return the figures of a worker that has sent one message with each of these changes."""
    fleet = Fleet(300, window_s=60)
    for change in changes:
        fleet.hear(structs.replace(metrics("w1"), **change))
    return Figures(fleet.sightings()[0])


def screen(fleet: Fleet, columns: int = 80, gateways: Sequence[GatewayMetrics] = ()) -> list[str]:
    console = Console(width=columns, force_terminal=True, color_system=None)
    picture = draw(fleet.sightings(), gateways, columns=columns, title="top")
    with console.capture() as drawn:
        console.print(picture)
    return [line.rstrip() for line in drawn.get().splitlines()]


def fleet_of(number: int) -> Fleet:
    fleet = Fleet(300, window_s=60)
    for index in range(number):
        fleet.hear(structs.replace(metrics(f"w{index:02}"), sessions=index % 7, running=0, waiting=index))
    return fleet


def test_rates_shown_by_top_cover_the_last_minute_and_start_again_when_the_worker_restarts() -> None:
    first = {"uptime_s": 100.0, "prefilled_tokens": 0}
    old, now = {"uptime_s": 130.0, "prefilled_tokens": 300}, {"uptime_s": 170.0, "prefilled_tokens": 500}
    assert figures(first).prefilled_per_s is None
    assert figures(first, old, now).prefilled_per_s == 5.0, "what is older than a minute is left out"
    again = {"uptime_s": 1.0, "prefilled_tokens": 9}
    assert figures(old, again).prefilled_per_s is None
    assert figures(old, again, {"uptime_s": 3.0, "prefilled_tokens": 19}).prefilled_per_s == 5.0


def test_tokens_per_second_in_top_are_averaged_only_over_the_time_in_which_answers_ran() -> None:
    def decoded(uptime_s: float, num: int, decoding_s: float) -> dict[str, object]:
        histogram = Histogram(bounds=(1.0,), counts=(num, 0), sum=decoding_s, count=num)
        return {"uptime_s": uptime_s, "time_per_output_token": histogram, "decoding_s": decoding_s}

    before = decoded(100.0, 1000, 50.0)
    assert figures(before).generated_per_s is None, "there is no rate before a second message"
    assert figures(before, decoded(150.0, 1060, 53.0)).generated_per_s == 20.0, "not 60 in 50 s"
    assert figures(before, decoded(150.0, 1000, 50.0)).generated_per_s is None, "nothing ran"
    assert figures(before, decoded(3.0, 30, 1.0), decoded(8.0, 60, 2.0)).generated_per_s == 30.0
    assert figures(before, decoded(150.0, 1060, 0.0)).generated_per_s is None


def of_gateway(name: str, **counts: object) -> GatewayMetrics:
    none: dict[str, int] = {}
    message = GatewayMetrics(
        gateway=name,
        version="1",
        uptime_s=1.0,
        running=1,
        conversations=2,
        resumed=1,
        requests={"200": 3},
        answers=none,
        tokens=none,
    )
    return structs.replace(message, **counts)


def test_top_shows_the_sums_over_all_gateways_in_one_line() -> None:
    clock = Clock()
    gateways = Gateways(clock)
    gateways.hear(of_gateway("a", answers={"begun": 2}, tokens={"reused": 3, "prefilled": 1}))
    gateways.hear(of_gateway("forged", requests={"200": 2**70}))
    text = "\n".join(screen(fleet_of(1), gateways=gateways.now()))
    assert "gateway    3 requests, 1 run; answers begun 2, 1 outlived a worker; 75% of" in text
    gateways.hear(of_gateway("b", answers={"begun": 1, "continued": 5}, requests={"200": 3, "429": 1}))
    text = "\n".join(screen(fleet_of(1), gateways=gateways.now()))
    assert "gateways   7 requests, 2 run; answers continued 5, begun 3, 2 outlived" in text
    clock.now_s += 16
    assert not gateways.now(), "a gateway that is silent is gone"
    assert "gateway" not in "\n".join(screen(fleet_of(1)))


def test_the_share_of_cached_tokens_in_top_counts_only_tokens_between_two_metrics_messages() -> None:
    before = {"uptime_s": 1.0, "cached_tokens": 90, "prefilled_tokens": 10}
    after = {"uptime_s": 2.0, "cached_tokens": 91, "prefilled_tokens": 13}
    assert figures(before).cached_share == 0.9
    assert figures(before, after).cached_share == 0.25
    assert figures(before, before | {"uptime_s": 3.0}).cached_share is None


def test_percentiles_in_top_are_interpolated_within_their_histogram_bucket() -> None:
    histogram = Histogram(bounds=(1.0, 2.0), counts=(2, 2, 1), sum=7.0, count=5)
    assert percentile(histogram, 0.4) == 1.0
    assert percentile(histogram, 0.6) == 1.5
    assert percentile(histogram, 0.99) == 2.0
    assert since(histogram, histogram) is None
    assert since(histogram, NOTHING) == histogram
    assert since(UNSET, None) is None


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (count(9999), "9999"),
        (count(10_000), "10k"),
        (count(12_345_678), "12M"),
        (seconds(0.012), "12ms"),
        (seconds(3.14), "3.1s"),
        (seconds(45), "45s"),
        (span(59), "59s"),
        (span(7200), "2h"),
        (span(3 * 86400), "3d"),
        (amount(0), "0B"),
        (amount(1536 * 2**20), "1.5G"),
    ],
)
def test_numbers_durations_and_sizes_in_top_are_shown_in_short_form(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("number", [0, 1, 40])
def test_the_screen_of_top_has_a_line_for_each_worker_and_fits_the_terminal_width(
    number: int, columns: int
) -> None:
    drawn = screen(fleet_of(number), columns)
    assert max(map(len, drawn)) <= columns
    assert [line.split()[0] for line in drawn[2 : 2 + number]] == [f"w{index:02}" for index in range(number)]


def test_top_omits_seldom_needed_columns_and_shortens_no_figure_on_a_narrow_terminal() -> None:
    fleet = Fleet(300)
    fleet.hear(structs.replace(metrics("studio-1"), resident_kv_bytes=900 * 2**20, kv_limit_bytes=2**30))
    heads = ["worker", "model", "up", "sess", "run", "wait", "tok/s", "first", "found", "KV", "disk", "drop"]
    assert screen(fleet, 120)[1].split() == heads
    assert screen(fleet)[1].split() == [head for head in heads if head not in {"sess", "disk", "drop"}]
    text = " ".join(" ".join(screen(fleet)).split())
    assert "…" not in text, "nothing is cut"
    for part in ("KV 900M of 1.0G; MLX 512B, process 4K", "free 0B", "a token 325ms (p95 932ms)"):
        assert part in text


def test_top_shortens_long_worker_names_and_removes_control_characters_from_names() -> None:
    fleet = Fleet(300)
    fleet.hear(structs.replace(metrics("w" * 64), model="m" * 300, requests={"\x1b[2J": {"ok": 1}}))
    drawn = screen(fleet)
    assert max(map(len, drawn)) <= 80
    assert "\x1b[2J" not in "\n".join(drawn)
    assert drawn[2].startswith("wwww")
    assert "…" in drawn[2]


def test_top_marks_a_silent_worker_as_silent_and_shows_no_figures_of_that_worker() -> None:
    clock = Clock()
    fleet = Fleet(300, clock)
    fleet.hear(metrics("w1"))
    clock.now_s += 80
    drawn = screen(fleet)
    assert drawn[0] == "top  1 worker, 1 silent"
    assert drawn[2].split() == ["w1", "tiny", "silent"]
    assert "silent  for 1m" in "\n".join(drawn)


def test_the_first_line_of_top_sums_running_and_waiting_requests_of_live_workers() -> None:
    clock = Clock()
    fleet = Fleet(300, clock)
    for number, name in enumerate(("silent", "w1", "w2")):
        fleet.hear(structs.replace(metrics(name), running=number, waiting=10, returned=100))
        clock.now_s += 80 * (not number)
    assert screen(fleet)[0] == "top  3 workers, 1 silent, 3 run, 20 wait, 200 returned"


def test_top_shows_the_number_of_dropped_snapshots_by_reason() -> None:
    fleet = Fleet(300)
    counters = SnapshotCounters(dropped={"disk_limit": 2, "queue_full": 5}, in_flight=3)
    fleet.hear(structs.replace(metrics("w1"), snapshots=counters))
    drawn = "\n".join(screen(fleet))
    assert "drops      queue_full 5, disk_limit 2; 0 failed" in drawn
    assert "3 in flight" in drawn


async def test_top_shows_a_worker_until_ctrl_c_and_restores_the_terminal(worker: LocalWorker) -> None:
    await worker.client.session("s1").append(text="abcdef")

    def watch() -> int:
        with Terminal("top", *where(worker)) as terminal:
            terminal.wait_for(r"worker +test: tiny on cpu")
            terminal.wait_for(r"append ok 1")
            terminal.type("\x03")
            return terminal.end()

    assert await asyncio.to_thread(watch) == 130


def test_top_without_a_terminal_fails_with_one_line(nats_url: str) -> None:
    done = turnkeep("top", "--nats", nats_url)
    expected = "turnkeep: top needs a terminal; turnkeep info --json prints one metrics message\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


HUGE = 10**400


def forged(**changes: Any) -> Metrics:
    """Return a metrics message with fields that no worker sends, as a client decodes it."""
    return decode_metrics(json.dumps(json.loads(encode(metrics("w1"))) | changes).encode())


def charted(fleet: Fleet) -> dict[str, Any]:
    history = FigureHistory(60)
    history.take(fleet.sightings(), 0.0)
    return history.shown()


FORGERIES = {
    "a number beyond floats": {"resident_kv_bytes": HUGE},
    "of a kind": {"requests": {"generate": {"ok": HUGE}}},
    "an interval that no setting allows": {"interval_s": 3601.0},
    "below them": {"generated_tokens": -HUGE},
    "in a part": {"snapshots": {"stored_bytes": HUGE}},
    "in a histogram": {"batch_size": {"bounds": [1.0], "counts": [HUGE, 0], "sum": 1.0, "count": HUGE}},
    "a time that no clock reaches": {"uptime_s": 1e308},
    "a name without end": {"model": "m" * 100_000},
    "a kind without end": {"requests": {"k" * 100_000: {"ok": 1}}},
    "kinds without end": {"ignored": {str(number): 1 for number in range(100_000)}},
}


@pytest.mark.parametrize("changes", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_metrics_message_changes_nothing_that_exporter_top_and_console_show(
    changes: dict[str, Any],
) -> None:
    fleet = Fleet(60, Clock(), window_s=60)
    fleet.hear(metrics("w1"))
    before = page(fleet), screen(fleet), charted(fleet)
    fleet.hear(forged(**changes))
    assert (page(fleet), screen(fleet), charted(fleet)) == before
    assert samples(page(fleet))[key("resident_kv_bytes")] == 1024


def test_top_keeps_a_bounded_number_of_metrics_messages_per_worker_whatever_uptimes_the_messages_state() -> (
    None
):
    for step_s in (0.0, 0.001, 0.1, 5.0):
        fleet = Fleet(60, window_s=60)
        for number in range(200):
            fleet.hear(structs.replace(metrics("w1"), uptime_s=number * step_s, generated_tokens=number))
        _, kept = fleet._heard["w1"]
        assert len(kept) <= MAX_MESSAGES
        assert kept[-1].generated_tokens == 199


def test_rates_from_frequent_metrics_messages_span_nearly_the_whole_rate_window() -> None:
    fleet = Fleet(60, window_s=60)
    for number in range(2000):
        fleet.hear(structs.replace(metrics("w1"), uptime_s=number / 10))
    (one,) = fleet.sightings()
    assert one.before is not None
    assert 54 <= one.metrics.uptime_s - one.before.uptime_s <= 60


def test_metrics_messages_with_made_up_worker_names_do_not_displace_real_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_module, "MAX_WORKERS", 20)
    clock = Clock()
    fleet = Fleet(300, clock)
    fleet.hear(metrics("w1"))
    for number in range(40):
        assert fleet.hear(metrics(f"made-up-{number}")) == (number < 19)
    assert len(fleet.sightings()) == 20
    assert fleet.sightings()[-1].metrics.worker == "w1"
    clock.now_s += 20
    assert fleet.hear(metrics("w2")), "in the place of one that is silent"
    assert len(fleet.sightings()) == 20


def test_a_worker_stays_listed_between_its_metrics_messages_even_if_it_publishes_them_rarely() -> None:
    clock = Clock()
    fleet = Fleet(300, clock)
    rare = structs.replace(metrics("w1"), interval_s=600.0)
    fleet.hear(rare)
    clock.now_s += 500
    fleet.hear(metrics("w2"))
    assert [(one.metrics.worker, one.up) for one in fleet.sightings()] == [("w1", True), ("w2", True)]
    assert not fleet.hear(rare), "it is known"
    clock.now_s += 3 * 600 + 1
    assert fleet.sightings() == []


def test_the_metrics_history_of_a_worker_keeps_a_bounded_number_of_points() -> None:
    history = FigureHistory(3600)
    fleet = Fleet(3600)
    fleet.hear(metrics("w1"))
    for number in range(3 * MOST_POINTS):
        history.take(fleet.sightings(), number / 100)
    at_s = history.course("w1")["at_s"]
    assert len(at_s) <= 12
    assert at_s[-1] == (3 * MOST_POINTS - 1) / 100


def test_when_the_clock_is_set_back_a_workers_metrics_history_keeps_only_points_taken_since() -> None:
    history, fleet = FigureHistory(3600), Fleet(3600)
    fleet.hear(metrics("w1"))
    for at_s in (7200, 7205, 10, 15, 20):
        history.take(fleet.sightings(), at_s)
    assert history.course("w1")["at_s"] == [10, 15, 20]


BOUNDS = (0.1, 0.5, 1.0, 5.0)


def message(worker: str, second: int) -> Metrics:
    """Return the metrics of a worker after `second` seconds, in each of which it ran a request for 0.5 s.

    Each answer has 10 tokens; 4 tokens of the prompt are prefilled, and 36 are found in KV.
    """
    few, slow = Histogram(BOUNDS, (second, 0, 0, 0, 0), 0.0, second), second // 2
    return structs.replace(
        metrics(worker),
        uptime_s=float(second),
        decoding_s=second / 2,
        time_per_output_token=Histogram(BOUNDS, (10 * second, 0, 0, 0, 0), second / 2, 10 * second),
        prefilled_tokens=4 * second,
        cached_tokens=36 * second,
        time_to_first_token=few,
        request_duration=Histogram(BOUNDS, (0, second - slow, slow, 0, 0), 0.0, second),
        sessions=second // 10,
    )


class Watched:
    """Replaces `LiveFigures`: a history whose workers have sent messages for `seconds` of a fake clock."""

    def __init__(self, seconds: int, *workers: str, keep_s: float = 3600) -> None:
        self.now_s = 0.0
        self.fleet = Fleet(keep_s, lambda: self.now_s, window_s=60)
        self.history = FigureHistory(keep_s)
        self.hear(seconds, *workers)

    def hear(self, seconds: int, *workers: str) -> None:
        """Advance the clock by `seconds`; every five seconds each of these workers sends a message."""
        for _ in range(seconds // 5):
            self.now_s += 5
            for worker in workers:
                self.fleet.hear(message(worker, int(self.now_s)))
            self.history.take(self.fleet.sightings(), self.now_s)

    def shown(self, worker: str | None) -> dict[str, Any]:
        """Return the figures and one worker's history; see `LiveFigures.shown`."""
        return {"connected": True, **self.history.shown(worker)}


def test_the_metrics_history_of_a_worker_has_rates_percentiles_and_sizes_over_time() -> None:
    course = Watched(100, "w1").history.course("w1")
    assert course["at_s"] == [5 * step for step in range(1, 21)]
    last = {name: values[-1] for name, values in course.items()}
    assert (last["generated_per_s"], last["prefilled_per_s"], last["cached_per_s"]) == (20, 4, 36)
    assert (last["first_token_p50_s"], last["duration_p50_s"]) == (0.05, 0.5)
    assert last["duration_p95_s"] == pytest.approx(0.95)
    assert (last["kv_bytes"], last["kv_limit_bytes"], last["sessions"]) == (1024, 2048, 10)
    assert course["generated_per_s"][0] is None, "there is no rate before a second message"


def test_a_silent_worker_has_a_gap_in_its_metrics_history_and_is_later_removed() -> None:
    watched = Watched(60, "w1", "w2", keep_s=120)
    watched.hear(30, "w2")
    course = watched.history.course("w1")
    assert course["sessions"][-3:] == (None, None, None)
    assert course["sessions"][11] == 6
    shown = watched.history.shown()
    assert (shown["workers"]["w1"]["up"], shown["worker"]) == (False, "w2"), "one that is up is shown first"
    assert watched.history.shown("w1")["worker"] == "w1"
    watched.hear(130, "w2")
    assert [*watched.history.shown("w1")["workers"]] == ["w2"]
    assert watched.history.course("w1") == {"at_s": [], **dict.fromkeys(SERIES, ())}
    assert watched.history.course("w2")["at_s"][0] == watched.now_s - 120
