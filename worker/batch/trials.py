"""Remembers on disk which trials a model has passed, so that not every start runs dozens of passes for them.

A trial finds out whether rows may share a pass, or be merged: on a CPU, with a large vocabulary, that takes
seconds, or half a minute where the cores have other work. Must not know what is tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = structlog.get_logger()

#: Models of which one file remembers trials; the one that was tried longest ago leaves first.
_MODELS: Final = 16


class Trials:
    """The trials of one model. `key` names all that an outcome depends on; without `path` nothing is kept."""

    def __init__(self, path: Path | None = None, key: str = "") -> None:
        self._path = path
        self._key = key

    def way(self, name: str, run: Callable[[], int | None], num_ways: int) -> int | None:
        """Return which of `num_ways` ways has passed: the remembered one, else what `run` finds.

        None, that no way has, is not remembered: memory that was short once must not count for good.
        """
        known = self._read().get(self._key, {}).get(name)
        if type(known) is int and 0 <= known < num_ways:
            return known
        started = time.perf_counter()
        found = run()
        took_s = round(time.perf_counter() - started, 2)
        log.info("tried how rows of this model run together", trial=name, way=found, seconds=took_s)
        if found is not None:
            self._keep(name, found)
        return found

    def _read(self) -> dict[str, dict[str, int]]:
        """Read the file; one that is missing or broken holds nothing."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if self._path is not None:
                found = json.loads(self._path.read_text("utf-8"))
                if isinstance(found, dict):
                    return {key: value for key, value in found.items() if isinstance(value, dict)}
        return {}

    def _keep(self, name: str, way: int) -> None:
        if self._path is None:
            return
        known = self._read()
        known[self._key] = {**known.pop(self._key, {}), name: way}
        unfinished = self._path.with_name(self._path.name + ".unfinished")
        with contextlib.suppress(OSError):  # a disk that is full costs the next start some seconds
            unfinished.write_text(json.dumps(dict(list(known.items())[-_MODELS:])), "utf-8")
            os.replace(unfinished, self._path)  # noqa: PTH105  # in one step
