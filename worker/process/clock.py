"""The wall clock and the monotonic clock of sessions and of the wire. A simulation replaces `source`."""

from __future__ import annotations

import time as real
from typing import Protocol


class Clocks(Protocol):
    """The functions that `source` must have, as the standard module `time` does."""

    def time(self) -> float:
        """Return the seconds since 1970, by the wall clock."""

    def monotonic(self) -> float:
        """Return the seconds of a clock that never goes back."""


source: Clocks = real


def time() -> float:
    """Return the seconds since 1970, by the wall clock."""
    return source.time()


def monotonic() -> float:
    """Return the seconds of a clock that never goes back."""
    return source.monotonic()
