"""Runs the coroutines of a command concurrently until one of them ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


async def until_one_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all coroutines until the first one ends; cancel the others, and raise what the first one raised.

    A task group would raise an exception group, which the command line could not show as one line.
    """
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
