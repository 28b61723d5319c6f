"""How this Turnkeep was installed: what a user types to run it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def program() -> str:
    """Return what a user types to run this program: `turnkeep`, or its path if the shell does not find it."""
    called = Path(sys.argv[0])
    if called.name != "turnkeep" or shutil.which("turnkeep") == str(called.absolute()):
        return "turnkeep"
    return os.path.relpath(called) if Path.cwd() in called.absolute().parents else str(called)
