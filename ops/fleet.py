"""The workers that were heard of lately: the last metrics message of each, and how long ago that was.

What `exporter` and `top` show is computed from this alone. No I/O.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from turnkeep_client.messages import Metrics

#: A worker that has missed this many messages is silent.
_MISSED: Final = 3


@dataclass(frozen=True, slots=True)
class Sighting:
    """A worker's last message, `age_s` seconds old."""

    metrics: Metrics
    age_s: float

    @property
    def up(self) -> bool:
        """Whether the worker still publishes: then the message's figures are its own by now."""
        return self.age_s <= _MISSED * self.metrics.interval_s


class Fleet:
    """Keeps each worker's last message; forgets a worker that was silent for `forget_s`.

    One thread may call `hear` while others call `sightings`.
    """

    def __init__(self, forget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._forget_s = forget_s
        self._clock = clock
        self._heard: dict[str, tuple[Metrics, float]] = {}

    def hear(self, metrics: Metrics) -> None:
        """Take a worker's message."""
        now_s = self._clock()
        gone = [name for name, (_, heard_s) in self._heard.items() if now_s - heard_s > self._forget_s]
        for name in gone:
            del self._heard[name]
        self._heard[metrics.worker] = (metrics, now_s)

    def sightings(self) -> list[Sighting]:
        """Return the workers that are not forgotten, by name."""
        now_s = self._clock()
        found = [Sighting(metrics, now_s - heard_s) for metrics, heard_s in list(self._heard.values())]
        return sorted(
            (one for one in found if one.age_s <= self._forget_s), key=lambda one: one.metrics.worker
        )
