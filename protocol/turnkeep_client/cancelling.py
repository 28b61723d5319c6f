"""Await calls, also in tasks that are cancelled meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

_T = TypeVar("_T")


async def cancellable(call: Awaitable[_T]) -> _T:
    """Await a call of nats-py without losing a cancellation.

    nats-py uses `asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives together with
    the reply or an error: the caller would wait forever.
    """
    task = asyncio.current_task()
    num_before = task.cancelling() if task else 0
    try:
        return await call
    finally:
        if task and task.cancelling() > num_before:
            raise asyncio.CancelledError


async def to_its_end(call: Coroutine[Any, Any, None]) -> None:
    """Await a short call to its end; raise a cancellation of the caller only then."""
    ending, cancelled = asyncio.create_task(call), None
    while not ending.done():
        try:
            await asyncio.wait([ending])
        except asyncio.CancelledError as error:  # a cancelled scope of anyio cancels at every await
            cancelled = error
    if cancelled is not None:
        raise cancelled
    ending.result()
