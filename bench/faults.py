"""The faults that stop a bench, each one line for the user."""

from __future__ import annotations


class BenchError(Exception):
    """A bench cannot continue, or a report cannot be used; the message is one line."""


class ReportError(BenchError):
    """A report cannot be written, read or compared."""
