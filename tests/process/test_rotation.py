"""`Rotation`: how many tasks have a place, and whose tasks get the next ones."""

from __future__ import annotations

import asyncio

import pytest

from worker.process.concurrency import Rotation


class Crowd:
    """Tasks of several tenants; each keeps its place until `end` ends it."""

    def __init__(self, most: int) -> None:
        self.rotation = Rotation(most)
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def come(self, *names: str) -> None:
        """Start tasks; a task's name begins with the letter of its tenant."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._stay(name))
        await settled()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settled()

    async def _stay(self, name: str) -> None:
        async with self.rotation.enter(name[0]):
            self.inside.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.inside.remove(name)


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns_for_places_and_a_tenants_tasks_keep_their_order() -> None:
    crowd = Crowd(2)
    await crowd.come("a1", "a2", "a3", "a4", "a5", "b1", "b2", "c1")
    order = []
    while crowd.inside:
        order.append(crowd.inside[0])
        await crowd.end(crowd.inside[0])
    assert order == ["a1", "a2", "a3", "b1", "c1", "a4", "b2", "a5"]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_waiting_task_that_is_cancelled_gives_its_place_to_the_next_tenants_task(
    is_late: bool,
) -> None:
    """Also if it has just got the place, and has not run since."""
    crowd = Crowd(1)
    await crowd.come("a1", "b1", "c1")
    if is_late:
        crowd._ends["a1"].set()
        await asyncio.sleep(0)
    crowd.tasks["b1"].cancel()
    await settled()
    await crowd.end("a1")
    assert (crowd.tasks["b1"].cancelled(), crowd.inside) == (True, ["c1"])
    await crowd.end("c1")
    await crowd.come("d1")
    assert crowd.inside == ["d1"]
    await crowd.end("d1")
