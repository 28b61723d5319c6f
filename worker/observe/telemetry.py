"""Counters and histograms of one worker, and the lag of its event loop. Event loop only, no I/O.

The counters that Prometheus gets are fields of `turnkeep_client.metrics.Totals`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from anyio import current_time, sleep
from msgspec import structs

from turnkeep_client.messages import OTHER_TENANTS, Histogram, TenantFigures, Totals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from turnkeep_client.messages import TokenKind

#: Upper bounds in seconds, from OpenTelemetry's advice for gen_ai.server.* metrics.
FIRST_TOKEN_BOUNDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
BATCH_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
DURATION_BOUNDS = tuple(0.01 * 2**power for power in range(14))
LAG_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)

_LAG_PERIOD_S = 0.1


class Distribution:
    """A histogram with fixed upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, once or several `times`."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def histogram(self) -> Histogram:
        """Return the counts so far, for a field of the metrics message."""
        return Histogram(self._bounds, tuple(self._counts), self._sum, sum(self._counts))


class RequestTimes:
    """Counts core NATS requests, which are answered by a reply, and adds up the time that they took."""

    def __init__(self) -> None:
        self.num = 0
        self.num_errors = 0
        self.last_error = ""
        self.seconds = 0.0

    def count(self, seconds: float, error: str) -> None:
        """Count a request; `error` is its error code, empty without one."""
        self.num += 1
        self.seconds += seconds
        if error:
            self.num_errors += 1
            self.last_error = error


class TenantCounters:
    """Counts requests and tokens by tenant.

    The first `most` tenants have counts of their own, all others share theirs. If `most` is 0, nothing is
    counted.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._named: set[str] = set()
        self._requests: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._tokens: defaultdict[TokenKind, Counter[str]] = defaultdict(Counter)

    def count_request(self, tenant: str, outcome: str) -> None:
        """Count a committed result; `outcome` is `ok` or an error's code."""
        if self._most:
            self._requests[self._name(tenant)][outcome] += 1

    def count_tokens(self, kind: TokenKind, tenant: str, num_tokens: int) -> None:
        """Count a tenant's tokens of one kind, such as `cached`."""
        if self._most and num_tokens:
            self._tokens[kind][self._name(tenant)] += num_tokens

    def figures(self, sessions: Mapping[str, int]) -> TenantFigures:
        """Return the counts by tenant.

        `sessions` has, for each tenant, its number of sessions with unanswered requests.
        """
        if not self._most:
            return TenantFigures()
        open_sessions: Counter[str] = Counter(dict.fromkeys(self._named, 0))
        for tenant, number in sessions.items():
            open_sessions[self._name(tenant)] += number
        tokens = {f"{kind}_tokens": dict(counts) for kind, counts in self._tokens.items()}
        requests = {name: dict(outcomes) for name, outcomes in self._requests.items()}
        return TenantFigures(requests=requests, sessions=dict(open_sessions), **tokens)

    def _name(self, tenant: str) -> str:
        if len(self._named) < self._most:
            self._named.add(tenant)
        return tenant if tenant in self._named else OTHER_TENANTS


class Telemetry:
    """A worker's counters and histograms."""

    def __init__(self, most_tenants: int = 0) -> None:
        self.tenants = TenantCounters(most_tenants)
        self.started_s = time.monotonic()
        #: Stored results by type of request, then by outcome: `ok` or an error's code.
        self.requests: defaultdict[str, Counter[str]] = defaultdict(Counter)
        #: Requests answered on `ctl` and `ask`.
        self.calls: defaultdict[str, RequestTimes] = defaultdict(RequestTimes)
        #: Ignored entries that no worker can have written, by kind.
        self.ignored: Counter[str] = Counter()
        self.totals = Totals(prefilled_tokens=0, cached_tokens=0, generated_tokens=0)
        self.time_to_first_token = Distribution(FIRST_TOKEN_BOUNDS)
        self.time_per_output_token = Distribution(PER_TOKEN_BOUNDS)
        self.batch_size = Distribution(BATCH_BOUNDS)
        self.queue_time = Distribution(DURATION_BOUNDS)
        self.request_duration = Distribution(DURATION_BOUNDS)
        self.event_loop_lag = Distribution(LAG_BOUNDS)

    @property
    def uptime_s(self) -> float:
        """Seconds since the worker started."""
        return time.monotonic() - self.started_s

    def figures(self) -> dict[str, Any]:
        """Return the counts so far, by field of the metrics message."""
        distributions = {name: one for name, one in vars(self).items() if isinstance(one, Distribution)}
        return {
            "uptime_s": self.uptime_s,
            "requests": {kind: dict(outcomes) for kind, outcomes in self.requests.items()},
            "ignored": dict(self.ignored),
            **structs.asdict(self.totals),
            **{name: one.histogram() for name, one in distributions.items()},
        }

    async def watch_loop(self) -> None:
        """Measure, until cancelled, how late the event loop runs a task that is due."""
        while True:
            due = current_time() + _LAG_PERIOD_S
            await sleep(_LAG_PERIOD_S)
            self.event_loop_lag.observe(max(current_time() - due, 0.0))
