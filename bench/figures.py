"""Formats numbers for readers: suitable units, significant digits only. Pure."""

from __future__ import annotations

import math
from typing import Final, Literal

from .stats import Estimate

Unit = Literal["s", "bytes", "tokens", "tokens/s", "MB/s", "share", ""]

_SCALES: Final[dict[str, tuple[tuple[float, str], ...]]] = {
    "s": ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "share": ((0.01, "%"),),
}
#: Where to switch to the next larger unit: 119 s, but 2.1 min.
_FROM: Final = {3600.0: 2 * 3600.0, 60.0: 120.0}


def scale(size: float, unit: Unit) -> tuple[float, str]:
    """Return the divisor and the name of the unit, such as ms or MB, that suits a number of this size."""
    scales = _SCALES.get(unit)
    if scales is None:
        return 1.0, unit
    return next((one for one in scales if abs(size) >= _FROM.get(one[0], one[0])), scales[-1])


def number(value: float | None, unit: Unit = "") -> str:
    """Write a number with three significant digits and a suitable unit; None is `-`."""
    if value is None:
        return "-"
    divisor, name = scale(value, unit)
    size = value / divisor
    places = 0 if abs(size - round(size)) < 1e-9 else _places(size, 3)
    return f"{_digits(size, places)} {name}".strip()


def interval(estimate: Estimate | None, unit: Unit = "") -> str:
    """Write an estimate with its interval, in as many digits as the interval supports; None is `-`."""
    if estimate is None:
        return "-"
    if math.isinf(estimate.high) or estimate.low == estimate.high:
        return number(estimate.value, unit)
    divisor, name = scale(max(abs(estimate.value), estimate.high - estimate.low), unit)
    value, low, high = (one / divisor for one in (estimate.value, estimate.low, estimate.high))
    places = min(_places((high - low) / 6, 1), _places(value, 4))
    places = max(places, min(0, _places(value, 3)))  # at least three digits of a large number
    shown = [_digits(one, places) for one in (value, low, high)]
    return f"{shown[0]} ({shown[1]} to {shown[2]}) {name}".strip()


def _places(value: float, digits: int) -> int:
    """Return the decimal places that give a value `digits` significant digits; negative for large values."""
    return digits - 1 - math.floor(math.log10(abs(value))) if value else 0


def _digits(value: float, places: int) -> str:
    return f"{round(value, places) + 0.0:,.{max(places, 0)}f}"  # no minus before a zero
