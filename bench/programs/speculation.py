"""A program that answers with and without drafts: `python -m bench.programs.speculation --data-dir FOLDER`.

`turnkeep bench speculation` runs it. It loads a model, and a draft model if one is named, as a worker does,
and prints a line that describes them. Each line of its input is a JSON array with the arguments of
`Answering.answer`; for each line it prints the result. Each side (no drafts, prompt lookup, draft model) has
a batch of the worker's own code; all use the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from array import array
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.models import blas
from worker.process import setting_sources

blas.preload()  # before anything imports MLX

import anyio  # noqa: E402
import mlx.core as mx  # noqa: E402

from cache.names.policy import FULL  # noqa: E402
from turnkeep_client.errors import TurnkeepError  # noqa: E402
from turnkeep_client.messages import JsonSchema, JsonSchemaFormat  # noqa: E402
from worker.batch.row_sampler import RowSampler, Sampling  # noqa: E402
from worker.batch.rows import PrefillPiece, Row  # noqa: E402
from worker.device import machine  # noqa: E402
from worker.device.served_model import ServedModel  # noqa: E402
from worker.models import model as models  # noqa: E402
from worker.text.grammar import Grammars  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker.models.model import LoadedModel

#: The start date of every session, for chat templates that use it.
_DAY = datetime(2026, 1, 1, tzinfo=UTC)


class Answering:
    """Decodes answers, with a batch for each side. Nothing else may run on the device meanwhile."""

    def __init__(self, loaded: LoadedModel, draft: LoadedModel | None, trials: Path) -> None:
        """Make each side's batch as a worker does: without drafts, with prompt lookup, with a draft model."""
        self._tokenizer = loaded.tokenizer
        self._grammars = Grammars(loaded.tokenizer)
        served = partial(
            ServedModel, loaded, lambda _: True, block_tokens=128, limit_bytes=None, trials=trials
        )
        self._sides = {"plain": served(max_draft=0), "lookup": served(max_draft=None)}
        if draft is not None:
            self._sides["draft model"] = served(max_draft=None, draft=draft)
        self.description = {
            "model": loaded.name,
            "draft model": draft.name if draft is not None else "none",
            "device": machine.name(),
            "sides": [*self._sides],
        }

    def answer(
        self, side: str, prompts: Sequence[str], most: int, temperature: float, schema: Any
    ) -> dict[str, Any]:
        """Decode answers to all prompts at once, each of up to `most` tokens.

        Returns the answers' tokens, the tokens/s without the first token of each answer, and the numbers of
        drafted and accepted tokens. With `schema`, a JSON schema, all answers are JSON that fits it.
        """
        served = self._sides[side]
        batch, spoken = served.batch, served.batch.speculation
        before = spoken.num_drafted, spoken.num_accepted
        ends = self._tokenizer.eos_ids
        rows = [self._begin(served, text, most, temperature, schema) for text in prompts]
        batch.step([piece for piece, _ in rows])
        answers: dict[Row, list[int]] = {row: [row.drawn[0].token] for _, row in rows}
        began_s, num = time.perf_counter(), 0
        while batch.rows:
            for row in batch.rows:
                if row.num_left <= 0 or answers[row][-1] in ends:
                    batch.remove(row)
            batch.step([], run_ahead=True)
            for row in batch.rows:
                drawn = [one.token for one in row.drawn]
                end = next((i + 1 for i, token in enumerate(drawn) if token in ends), len(drawn))
                answers[row] += drawn[:end]
                num += end
        mx.synchronize()
        rate = num / (time.perf_counter() - began_s)
        drafted, right = spoken.num_drafted - before[0], spoken.num_accepted - before[1]
        return {"tokens": [*answers.values()], "rate": rate, "drafted": drafted, "right": right}

    def _begin(
        self, served: ServedModel, text: str, most: int, temperature: float, schema: Any
    ) -> tuple[PrefillPiece, Row]:
        asked = None if schema is None else JsonSchemaFormat(JsonSchema(schema))
        grammar = None if asked is None else anyio.run(self._grammars.compiled, asked)
        sampling = Sampling(temperature, seed=len(text), grammar=grammar)
        tokens = self._tokens(text)
        caches = served.make_caches(FULL)
        sampler = RowSampler(sampling, end_tokens=self._tokenizer.eos_ids)
        row = Row(caches, array("I", tokens), sampler, len(tokens), most)
        return PrefillPiece(caches, 0, tokens, row), row

    def _tokens(self, text: str) -> list[int]:
        if self._tokenizer.has_template:
            said = [{"role": "user", "content": text}]
            text = self._tokenizer.render(said, add_generation_prompt=True, started=_DAY)
        return [*self._tokenizer.encode(text, at_start=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Load the models, then answer each line of standard input until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.programs.speculation")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--draft-model")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # log lines must not come between the replies
    chosen = setting_sources.load(vars(parser.parse_args(arguments)), os.environ)
    dtype = chosen.dtype if chosen.dtype != "auto" else models.default_dtype()
    machine.prepare()

    def load(name: str | None) -> LoadedModel:
        return models.load(models.resolve(name, chosen.data_dir, dtype=dtype), dtype=dtype)

    try:
        draft = None if chosen.draft_model is None else load(chosen.draft_model)
        answering = Answering(load(chosen.model), draft, chosen.data_dir / "trials.json")
        print(json.dumps(answering.description), file=replies, flush=True)
        for line in sys.stdin:
            print(json.dumps(answering.answer(*json.loads(line))), file=replies, flush=True)
    except TurnkeepError as error:
        raise SystemExit(str(error)) from None
    mx.clear_streams()


if __name__ == "__main__":
    main()
