"""Runs the tasks of a command concurrently."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


async def until_one_ends(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all parts until the first one ends, cancel the others, and re-raise the first one's exception.

    Unlike a task group it raises the exception itself, which the command line shows as one line.
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
