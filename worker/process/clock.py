"""The clocks that the parts above the device read. A simulation replaces `source`."""

from __future__ import annotations

import time as real
from typing import Protocol


class Clocks(Protocol):
    """What is asked of a clock; the module `time` has it."""

    def time(self) -> float:
        """Return the seconds since 1970, by the wall clock."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""


source: Clocks = real


def time() -> float:
    """Return the seconds since 1970, by the wall clock."""
    return source.time()


def monotonic() -> float:
    """Return seconds that never go back."""
    return source.monotonic()
