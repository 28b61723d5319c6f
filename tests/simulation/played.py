"""Runs simulated histories in a subprocess, for the tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def simulate(*args: str) -> tuple[int, str]:
    """Run `python -m tests.simulation` with these arguments; return its exit code and its output."""
    command = [sys.executable, "-P", "-m", "tests.simulation", *args]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "protocol")])}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, timeout=3600, check=False
    )
    return done.returncode, done.stdout + done.stderr
