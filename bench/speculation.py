"""`turnkeep bench speculation`: answers without drafts, with prompt lookup, and with a draft model.

One program, `bench.programs.speculation`, has a batch for each side over the same weights. The sides take
turns in a random order with the same prompts. A round is a block of the statistics.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

from .checks import Check, bounded
from .local import Program
from .plan import Corpus, Option, Rounds, Seed, Timeout
from .run import Run
from .spec import Against, Bench, Findings, Plot
from .turns import Measure

PLAIN, LOOKUP, DRAFT_MODEL = SIDES = ("plain", "lookup", "draft model")
#: The least tokens/s with drafts, as a share of the tokens/s without them.
KEPT: Final = 0.97
#: The share of equal tokens that is required: rounding sometimes decides a near tie otherwise.
AGREEING: Final = 0.9
CODE: Final = (
    "Write a Python function that merges two sorted lists.",
    "Write a Python class for an LRU cache with get and put.",
    "Write a SQL query for the ten customers with the highest revenue of each month.",
    "Write a JavaScript function that debounces another function.",
    "Write a Python function that parses a line of CSV with quotes.",
    "Write a Go function that reverses a linked list.",
    "Write a Python decorator that retries on exceptions, with a pause that doubles.",
    "Write a bash script that backs up a folder and keeps seven copies.",
    "Write binary search in C, with a test.",
    "Write a Rust function that counts the words of a string.",
    "Write a TypeScript type for a tree, and a function that flattens it.",
    "Write a Python function that validates an IPv4 address, without a library.",
)
CALLS: Final = (
    "Book a table for four people at Da Mario in Rome on Friday at eight.",
    "Order two large pizzas with mushrooms to Harbour Street 12 in Bergen.",
    "Remind me on Monday at nine to call the dentist about the bill.",
    "Find flights from Oslo to Lisbon on the third of May for two adults.",
)
#: The JSON schema of a tool call's arguments, the same for all tools.
ARGUMENTS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "action": {"enum": ["book", "order", "remind", "find"]},
        "details": {"type": "string", "maxLength": 120},
        "place": {"type": "string", "maxLength": 40},
        "people": {"type": "integer", "minimum": 1, "maximum": 20},
        "when": {"type": "string", "maxLength": 40},
    },
    "required": ["action", "details", "place", "people", "when"],
    "additionalProperties": False,
}

NOTES: Final = (
    "Tokens a second of all answers at a time, behind their first tokens, up to {plan.answer:,} tokens each."
    " Every other round samples at temperature 0.7, with the same seed on all sides. Tool calls are"
    " arguments that follow a JSON schema. The sides learn from round to round what drafts cost, as a worker"
    " does; the first round is not kept."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Answers without drafts, with prompt lookup, and with a draft model, if one is named.

    On code, chat and tool calls, one or several at a time. Drafts are made as a worker makes them: only where
    it has measured that they pay.
    """

    draft_model: Annotated[
        tuple[str, ...], Option("A smaller model with the same tokenizer.", metavar="NAME")
    ] = ()
    rows: Annotated[tuple[int, ...], Option("Answers at a time.", smoke=(1, 2))] = (1, 2, 4, 8)
    answer: Annotated[int, Option("Most tokens of an answer.", smoke=12)] = 128
    rounds: Rounds = 6
    timeout: Timeout = 1800.0
    corpus: Corpus = "mt-bench"
    seed: Seed = 0


class Described(msgspec.Struct, frozen=True):
    """The program's description of the models and the device."""

    model: str
    draft_model: str = msgspec.field(name="draft model")
    device: str = ""
    sides: tuple[str, ...] = ()


class Answered(msgspec.Struct, frozen=True):
    """The program's reply with its answers; see `bench.programs.speculation.Answering`."""

    tokens: list[list[int]]
    rate: float
    drafted: int
    right: int


