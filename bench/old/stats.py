"""The statistics of the reports: values in, values out. Knows nothing of turns, workers or files.

Times are in seconds. What cannot be told from the values given is None, never a made-up number.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Turns at either end of a run whose medians are compared.
DRIFT_WINDOW: Final = 5
BUCKET_S: Final = 600.0
KV_BOUND: Final = 0.10
PREFILL_BOUND_S: Final = 5.0
_CONFIDENCE: Final = 0.95
#: Above this, the expansion around the normal distribution is exact to seven digits.
_MANY_DEGREES: Final = 200


def percentile(values: Sequence[float], share: float) -> float:
    """Return the percentile at `share` (0 to 1), linear between the neighbours of rank `share * (n - 1)`.

    Definition 7 of Hyndman and Fan, "Sample quantiles in statistical packages" (1996), numpy's default.
    Raises ValueError without values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def drift(values: Sequence[float], window: int = DRIFT_WINDOW) -> float | None:
    """Return the median of the last `window` values less that of the first ones.

    None where the two windows would overlap, since shared values hide what changed.
    """
    if len(values) < 2 * window:
        return None
    return statistics.median(values[-window:]) - statistics.median(values[:window])


class Spread(Struct, frozen=True, kw_only=True):
    """A measure in seconds, its values in the order of time; drift is that of the last five to the first."""

    count: int
    min: float
    p50: float
    p95: float
    p99: float
    max: float
    drift: float | None
    drift_share: float | None


def spread(values: Sequence[float]) -> Spread | None:
    """Describe the values; None where there are none."""
    if not values:
        return None
    middle = percentile(values, 0.5)
    change = drift(values)
    return Spread(
        count=len(values),
        min=min(values),
        p50=middle,
        p95=percentile(values, 0.95),
        p99=percentile(values, 0.99),
        max=max(values),
        drift=change,
        drift_share=change / middle if change is not None and middle > 0 else None,
    )


def kv_bounded(sizes: Sequence[float]) -> bool | None:
    """Say whether KV stayed on one level: `(max - min) / max(min, 1) < 0.10`. None without sizes.

    A series of zeros passes; look at the sizes themselves too.
    """
    if not sizes:
        return None
    return (max(sizes) - min(sizes)) / max(min(sizes), 1) < KV_BOUND


def prefill_bounded(drift_s: float | None) -> bool | None:
    """Say whether turns did not slow down by more than 5 s from the first to the last."""
    return None if drift_s is None else drift_s <= PREFILL_BOUND_S


def kv_bytes_per_token(positions: Sequence[int], sizes: Sequence[int]) -> int | None:
    """Return the bytes of KV per token that most turns agree on; None where two turns never agree.

    After a turn, `size = bytes_per_token * cached`, and `cached` is the position or, while the last token
    waits for its forward pass, one less. One turn alone would agree with itself, so turns of at least two
    positions are needed.
    """
    votes: defaultdict[int, set[int]] = defaultdict(set)
    for position, size in zip(positions, sizes, strict=True):
        for cached in (position, position - 1):
            if cached > 0 and size > 0 and size % cached == 0:
                votes[size // cached].add(position)
    counted = Counter({value: len(agreeing) for value, agreeing in votes.items()})
    if not counted or counted.most_common(1)[0][1] < 2:
        return None
    return counted.most_common(1)[0][0]


def keeps_kv_formula(position: int, size: int, bytes_per_token: int) -> bool:
    """Say whether a turn's KV is a whole number of tokens, the position or one less, and not nothing."""
    cached, rest = divmod(size, bytes_per_token)
    return size > 0 and rest == 0 and position - 1 <= cached <= position


def bucket(
    times_s: Sequence[float], values: Sequence[float], width_s: float = BUCKET_S
) -> dict[int, list[float]]:
    """Sort values by the bucket that their time falls into, `floor(time / width)`; leave out empty ones."""
    buckets: defaultdict[int, list[float]] = defaultdict(list)
    for time_s, value in zip(times_s, values, strict=True):
        buckets[math.floor(time_s / width_s)].append(value)
    return dict(sorted(buckets.items()))


@dataclass(frozen=True, slots=True)
class Line:
    """A fitted line; the slope's 95% confidence interval is infinite where the points do not tell."""

    slope: float
    intercept: float
    low: float
    high: float


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line | None:
    """Fit `y = intercept + slope * x` by least squares; None below three points or two different `xs`.

    The interval is `slope +- t * s / sqrt(sum((x - mean)^2))` with Student's t for 95%. Neighbouring
    readings of one process are not independent, and taking them so makes a jump look like a trend: the
    number of points is replaced by `n * (1 - r) / (1 + r)`, r being the correlation of neighbouring
    residuals, where that is positive (Santer et al., "Statistical significance of trends", 2000).
    """
    n = len(xs)
    if n < 3 or len(ys) != n:
        return None
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = math.fsum((x - mean_x) ** 2 for x in xs)
    if spread == 0:
        return None
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    residuals = [y - mean_y - slope * (x - mean_x) for x, y in zip(xs, ys, strict=True)]
    squares = math.fsum(residual**2 for residual in residuals)
    margin = 0.0
    if squares > 0:
        neighbours = math.fsum(a * b for a, b in pairwise(residuals)) / squares
        correlation = max(0.0, neighbours)
        degrees = math.floor(n * (1 - correlation) / (1 + correlation)) - 2
        margin = math.inf if degrees < 1 else student_t(degrees) * math.sqrt(squares / degrees / spread)
    return Line(slope, mean_y - slope * mean_x, slope - margin, slope + margin)


def robust_line(xs: Sequence[float], ys: Sequence[float], max_points: int = 400) -> Line | None:
    """Fit a line that a burst of outliers does not bend; None below three points or two different `xs`.

    The slope is the median of the slopes between any two points, its 95% interval that of Sen, "Estimates
    of the regression coefficient based on Kendall's tau" (1968). Long series are thinned evenly to about
    `max_points`, since the pairs grow with the square.
    """
    step = max(1, math.ceil(len(xs) / max_points))
    points = sorted(zip(xs[::step], ys[::step], strict=True))
    slopes = sorted((d - b) / (c - a) for (a, b), (c, d) in combinations(points, 2) if c > a)
    n = len(points)
    if n < 3 or not slopes:
        return None
    slope = statistics.median(slopes)
    z = statistics.NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)
    half = z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / 2
    low, high = math.floor(len(slopes) / 2 - half), math.ceil(len(slopes) / 2 + half)
    return Line(
        slope,
        statistics.median(y - slope * x for x, y in points),
        slopes[low] if low >= 0 else -math.inf,
        slopes[high] if high < len(slopes) else math.inf,
    )


