"""The statistics against numpy, against published tables, and on series whose answer is known."""

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.old import stats

SECONDS = st.floats(min_value=0, max_value=1e6, allow_nan=False)
#: A busy machine makes inputs slowly, which says nothing of what is tested.
CALM = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
SOME = st.lists(SECONDS, min_size=1, max_size=60)


@CALM
@given(SOME, st.floats(min_value=0, max_value=1))
def test_a_percentile_is_the_linear_one_of_numpy(values, share):
    assert stats.percentile(values, share) == pytest.approx(
        float(np.percentile(values, share * 100)), rel=1e-9, abs=1e-9
    )


def test_the_middle_percentile_of_an_even_count_lies_between_its_neighbours():
    assert stats.percentile([1, 2, 3, 4], 0.5) == 2.5
    assert stats.percentile([4, 1], 0.95) == pytest.approx(3.85)
    with pytest.raises(ValueError, match="at least one"):
        stats.percentile([], 0.5)


@CALM
@given(st.lists(SECONDS, min_size=10, max_size=60))
def test_drift_is_the_difference_of_the_medians_at_both_ends(values):
    assert stats.drift(values) == statistics.median(values[-5:]) - statistics.median(values[:5])


def test_windows_that_overlap_tell_no_drift():
    assert stats.drift([1.0] * 9) is None
    assert stats.drift([1, 1, 1, 1, 1, 3, 3, 3, 3, 99]) == 2


def test_bounds_are_those_of_the_published_formulas():
    assert stats.kv_bounded([100, 109]) is True
    assert stats.kv_bounded([100, 110]) is False
    assert stats.kv_bounded([0, 0]) is True  # why zero is a finding of its own
    assert stats.kv_bounded([]) is None
    assert stats.prefill_bounded(5.0) is True
    assert stats.prefill_bounded(5.1) is False
    assert stats.prefill_bounded(None) is None


@CALM
@given(
    st.integers(1, 200_000),
    st.lists(st.tuples(st.integers(2, 10**6), st.booleans()), min_size=5, unique_by=lambda turn: turn[0]),
)
def test_the_bytes_per_token_are_found_and_every_turn_then_keeps_the_formula(per_token, turns):
    positions = [position for position, _ in turns]
    sizes = [per_token * (position - waits) for position, waits in turns]
    found = stats.kv_bytes_per_token(positions, sizes)
    assert found is not None
    assert all(stats.keeps_kv_formula(p, s, found) for p, s in zip(positions, sizes, strict=True))


def test_one_turn_that_breaks_the_formula_does_not_hide_behind_the_others():
    positions = [100, 180, 260, 340]
    sizes = [512 * (p - 1) for p in positions]
    sizes[2] += 512 * 7
    assert stats.kv_bytes_per_token(positions, sizes) == 512
    kept = [stats.keeps_kv_formula(p, s, 512) for p, s in zip(positions, sizes, strict=True)]
    assert kept == [True, True, False, True]
    assert not stats.keeps_kv_formula(100, 0, 512)
    assert not stats.keeps_kv_formula(100, 512 * 99 + 1, 512)
    assert not stats.keeps_kv_formula(100, 512 * 98, 512)
    assert stats.keeps_kv_formula(100, 512 * 100, 512)


def test_bytes_per_token_need_two_positions_that_agree():
    assert stats.kv_bytes_per_token([100, 100], [9900, 9900]) is None
    assert stats.kv_bytes_per_token([100, 200], [0, 0]) is None


@CALM
@given(st.lists(st.tuples(st.floats(0, 1e5), SECONDS), max_size=60))
def test_every_value_is_in_the_bucket_of_its_time(pairs):
    times, values = [time for time, _ in pairs], [value for _, value in pairs]
    buckets = stats.bucket(times, values)
    assert sorted(v for some in buckets.values() for v in some) == sorted(values)
    assert list(buckets) == sorted(buckets)
    assert stats.bucket([0, 599.9, 600, 1800], [1, 2, 3, 4]) == {0: [1, 2], 1: [3], 3: [4]}


@CALM
@given(st.lists(st.tuples(st.integers(0, 10**5), st.integers(-(10**6), 10**6)), min_size=3, max_size=60))
def test_a_fitted_line_is_the_one_of_numpy(points):
    xs, ys = [float(x) for x, _ in points], [float(y) for _, y in points]
    line = stats.fit_line(xs, ys)
    if len(set(xs)) < 2:
        assert line is None
        return
    slope, intercept = np.linalg.lstsq(np.stack([xs, np.ones(len(xs))], axis=1), np.array(ys))[0]
    assert line.slope == pytest.approx(slope, rel=1e-6, abs=1e-6)
    assert line.intercept == pytest.approx(intercept, rel=1e-6, abs=1e-2)
    assert line.low <= line.slope <= line.high


