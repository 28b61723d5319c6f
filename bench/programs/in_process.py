"""A program that runs mlx-lm alone, for comparison: no network, no log, no snapshots.

`python -m bench.programs.in_process MODEL` runs new sessions for each line of its standard input, and prints
a line with their turns. The input is `[prompts, max_tokens]` in JSON: a list for each turn, with a prompt for
each session. Sessions keep their caches from turn to turn. The first line of output, `[]`, means ready.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx_lm
import msgspec
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model

from bench.turns import Turn

Prompts = list[list[int]]


class Engine:
    """Runs mlx-lm with one model, and keeps each session's prompt cache from turn to turn."""

    def __init__(self, folder: str) -> None:
        """Load the model as a worker with its default settings does."""
        self._caches: dict[int, list[Any]] = {}
        self._model, tokenizer = mlx_lm.load(folder, lazy=True)[:2]
        if mx.default_device() == mx.Device(mx.cpu):
            self._model = dequantize_model(self._model)
            self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._batches: Any = BatchGenerator(
            self._model, stop_tokens=[[token] for token in sorted(self._ends)]
        )

    def converse(self, prompts: list[Prompts], max_tokens: int) -> list[list[Turn]]:
        """Run new sessions, and answer greedily; `prompts` has a list for each turn, with one per session."""
        began_s = time.perf_counter()
        answers = [self._answer(asked, max_tokens, began_s) for asked in prompts]
        self._caches.clear()
        mx.clear_cache()
        return answers

    def _answer(self, prompts: Prompts, max_tokens: int, began_s: float) -> list[Turn]:
        sent_s = time.perf_counter()
        drawn = self._alone(prompts[0], max_tokens) if len(prompts) == 1 else self._batch(prompts, max_tokens)
        tokens: list[list[int]] = [[] for _ in prompts]
        times_s: list[list[float]] = [[] for _ in prompts]
        for session, token in drawn:
            times_s[session].append(time.perf_counter() - sent_s)
            tokens[session].append(token)
        return [
            Turn(
                at_s=sent_s - began_s,
                first_s=when_s[0],
                total_s=when_s[-1],
                gaps_s=tuple(later - sooner for sooner, later in itertools.pairwise(when_s)),
                tokens=tuple(said),
            )
            for said, when_s in zip(tokens, times_s, strict=True)
        ]

    def _alone(self, prompt: list[int], max_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield the tokens of a single session's answer, made by mlx-lm's fastest function for that case."""
        cache = self._caches.setdefault(0, make_prompt_cache(self._model))
        steps = generate_step(mx.array(prompt), self._model, max_tokens=max_tokens, prompt_cache=cache)
        for token, _ in steps:
            yield 0, int(token)
            if token in self._ends:
                break

    def _batch(self, prompts: Prompts, max_tokens: int) -> Iterator[tuple[int, int]]:
        caches = [self._caches.get(session) for session in range(len(prompts))]
        uids = self._batches.insert(prompts, [max_tokens] * len(prompts), caches=caches)
        running = {uid: session for session, uid in enumerate(uids)}
        while running:
            for response in self._batches.next_generated():
                session = running[response.uid]
                yield session, int(response.token)
                if response.finish_reason is not None:
                    self._caches[session] = response.prompt_cache
                    del running[response.uid]


def main() -> None:
    """Load the model, then answer each line of input. The bench reports the last line of a traceback."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print, but not between the replies
    engine = Engine(sys.argv[1])
    print("[]", file=replies, flush=True)
    for line in sys.stdin:
        prompts, max_tokens = msgspec.json.decode(line, type=tuple[list[Prompts], int])
        answers = engine.converse(prompts, max_tokens)
        print(msgspec.json.encode(answers).decode(), file=replies, flush=True)


if __name__ == "__main__":
    main()
