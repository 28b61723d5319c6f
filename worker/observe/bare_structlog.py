"""Imports structlog without rich, which structlog needs only for tracebacks that `logs` never prints.

Importing rich takes a twentieth of a worker's start. This module must be the first in a process to import
structlog; rich may be imported afterwards.
"""

from __future__ import annotations

import sys

__all__ = ["structlog"]

_is_first = {"structlog", "rich"}.isdisjoint(sys.modules)
if _is_first:
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import of rich now fails
try:
    import structlog
finally:
    if _is_first:
        del sys.modules["rich"]
