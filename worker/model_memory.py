"""Divides the supervisor's memory among models: which of them are loaded, and which make room for others."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
from anyio import Event, current_time, move_on_after

from worker.model_process import SupervisorError

from .process.formatting import size

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from worker.model_process import ModelProcess

    from .reports import Needs

#: The pause between two checks of whether a model is still in use.
_LOOK_S: Final = 0.5
#: How long a model keeps memory that another one waits for: `_GRACE_S` after its last request, and `_TURN_S`
#: while it is in use. After `_TURN_S` its unfinished answers wait until it is loaded again.
_GRACE_S: Final = 1.0
_TURN_S: Final = 60.0


class IdleModel(NamedTuple):
    """A loaded model that may be unloaded."""

    #: When it was last used, by the event loop's monotonic clock.
    used_s: float
    size_bytes: int
    name: str


def choose_to_unload(lacking_bytes: int, idle: Iterable[IdleModel]) -> list[str]:
    """Return the least recently used models that together free `lacking_bytes`; none if all free less."""
    chosen: list[str] = []
    for one in sorted(idle):
        if lacking_bytes <= 0:
            break
        chosen.append(one.name)
        lacking_bytes -= one.size_bytes
    return chosen if lacking_bytes <= 0 else []


def _sum(models: Iterable[ModelProcess]) -> int:
    return sum(one.size_bytes for one in models)


class MemoryBudget:
    """The memory for models, of which each loaded one has reserved a part. Event loop only."""

    def __init__(self) -> None:
        """Begin with 0 bytes; that suffices for a single model, whose size is 0 here."""
        self.size_bytes = 0
        #: The models that have reserved memory.
        self.loaded: list[ModelProcess] = []
        self._turn = anyio.Lock()
        self._freed = Event()

    @asynccontextmanager
    async def reserve(self, model: ModelProcess) -> AsyncIterator[None]:
        """Reserve a model's memory until the block ends. Waits until it is free; first come, first served."""
        async with self._turn:
            since_s = current_time()
            while model.size_bytes > self.size_bytes - _sum(self.loaded):
                await self._make_room(model.size_bytes, since_s)
                with move_on_after(_LOOK_S):
                    await self._freed.wait()
            self.loaded.append(model)
        try:
            yield
        finally:
            self.loaded.remove(model)
            self._freed.set()
            self._freed = Event()

    async def _make_room(self, for_bytes: int, since_s: float) -> None:
        """Free `for_bytes`: unload models that are idle, or were loaded for `_TURN_S` since `since_s`."""
        idle = [one for one in [*self.loaded] if await self._may_leave(one, since_s)]
        # Counted only now: some may have begun to leave, or have left, while the server was asked.
        staying = [one for one in self.loaded if not one.leave.is_set()]
        lacking_bytes = for_bytes + _sum(staying) - self.size_bytes
        choice = [
            IdleModel(one.activator.used_s, one.size_bytes, one.name or "") for one in idle if one in staying
        ]
        chosen = choose_to_unload(lacking_bytes, choice)
        for one in staying:
            if one.name in chosen:
                one.let_go()

    async def _may_leave(self, model: ModelProcess, since_s: float) -> bool:
        had_turn = current_time() - max(since_s, model.loaded_s) > _TURN_S
        return had_turn or (model.unused_s > _GRACE_S and not await model.activator.has_work())


def share_of(name: str, wanted_bytes: int | None, needs: Needs, memory_bytes: int) -> int:
    """Return the bytes that a model's worker may use. Raises `SupervisorError` if it can never be loaded."""
    least = size(needs.least_bytes)
    if wanted_bytes is not None and wanted_bytes < needs.least_bytes:
        raise SupervisorError(
            f"device_memory of the model {name} is {size(wanted_bytes)}, and it needs {least}: raise it"
        )
    if (wanted_bytes or needs.least_bytes) > memory_bytes:
        needed = least if wanted_bytes is None else f"device_memory of {size(wanted_bytes)}"
        raise SupervisorError(
            f"the model {name} can never be loaded: it needs {needed}, and memory is {size(memory_bytes)};"
            " raise memory, or take a smaller model"
        )
    return wanted_bytes or min(needs.usual_bytes, memory_bytes)