def test_the_interval_is_the_textbook_one_where_residuals_are_independent():
    """Residuals that alternate are correlated negatively, which changes nothing."""
    xs, ys = list(range(8)), [0, 1, 0, 1, 0, 1, 0, 1]
    _, covariance = np.polyfit(xs, ys, 1, cov=True)
    line = stats.fit_line(xs, ys)
    assert (line.high - line.low) / 2 == pytest.approx(2.446912 * math.sqrt(covariance[0][0]), rel=1e-6)


def test_a_single_jump_is_no_trend_but_a_leak_is():
    noise = random.Random(3)
    hours = [i / 100 for i in range(400)]
    jump = stats.fit_line(hours, [100.0 if hour < 2 else 110.0 for hour in hours])
    assert jump.low < 0 < jump.high
    leak = stats.fit_line(hours, [100 + 3 * hour + noise.gauss(0, 2) for hour in hours])
    assert 0 < leak.low < 3 < leak.high


def test_the_interval_covers_a_slope_of_zero_about_95_times_in_100():
    noise = random.Random(11)
    xs = list(range(60))
    lines = [stats.fit_line(xs, [noise.gauss(0, 1) for _ in xs]) for _ in range(400)]
    covered = sum(line.low <= 0 <= line.high for line in lines)
    assert 360 <= covered <= 395


def test_a_robust_line_is_not_bent_by_a_burst_of_outliers():
    noise = random.Random(9)
    xs = list(range(0, 1200, 30))
    ys = [5 + 0.1 * x + noise.gauss(0, 2) for x in xs]
    ys[12:17] = [900, 800, 700, 600, 500]
    line = stats.robust_line(xs, ys)
    assert line.low < 0.1 < line.high
    assert line.low > 0.08
    assert stats.fit_line(xs, ys).low < 0
    level = stats.robust_line(xs, [y - 0.1 * x for x, y in zip(xs, ys, strict=True)])
    assert level.low < 0 < level.high
    assert stats.robust_line([1, 1, 1], [1, 2, 3]) is None
    assert stats.robust_line([1, 2], [1, 2]) is None


def test_a_robust_line_of_a_long_series_is_thinned():
    line = stats.robust_line(list(range(20_000)), [3.0 * x for x in range(20_000)])
    assert (line.slope, line.low, line.high, line.intercept) == (3, 3, 3, 0)


@pytest.mark.parametrize(
    ("degrees", "t"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (8, 2.30600), (30, 2.04227), (200, 1.97190), (1000, 1.96234)],
)
def test_student_t_is_that_of_the_tables(degrees, t):
    assert stats.student_t(degrees) == pytest.approx(t, abs=1e-4)


@CALM
@given(SOME)
def test_a_cdf_rises_to_one_and_keeps_both_ends(values):
    points = stats.cdf(values)
    assert points == sorted(points)
    assert points[0][0] == min(values)
    assert points[-1] == (max(values), 1.0)
    assert len(stats.cdf(values * 40)) <= 402
    assert stats.cdf([]) == []


def test_a_ratio_of_medians_tells_a_difference_from_none():
    noise = random.Random(5)
    base = [noise.gauss(1.0, 0.05) for _ in range(80)]
    slower = stats.median_ratio(base, [noise.gauss(1.3, 0.05) for _ in range(80)])
    assert 1.0 < slower.low < slower.ratio < slower.high
    assert slower.ratio == pytest.approx(1.3, rel=0.05)
    same = stats.median_ratio(base, [noise.gauss(1.0, 0.05) for _ in range(80)])
    assert same.low < 1.0 < same.high
    assert stats.median_ratio([0.0, 0.0], base) is None
    assert stats.median_ratio([], base) is None


def test_a_paired_ratio_sees_what_the_spread_of_all_hides():
    base = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    other = [1.1 * value for value in base]
    found = stats.paired_ratio(base, other)
    assert (found.low, found.ratio, found.high) == pytest.approx((1.1, 1.1, 1.1))
    assert stats.median_ratio(base, other).low < 1
    few = stats.paired_ratio(base[:4], other[:4])
    assert (few.low, few.high) == (-math.inf, math.inf)
    assert stats.paired_ratio([0.0], [1.0]) is None
    with pytest.raises(ValueError, match="zip"):
        stats.paired_ratio([1.0], [])
