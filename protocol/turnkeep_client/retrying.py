"""Sends a request again that has failed for a reason that may pass."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final, TypeVar

from .errors import RequestFailedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FIRST_PAUSE_S: Final = 0.5
LAST_PAUSE_S: Final = 8.0

_T = TypeVar("_T")


async def retry(send: Callable[[], Awaitable[_T]], *, attempts: int = 3) -> _T:
    """Await `send()` until it does not fail with a `retryable` error, `attempts` times at most.

    Each call of `send` must make a request of its own, so without a `request_id`: under a known id the worker
    answers with the recorded failure. A call that was not answered in time is not sent again, since the
    request is in the log. Between two attempts it pauses, each time for twice as long.
    """
    pause_s = FIRST_PAUSE_S
    for _ in range(attempts - 1):
        try:
            return await send()
        except RequestFailedError as error:
            if not error.retryable:
                raise
        await asyncio.sleep(random.uniform(pause_s / 2, pause_s))  # noqa: S311  # so that callers do not return at once
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
    return await send()
