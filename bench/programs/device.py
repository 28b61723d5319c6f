"""A program that measures a device: `python -m bench.programs.device --data-dir FOLDER`.

`turnkeep bench device` runs it. It loads a model as a worker does and prints a line that describes model and
device. Each line of its input is a JSON array: the name of a method of `DeviceMeter`, and its arguments. For
each line it prints the measured values by the names of the bench's measures. Runs the worker's own batch,
without sessions and the scheduler.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from array import array
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from worker.models import blas
from worker.process import setting_sources

blas.preload()  # before anything imports MLX

import mlx.core as mx  # noqa: E402

from cache.kv import layers  # noqa: E402
from turnkeep_client.errors import TurnkeepError  # noqa: E402
from worker.batch.batch_kinds import batch_for  # noqa: E402
from worker.batch.row_sampler import RowSampler, RowSampling  # noqa: E402
from worker.batch.rows import PrefillPiece, Row  # noqa: E402
from worker.batch.trials import Trials  # noqa: E402
from worker.device import machine  # noqa: E402
from worker.device.served_model import estimator  # noqa: E402
from worker.models import model as models  # noqa: E402
from worker.process.constants import CONSTANTS  # noqa: E402
from worker.process.datadir import DataDir  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.models.model import LoadedModel
    from worker.process.settings import Settings

#: Measured values, by the names of the bench's measures.
Figures: TypeAlias = "dict[str, float]"


class DeviceMeter:
    """Measures a loaded model and a worker's batch. Nothing else may run on the device meanwhile."""

    def __init__(
        self,
        loaded: LoadedModel,
        directory: DataDir,
        chosen: Settings,
        *,
        block_tokens: int = CONSTANTS.block_tokens,
    ) -> None:
        """Make the model's batches as a worker does: one decodes rows together, the other each row alone.

        `chosen` are the worker's settings.
        """
        model = loaded.model
        self._block = block = block_tokens
        trials = Trials(directory.path / "trials", loaded.name)
        self._batches = {
            together: batch_for(model, pooled_rows=least, merged_rows=least, runs_ahead=True, trials=trials)
            for together, least in ((True, 1), (False, sys.maxsize))
        }
        batch = self._batches[False]
        self._new = partial(
            layers.make, model, rings=batch.windows_are_rings, sketched=batch.sketched, block_tokens=block
        )
        self._held: dict[tuple[int, ...], list[Any]] = {}
        caches = self._prefilled((0,))
        limit_bytes = chosen.device_memory or machine.default_limit().size_bytes
        machine.limit_active(limit_bytes)
        self._estimator = estimator(loaded, caches, limit_bytes, batch.sketched)
        self._trimmable = layers.trimmable(caches)
        #: The line that this program prints when it is ready.
        self.description = {
            "folder": str(loaded.folder),
            "model": loaded.name,
            "device": machine.name(),
            "least": self._least_rows(),
            "block": self._block,
            "context": loaded.context_tokens,
            "constants": {
                name: value for name, value in asdict(machine.profile()).items() if type(value) is int
            },
        }

    def prefill(self, piece: int, tokens: Sequence[int]) -> Figures:
        """Prefill tokens in pieces of `piece` tokens; return `prefill` (tokens/s) and two figures of memory.

        `scratch memory` is that of the piece that exceeds its estimate most, as a share of the estimate;
        `layers kept` is how many layers had temporary arrays at once, as computed from the same figures.
        """
        caches, step_s, ratios, kept = self._new(), 0.0, [0.0], [0.0]
        for start in range(0, len(tokens), piece):
            some = list(tokens[start : start + piece])
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            began_s = time.perf_counter()
            self._batches[True].step([PrefillPiece(caches, start, some)])
            step_s += time.perf_counter() - began_s
            measured = mx.get_peak_memory() - max(before, mx.get_active_memory())  # as the runner measures it
            shapes = [(len(some), start + len(some))]
            one, two = (
                replace(self._estimator, kept_layers=number, num_layers=2).scratch_bytes(0, shapes)
                for number in (1, 2)
            )
            ratios.append(measured / self._estimator.scratch_bytes(0, shapes))
            kept.append(1 + (measured - one) / (two - one))
        memory = {"scratch memory": max(ratios), "layers kept": max(kept)}
        return {"prefill": len(tokens) / step_s, **memory}

    def decode(self, together: bool, steps: int, prompts: Sequence[Sequence[int]]) -> Figures:
        """Decode `steps` tokens after each prompt, all prompts at once; return `decoding`, in tokens/s.

        With `together` rows are pooled or merged, else each runs alone. Each step is launched before the
        tokens of the step before it are read. The time includes copying rows into a pool and out of it.
        """
        batch, rows = self._batches[together], self._begin(together, steps, prompts)
        began_s = time.perf_counter()
        for _ in range(steps):
            batch.step([], run_ahead=True)
        for row in rows:
            batch.remove(row)
        return {"decoding": len(rows) * steps / (time.perf_counter() - began_s)}

    def _prefilled(self, tokens: Sequence[int]) -> list[Any]:
        """Return the KV caches of these tokens, prefilled on the first call. Callers must not change them."""
        key = tuple(tokens)
        if key not in self._held:
            self._held[key] = self._run(key)
        return self._held[key]

    def _run(self, tokens: Sequence[int]) -> list[Any]:
        """Prefill tokens into new caches, block by block."""
        caches = self._new()
        for start in range(0, len(tokens), self._block):
            piece = list(tokens[start : start + self._block])
            self._batches[False].step([PrefillPiece(caches, start, piece)])
        return caches

    def _least_rows(self) -> str:
        """Return the constant with the least number of rows that this model's batch decodes together.

        That is `pooled_rows` or `merged_rows`; "" if the batch never pools or merges rows.
        """
        (row,) = self._begin(True, 1, [[0, 0]])
        self._batches[True].step([])
        is_together = row.caches is None
        self._batches[True].remove(row)
        return ("merged_rows" if row.form is None else "pooled_rows") if is_together else ""

    def _begin(self, together: bool, steps: int, prompts: Sequence[Sequence[int]]) -> list[Row]:
        """Start an answer to each prompt; return the rows, each with its first token sampled."""
        pieces = []
        for prompt in prompts:
            *before, last = prompt
            if self._trimmable:
                caches = layers.fork(self._prefilled(before), self._new(), len(before))
            else:
                caches = self._run(before)
            row = Row(caches, array("I", prompt), RowSampler(RowSampling()), len(prompt), steps + 1)
            pieces.append(PrefillPiece(caches, len(before), [last], row))
        self._batches[together].step(pieces)
        return [piece.row for piece in pieces if piece.row is not None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the model, then answer each line of standard input until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.programs.device")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # log lines must not come between the replies
    chosen = setting_sources.load(vars(parser.parse_args(arguments)), os.environ)
    dtype = chosen.dtype if chosen.dtype != "auto" else models.default_dtype()
    machine.prepare()
    try:
        directory = DataDir.open(chosen.data_dir)
        folder = models.resolve(chosen.model, chosen.data_dir, dtype=dtype)
        loaded = models.load(folder, dtype=dtype, kv_bits=chosen.kv_bits)
        measuring = DeviceMeter(loaded, directory, replace(chosen, dtype=dtype))
        print(json.dumps(measuring.description), file=replies, flush=True)
        for line in sys.stdin:
            name, *asked = json.loads(line)
            print(json.dumps(getattr(measuring, name)(*asked)), file=replies, flush=True)
    except TurnkeepError as error:
        raise SystemExit(str(error)) from None
    mx.clear_streams()


if __name__ == "__main__":
    main()
