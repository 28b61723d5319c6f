"""The workers that were heard of lately: the last metrics messages of each, and how long ago they came.

What `exporter`, `top` and `dashboard` show is computed from this alone. No I/O.
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
    """A worker's last message, `age_s` seconds old.

    `before` is the oldest message of the same run of the worker in the fleet's window, if there is another.
    """

    metrics: Metrics
    age_s: float
    before: Metrics | None = None

    @property
    def up(self) -> bool:
        """Whether the worker still publishes: then the message's figures are its own by now."""
        return self.age_s <= _MISSED * self.metrics.interval_s


class Fleet:
    """Keeps each worker's messages of the last `window_s`; forgets a worker that was silent for `forget_s`.

    One thread may call `hear` while others call `sightings`.
    """

    def __init__(
        self, forget_s: float, clock: Callable[[], float] = time.monotonic, *, window_s: float = 0.0
    ) -> None:
        self._forget_s = forget_s
        self._window_s = window_s
        self._clock = clock
        #: When the last message came, and the messages, never empty. A list is replaced, not changed.
        self._heard: dict[str, tuple[float, list[Metrics]]] = {}

    def hear(self, metrics: Metrics) -> None:
        """Take a worker's message."""
        now_s = self._clock()
        gone = [name for name, (heard_s, _) in self._heard.items() if now_s - heard_s > self._forget_s]
        for name in gone:
            del self._heard[name]
        _, messages = self._heard.get(metrics.worker, (0.0, []))
        if messages and messages[-1].uptime_s > metrics.uptime_s:
            messages = []  # a new run of the worker, whose counters begin at 0
        kept = [one for one in messages if metrics.uptime_s - one.uptime_s <= self._window_s]
        self._heard[metrics.worker] = (now_s, [*kept, metrics])

    def sightings(self) -> list[Sighting]:
        """Return the workers that are not forgotten, by name."""
        now_s = self._clock()
        found = [
            Sighting(messages[-1], now_s - heard_s, messages[0] if len(messages) > 1 else None)
            for heard_s, messages in list(self._heard.values())
            if now_s - heard_s <= self._forget_s
        ]
        return sorted(found, key=lambda one: one.metrics.worker)
