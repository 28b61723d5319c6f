"""`turnkeep bench device`: measures this device, and suggests a worker's constants for it.

Two programs take turns: `bench.programs.device` runs the worker's own batch, and `bench.programs.in_process`
runs mlx-lm. A round is a block of the statistics.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import msgspec

from . import stats
from .checks import Check, bounded
from .corpus import Texts
from .faults import BenchError
from .local import Program, common_blas
from .plan import Corpus, Option
from .run import BenchRun
from .spec import Bench, CaseRatio, Findings, Plot
from .turns import Measure

WORKER, MLX = "worker", "mlx-lm"
#: Cases of decoding: whether rows are pooled or merged.
TOGETHER, APART = "together", "apart"
#: A measurement that takes longer has failed.
TIMEOUT_S: Final = 600.0
#: The tokens of a prompt that mlx-lm prefills at a time.
MLX_PIECE: Final = 2048
#: The least share of the best rate for a shorter piece, which delays others less and takes less memory.
FAST_ENOUGH: Final = 0.95
#: A measured number of layers is rounded up, unless it exceeds a whole number by less than this.
ROUNDING: Final = 0.05

NOTES: Final = (
    "A prompt of {plan.prompt:,} tokens is evaluated after each piece. Rows have {plan.context:,} tokens of"
    " context and answer with {plan.answer:,}, without drafts. Rows together are pooled or merged; copying"
    " them is part of the worker's time, and not of mlx-lm's. Memory is that of the piece that exceeds its"
    " estimate most. A dash: the figures suggest no value."
)

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """This device, by the worker's own batch: prefill, decoding, memory.

    mlx-lm's own loop is measured for comparison. The last table has the constants of
    worker/device/machine.py in use, and those that the figures suggest.
    """

    prompt: Annotated[int, Option("Tokens of the prompt.", smoke=256)] = 2048
    pieces: Annotated[Numbers, Option("Tokens that are prefilled at a time.", smoke=(64, 128, 256))] = (
        *(16, 32, 64, 128),
        *(256, 512, 1024, 2048),
    )
    rows: Annotated[Numbers, Option("Answers at a time.", smoke=(1, 2))] = (1, 2, 3, 4, 8, 16)
    context: Annotated[int, Option("Tokens before each answer; at least a block and one.", smoke=129)] = 256
    answer: Annotated[int, Option("Tokens of an answer.", smoke=4)] = 32
    rounds: Annotated[int, Option("How often everything is measured, after one to warm up.", smoke=1)] = 5
    corpus: Corpus = "mt-bench"


class DeviceDescription(msgspec.Struct, frozen=True):
    """The program's description of the model, the device, and the worker's settings and constants."""

    folder: str
    model: str
    device: str
    least: str
    block: int
    context: int
    constants: dict[str, int]


PIECE, ROW = "tokens a piece", "at a time"
PREFILL = Measure("prefill", "tokens/s", levels=PIECE)
SCRATCH = Measure("scratch memory", "share", levels=PIECE)
KEPT = Measure("layers kept", "", levels=PIECE)
DECODING = Measure("decoding", "tokens/s", levels=ROW)
MEASURES: Final = {one.name: one for one in (PREFILL, SCRATCH, KEPT, DECODING)}
PLOTS = (
    Plot("by x", "Prefill", (PREFILL,), "Of one prompt; mlx-lm has pieces of up to 2,048."),
    Plot("by x", "Decoding", (DECODING,), "Of all rows together."),
    Plot("by x", "Memory of a piece", (SCRATCH,), "Measured, as a share of the estimate."),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check that no piece takes more memory than estimated."""
    most = stats.grouped((one.block, one.value) for one in found.of(SCRATCH))
    name = "a piece of a prompt takes at most its estimated memory"
    yield bounded(name, {"": [max(some) for some in most.values()]}, at_most=1, unit="share")


