"""Turns on the device, as the event loop sees them: the one way there, and the one way back.

Owns which turns are submitted, and by turn what the device has told of them and nobody has read yet. Knows
nothing of memory, nor of what a turn is for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeAlias

from .turn import Faulted, Finished, Sampled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from turnkeep_client.subjects import SessionKey

    from .device import Device
    from .turn import StepReport, Turn

#: What whoever follows a turn hears of it; the last one is no `Sampled`.
TurnEvent: TypeAlias = Sampled | Finished | Faulted


class Flights:
    """Turns from `submit` to their end; event loop only."""

    def __init__(self, device: Device, handle: Callable[[StepReport], None]) -> None:
        """`handle` takes the device's reports on the event loop, and gives `deliver` those of a turn."""
        self._device = device
        self._flights: dict[Turn, Flight] = {}
        loop = asyncio.get_running_loop()
        device.listen(lambda report: loop.call_soon_threadsafe(handle, report))

    def __contains__(self, turn: Turn) -> bool:
        return turn in self._flights

    def __iter__(self) -> Iterator[Turn]:
        """List the turns in the order in which they were submitted."""
        return iter(self._flights)

    @property
    def keys(self) -> set[SessionKey]:
        """The sessions whose KV a turn has taken along."""
        return {turn.key for turn in self._flights}

    def submit(self, turn: Turn) -> Flight:
        """Send a turn to the device."""
        flight = self._flights[turn] = Flight()
        self._device.submit(turn)
        return flight

    def cancel(self, turn: Turn | None) -> None:
        """End a turn where it stands; one that is not on the device is left alone."""
        if turn is not None and turn in self._flights:
            self._device.cancel(turn)

    def deliver(self, event: TurnEvent) -> None:
        """Pass on what the device has told of a turn."""
        if isinstance(event, Sampled):
            self._flights[event.turn].events.put_nowait(event)
        else:
            self._flights.pop(event.turn).events.put_nowait(event)


class Flight:
    """A turn that is submitted, for the one who follows it."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[TurnEvent] = asyncio.Queue()

    async def next_events(self) -> list[TurnEvent]:
        """Wait for what is told of the turn: several at a time for a slow reader. Its end is the last."""
        events = [await self.events.get()]
        while not self.events.empty():
            events.append(self.events.get_nowait())
        return events
