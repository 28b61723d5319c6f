"""Measures how long JetStream has stored nothing, although writes wait for it; clients and workers use it.

If a write to a stream's files fails, as on a full disk, a NATS server still reads, and refuses what it must;
it answers no write to that stream, and sends no error.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A server that has acknowledged no waiting write for so long cannot store.
UNSTORED_S: Final = 5.0
#: What to ask the operator while JetStream has not said why it stores nothing.
LIKELY: Final = "is its disk full, or do too few servers of its cluster run?"


def unstored(refusal: str) -> str:
    """Return the sentence that nothing is stored; `refusal` is what JetStream says, or empty."""
    return f"the NATS server stores nothing{f': {refusal}' if refusal else f'; {LIKELY}'}"


class Writes:
    """The writes that wait until they are stored. Event loop only."""

    def __init__(self) -> None:
        #: Why JetStream refuses what waits; empty if it says nothing, as on a full disk.
        self.refusal = ""
        self._num_waiting = 0
        self._since_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count one write, which the block repeats until it is stored or given up, as waiting."""
        if not self._num_waiting:
            self.restart()
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1
        self.restart()  # without an exception it is stored

    def restart(self) -> None:
        """Measure from now on: the server has stored a write, or there is another connection."""
        self._since_s = asyncio.get_running_loop().time()
        self.refusal = ""

    @property
    def are_stored(self) -> bool:
        """Whether JetStream stores what waits; also true if nothing waits."""
        waited_s = asyncio.get_running_loop().time() - self._since_s
        return not self._num_waiting or waited_s < UNSTORED_S
