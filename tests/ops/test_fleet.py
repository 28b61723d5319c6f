"""The metrics messages that `exporter`, `top` and `console` keep in memory, some of them forged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from ops.fleet import MAX_MESSAGES, MAX_WORKERS, Fleet
from ops.history import MOST_POINTS, FigureHistory
from tests.ops.test_exporter import key, page, samples
from tests.ops.test_top import Clock, screen
from tests.protocol.scripted_worker import metrics
from turnkeep_client.messages import Metrics, decode_metrics, encode

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
@pytest.mark.parametrize("show", [page, screen, charted], ids=["exporter", "top", "console"])
def test_a_forged_metrics_message_changes_nothing_that_is_shown(
    changes: dict[str, Any], show: Callable[[Fleet], object]
) -> None:
    fleet = Fleet(60, Clock(), window_s=60)
    fleet.hear(metrics("w1"))
    before = show(fleet)
    fleet.hear(forged(**changes))
    assert show(fleet) == before
    assert samples(page(fleet))[key("resident_kv_bytes")] == 1024


def test_a_bounded_number_of_a_workers_metrics_messages_is_kept_whatever_uptimes_they_state() -> None:
    for step_s in (0.0, 0.001, 0.1, 5.0):
        fleet = Fleet(60, window_s=60)
        for number in range(1000):
            fleet.hear(structs.replace(metrics("w1"), uptime_s=number * step_s, generated_tokens=number))
        _, kept = fleet._heard["w1"]
        assert len(kept) <= MAX_MESSAGES
        assert kept[-1].generated_tokens == 999


def test_rates_from_frequent_messages_span_nearly_the_whole_window() -> None:
    fleet = Fleet(60, window_s=60)
    for number in range(2000):
        fleet.hear(structs.replace(metrics("w1"), uptime_s=number / 10))
    (one,) = fleet.sightings()
    assert one.before is not None
    assert 54 <= one.metrics.uptime_s - one.before.uptime_s <= 60


def test_made_up_worker_names_do_not_displace_workers_that_publish() -> None:
    clock = Clock()
    fleet = Fleet(300, clock)
    fleet.hear(metrics("w1"))
    for number in range(2 * MAX_WORKERS):
        assert fleet.hear(metrics(f"made-up-{number}")) == (number < MAX_WORKERS - 1)
    assert len(fleet.sightings()) == MAX_WORKERS
    assert fleet.sightings()[-1].metrics.worker == "w1"
    clock.now_s += 20
    assert fleet.hear(metrics("w2")), "in the place of one that is silent"
    assert len(fleet.sightings()) == MAX_WORKERS


def test_a_worker_that_publishes_rarely_is_not_forgotten_between_its_messages() -> None:
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


def test_the_history_of_a_worker_keeps_few_points_however_often_it_is_sampled() -> None:
    history = FigureHistory(3600)
    fleet = Fleet(3600)
    fleet.hear(metrics("w1"))
    for number in range(3 * MOST_POINTS):
        history.take(fleet.sightings(), number / 100)
    at_s = history.course("w1")["at_s"]
    assert len(at_s) <= 12
    assert at_s[-1] == (3 * MOST_POINTS - 1) / 100
