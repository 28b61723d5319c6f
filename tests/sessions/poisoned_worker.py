"""A worker that some requests end, as an abort in MLX would: run like `python -m commands`.

`POISON` in an append's text ends the process as the request is carried out. When the log is read again,
`BANE` raises where no error is expected, and `CURSE` ends the process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from commands.__main__ import main
from turnkeep_client.messages import Append
from worker.sessions.execution import Execution
from worker.sessions.fold import Fold

carry_out, replay = Execution.carry_out, Fold.replay


async def poisoned(self: Execution, key: Any, request: Any, pending: Any, history: Any) -> Any:
    if isinstance(request, Append) and "POISON" in (request.text or ""):
        await asyncio.sleep(0.3)  # others are on their way by now
        os.abort()
    return await carry_out(self, key, request, pending, history)


def baneful(self: Fold, history: Any, request: Any, *result: Any) -> Any:
    if isinstance(request, Append) and "BANE" in (request.text or ""):
        raise OverflowError("too much")
    if isinstance(request, Append) and "CURSE" in (request.text or ""):
        os.abort()
    return replay(self, history, request, *result)


Execution.carry_out = poisoned  # type: ignore[method-assign]
Fold.replay = baneful  # type: ignore[method-assign]
main()
