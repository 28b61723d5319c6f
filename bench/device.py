"""`turnkeep bench device`: measures this device, and suggests a worker's constants for it.

Two programs take turns: `bench.programs.device` runs the worker's own batch, snapshots and NATS server, and
`bench.programs.in_process` runs mlx-lm. A round is a block of the statistics.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import msgspec

from . import stats
from .checks import Check, bounded, count
from .corpus import Texts
from .faults import BenchError
from .local import Program, common_blas, free_port
from .plan import Corpus, Option, Rounds, Seed, Timeout
from .run import Run
from .spec import Against, Bench, Findings, Plot
from .stats import Estimate
from .turns import Measure, Turn

WORKER, MLX = "worker", "mlx-lm"
#: Cases of decoding: whether rows are pooled or merged, and whether the next step is launched ahead.
WAYS: Final = {
    "together, ahead": (True, True),
    "together": (True, False),
    "apart, ahead": (False, True),
    "apart": (False, False),
}
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
    " estimate most. Files are in the system's temporary folder. A restore certainly reads the disk on Linux"
    " only: elsewhere the system may have the files in memory. Several values of a constant: the intervals"
    " are too wide to decide, and more rounds or a quiet machine may. A dash: the figures suggest no value."
)

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """This device, by the worker's own parts: prefill, decoding, snapshots, the NATS server, memory.

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
    cuts: Annotated[int, Option("Blocks that are cut in a round.", smoke=1)] = 8
    restored: Annotated[int, Option("Tokens that are restored from SSD.", smoke=256)] = 1024
    publishes: Annotated[int, Option("Messages that are published in a round.", smoke=10)] = 100
    rounds: Rounds = 5
    timeout: Timeout = 600.0
    corpus: Corpus = "mt-bench"
    seed: Seed = 0


class Described(msgspec.Struct, frozen=True):
    """The program's description of the model, the device, and the worker's settings and constants."""

    folder: str
    model: str
    device: str
    least: str
    block: int
    context: int
    sync: str
    constants: dict[str, int]


