"""Imports structlog without rich, which its package imports for tracebacks that `logs` never prints.

That takes a twentieth of a worker's start.
"""

from __future__ import annotations

import sys


def import_structlog() -> None:
    """Import structlog; call it before anything else does. Others may import rich afterwards."""
    if not {"structlog", "rich"}.isdisjoint(sys.modules):
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # what Python takes for "there is none"
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]
