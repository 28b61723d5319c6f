"""Retries requests that failed with a retryable error."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final, TypeVar

from .errors import RequestFailedError
from .options import check_options

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FIRST_PAUSE_S: Final = 0.5
LAST_PAUSE_S: Final = 8.0

_T = TypeVar("_T")


async def retry(send: Callable[[], Awaitable[_T]], *, attempts: int = 3) -> _T:
    """Await `send()` again while it fails with a `retryable` error, `attempts` times at most.

    Each call of `send` must make a new request, without a `request_id`: a repeat under the same id would get
    the recorded failure. A request that timed out is not sent again, since it is in the log. The pause
    between two attempts doubles each time.
    """
    check_options(attempts=attempts)
    pause_s = FIRST_PAUSE_S
    for _ in range(attempts - 1):
        try:
            return await send()
        except RequestFailedError as error:
            if not error.retryable:
                raise
        await asyncio.sleep(random.uniform(pause_s / 2, pause_s))  # noqa: S311  # so that callers do not all retry at once
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
    return await send()
