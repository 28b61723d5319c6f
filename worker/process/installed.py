"""Finds the commands with which a user of this installation runs Turnkeep and installs its extras."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from turnkeep_client.errors import TurnkeepError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIP: Final = re.compile(r"(?<![\w/])pip install ('turnkeep(?P<extra>\[\w+\])')?")


def program() -> str:
    """Return the command that runs this program in a shell: `turnkeep`, or its path if not on the PATH."""
    called = Path(sys.argv[0])
    if called.name != "turnkeep" or shutil.which("turnkeep") == str(called.absolute()):
        return "turnkeep"
    return shlex.quote(_from_here(called))


@contextlib.contextmanager
def http_libraries(extra: str) -> Iterator[None]:
    """Raise `TurnkeepError` if the block imports an HTTP library of the `extra` that is not installed."""
    try:
        yield
    except ModuleNotFoundError as missing:
        library = (missing.name or "").partition(".")[0]
        if library not in {"starlette", "uvicorn", "h11", "prometheus_client"}:
            raise
        raise TurnkeepError(f"{library} is missing; pip install 'turnkeep[{extra}]' brings it") from None


def as_installed(message: str) -> str:
    """Adapt the commands in a message to this installation.

    Replaces `pip install` by this environment's pip, and `'turnkeep[EXTRA]'` by the path of a checkout.
    """
    return _PIP.sub(lambda found: _install(found["extra"]), message)


def _install(extra: str | None) -> str:
    beside = Path(sys.executable).with_name("pip")
    pip = "pip" if shutil.which("pip") == str(beside) else shlex.quote(_from_here(beside))
    if extra is None:
        return f"{pip} install "
    checkout = _checkout()
    return f"{pip} install " + (f"-e '{checkout}{extra}'" if checkout else f"'turnkeep{extra}'")


@functools.cache
def _checkout() -> str | None:
    """Return the folder of the checkout if this is an editable installation; None for a wheel."""
    origin = json.loads(importlib.metadata.distribution("turnkeep").read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    from urllib.request import url2pathname  # imports an HTTP client

    return _from_here(Path(url2pathname(urlsplit(origin["url"]).path)))


def _from_here(path: Path) -> str:
    """Return a path as text; relative, if it is below the working directory."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
