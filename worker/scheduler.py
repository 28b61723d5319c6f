"""What the device runs next. Pure: turns in, one step out.

A step is one decode pass over every running row and at most one prefill chunk, so that neither a long
prompt starves the answers in flight nor the answers starve the prompt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step(Generic[T]):
    """`decode` are the rows of one forward pass; `prefill` gets one chunk."""

    decode: tuple[T, ...]
    prefill: T | None

    def __bool__(self) -> bool:
        return bool(self.decode) or self.prefill is not None


class Scheduler(Generic[T]):
    """Turns by phase: prefilling -> ready -> decoding. Ready ones join as rows become free, in order."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._prefilling: deque[T] = deque()
        self._ready: deque[T] = deque()
        self._decoding: list[T] = []

    def __len__(self) -> int:
        return len(self._prefilling) + len(self._ready) + len(self._decoding)

    def __contains__(self, turn: object) -> bool:
        return turn in self._prefilling or turn in self._ready or turn in self._decoding

    @property
    def decoding(self) -> tuple[T, ...]:
        """The turns that decode."""
        return tuple(self._decoding)

    def add(self, turn: T) -> None:
        """Queue a turn whose prompt has to be prefilled."""
        self._prefilling.append(turn)

    def prefilled(self, turn: T) -> None:
        """Note that a turn's prompt is done: it decodes as soon as a row is free."""
        self._prefilling.remove(turn)
        self._ready.append(turn)

    def remove(self, turn: T) -> None:
        """Take a turn out, in whatever phase it is."""
        for phase in (self._prefilling, self._ready, self._decoding):
            if turn in phase:
                phase.remove(turn)

    def next(self) -> Step[T]:
        """Choose a step. Prefilling turns take chunks in rotation: a short prompt passes a long one."""
        while self._ready and len(self._decoding) < self._max_batch:
            self._decoding.append(self._ready.popleft())
        prefill = self._prefilling[0] if self._prefilling else None
        self._prefilling.rotate(-1)
        return Step(tuple(self._decoding), prefill)
