"""A program that measures the cost of quantised KV.

`turnkeep bench quality` runs `python -m bench.programs.quality TEXT --data-dir FOLDER ...`, and makes a
report of its output. Each line is a JSON array, printed as soon as it is measured: the bits, the window of
the text, and the measured values by name. Loads the model as a worker does, once per precision, and runs it
with the worker's attention, without NATS, sessions or the scheduler.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.models import blas
from worker.process import setting_sources
from worker.process.constants import CONSTANTS

blas.preload()  # before anything imports MLX

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from cache.kv import layers  # noqa: E402
from cache.names import blocks  # noqa: E402
from cache.names.identity import Identity  # noqa: E402
from cache.names.snapshot import Name  # noqa: E402
from cache.names.tokens import pack  # noqa: E402
from cache.store import file_bytes  # noqa: E402
from worker.batch.forward import Forward  # noqa: E402
from worker.device import machine  # noqa: E402
from worker.models import model as models  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from worker.models.model import LoadedModel


@dataclass(frozen=True, slots=True)
class Plan:
    """The amount of work. `window`, `answer` and `block` are in tokens, `windows` and `answers` are numbers.

    An answer continues the first half of a window.
    """

    window: int
    windows: int
    answer: int
    answers: int
    block: int


class Side:
    """Runs a model with KV of one precision, and measures its outputs and the size of its KV."""

    def __init__(self, loaded: LoadedModel, plan: Plan, kv_bits: int | None) -> None:
        self._model = loaded.model
        self._per_token = loaded.kv.bytes_per_token
        self._plan = plan
        self._bits = kv_bits
        Forward(loaded.model)  # installs the worker's attention

    def score(self, tokens: Sequence[int]) -> tuple[float, list[int]]:
        """Run a window; return the sum of -log p over its second half, and the likeliest tokens there.

        Each scored token has at least half a window before it. Perplexity is exp of the mean of -log p
        (Jelinek, Mercer, Bahl and Baker, 1977). llama.cpp's `perplexity` also scores the second halves of
        consecutive windows.
        """
        half = self._plan.window // 2
        loss, best = 0.0, []
        for start, logits in self._run(make_prompt_cache(self._model), tokens):
            ahead = tokens[start + 1 : start + 1 + logits.shape[0]]
            first = max(half - 1 - start, 0)
            some = logits[first : len(ahead)]
            if not some.shape[0]:
                continue
            targets = mx.array(list(ahead[first:]))
            own = mx.take_along_axis(some, targets[:, None], axis=-1)[:, 0]
            losses = np.array(mx.logsumexp(some, axis=-1) - own)
            loss += float(losses.sum(dtype=np.float64))
            best += np.array(mx.argmax(some, axis=-1)).tolist()
        return loss, best

    def answer(self, tokens: Sequence[int]) -> list[int]:
        """Decode the plan's number of tokens greedily after these tokens; return them."""
        caches = make_prompt_cache(self._model)
        *_, (_, logits) = self._run(caches, tokens)
        answer = [_most_likely(logits[-1])]
        while len(answer) < self._plan.answer:
            logits = self._model(mx.array([answer[-1:]]), cache=caches)[0, -1]
            answer.append(_most_likely(logits))
        return answer

    def sizes(self, tokens: Sequence[int]) -> dict[str, float]:
        """Return the bytes of KV per token, on the device and in a block's snapshot file, by measure name."""
        block = self._plan.block
        caches = make_prompt_cache(self._model)
        list(self._run(caches, tokens[:block]))
        cut = layers.cut(caches, 0, block, at_end=True)
        if cut is None:
            raise AssertionError("a cut without a size limit cannot fail")
        described = layers.describe(caches)
        digest = "0" * 64  # as long as a real digest: only the file's size matters
        identity = Identity(
            weights=digest,
            config=digest,
            tokenizer=digest,
            kv_dtype="float32",
            block_tokens=block,
            caches=described,
        )
        name = Name(blocks.root(identity.digest(), "default"), 0, pack(tokens[:block]))
        on_disk = file_bytes(name, identity, cut) / block
        return {"a token's KV in memory": self._per_token, "a token's KV on disk": on_disk}

    def _run(self, caches: list[Any], tokens: Sequence[int]) -> Iterator[tuple[int, mx.array]]:
        """Prefill by whole blocks, as a worker does; yield the start of each block and its logits."""
        for start in range(0, len(tokens), self._plan.block):
            piece = mx.array([list(tokens[start : start + self._plan.block])])
            logits = self._model(piece, cache=caches)[0].astype(mx.float32)
            mx.eval(logits)
            yield start, logits


class Comparison:
    """Compares each precision with the first one, which is full precision."""

    def __init__(self, text: str, plan: Plan) -> None:
        self._text = text
        self._plan = plan
        self._best: list[list[int]] = []
        self._answers: list[list[int]] = []

    def add(self, loaded: LoadedModel, kv_bits: int | None) -> None:
        """Measure the model with this precision and print the figures. Exits if the text is too short."""
        plan = self._plan
        tokens = loaded.tokenizer.encode(self._text, at_start=True)
        found = [tokens[at : at + plan.window] for at in range(0, len(tokens), plan.window)]
        windows = [window for window in found if len(window) == plan.window][: plan.windows]
        if not windows:
            raise SystemExit(f"the text has {len(tokens)} tokens, fewer than a window of {plan.window}")
        side = Side(loaded, plan, kv_bits)
        _print(kv_bits, None, side.sizes(windows[0]))
        for i, window in enumerate(windows):
            loss, best = side.score(window)
            figures = {"perplexity": math.exp(loss / len(best))}
            if kv_bits is None:
                self._best.append(best)
            else:
                same = sum(a == b for a, b in zip(best, self._best[i], strict=True))
                figures["likeliest token equal"] = same / len(best)
            _print(kv_bits, i, figures)
        for i, window in enumerate(windows[: plan.answers]):
            answer = side.answer(window[: plan.window // 2])
            if kv_bits is None:
                self._answers.append(answer)
                continue
            pairs = zip(answer, self._answers[i], strict=True)
            same = next((at for at, (a, b) in enumerate(pairs) if a != b), plan.answer)
            share = same / len(answer)
            figures = {"answer equal up to the first difference": share}
            _print(kv_bits, i, figures | {"answers equal as a whole": float(share == 1)})


def _most_likely(logits: mx.array) -> int:
    return int(np.array(mx.argmax(logits)))


def _print(kv_bits: int | None, window: int | None, figures: dict[str, float]) -> None:
    print(json.dumps([kv_bits, window, figures]), flush=True)  # noqa: T201  # the program's output


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure full precision, then each number of bits, and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.programs.quality")
    parser.add_argument("text", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--bits", type=int, nargs="+", required=True)
    for name in ("--window", "--windows", "--answer", "--answers"):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args(arguments)
    chosen = setting_sources.load({"model": given.model, "data_dir": given.data_dir}, os.environ)
    dtype = chosen.dtype if chosen.dtype != "auto" else models.default_dtype()
    machine.prepare()
    block = min(CONSTANTS.block_tokens, given.window)
    plan = Plan(given.window, given.windows, given.answer, given.answers, block)
    try:
        folder = models.resolve(chosen.model, chosen.data_dir, dtype=dtype)
        comparison = Comparison(given.text.read_text("utf-8"), plan)
        for bits in (None, *given.bits):
            comparison.add(models.load(folder, dtype=dtype, kv_bits=bits), bits)
    except models.ModelError as error:
        raise SystemExit(str(error)) from None
    mx.clear_streams()


if __name__ == "__main__":
    main()
