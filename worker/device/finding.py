"""Finds a turn's KV: its session's own, another session's, or what the SSD has more of. Event loop only.

Owns what a turn holds for that until it is over: snapshots that stay on disk, and room on the device.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from .memory import GROWTH_TOKENS
from .residency import LEAST_SHARED
from .turn import num_common

if TYPE_CHECKING:
    from collections.abc import Collection

    from cache.store import HeldPrefix, Store
    from turnkeep_client.subjects import SessionKey

    from .admission import Ledger
    from .device import Device
    from .flights import Flights
    from .turn import Turn

#: What is on the device is given up for a longer prefix on SSD only if that spares enough: a restore reads
#: the whole prefix, and reading a token is about this much faster than computing it.
_RESTORE_GAIN: Final = 16
#: Of a chain with a doubtful file, what is before that may still be of use.
_RESTORE_TRIES: Final = 2


@dataclass(slots=True, eq=False)
class Holding:
    """What a session's turn holds until it is over; `room` is asked for, or had."""

    key: SessionKey
    prefix: HeldPrefix | None = None
    room: asyncio.Future[bool] | None = None

    def stop_waiting(self) -> None:
        """Wait for room no more."""
        resolve(self.room, granted=False)


def resolve(waiting: asyncio.Future[bool] | None, *, granted: bool) -> None:
    """Answer one who waits, if one still does."""
    if waiting is not None and not waiting.done():
        waiting.set_result(granted)


class Finder:
    """Finds KV for turns of one device."""

    def __init__(self, device: Device, store: Store | None, ledger: Ledger, flights: Flights) -> None:
        self._device = device
        self._store = store
        self._ledger = ledger
        self._residency = ledger.residency
        self._flights = flights

    def release(self, holding: Holding) -> None:
        """Give up what a turn holds."""
        if self._store is not None and holding.prefix is not None:
            self._store.release(holding.prefix)
        if holding.room is not None:
            self._device.release_room(holding.key)
        holding.prefix = holding.room = None

    async def find(self, turn: Turn, holding: Holding, busy: Collection[SessionKey]) -> None:
        """Give the turn the longest KV there is. Sessions that are `busy` have a turn that has its memory."""
        resident = self._residency.tokens(turn.key)
        turn.num_kept = num_common(resident, turn.context)
        # Where KV cannot be trimmed it is of use as a whole, and the last token is left for the turn to run.
        num_usable = len(turn.context) - (not self._device.trimmable)
        if not self._device.trimmable and not turn.num_kept == len(resident) <= num_usable:
            turn.num_kept = 0
        turn.source, num_shared = self._find_source(turn, busy)
        if self._store is None:
            return
        found = max(turn.num_kept, num_shared)
        least = found + found // _RESTORE_GAIN
        turn.chain = self._store.chain(turn.key.tenant)
        for _ in range(_RESTORE_TRIES):
            if num_usable <= least:  # as in most turns of a session that is in memory
                break
            match = self._store.match(turn.chain, turn.context[:num_usable])
            # With room for what the turn runs first, so that it need not copy the KV to grow.
            room_tokens = min(len(turn.context) + 1, match.num_tokens + GROWTH_TOKENS)
            if match.num_tokens <= least or not await self._has_room(holding, room_tokens):
                self._store.release(match)
                break
            restored = await self._store.load(match, room_tokens=room_tokens)
            if restored is not None:
                if restored.num_tokens > found:
                    turn.restored, turn.num_restored = restored.tensors, restored.num_tokens
                    turn.source = None
                break
        # Held until the turn is over: what it cuts continues what is there now.
        holding.prefix = self._store.hold(turn.chain, turn.context)
        turn.edges = holding.prefix.edges
        # An append ends, and cuts its tail, before the last token.
        end = len(turn.context) - (turn.answer is None)
        # What is held is there; but of layers with states, the end of an append is looked for before that.
        start = turn.edges[0] if self._device.trimmable else 0
        turn.spans = self._store.wanted(turn.chain, turn.context, start, end)

    def _find_source(self, turn: Turn, busy: Collection[SessionKey]) -> tuple[SessionKey | None, int]:
        """Find the tenant's session whose KV, here or about to be, has the most of the turn's context.

        Of those that have as much, one that is idle, or else was submitted first, is the furthest.
        """
        if not self._device.trimmable:  # such KV cannot be cut to a beginning
            return None, 0
        found, most = None, turn.num_kept + LEAST_SHARED - 1
        if len(turn.context) <= most:
            return None, 0
        alike = self._residency.alike(turn.key.tenant, turn.context)
        idle = ((key, self._residency.tokens(key)) for key in alike if key not in busy)
        running = ((other.key, other.context) for other in self._flights)
        for key, tokens in chain(idle, running):
            if key.tenant != turn.key.tenant or min(len(tokens), len(turn.context)) <= most:
                continue
            # Most others differ in the one token that would have to be the same.
            if tokens[most] == turn.context[most] and (num := num_common(tokens, turn.context)) > most:
                found, most = key, num
        return found, most if found else 0

    async def _has_room(self, holding: Holding, num_tokens: int) -> bool:
        """Wait until the device has room for a restore; False where it has not, or the turn is cancelled.

        What has left the ledger is on the device until the step that runs is over.
        """
        if 2 * self._ledger.used_bytes <= self._ledger.max_bytes:
            return True
        loop = asyncio.get_running_loop()
        room: asyncio.Future[bool] = loop.create_future()
        holding.room = room

        def answered(granted: bool) -> None:
            loop.call_soon_threadsafe(lambda: resolve(room, granted=granted))

        self._device.reserve_room(holding.key, num_tokens, answered)
        return await room