def prompt_blocks(shares: Mapping[int, float], block: int) -> int | None:
    """Return how many blocks of a prompt to prefill at once: the fewest with nearly the best rate.

    `shares` has, by the tokens of a piece, the rate as a share of the best rate; `block` is a block's tokens.
    None without pieces.
    """
    return min((piece // block for piece, share in shares.items() if share >= FAST_ENOUGH), default=None)


def rows_together(ratios: Mapping[int, float]) -> int | None:
    """Return the least number of rows from which on decoding together is never slower than one by one.

    `ratios` has, by the number of rows, the rate of rows together divided by the rate of rows apart. None if
    even the most rows are slower together.
    """
    least = None
    for num in sorted(ratios, reverse=True):
        if ratios[num] < 1:
            break
        least = num
    return least


def kept_layers(kept: Mapping[int, float], block: int) -> int | None:
    """Return how many layers had temporary arrays in memory at once, at the most.

    `kept` has the measured numbers by the tokens of a piece. Pieces shorter than a block are ignored, since
    growing caches take more memory than such a piece; None without others.
    """
    most = max((number for piece, number in kept.items() if piece >= block), default=None)
    return None if most is None else max(1, math.ceil(most - ROUNDING))


def closing(found: Findings[Plan]) -> Sequence[Sequence[str]]:
    """Return a table of the constants in use, and those that the figures suggest."""
    facts, block = found.facts, int(found.facts["block"])
    kept = {piece: [*found.blocks(KEPT, WORKER, piece).values()] for piece in found.plan.pieces}
    rates = {piece: found.blocks(PREFILL, WORKER, piece) for piece in found.plan.pieces if piece % block == 0}
    best = max(rates.values(), key=lambda some: median(some.values() or [0]), default={})
    shares = {piece: stats.ratios(best, some) for piece, some in rates.items()}
    ratios = {num: found.compared(DECODING, APART, TOGETHER, num) for num in found.plan.rows}
    if facts["least"] == "pooled_rows":
        ratios.pop(1, None)  # a single row that is pooled has no drafts
    values = dict.fromkeys(("pooled_rows", "merged_rows", "freed_bytes"), "not measured") | {
        "prompt_blocks": str(prompt_blocks(_medians(shares), block) or "-"),
        "kept_layers": str(kept_layers(_medians(kept), block) or "-"),
    }
    if facts["least"]:
        values[str(facts["least"])] = str(rows_together(_medians(ratios)) or "-")
    rows = [(name, f"{facts[name]:,}", value) for name, value in values.items()]
    return [(f"constants of {facts['device']}", "in use", "suggested"), *rows]


def _medians(figures: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {x: median(some) for x, some in figures.items() if some}


async def measure(run: BenchRun[Plan]) -> None:
    """Run the bench: start both programs, let them take turns, and record their figures in `run`.

    Raises `BenchError` if the model's context is too short for the plan.
    """
    with tempfile.TemporaryDirectory(prefix="turnkeep-bench-") as folder:
        model = () if run.where.model is None else ("--model", run.where.model)
        program = Program("bench.programs.device", "--data-dir", folder, *model)
        run.progress(0, None, "loading the model")
        with run.owning(program):
            said = msgspec.json.decode(await program.exchange(), type=DeviceDescription)
            if said.context < max(run.plan.prompt, run.plan.context + run.plan.answer):
                limit = f"the context of {said.model} is {said.context:,} tokens"
                raise BenchError(f"{limit}; take a shorter --prompt and --context")
            run.facts |= {"model": said.model, "device": said.device, "least": said.least}
            run.facts |= {"block": said.block, **said.constants}
            mlx = Program("bench.programs.in_process", said.folder, like=program)
            with run.owning(mlx):
                await mlx.exchange()
                run.facts["BLAS"] = common_blas(program, mlx)
                await _measure(run, said, program, mlx)


async def _measure(run: BenchRun[Plan], said: DeviceDescription, program: Program, mlx: Program) -> None:
    plan, order = run.plan, random.Random(0)  # noqa: S311  # an order, not a secret
    texts = Texts(Path(said.folder), run.corpus.texts())
    prompt = texts.next_tokens(plan.prompt)
    prompts = [texts.next_tokens(max(plan.context, said.block + 1)) for _ in range(max(plan.rows))]

    # Groups of measurements to compare, which directly follow each other: case, level and request of each.
    prefills: list[tuple[str, int, tuple[Any, ...]]] = [
        (WORKER, piece, ("prefill", piece, prompt)) for piece in plan.pieces
    ]
    groups = [[*prefills, (MLX, min(MLX_PIECE, plan.prompt), ("prefill", prompt))]]
    ways = (TOGETHER, APART) if said.least else (APART,)
    for num in plan.rows:
        some = prompts[:num]
        decodes = [(case, num, ("decode", case == TOGETHER, plan.answer, some)) for case in ways]
        groups.append([(MLX, num, ("decode", plan.answer, some)), *decodes])
    for block in range(-1, plan.rounds):
        shuffled = (order.sample(group, len(group)) for group in order.sample(groups, len(groups)))
        for case, x, asked in chain.from_iterable(shuffled):
            run.progress(block + 1, plan.rounds + 1, f"round {block + 1}: {case} {x}")
            side = mlx if case == MLX else program
            line = await side.exchange(msgspec.json.encode(asked) + b"\n", TIMEOUT_S)
            for name, value in msgspec.json.decode(line, type=dict[str, float]).items():
                if block >= 0:
                    run.sample(MEASURES[name], case, x, block, value)


BENCH = Bench(
    name="device",
    plan=Plan,
    cases=(WORKER, TOGETHER, APART, MLX),
    measures=tuple(MEASURES.values()),
    against=(CaseRatio(PREFILL, MLX), CaseRatio(DECODING, MLX)),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    notes=NOTES,
    closing=closing,
)
