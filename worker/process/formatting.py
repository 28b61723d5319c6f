"""Formats sizes, times and errors of the operating system for people."""

from __future__ import annotations

_DAY_S = 86400


def size(size_bytes: float) -> str:
    """Format a size in a suitable unit: `512 B`, `13 MiB`, `1.5 GiB`, `20 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f}".removesuffix(".0") + " GiB"


def span(seconds: float) -> str:
    """Format a time in its largest unit: `45 s`, `3 min`, `2 h`, `5 days`."""
    for unit_s, name in ((2 * _DAY_S, "days"), (3600, "h"), (60, "min")):
        if seconds >= unit_s:
            return f"{seconds / min(unit_s, _DAY_S):.0f} {name}"
    return f"{seconds:.0f} s"


def fault(error: OSError) -> str:
    """Format an error of the operating system: the file that it names, if it names one, and what is wrong."""
    why = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {why}" if error.filename else why
