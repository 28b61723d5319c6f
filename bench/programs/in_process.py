"""A program that runs mlx-lm alone, for comparison: `python -m bench.programs.in_process MODEL`.

`turnkeep bench device` runs it beside `bench.programs.device`. Each line of its input is a JSON array: the
name of a method of `MlxLm`, and its arguments. For each line it prints the measured values by the names of
the bench's measures. The first line of output, `{}`, means ready.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.utils import dequantize_model


class MlxLm:
    """Runs mlx-lm with one model."""

    def __init__(self, folder: str) -> None:
        """Load the model as a worker with its default settings does."""
        self._model, tokenizer = mlx_lm.load(folder, lazy=True)[:2]
        if mx.default_device() == mx.Device(mx.cpu):
            self._model = dequantize_model(self._model)
            self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._batches: Any = BatchGenerator(
            self._model, stop_tokens=[[token] for token in sorted(self._ends)]
        )

    def prefill(self, prompt: Sequence[int]) -> dict[str, float]:
        """Prefill a prompt and sample one token; return `{"prefill": rate}`, in prompt tokens per second."""
        began_s = time.perf_counter()
        next(self._alone(prompt, 1))
        return {"prefill": len(prompt) / (time.perf_counter() - began_s)}

    def decode(self, steps: int, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Answer all prompts at once, greedily, with `steps` tokens after the first one.

        Return `{"decoding": rate}`, the tokens per second while all answers run; `{}` if they never do so at
        the same time.
        """
        alone = len(prompts) == 1
        rows = (0 for _ in self._alone(prompts[0], steps + 1)) if alone else self._batch(prompts, steps + 1)
        times_s: list[list[float]] = [[] for _ in prompts]
        for row in rows:
            times_s[row].append(time.perf_counter())
        mx.clear_cache()
        rate = rate_of(times_s)
        return {} if rate is None else {"decoding": rate}

    def _alone(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yield the tokens of a single answer, made by mlx-lm's fastest function for that case."""
        for token, _ in generate_step(mx.array(list(prompt)), self._model, max_tokens=max_tokens):
            yield int(token)
            if token in self._ends:
                break

    def _batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[int]:
        """Yield the number of a prompt for each token of its answer."""
        uids = self._batches.insert(list(map(list, prompts)), [max_tokens] * len(prompts))
        running = {uid: row for row, uid in enumerate(uids)}
        while running:
            for response in self._batches.next_generated():
                yield running[response.uid]
                if response.finish_reason is not None:
                    del running[response.uid]


def rate_of(times_s: Sequence[Sequence[float]]) -> float | None:
    """Return the tokens per second of all rows while all run, from the times of each row's tokens.

    None if they never run at the same time.
    """
    began_s, ended_s = max(some[0] for some in times_s), min(some[-1] for some in times_s)
    num_tokens = sum(began_s < at <= ended_s for some in times_s for at in some)
    return num_tokens / (ended_s - began_s) if ended_s > began_s else None


def main() -> None:
    """Load the model, then answer each line of input. The bench reports the last line of a traceback."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print, but not between the replies
    engine = MlxLm(sys.argv[1])
    print("{}", file=replies, flush=True)
    for line in sys.stdin:
        name, *asked = json.loads(line)
        print(json.dumps(getattr(engine, name)(*asked)), file=replies, flush=True)


if __name__ == "__main__":
    main()
