"""`turnkeep bench recall`: how many planted facts a session finds if only part of its KV is on the device.

Each long text has secret codes at several depths, and a question for each code. Every cache policy gets the
same texts; a text is a block of the statistics. The main result is the share of right answers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Final, NamedTuple

from msgspec.structs import replace

from turnkeep_client.messages import CachePolicy

from . import stats
from .checks import Check, bounded, count
from .corpus import Texts
from .faults import BenchError
from .plan import Corpus, Option
from .run import TURN_TIMEOUT_S, BenchRun
from .spec import Bench, CaseRatio, Findings, Plot
from .turns import Measure, TimedTurn

FULL, WINDOW, PAGED = WAYS = ("full", "window", "paged")
#: The sinks of a window, which count among its tokens.
SINK: Final = 4
#: Most tokens of an answer: some words, then a code of four digits.
ANSWER_TOKENS: Final = 12
#: The share of a full session's right answers that a paged one may lose.
LOST: Final = 1 / 3
NAMES: Final = ("Greta", "Anton", "Marie", "Oskar", "Paula", "Viktor", "Helen", "Bruno", "Clara", "Simon")

DEPTHS: Final = "Where the facts are, in percent of the text."


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Facts planted in long texts, and a question for each, under every cache policy.

    At each depth of a text a sentence tells a secret code; after the text a question asks for each code. Each
    number of resident tokens is tried as a window and as a paged session, and compared with a full session.
    """

    corpus: Corpus = "mt-bench"
    tokens: Annotated[int, Option("Tokens of each text.", smoke=1200)] = 4096
    texts: Annotated[int, Option("How many of them.", smoke=1)] = 5
    resident: Annotated[tuple[int, ...], Option("Tokens on the device.", smoke=(512,))] = (512, 1024)
    depths: Annotated[tuple[int, ...], Option(DEPTHS, smoke=(10, 90))] = (10, 50, 90)

    @property
    def policies(self) -> dict[str, CachePolicy]:
        """The cache policy of each case, by the case's name. Tables show the cases in this order."""
        found = {FULL: CachePolicy("full")}
        for tokens in sorted(self.resident, reverse=True):
            found[_case(WINDOW, tokens)] = CachePolicy("sink_window", SINK, tokens - SINK)
            found[_case(PAGED, tokens)] = CachePolicy("paged", resident=tokens)
        return found


def _case(way: str, resident: int) -> str:
    return f"{way}, {resident:,}"


