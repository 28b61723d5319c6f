"""`turnkeep bench quality`: what KV in fewer bits costs and saves, beside full precision.

The program `worker.quality` runs the model as a worker does, and prints a line for each window of the text
and each answer. A window is a block: the geometric mean of perplexity over windows is that over all tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import click
import msgspec

from .checks import Check, bounded, count
from .faults import BenchError
from .plan import Corpus, Option
from .program import lines
from .spec import Against, Bench, Measure, Plot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .run import Run
    from .samples import Findings

FULL, EIGHT, FOUR = CASES = ("full precision", "8 bits", "4 bits")
BITS: Final = {None: FULL, 8: EIGHT, 4: FOUR}
#: The most perplexity, relative to full precision; the packaged model has 1.002 and 1.13.
PERPLEXITY_BOUNDS: Final = {EIGHT: 1.02, FOUR: 1.25}
#: The least share of an answer's tokens before the first difference; the packaged model has 0.87 (8 bits).
EQUAL_BOUND: Final = 0.5


FILE: Final = click.Path(path_type=Path, exists=True, dir_okay=False)
WINDOW: Final = "Tokens that are run together; the second half of them counts."


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """KV in 8 and 4 bits beside full precision: perplexity, likeliest tokens, answers, and bytes.

    The model is run as a worker runs it, on a text that is cut into windows. An answer follows on the first
    half of a window, by the likeliest tokens; it counts up to the first token that differs.
    """

    corpus: Corpus = "mt-bench"
    text: Annotated[Path | None, Option("A file of text, in the place of a corpus.", type=FILE)] = None
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
MEASURES = (PERPLEXITY, LIKELIEST, EQUAL, WHOLE, MEMORY, DISK)
AGAINST = tuple(Against(measure, FULL) for measure in (PERPLEXITY, MEMORY, DISK))
PLOTS = (
    Plot("points", "Perplexity of each window", (PERPLEXITY,), "Windows in the text's order.", x="window"),
    Plot("cdf", "How far answers are equal", (EQUAL,), "Up to the first token that differs."),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check what the precisions save, and what they cost."""
    some = [case for case in CASES if found.of(DISK, case)]
    sizes = {case: [found.of(one, case)[0].value for one in (MEMORY, DISK)] for case in some}
    pairs = list(pairwise(some))
    wrong = [(a, b) for a, b in pairs if any(map(operator.le, sizes[a], sizes[b]))]
    yield count("fewer bits take less memory and disk", wrong, pairs, "steps")
    for case, bound in PERPLEXITY_BOUNDS.items():
        ratios = {"": found.ratios(PERPLEXITY, case, FULL)}
        yield bounded(f"{case} have at most {bound:g} times the perplexity", ratios, at_most=bound, log=True)
    equal = {"": list(found.blocks(EQUAL, EIGHT).values())}
    name = f"8 bits answer alike for {EQUAL_BOUND:.0%} of an answer, and more"
    yield bounded(name, equal, at_least=EQUAL_BOUND, unit="share")


def notes(plan: Plan) -> Iterator[str]:
    """Say how the precisions were compared."""
    yield (
        f"Perplexity is taken over the second half of windows of {plan.window:,} tokens. Likeliest tokens are"
        " compared where all precisions have the same text before them; answers go their own way."
    )


class Line(msgspec.Struct):
    """A line of the program's output, by `kind`: a precision (`kept`), a `window`, an `answer`.

    `loss` is the sum of -log p of `tokens` tokens. `same` counts a window's likeliest tokens that are those
    of full precision, or an answer's tokens before the first difference.
    """

    kind: str
    kv_bits: int | None
    caches: str = ""
    kv_bytes_per_token: int = 0
    disk_bytes_per_token: float = 0.0
    tokens: int = 0
    loss: float = 0.0
    same: int = 0


async def measure(run: Run[Plan]) -> None:
    """Run the program."""
    plan = run.plan
    options = [f"--{name}={getattr(plan, name)}" for name in ("window", "windows", "answer", "answers")]
    run.facts["model"] = run.where.model or "the packaged model"
    if run.where.model is not None:
        options.append(f"--model={run.where.model}")
    module, *told = run.where.program
    program = run.where.program if told else (f"{module}.quality",)
    blocks: defaultdict[tuple[str, int | None], Iterator[int]] = defaultdict(itertools.count)
    with tempfile.TemporaryDirectory(prefix="turnkeep-bench-") as folder:
        text = Path(folder) / "text"
        text.write_text(_text(run), "utf-8")
        run.progress(0, None, "loading the model")
        said = lines(*program, text, "--data-dir", folder, *options, "--bits", *filter(None, BITS))
        async with contextlib.aclosing(said):
            async for one in said:
                line = msgspec.json.decode(one, type=Line)
                block = next(blocks[line.kind, line.kv_bits])
                _keep(run, line, block)
                run.progress(block, None, f"{line.kind} {block + 1}, {BITS[line.kv_bits]}")


def _keep(run: Run[Plan], line: Line, block: int) -> None:
    case = BITS[line.kv_bits]
    if line.kind == "kept":
        run.facts[f"caches, {case}"] = line.caches
        run.sample(MEMORY, case, None, block, line.kv_bytes_per_token)
        run.sample(DISK, case, None, block, line.disk_bytes_per_token)
        return
    share = line.same / line.tokens
    if line.kind == "window":
        run.sample(PERPLEXITY, case, block, block, math.exp(line.loss / line.tokens))
    if line.kv_bits is not None:
        values = {LIKELIEST: share} if line.kind == "window" else {EQUAL: share, WHOLE: float(share == 1)}
        for measure, value in values.items():
            run.sample(measure, case, block, block, value)


def _text(run: Run[Plan]) -> str:
    """Return the text of the plan's file, or all utterances of the corpus."""
    path = run.plan.text
    if path is None:
        return "\n\n".join(said for one in run.corpus.conversations for said in one)
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"the text {path} cannot be read: {error}") from None


BENCH = Bench(
    name="quality",
    title="KV in fewer bits",
    plan=Plan,
    cases=CASES,
    measures=MEASURES,
    against=AGAINST,
    plots=PLOTS,
    checks=checks,
    measure=measure,
    same=("model",),
    notes=notes,
)
