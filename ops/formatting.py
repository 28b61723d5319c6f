"""Formats figures in few characters, for a screen of 80 columns."""

from __future__ import annotations

from typing import Final

_BAR_CELLS: Final = 12


def bar(part: float | None) -> str:
    """Draw a share (0 to 1) as a bar of 12 characters."""
    num_full = round(min(max(part or 0.0, 0.0), 1.0) * _BAR_CELLS)
    return "█" * num_full + "░" * (_BAR_CELLS - num_full)


def count(value: float | None) -> str:
    """Format a number in at most five characters: `31`, `4200`, `12k`, `3M`."""
    if value is None:
        return "-"
    for limit, unit, name in ((1e4, 1, ""), (1e7, 1e3, "k")):
        if value < limit:
            return f"{value / unit:.0f}{name}"
    return f"{value / 1e6:.0f}M"


def number(value: float | None) -> str:
    """Format a number with one decimal place; None is `-`."""
    return "-" if value is None else f"{value:.1f}"


def percent(part: float | None) -> str:
    """Format a share (0 to 1) as a percentage."""
    return "-" if part is None else f"{100 * part:.0f}%"


def seconds(value_s: float | None) -> str:
    """Format a short time: `12ms`, `1.3s`, `45s`."""
    if value_s is None:
        return "-"
    if value_s < 1:
        return f"{1000 * value_s:.0f}ms"
    return f"{value_s:.1f}s" if value_s < 10 else f"{value_s:.0f}s"


def span(value_s: float) -> str:
    """Format a long time in the largest unit that fits: `45s`, `3m`, `2h`, `5d`."""
    for unit_s, name in ((2 * 86400, "d"), (3600, "h"), (60, "m")):
        if value_s >= unit_s:
            return f"{value_s / min(unit_s, 86400):.0f}{name}"
    return f"{value_s:.0f}s"


def amount(size_bytes: float) -> str:
    """Format a size: `512B`, `13M`, `1.5G`."""
    for unit in ("B", "K", "M"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f}{unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f}G"