KV = Measure("KV of the session", "bytes", of=lambda turn: turn.kv_live_bytes, levels="")
FIRST = Measure("first token of the answer", "s", of=lambda turn: turn.first_s, levels="")
NOTES = (
    "Texts of {plan.tokens:,} tokens. An answer is right if it has the code's four digits. Where a full"
    " session is wrong the model cannot tell: compare with its line, not with 100%."
    f" A window of n tokens has {SINK} sinks among them; paged sessions divide n as the protocol says."
)
PLOTS = (Plot("cdf", "First token of the answer", (FIRST,), "Each step is a question."),)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check the size of the KV on the device, and the share of right answers."""
    name = "a part on the device takes less than the whole"
    pairs = [*found.pairs(FULL)]
    yield count(name, pairs, lambda pair: not 0 < pair[0].kv_live_bytes < pair[1].kv_live_bytes)
    name = "a question is all that is prefilled for its answer"
    yield count(name, found.answered, _prefills_more)
    known = stats.grouped(
        (turn.case, turn.fact("right") or 0.0) for turn, full in pairs if full.fact("right")
    )
    losses = {
        case: 1 - fmean(some) if len(some) >= stats.MIN_BLOCKS else None
        for case, some in known.items()
        if case.startswith(PAGED)
    }
    name = f"paged sessions lose at most {LOST:.0%} of what a full session answers"
    yield bounded(name, losses, at_most=LOST, unit="share")


def closing(found: Findings[Plan]) -> Sequence[Sequence[str]]:
    """Return a table of the right answers of each case, by depth."""
    told = stats.grouped(((turn.case, turn.x), turn.fact("right") or 0.0) for turn in found.answered)
    rows = [("right answers", *(f"{depth}% deep" for depth in found.plan.depths))]
    for case in dict.fromkeys(turn.case for turn in found.answered):
        answers = [told.get((case, depth), []) for depth in found.plan.depths]
        rows.append((case, *(f"{sum(some):.0f} of {len(some)}" for some in answers)))
    return rows


def _prefills_more(turn: TimedTurn) -> bool:
    """Say whether a turn prefilled more than its question and the last token before it."""
    return turn.prefilled_tokens > turn.prompt_tokens - (turn.fact("held") or 0) + 1


class Fact(NamedTuple):
    """A planted sentence: its depth in the text in percent, its subject, and the code that it contains."""

    depth: int
    who: str
    code: str

    @property
    def said(self) -> str:
        """The sentence to plant in the text."""
        return f" The secret code of {self.who} is {self.code}. "

    @property
    def question(self) -> str:
        """A question whose answer begins with the code."""
        return f"\nQuestion: What is the secret code of {self.who}? Answer: The secret code of {self.who} is"


def planted(texts: Texts, tokens: int, facts: Sequence[Fact]) -> tuple[int, ...]:
    """Return the next `tokens` tokens of the texts, with each fact inserted at its depth; depths ascend."""
    said, found = texts.next_tokens(tokens), list[int]()
    edges = [0, *(tokens * fact.depth // 100 for fact in facts), tokens]
    for (start, end), fact in itertools.zip_longest(itertools.pairwise(edges), facts):
        found += said[start:end]
        found += texts.tokens_of(fact.said) if fact is not None else ()
    return tuple(found)


async def measure(run: BenchRun[Plan]) -> None:
    """Run the bench: prefill each text under each policy, and ask its questions, rewinding to the text's end.

    Raises `BenchError` for a plan that cannot be measured.
    """
    plan, drawn = run.plan, random.Random(0)  # noqa: S311  # codes in a text, not secrets
    if max(plan.resident) >= plan.tokens or max(plan.depths) > 100 or len(plan.depths) > len(NAMES):
        raise BenchError(
            f"take fewer resident tokens than the {plan.tokens:,} of a text,"
            f" and at most {len(NAMES)} depths of up to 100%"
        )
    async with run.worker() as (worker, client):
        texts = Texts(worker.model_folder, run.corpus.texts())
        total = plan.texts * len(plan.policies) * len(plan.depths)
        for block in range(plan.texts):
            told = zip(plan.depths, drawn.sample(NAMES, len(plan.depths)), strict=True)
            facts = [Fact(depth, who, f"{drawn.randint(1000, 9999)}") for depth, who in told]
            said = planted(texts, plan.tokens, facts)
            for number, (case, policy) in enumerate(plan.policies.items()):
                run.progress(len(run.turns), total, f"text {block + 1} of {plan.texts}, {case}")
                session = client.session(f"s{block}-{number}", cache=policy)
                held = (await session.append(tokens=said, timeout_s=TURN_TIMEOUT_S)).position
                for fact in facts:
                    asked = texts.tokens_of(fact.question)
                    turn = await run.ask(
                        session, tokens=asked, raw=True, max_tokens=ANSWER_TOKENS, texts=True
                    )
                    right = float(fact.code in str(turn.facts.get("text")))
                    told_of = {**turn.facts, "held": held, "right": right}
                    run.keep(replace(turn, case=case, x=fact.depth, block=block, facts=told_of))
                    await session.rewind(held, timeout_s=TURN_TIMEOUT_S)
                await session.close(timeout_s=TURN_TIMEOUT_S)


BENCH = Bench(
    name="recall",
    plan=Plan,
    levels="% deep",
    cases=WAYS,
    measures=(KV, FIRST),
    against=(CaseRatio(KV, FULL),),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    notes=NOTES,
    closing=closing,
)
