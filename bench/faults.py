"""What stops a bench: faults that are one line for whoever ran it."""

from __future__ import annotations


class BenchError(Exception):
    """A bench cannot go on, or a report cannot be used; one line for whoever ran it."""


class ReportError(BenchError):
    """A report cannot be written, read or compared."""
