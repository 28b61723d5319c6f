"""A worker that some requests end, as an abort in MLX would: run like `python -m worker`.

`POISON` in an append's text ends the process as the request is carried out.
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

carry_out = Execution.carry_out


async def poisoned(self: Execution, key: Any, request: Any, pending: Any, history: Any) -> Any:
    if isinstance(request, Append) and "POISON" in (request.text or ""):
        await asyncio.sleep(0.3)  # others are on their way by now
        os.abort()
    return await carry_out(self, key, request, pending, history)


Execution.carry_out = poisoned  # type: ignore[method-assign]
main()
