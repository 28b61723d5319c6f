"""The history of each worker, computed from its metrics messages, that the console shows."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from ops.fleet import Fleet
from ops.history import SERIES, FigureHistory
from tests.protocol.scripted_worker import metrics
from turnkeep_client.messages import Histogram, Metrics

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


def test_the_history_of_a_worker_has_rates_percentiles_and_sizes_over_time() -> None:
    course = Watched(100, "w1").history.course("w1")
    assert course["at_s"] == [5 * step for step in range(1, 21)]
    last = {name: values[-1] for name, values in course.items()}
    assert (last["generated_per_s"], last["prefilled_per_s"], last["cached_per_s"]) == (20, 4, 36)
    assert (last["first_token_p50_s"], last["duration_p50_s"]) == (0.05, 0.5)
    assert last["duration_p95_s"] == pytest.approx(0.95)
    assert (last["kv_bytes"], last["kv_limit_bytes"], last["sessions"]) == (1024, 2048, 10)
    assert course["generated_per_s"][0] is None, "there is no rate before a second message"


def test_a_silent_worker_leaves_a_gap_in_its_history_and_is_later_removed() -> None:
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
