"""`turnkeep bench restart`: the time to the next token after a restart or a kill.

Sessions of one length get the same tokens. Each case has its own tenant, so that no case finds the KV of
another case. A round runs, for each case, a turn, then the case's event (for example a restart), then the
turn that is measured. The cases are paired by round.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Final
from uuid import uuid4

from msgspec.structs import replace

from turnkeep_client.client import connect
from turnkeep_client.session import Session

from .checks import Check, count
from .corpus import Texts
from .faults import BenchError
from .local import LocalWorker
from .plan import Corpus, Option
from .run import TURN_TIMEOUT_S, BenchRun
from .spec import Bench, CaseRatio, Findings, Plot
from .turns import Measure, TimedTurn

#: The most tokens of a block, which a kill may lose.
BLOCK_TOKENS: Final = 128
#: Tokens of an answer that a kill interrupts: still far from its end when its first token arrives.
INTERRUPTED_TOKENS: Final = 96

WARM, RESTART, KILL, COLD = CASES = ("in memory", "restart", "kill -9", "cold")
RESTARTED = (RESTART, KILL)

Tokens = tuple[int, ...]
Lengths = Annotated[tuple[int, ...], Option("Lengths of the sessions.", smoke=(256,))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The time to the first token of a session's next turn, after a restart and after kill -9.

    Also the time until a worker is ready, and from a kill -9 in mid-answer to the answer's next token. For
    comparison, the same turn in a session in memory, and in a session without KV, which is prefilled from
    its beginning.
    """

    tokens: Lengths = (256, 1024, 2048, 4096, 6000)
    rounds: Annotated[int, Option("How often every case is measured.", smoke=1)] = 5
    turn_tokens: Annotated[int, Option("Tokens of a turn.")] = 16
    max_tokens: Annotated[int, Option("Most tokens of an answer.", smoke=8)] = 16
    corpus: Corpus = "mt-bench"


FIRST = Measure("first token", "s", of=lambda turn: turn.first_s)
PREFILLED = Measure("prefilled", "tokens", of=lambda turn: turn.prefilled_tokens)
ENDING = Measure("ending", "s", of=lambda turn: turn.fact("ending_s"))
STARTING = Measure("starting", "s", of=lambda turn: turn.fact("starting_s"))
RESUMED = Measure("next token of a killed answer", "s", of=lambda turn: turn.fact("resumed_s"))