ROWS: Final = "at a time"
RATES: Final = {
    kind: Measure(kind, "tokens/s", "higher", levels=ROWS) for kind in ("code", "chat", "tool calls")
}
RIGHT = Measure("drafts that were right", "share", "higher", log=False, levels=ROWS)
SAME = Measure("tokens that are those without drafts", "share", log=False)
PLOTS = tuple(Plot("by x", kind.capitalize(), (rate,)) for kind, rate in RATES.items())


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check that drafts change few tokens, and hardly lower the tokens/s."""
    same = {side: [*found.blocks(SAME, side).values()] for side in found.cases(SAME)}
    name = f"answers have {AGREEING:.0%} of the tokens that they have without drafts"
    yield bounded(name, same, at_least=AGREEING, unit="share")
    ratios = {
        f"{kind}, {num} with {side}": found.compared(Against(rate, PLAIN), side, num)
        for kind, rate in RATES.items()
        for num, side in found.places(rate)
        if side != PLAIN
    }
    yield bounded(f"drafts leave at least {KEPT:.0%} of the tokens/s", ratios, at_least=KEPT, log=True)


def agreeing(tokens: list[list[int]], expected: list[list[int]]) -> float:
    """Return the share of `expected` tokens before each answer's first different token."""
    num = sum(
        next(
            (i for i, (ours, theirs) in enumerate(zip(one, other, strict=False)) if ours != theirs),
            len(other),
        )
        for one, other in zip(tokens, expected, strict=True)
    )
    return num / max(sum(map(len, expected)), 1)


async def measure(run: Run[Plan]) -> None:
    """Start the program, and let its sides take turns."""
    module, *told = run.where.program
    named = (module, *told) if told else ("bench.programs.speculation",)
    with tempfile.TemporaryDirectory(prefix="turnkeep-bench-") as folder:
        models = [] if run.where.model is None else ["--model", run.where.model]
        models += [word for name in run.plan.draft_model[-1:] for word in ("--draft-model", name)]
        program = Program(*named, "--data-dir", folder, *models)
        run.progress(0, None, "loading the models")
        with run.owning(program):
            said = msgspec.json.decode(await program.exchange(), type=Described)
            run.facts |= {"model": said.model, "draft model": said.draft_model, "device": said.device}
            await _measure(run, said, program)


async def _measure(run: Run[Plan], said: Described, program: Program) -> None:
    plan, order = run.plan, random.Random(run.plan.seed)  # noqa: S311  # an order, not a secret
    texts: Mapping[str, Iterator[str]] = {
        "code": itertools.cycle(CODE),
        "chat": run.corpus.texts(),
        "tool calls": itertools.cycle(CALLS),
    }
    places = [(kind, num) for kind in RATES for num in plan.rows]
    for block in range(-1, plan.rounds):
        for kind, num in order.sample(places, len(places)):
            run.progress(block + 1, plan.rounds + 1, f"round {block + 1}: {kind}, {num}")
            prompts = list(itertools.islice(texts[kind], num))
            schema = ARGUMENTS if kind == "tool calls" else None
            asked = prompts, plan.answer, 0.7 * (block % 2), schema
            found: dict[str, Answered] = {}
            for side in order.sample(said.sides, len(said.sides)):
                line = await program.exchange(msgspec.json.encode((side, *asked)) + b"\n", plan.timeout)
                found[side] = msgspec.json.decode(line, type=Answered)
            for side, one in found.items() if block >= 0 else ():
                run.sample(RATES[kind], side, num, block, one.rate)
                if side != PLAIN:
                    run.sample(SAME, side, None, block, agreeing(one.tokens, found[PLAIN].tokens))
                if one.drafted:
                    run.sample(RIGHT, side, num, block, one.right / one.drafted)


BENCH = Bench(
    name="speculation",
    plan=Plan,
    cases=SIDES,
    measures=(*RATES.values(), RIGHT, SAME),
    against=tuple(Against(rate, PLAIN) for rate in RATES.values()),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    notes=NOTES,
)
