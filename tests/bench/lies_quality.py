"""Precisions that lose more than they say, or save less."""

from __future__ import annotations

import random

from msgspec.structs import replace
from saboteurs import Lie, Suite

from bench.quality import BENCH, CASES, DISK, EIGHT, EQUAL, FOUR, FULL, MEMORY, PERPLEXITY, Plan
from bench.spec import Sample, Turn
from worker.models import model
from worker.quality import Side

PLAN = Plan(corpus="built-in")
BYTES = {FULL: 46_080, EIGHT: 12_960, FOUR: 7_200}
WORSE = {FULL: 1.0, EIGHT: 1.0007, FOUR: 1.11}


def honest(seed: int) -> tuple[list[Turn], list[Sample]]:
    """Windows that differ much, precisions that differ by a little of it, and answers that hold or do not."""
    noise = random.Random(seed)
    windows = [20 * noise.lognormvariate(0, 0.4) for _ in range(PLAN.windows)]
    found = []
    for case in CASES:
        found += [Sample(one.name, case, None, 0, BYTES[case]) for one in (MEMORY, DISK)]
        for i, window in enumerate(windows):
            value = window * WORSE[case] * noise.lognormvariate(0, 0 if case == FULL else 0.02)
            found.append(Sample(PERPLEXITY.name, case, i, i, value))
        for i in range(PLAN.answers if case == EIGHT else 0):
            share = 1.0 if noise.random() < 0.8 else noise.random()
            found.append(Sample(EQUAL.name, case, i, i, share))
    return [], found


def sized(sample: Sample) -> Sample:
    return replace(sample, value=46_080) if sample.measure == DISK.name else sample


def times(measure: str, case: str, factor: float):
    def bend(sample: Sample) -> Sample:
        mine = (sample.measure, sample.case) == (measure, case)
        return replace(sample, value=sample.value * factor) if mine else sample

    return bend


def keep_in_full() -> None:
    """Load the model without fewer bits, whatever was asked for."""
    load = model.load
    model.load = lambda folder, *, kv_bits, **more: load(folder, kv_bits=None, **more)


def lose_half() -> None:
    """Count twice the loss of what keeps KV in 8 bits."""
    score = Side.score

    def worse(self: Side, tokens: list[int]) -> tuple[float, list[int]]:
        loss, best = score(self, tokens)
        return loss * (2 if self._bits == 8 else 1), best

    Side.score = worse


LIES = (
    Lie("saves nothing", "fewer bits take less", bend_sample=sized, serve=keep_in_full),
    Lie("loses with 8 bits", "8 bits have", bend_sample=times("perplexity", EIGHT, 1.05), serve=lose_half),
    Lie("loses with 4 bits", "4 bits have", bend_sample=times("perplexity", FOUR, 1.25)),
    Lie("answers otherwise", "8 bits answer alike", bend_sample=times(EQUAL.name, EIGHT, 0.3)),
)
LONG = ("--corpus", "built-in", "--window", "16", "--answer", "1000", "--answers", "100")
SUITE = Suite(BENCH, PLAN, honest, LIES, LONG, model="wide_model", program="worker.quality")