PLOTS = (
    Plot("by x", "First token", (FIRST,), "From sending the turn to a worker that is ready.", log=True),
    Plot("by x", "Tokens prefilled", (PREFILLED,), "Of a cold session all, of others the turn's own."),
    Plot("cdf", "First token, all rounds", (FIRST,), "Each step is a turn.", log=True),
    Plot("cdf", "Until a new process is ready", (STARTING,), "Each step is a start."),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check the prefilled tokens and the answers of turns after a restart."""
    turns, pairs = found.answered, list(found.pairs(WARM))
    yield count("every case had the same length", pairs, lambda p: p[0].prompt_tokens != p[1].prompt_tokens)
    # The last token of the answer before has no KV yet. A kill may lose snapshots in flight.
    most = {case: found.plan.turn_tokens + 1 + BLOCK_TOKENS * (case in RESTARTED) for case in CASES}
    kept = [turn for turn in turns if turn.case != COLD]
    name = "only a turn's own tokens are prefilled, after a restart at most a block more"
    yield count(name, kept, lambda turn: turn.prefilled_tokens > most[turn.case])
    cold = [turn for turn in turns if turn.case == COLD]
    yield count("cold sessions found nothing in any cache", cold, lambda turn: turn.cached_tokens)
    # A full restore has the same bits. A prefill in other pieces rounds differently, which can decide a near
    # tie otherwise.
    same = [(t, warm) for t, warm in pairs if t.case != COLD and t.prefilled_tokens == warm.prefilled_tokens]
    name = "what was restored in full answers as if nothing had happened"
    yield count(name, same, lambda pair: pair[0].tokens != pair[1].tokens)


async def measure(run: BenchRun[Plan]) -> None:
    """Begin a session of each length for each case except the cold case, then run the rounds."""
    plan, order = run.plan, random.Random(0)  # noqa: S311  # an order, not a secret
    async with run.worker() as (worker, _):
        texts = Texts(worker.model_folder, run.corpus.texts())
        lives = _Lives(run, worker)
        lengths = sorted(plan.tokens, reverse=True)  # longest first, to fail at once if that does not fit
        for length in lengths:
            run.progress(0, None, f"beginning with {length:,} tokens")
            await lives.begin(length, texts.next_tokens(length))
        total = plan.rounds * len(lengths) * len(CASES)
        for block in range(plan.rounds):
            for length in order.sample(lengths, len(lengths)):
                lead, own = texts.next_tokens(plan.turn_tokens), texts.next_tokens(plan.turn_tokens)
                cases = [*order.sample(CASES[:-1], 3), COLD]
                # The cold turn repeats the context of the session in memory, so it comes after that turn.
                cases.insert(order.randint(cases.index(WARM) + 1, 3), cases.pop())
                for case in cases:
                    where = f"round {block + 1} of {plan.rounds}, {length:,}, {case}"
                    run.progress(len(run.turns), total, where)
                    turn = await lives.turn(case, length, lead, own)
                    run.keep(replace(turn, case=case, x=length, block=block))


class _Lives:
    """The bench's sessions, one for each session length and case.

    The cases are: in memory, restart, kill -9, cold.
    """

    def __init__(self, run: BenchRun[Plan], worker: LocalWorker) -> None:
        self._run, self._worker = run, worker
        self._sent: dict[int, Tokens] = {}  # the tokens of the session in memory
        self._contexts: dict[int, Tokens] = {}  # its context at the last turn

    async def begin(self, length: int, tokens: Tokens) -> None:
        """Prefill the sessions of this length, one for each case except the cold case."""
        self._sent[length] = tokens
        for case in CASES[:-1]:
            async with self._session(case, length) as session:
                await session.append(tokens=tokens, timeout_s=TURN_TIMEOUT_S)
                await self._run.wait_for_snapshots(session)

    async def turn(self, case: str, length: int, lead: Tokens, own: Tokens) -> TimedTurn:
        """Run a turn with the tokens `lead`, then the case's event; then measure a turn with `own`.

        The measured turn uses an open connection to a worker that is ready and idle.
        """
        facts: dict[str, float | str | None] = {}
        if case in RESTARTED:
            async with self._session(case, length) as session:
                await self._ask(session, lead)
            facts["ending_s"], facts["starting_s"] = await self._run.restart(self._worker, kill=case == KILL)
        async with self._session(case, length) as session:
            if case == WARM:
                led = await self._ask(session, lead)
                await self._run.wait_for_snapshots(session)
            turn = await self._ask(session, own if case != COLD else self._contexts[length])
            await self._run.wait_for_snapshots(session)
            if case == COLD:
                await session.close(timeout_s=TURN_TIMEOUT_S)
        if case == WARM:
            self._contexts[length] = (*self._sent[length], *lead, *led.tokens, *own)
            self._sent[length] = (*self._contexts[length], *turn.tokens)
        if case == KILL:
            facts["resumed_s"] = await self._interrupt(lead)
        return replace(turn, facts=facts)

    async def _interrupt(self, tokens: Tokens) -> float | None:
        """Kill the worker during an answer; return the seconds until the restarted worker's next token.

        None if the answer had ended before the kill.
        """
        async with connect(self._worker.url, tenant=f"cut-{uuid4().hex[:12]}") as client:
            session, begun = client.session("cut"), asyncio.Event()
            asked = self._run.ask(session, begun=begun, tokens=tokens, max_tokens=INTERRUPTED_TOKENS)
            answer = asyncio.ensure_future(asked)
            answer.add_done_callback(lambda _: begun.set())
            await begun.wait()
            _, starting_s = await self._run.restart(self._worker, kill=True)
            turn = await answer
            if turn.error is not None:
                raise BenchError(f"an answer that a kill interrupted failed: {turn.message}")
            await session.close(timeout_s=TURN_TIMEOUT_S)
        longest_s = max(turn.gaps_s, default=0.0)
        return longest_s if longest_s > starting_s / 2 else None

    @asynccontextmanager
    async def _session(self, case: str, length: int) -> AsyncGenerator[Session]:
        """Connect, and yield the session of a case and length; for the cold case a new session each time."""
        tenant = f"cold-{uuid4().hex[:12]}" if case == COLD else case.replace(" ", "-")
        async with connect(self._worker.url, tenant=tenant) as client:
            yield client.session(f"s{length}")

    async def _ask(self, session: Session, tokens: Tokens) -> TimedTurn:
        turn = await self._run.ask(session, tokens=tokens, max_tokens=self._run.plan.max_tokens)
        if turn.error is not None:  # the cases' histories would differ
            raise BenchError(f"a turn of {len(tokens):,} tokens failed: {turn.message}")
        return turn


BENCH = Bench(
    name="restart",
    plan=Plan,
    levels="tokens",
    cases=CASES,
    measures=(FIRST, ENDING, STARTING, RESUMED, PREFILLED),
    against=(CaseRatio(FIRST, WARM), CaseRatio(FIRST, COLD)),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    notes="Snapshots were read soon after they were written: mostly from the page cache.",
)
