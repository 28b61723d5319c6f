"""Stores on disk which trials a model has passed, so that later starts need not repeat them.

A trial runs dozens of passes, to find out whether rows can share a pass or be merged. With a large vocabulary
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

#: Models that a file remembers; the one tried longest ago is dropped first.
_MODELS: Final = 16

#: What the packaged model has passed on a CPU, with the locked versions of MLX and mlx-lm, so that its first
#: start need not try it. A test runs its trials and compares.
SHIPPED: Final[Mapping[str, Mapping[str, int]]] = {
    "46785392980a9ec4de6fca47a87ade261984afd16f4b8a1dbac4eff0c47d40a3": {
        "share": 0,
        "rings": 0,
        "sketches": sum(1 << layer for layer in (8, 14, 15, 17, 18, 20)),
    }
}


class Trials:
    """One model's trials.

    `key` identifies everything that their results depend on. Without `path` no result is stored. `shipped`
    has results that need not be tried.
    """

    def __init__(
        self, path: Path | None = None, key: str = "", shipped: Mapping[str, int] | None = None
    ) -> None:
        self._path = path
        self._key = key
        self._shipped = shipped or {}
        self._has_begun = False

    def way(self, name: str, run: Callable[[], int | None], num_ways: int) -> int | None:
        """Return the index of the way, of `num_ways`, that passed: a known one, or the result of `run()`.

        If no way passes, the result is None, and is not stored: a trial may have failed because memory was
        short.
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
        """Read the file; empty if the file is missing or broken."""
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
        with contextlib.suppress(OSError):  # a full disk costs the next start some seconds
            unfinished.write_text(json.dumps(dict(list(known.items())[-_MODELS:])), "utf-8")
            os.replace(unfinished, self._path)  # noqa: PTH105  # atomically
