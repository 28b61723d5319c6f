"""Keeps the recent metrics messages of each worker, and their age. No I/O.

`exporter`, `top` and `console` compute all their figures from these messages. Every NATS user who may publish
on the metrics subject can forge messages. So this module ignores messages that no worker can have sent, and
limits the memory for messages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, structs

if TYPE_CHECKING:
    from collections.abc import Callable

    from turnkeep_client.messages import GatewayMetrics, Metrics

#: A worker that has missed this many messages is silent.
_MISSED: Final = 3
#: Most workers to keep, and most messages of each worker.
MAX_WORKERS: Final = 1000
MAX_MESSAGES: Final = 16
#: Limits of a message: size of a number, length of a text, entries of a mapping (as of 1,000 tenants).
_MAX_NUMBER: Final = 2**63
_MAX_TEXT: Final = 4096
_MAX_ENTRIES: Final = 2000
#: The longest time between two metrics messages of a worker.
_MAX_INTERVAL_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """A worker's last message, and how old it is."""

    metrics: Metrics
    age_s: float
    #: The oldest message in memory since the worker's last start; None if that is `metrics`.
    before: Metrics | None = None

    @property
    def up(self) -> bool:
        """Whether the worker still publishes, so that the last message is current."""
        return self.age_s <= _MISSED * self.metrics.interval_s


class Fleet:
    """Keeps each worker's messages of the last `window_s`; forgets workers that are silent for `forget_s`.

    One thread can call `hear` while others call `sightings`.
    """

    def __init__(
        self, forget_s: float, clock: Callable[[], float] = time.monotonic, *, window_s: float = 0.0
    ) -> None:
        self._forget_s = forget_s
        self._window_s = window_s
        self._clock = clock
        #: Each worker's last arrival time, and its messages (at least one). Lists are replaced, not changed.
        self._heard: dict[str, tuple[float, list[Metrics]]] = {}

    def hear(self, metrics: Metrics) -> bool:
        """Store a worker's message; return whether the worker is new.

        Ignores a message that no worker can have sent, and a new worker if there are too many.
        """
        now_s = self._clock()
        self._heard = {name: heard for name, heard in self._heard.items() if not self._is_gone(now_s, *heard)}
        is_new = metrics.worker not in self._heard
        is_possible = _is_possible(metrics) and metrics.interval_s <= _MAX_INTERVAL_S
        if not is_possible or (is_new and not self._make_room(now_s)):
            return False
        _, messages = self._heard.get(metrics.worker, (0.0, []))
        if messages and messages[-1].uptime_s > metrics.uptime_s:
            messages = []  # a new run of the worker, whose counters begin at 0
        kept = [one for one in messages if metrics.uptime_s - one.uptime_s <= self._window_s]
        if len(kept) > 1 and kept[-1].uptime_s - kept[-2].uptime_s <= self._window_s / (MAX_MESSAGES - 2):
            kept.pop()  # so at most `MAX_MESSAGES` frequent messages are kept
        self._heard[metrics.worker] = (now_s, [*kept, metrics])
        return is_new

    def _is_gone(self, now_s: float, heard_s: float, messages: list[Metrics]) -> bool:
        """Return whether to forget a worker: one that publishes rarely is kept until it is silent."""
        age_s = now_s - heard_s
        return age_s > self._forget_s and not Sighting(messages[-1], age_s).up

    def _make_room(self, now_s: float) -> bool:
        """Return whether one more worker may be added; if necessary, forget the worker silent for longest."""
        if len(self._heard) < MAX_WORKERS:
            return True
        name, (heard_s, messages) = min(self._heard.items(), key=lambda item: item[1][0])
        if Sighting(messages[-1], now_s - heard_s).up:
            return False
        del self._heard[name]
        return True

    def sightings(self) -> list[Sighting]:
        """Return a sighting of each worker that is not forgotten, sorted by the worker's name."""
        now_s = self._clock()
        found = [
            Sighting(messages[-1], now_s - heard_s, messages[0] if len(messages) > 1 else None)
            for heard_s, messages in list(self._heard.values())
            if not self._is_gone(now_s, heard_s, messages)
        ]
        return sorted(found, key=lambda one: one.metrics.worker)


class Gateways:
    """Keeps the last metrics message of each gateway. Event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: dict[str, tuple[float, GatewayMetrics]] = {}

    def hear(self, metrics: GatewayMetrics) -> None:
        """Store a gateway's message; ignore an impossible one, and a new gateway if there are too many."""
        self._heard = {one.gateway: (heard_s, one) for heard_s, one in self._now()}
        is_known = metrics.gateway in self._heard
        if _is_possible(metrics) and (is_known or len(self._heard) < MAX_WORKERS):
            self._heard[metrics.gateway] = (self._clock(), metrics)

    def now(self) -> list[GatewayMetrics]:
        """Return the last messages of the gateways that still publish."""
        return [one for _, one in self._now()]

    def _now(self) -> list[tuple[float, GatewayMetrics]]:
        now_s = self._clock()
        return [
            (heard_s, one)
            for heard_s, one in self._heard.values()
            if now_s - heard_s <= _MISSED * one.interval_s
        ]


def _is_possible(value: Any) -> bool:
    """Whether the numbers, texts and sizes in a message, or a part of one, are within a worker's limits."""
    match value:
        case int() | float():
            return abs(value) < _MAX_NUMBER
        case str():
            return len(value) <= _MAX_TEXT
        case tuple():
            return len(value) <= _MAX_ENTRIES and all(map(_is_possible, value))
        case dict():
            return len(value) <= _MAX_ENTRIES and all(map(_is_possible, (*value, *value.values())))
        case Struct():
            return all(map(_is_possible, structs.astuple(value)))
        case _:
            return True  # an optional field that was not sent