def student_t(degrees: int) -> float:
    """Return t for a two-sided interval of 95% with this many degrees of freedom (1 or more).

    Inverts the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4; with many degrees their
    asymptotic expansion 26.7.5 is used.
    """
    if degrees > _MANY_DEGREES:
        z = statistics.NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)
        first = (z**3 + z) / (4 * degrees)
        second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        return z + first + second
    low, high = 0.0, 1000.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, degrees) < _CONFIDENCE else (low, middle)
    return (low + high) / 2


def _student_within(t: float, degrees: int) -> float:
    """Return the probability that Student's t lies between -t and t."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for i in range(2 + odd, degrees, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def cdf(values: Sequence[float], max_points: int = 400) -> list[tuple[float, float]]:
    """Return points `(value, share of values at or below it)`, thinned evenly to about `max_points`.

    The smallest and the largest value always stay.
    """
    ordered = sorted(values)
    n = len(ordered)
    if not n:
        return []
    step = max(1, math.ceil(n / max_points))
    kept = sorted({*range(0, n, step), n - 1})
    return [(ordered[i], (i + 1) / n) for i in kept]


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of two medians with its 95% interval."""

    ratio: float
    low: float
    high: float


def median_ratio(
    base: Sequence[float], other: Sequence[float], *, resamples: int = 2000, seed: int = 0
) -> Ratio | None:
    """Return `median(other) / median(base)` with the interval of a percentile bootstrap.

    Efron's bootstrap (1979): both sides are drawn anew with replacement, `resamples` times, and the middle
    95% of the ratios are kept. It treats values as independent, which turns of one session are not quite.
    None where a side is empty or the base's median is not above 0.
    """
    if not base or not other or statistics.median(base) <= 0:
        return None
    draw = np.random.default_rng(seed)
    first, second = np.asarray(base, dtype=float), np.asarray(other, dtype=float)
    ratios = []
    for _ in range(resamples):
        below = float(np.median(draw.choice(first, len(first))))
        if below > 0:
            ratios.append(float(np.median(draw.choice(second, len(second)))) / below)
    return Ratio(
        statistics.median(other) / statistics.median(base),
        percentile(ratios, 0.025),
        percentile(ratios, 0.975),
    )


#: The range of fewer ratios covers their median in less than 94% of cases, so that no interval does.
MIN_PAIRS: Final = 5


def paired_ratio(base: Sequence[float], other: Sequence[float]) -> Ratio | None:
    """Return the median of `other / base`, pair by pair, with the interval of a percentile bootstrap.

    What both of a pair share (the turn, the length) cancels out. With fewer than five pairs the interval is
    infinite. None without a pair whose base is above 0. Raises ValueError for two different lengths.
    """
    ratios = [b / a for a, b in zip(base, other, strict=True) if a > 0]
    found = median_ratio([1.0], ratios)
    if found is None or len(ratios) >= MIN_PAIRS:
        return found
    return Ratio(found.ratio, -math.inf, math.inf)


class Middle(Struct, frozen=True):
    """A median, or another middle of a sample, with its 95% interval."""

    median: float
    low: float
    high: float


def middle(values: Sequence[float], *, resamples: int = 2000, seed: int = 0) -> Middle | None:
    """Return the median with the interval of a percentile bootstrap; None without values."""
    if not values:
        return None
    drawn = np.random.default_rng(seed).choice(np.asarray(values, dtype=float), (resamples, len(values)))
    medians = np.median(drawn, axis=1).tolist()
    return Middle(statistics.median(values), percentile(medians, 0.025), percentile(medians, 0.975))


def mean_difference(
    base: Sequence[float], other: Sequence[float], *, resamples: int = 2000, seed: int = 0
) -> Middle | None:
    """Return `mean(other) - mean(base)`, with the interval of a percentile bootstrap; None below two values.

    For costs, which add up: what comes seldom and is large counts, as it does not in a median.
    """
    if min(len(base), len(other)) < 2:
        return None
    draw = np.random.default_rng(seed)
    first, second = (
        draw.choice(np.asarray(values, dtype=float), (resamples, len(values))).mean(axis=1)
        for values in (base, other)
    )
    found = (second - first).tolist()
    centre = statistics.fmean(other) - statistics.fmean(base)
    return Middle(centre, percentile(found, 0.025), percentile(found, 0.975))
