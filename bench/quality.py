"""`turnkeep bench quality`: the memory that quantised KV saves, and the quality that it costs.

The program `bench.programs.quality` runs the model as a worker does, and prints the figures of each window of
the text and of the answer after it. A window is a block: the geometric mean of the windows' perplexities
equals the perplexity over all tokens.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

import click
import msgspec

from .checks import Check, bounded, count
from .local import Program
from .plan import Corpus, Option, TextFile
from .run import Run
from .spec import Against, Bench, Findings, Plot
from .turns import Measure

FULL, EIGHT, FOUR = CASES = ("full precision", "8 bits", "4 bits")
#: A line of the program's output: bits, window, and values by the measures' names.
Line = tuple[int | None, int | None, dict[str, float]]
BITS: Final = {None: FULL, 8: EIGHT, 4: FOUR}
#: The most perplexity, relative to full precision; the packaged model has 1.002 and 1.13.
PERPLEXITY_BOUNDS: Final = {EIGHT: 1.02, FOUR: 1.25}
#: The least share of an answer's tokens before the first difference; the packaged model has 0.87 (8 bits).
EQUAL_BOUND: Final = 0.5

WINDOW: Final = "Tokens that are run together; the second half of them counts."


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """KV in 8 and 4 bits compared with full precision: perplexity, likeliest tokens, answers, bytes.

    The model runs as in a worker, on a text that is cut into windows. An answer continues the first half of
    each window greedily; it counts up to the first token that differs.
    """

    corpus: Corpus = "mt-bench"
    text: TextFile = None
    window: Annotated[int, Option(WINDOW, smoke=64, type=click.IntRange(min=16))] = 512
    windows: Annotated[int, Option("How many of them, at the most.", smoke=5)] = 16
    answer: Annotated[int, Option("Tokens of an answer.", smoke=6)] = 64
    answers: Annotated[int, Option("How many of them, at the most.", smoke=1)] = 16


PERPLEXITY = Measure("perplexity", "")
LIKELIEST = Measure("likeliest token equal", "share", "higher", log=False)
EQUAL = Measure("answer equal up to the first difference", "share", "higher", log=False)
WHOLE = Measure("answers equal as a whole", "share", "higher", log=False)
MEMORY = Measure("a token's KV in memory", "bytes")
DISK = Measure("a token's KV on disk", "bytes")
MEASURES: Final = {one.name: one for one in (PERPLEXITY, LIKELIEST, EQUAL, WHOLE, MEMORY, DISK)}
NOTES = (
    "Perplexity is taken over the second half of windows of {plan.window:,} tokens. Likeliest tokens are"
    " compared where all precisions have the same text before them; answers go their own way."
)
PLOTS = (
    Plot("points", "Perplexity of each window", (PERPLEXITY,), "Windows in the text's order.", x="window"),
    Plot("cdf", "How far answers are equal", (EQUAL,), "Up to the first token that differs."),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check the saved memory and the lost quality of each precision."""
    some = [case for case in CASES if found.of(DISK, case)]
    sizes = {case: [found.of(one, case)[0].value for one in (MEMORY, DISK)] for case in some}
    pairs = list(pairwise(some))
    name = "fewer bits take less memory and disk"
    yield count(name, pairs, lambda p: any(map(operator.le, sizes[p[0]], sizes[p[1]])), "steps")
    for case, bound in PERPLEXITY_BOUNDS.items():
        ratios = {"": found.compared(Against(PERPLEXITY, FULL), case)}
        yield bounded(f"{case} have at most {bound:g} times the perplexity", ratios, at_most=bound, log=True)
    name = f"8 bits answer alike for {EQUAL_BOUND:.0%} of an answer, and more"
    equal = found.numbers(EQUAL).get(EIGHT, [])
    yield bounded(name, {"": equal}, at_least=EQUAL_BOUND, unit="share")


async def measure(run: Run[Plan]) -> None:
    """Run the measuring program on a text, and keep the figures that it prints."""
    plan = run.plan
    options = [f"--{name}={getattr(plan, name)}" for name in ("window", "windows", "answer", "answers")]
    run.facts["model"] = run.where.model or "the packaged model"
    if run.where.model is not None:
        options.append(f"--model={run.where.model}")
    module, *told = run.where.program
    with tempfile.TemporaryDirectory(prefix="turnkeep-bench-") as folder:
        text = plan.text or Path(folder) / "text"
        if plan.text is None:
            text.write_text("\n\n".join(said for one in run.corpus.conversations for said in one), "utf-8")
        run.progress(0, None, "loading the model")
        named = (module, *told) if told else ("bench.programs.quality",)
        program = Program(*named, text, "--data-dir", folder, *options, "--bits", *filter(None, BITS))
        with run.owning(program):
            while said := await program.exchange():
                bits, window, figures = msgspec.json.decode(said, type=Line)
                for name, value in figures.items():
                    run.sample(MEASURES[name], BITS[bits], window, window or 0, value)
                run.progress(window or 0, None, f"{', '.join(figures)}, {BITS[bits]}")


BENCH = Bench(
    name="quality",
    plan=Plan,
    cases=CASES,
    measures=tuple(MEASURES.values()),
    against=tuple(Against(measure, FULL) for measure in (PERPLEXITY, MEMORY, DISK)),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    notes=NOTES,
)
