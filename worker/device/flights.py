"""Submits turns to the device thread, and hands each turn's events to its follower. Event loop only.

Owns the submitted turns and their unread events. Knows nothing of memory, or of what a turn is for.
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

#: What the follower of a turn receives; the last event is `Finished` or `Faulted`.
TurnEvent: TypeAlias = Sampled | Finished | Faulted


class Flights:
    """The submitted turns that have not ended yet; event loop only."""

    def __init__(self, device: Device, handle: Callable[[StepReport], None]) -> None:
        """`handle` gets the device's reports on the event loop, and calls `deliver` for a turn's events."""
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
        """The sessions that have a submitted turn."""
        return {turn.key for turn in self._flights}

    def submit(self, turn: Turn) -> Flight:
        """Send a turn to the device."""
        flight = self._flights[turn] = Flight()
        self._device.submit(turn)
        return flight

    def cancel(self, turn: Turn | None) -> None:
        """End a turn with the tokens so far; no effect if the turn is over, or None."""
        if turn is not None and turn in self._flights:
            self._device.cancel(turn)

    def deliver(self, event: TurnEvent) -> None:
        """Pass an event from the device to its turn's follower."""
        if isinstance(event, Sampled):
            self._flights[event.turn].events.put_nowait(event)
        else:
            self._flights.pop(event.turn).events.put_nowait(event)


class Flight:
    """One submitted turn, through which its follower receives the turn's events."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[TurnEvent] = asyncio.Queue()

    async def next_events(self) -> list[TurnEvent]:
        """Wait for the turn's next event; return all that have arrived. A turn's last event is its end."""
        events = [await self.events.get()]
        while not self.events.empty():
            events.append(self.events.get_nowait())
        return events
