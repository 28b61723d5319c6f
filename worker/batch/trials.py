"""Stores on disk which trials a model has passed, so that later starts need not repeat them.

A trial runs dozens of passes to find out whether rows can share a pass or be merged. With a large vocabulary
on a CPU it takes seconds, or half a minute on busy cores. `batch_kinds` runs the trials; this module must not
know what they test.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

log = structlog.get_logger()

#: The most models in a file; the one whose trial is oldest is dropped first.
_MODELS: Final = 16

#: Results of the packaged model's trials on a CPU, with the locked versions of MLX and mlx-lm, so that its
#: first start runs no trials. A test repeats the trials and compares.
SHIPPED: Final[Mapping[str, Mapping[str, int]]] = {
    "46785392980a9ec4de6fca47a87ade261984afd16f4b8a1dbac4eff0c47d40a3": {
        "share": 0,
        "rings": 0,
        "sketches": sum(1 << layer for layer in (8, 14, 15, 17, 18, 20)),
    }
}


class Trials:
    """The results of one model's trials.

    `path` is the file that stores them; without it none is stored. `key` identifies the model and everything
    else that the results depend on. `shipped` has known results, whose trials are not run.
    """

    def __init__(
        self, path: Path | None = None, key: str = "", shipped: Mapping[str, int] | None = None
    ) -> None:
        self._path = path
        self._key = key
        self._shipped = shipped or {}
        self._has_begun = False

    def way(self, name: str, run: Callable[[], int | None], num_ways: int) -> int | None:
        """Return a trial's result, an index below `num_ways`: a shipped or stored one, else that of `run()`.

        Stores the result of `run()`, but not None (the trial failed): the cause may have been lack of memory.
        """
        known = self._shipped.get(name, self._read().get(self._key, {}).get(name))
        if type(known) is int and 0 <= known < num_ways:
            return known
        if not self._has_begun:
            log.info("testing how this model runs best; only its first start does this")
            self._has_begun = True
        started = time.perf_counter()
        found = run()
        took_s = round(time.perf_counter() - started, 2)
        log.debug("tried how rows of this model run together", trial=name, way=found, seconds=took_s)
        if found is not None:
            self._keep(name, found)
        return found

    def _read(self) -> dict[str, dict[str, int]]:
        """Return the file's results, by key and trial; empty if the file is missing or broken."""
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
        with contextlib.suppress(OSError):  # if the disk is full, the next start repeats the trials
            unfinished.write_text(json.dumps(dict(list(known.items())[-_MODELS:])), "utf-8")
            os.replace(unfinished, self._path)  # noqa: PTH105  # atomically
