"""Imports structlog without rich, which its package imports for tracebacks that `logs` never prints.

That takes a twentieth of a worker's start. The first import of structlog in a process must be this one; rich
may be imported afterwards.
"""

from __future__ import annotations

import sys

__all__ = ["structlog"]

_is_first = {"structlog", "rich"}.isdisjoint(sys.modules)
if _is_first:
    sys.modules["rich"] = None  # type: ignore[assignment]  # what Python takes for "there is none"
try:
    import structlog
finally:
    if _is_first:
        del sys.modules["rich"]
