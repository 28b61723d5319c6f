"""A worker that some requests end, as an abort in MLX would: run like `python -m worker`.

`POISON` in an append's text ends the process as the request is carried out; `VENOM` raises where no error is
expected, when it is carried out, and `BANE` when the log is read again, at which `CURSE` ends the process.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from turnkeep_client.messages import Append
from worker.__main__ import main
from worker.sessions.execution import Execution
from worker.sessions.history import Fold
from worker.sessions.session import Session

carry_out, replay, attempt = Execution.carry_out, Fold.replay, Session._attempt


async def poisoned(self: Execution, key: Any, request: Any, pending: Any, history: Any) -> Any:
    if isinstance(request, Append) and "POISON" in (request.text or ""):
        await asyncio.sleep(0.3)  # others are on their way by now
        os.abort()
    return await carry_out(self, key, request, pending, history)


async def venomous(self: Session, pending: Any) -> Any:
    if isinstance(pending.request, Append) and "VENOM" in (pending.request.text or ""):
        raise LookupError("bitten")
    return await attempt(self, pending)


def baneful(self: Fold, history: Any, request: Any, *result: Any) -> Any:
    if isinstance(request, Append) and "BANE" in (request.text or ""):
        raise OverflowError("too much")
    if isinstance(request, Append) and "CURSE" in (request.text or ""):
        os.abort()
    return replay(self, history, request, *result)


Execution.carry_out = poisoned  # type: ignore[method-assign]
Session._attempt = venomous  # type: ignore[method-assign]
Fold.replay = baneful  # type: ignore[method-assign]
main()