PIECE, ROW = "tokens a piece", "at a time"
PREFILL = Measure("prefill", "tokens/s", "higher", levels=PIECE)
SCRATCH = Measure("scratch memory", "share", log=False, levels=PIECE)
KEPT = Measure("layers kept", "", log=False, levels=PIECE)
DECODING = Measure("decoding", "tokens/s", "higher", levels=ROW)
CUT, CUT_RATE = Measure("cut of a block", "s"), Measure("cut rate", "MB/s", "higher")
DELAY = Measure("delay by a cut", "s", log=False)
RESTORE, RESTORE_RATE = Measure("restore", "s"), Measure("restore rate", "MB/s", "higher")
CHANGED = Measure("arrays changed", "", log=False)
PUBLISH = Measure("publish", "s")
SHOWN = (PREFILL, SCRATCH, KEPT, DECODING, CUT, CUT_RATE, DELAY, RESTORE, RESTORE_RATE, CHANGED, PUBLISH)
MEASURES: Final = {one.name: one for one in SHOWN}
PLOTS = (
    Plot("by x", "Prefill", (PREFILL,), "Of one prompt; mlx-lm has pieces of up to 2,048."),
    Plot("by x", "Decoding", (DECODING,), "Of all rows together."),
    Plot("by x", "Memory of a piece", (SCRATCH,), "Measured, as a share of the estimate."),
    Plot("cdf", "A publish", (PUBLISH,), "To the worker's own NATS server.", log=True),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check that restored KV equals the stored KV, and that no piece takes more memory than estimated."""
    changed = found.of(CHANGED)
    yield count("what is restored is what was cut", changed, lambda one: one.value, "restores")
    most = stats.grouped((one.block, one.value) for one in found.of(SCRATCH))
    name = "a piece of a prompt takes at most its estimated memory"
    yield bounded(name, {"": [max(some) for some in most.values()]}, at_most=1, unit="share")


def prompt_blocks(shares: Mapping[int, float], block: int) -> int | None:
    """Return how many blocks of a prompt to prefill at once: the fewest with nearly the best rate.

    `shares` has, by the tokens of a piece, the rate as a share of the best rate; `block` is a block's tokens.
    """
    return min((piece // block for piece, share in shares.items() if share >= FAST_ENOUGH), default=None)


def rows_together(ratios: Mapping[int, float]) -> int | None:
    """Return the least number of rows from which decoding them together is not slower than one by one.

    `ratios` has, by the number of rows, the rate of rows together divided by the rate of rows apart.
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
    growing caches take more memory than such a piece.
    """
    most = max((number for piece, number in kept.items() if piece >= block), default=None)
    return None if most is None else max(1, math.ceil(most - ROUNDING))


def suggested(choose: Callable[[dict[int, float]], int | None], figures: Mapping[int, Estimate]) -> str:
    """Format the constant that `choose` suggests from the figures.

    Several values if it suggests other constants from the ends of the figures' intervals.
    """
    chosen = []
    for end in ("value", "low", "high"):
        ends = {x: getattr(one, end if math.isfinite(one.high) else "value") for x, one in figures.items()}
        chosen.append(choose(ends))
    numbers = sorted({number for number in chosen if number is not None})
    return " or ".join([*map(str, numbers), *(["-"] if None in chosen else [])])


def closing(found: Findings[Plan]) -> Sequence[Sequence[str]]:
    """Return a table of the constants in use, and those that the figures suggest."""
    facts, block = found.facts, int(found.facts["block"])
    kept = {piece: found.estimate(KEPT, WORKER, piece) for piece in found.plan.pieces}
    rates = {piece: found.blocks(PREFILL, WORKER, piece) for piece in found.plan.pieces if piece % block == 0}
    best = max(rates.values(), key=lambda some: median(some.values() or [0]), default={})
    shares = {piece: stats.mean(stats.ratios(best, some), log=True) for piece, some in rates.items()}
    both, apart = (name for name, (_, ahead) in WAYS.items() if ahead)
    pairs = {num: found.compared(Against(DECODING, apart), both, num) for num in found.plan.rows}
    ratios = {num: stats.mean(some, log=True) for num, some in pairs.items()}
    if facts["least"] == "pooled_rows":
        ratios.pop(1, None)  # a single row that is pooled has no drafts
    values = dict.fromkeys(("pooled_rows", "merged_rows", "freed_bytes"), "not measured") | {
        "prompt_blocks": suggested(lambda some: prompt_blocks(some, block), _known(shares)),
        "kept_layers": suggested(lambda some: kept_layers(some, block), _known(kept)),
    }
    if facts["least"]:
        values[str(facts["least"])] = suggested(rows_together, _known(ratios))
    rows = [(name, f"{facts[name]:,}", value) for name, value in values.items()]
    return [(f"constants of {facts['device']}", "in use", "suggested"), *rows]


def _known(estimates: Mapping[int, Estimate | None]) -> dict[int, Estimate]:
    return {x: one for x, one in estimates.items() if one is not None}


def rate_of(turns: Sequence[Turn]) -> float | None:
    """Return the tokens per second of all answers while all run; None if they never run at the same time."""
    times = [[*accumulate(turn.gaps_s, initial=turn.first_s or 0.0)] for turn in turns]
    began_s, ended_s = max(some[0] for some in times), min(some[-1] for some in times)
    num_tokens = sum(began_s < at <= ended_s for some in times for at in some)
    return num_tokens / (ended_s - began_s) if ended_s > began_s else None


async def measure(run: Run[Plan]) -> None:
    """Start both programs, and let them take turns."""
    module, *told = run.where.program
    named = (module, *told) if told else ("bench.programs.device",)
    with tempfile.TemporaryDirectory(prefix="turnkeep-bench-") as folder:
        model = () if run.where.model is None else ("--model", run.where.model)
        program = Program(*named, "--data-dir", folder, "--nats-port", free_port(), *model)
        run.progress(0, None, "loading the model")
        with run.owning(program):
            said = msgspec.json.decode(await program.exchange(), type=Described)
            if said.context < max(run.plan.prompt, run.plan.restored, run.plan.context + run.plan.answer):
                limit = f"the context of {said.model} is {said.context:,} tokens"
                raise BenchError(f"{limit}; take a shorter --prompt, --restored and --context")
            run.facts |= {
                "model": said.model,
                "device": said.device,
                "least": said.least,
                "block": said.block,
            }
            run.facts |= {"sync_interval": said.sync, **said.constants}
            mlx = Program("bench.programs.in_process", said.folder, like=program)
            with run.owning(mlx):
                await mlx.exchange()
                run.facts["BLAS"] = common_blas(program, mlx)
                await _measure(run, said, program, mlx)


async def _measure(run: Run[Plan], said: Described, program: Program, mlx: Program) -> None:
    plan, order = run.plan, random.Random(run.plan.seed)  # noqa: S311  # an order, not a secret
    texts = Texts(Path(said.folder), run.corpus.texts())
    prompt, restored = texts.next_tokens(plan.prompt), texts.next_tokens(plan.restored)
    prompts = [texts.next_tokens(max(plan.context, said.block + 1)) for _ in range(max(4, *plan.rows))]

    async def ask(case: str, asked: tuple[Any, ...]) -> dict[str, Any]:
        """Send a request to one of the two programs; return the figures by the names of their measures."""
        side = mlx if case == MLX else program
        line = await side.exchange(msgspec.json.encode(asked) + b"\n", plan.timeout)
        if case != MLX:
            return msgspec.json.decode(line, type=dict[str, Any])
        (turns,) = msgspec.json.decode(line, type=list[list[Turn]])
        if asked[1] == 1:
            return {PREFILL.name: plan.prompt / (turns[0].first_s or math.inf)}
        return {DECODING.name: rate_of(turns) or []}

    # Groups of measurements to compare, which directly follow each other: case, level and request of each.
    groups: list[list[tuple[str, int | None, tuple[Any, ...]]]] = [
        [(WORKER, piece, ("prefill", piece, prompt)) for piece in plan.pieces],
        [("", None, ("restore", restored))],
        [("", None, ("publish", plan.publishes))],
        [("", None, ("cut", plan.cuts, prompts[:4]))],
    ]
    groups[0].append((MLX, min(MLX_PIECE, plan.prompt), ([[prompt]], 1)))
    ways = WAYS if said.least else {name: way for name, way in WAYS.items() if not way[0]}
    for num in plan.rows:
        groups.append([(MLX, num, ([prompts[:num]], plan.answer + 1))])
        groups[-1] += [
            (case, num, ("decode", *way, plan.answer, prompts[:num])) for case, way in ways.items()
        ]
    for block in range(-1, plan.rounds):
        shuffled = (order.sample(group, len(group)) for group in order.sample(groups, len(groups)))
        for case, x, asked in chain.from_iterable(shuffled):
            run.progress(block + 1, plan.rounds + 1, f"round {block + 1}: {case} {x or ''}")
            for name, values in (await ask(case, asked)).items():
                for value in values if isinstance(values, list) else [values]:
                    if block >= 0:
                        run.sample(MEASURES[name], case, x, block, value)


BENCH = Bench(
    name="device",
    plan=Plan,
    cases=(WORKER, *WAYS, MLX),
    measures=SHOWN,
    against=(Against(PREFILL, MLX), Against(DECODING, MLX)),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    notes=NOTES,
    closing=closing,
)
