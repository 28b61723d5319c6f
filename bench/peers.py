"""`turnkeep bench peers`: the same conversations with a worker and with OpenAI-compatible servers.

Every measurement runs on one side after the other: only one side works at any time, and each goes first
equally often. The sides are paired by block: a chat, a round of streams, or a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any, Final
from uuid import uuid4

import click
from msgspec.structs import replace

from turnkeep_client.client import Client
from turnkeep_client.errors import RequestFailedError

from . import stats
from .checks import Check, bounded
from .corpus import Texts
from .faults import BenchError
from .local import LocalWorker, Process, common_blas
from .openai import MODEL, OWN, MlxServer, Server, parse
from .plan import Corpus, Option
from .run import TURN_TIMEOUT_S, BenchRun
from .spec import Bench, CaseRatio, Findings, Plot
from .turns import Measure, Sample, TimedTurn

TURNKEEP: Final = "turnkeep"
CHAT, CONCURRENT, RESTART = PARTS = ("chat", "concurrent", "restart")
FILL, WARM, STOP, KILL = "fill", "warm", "stop", "kill"
#: Turns around a restart are short, so that a conversation keeps about its nominal length.
RESTART_TURN_TOKENS: Final = 30
RESTART_ANSWER_TOKENS: Final = 16
#: Contexts that differ by more than this share are not the same conversation.
CONTEXT_BOUND: Final = 0.01

WHO = f"Compare with: {OWN}, started for it, or a running server, NAME=URL or NAME=URL#MODEL."


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The same conversations with a worker and with OpenAI-compatible servers.

    The sides take turns with every measurement, and only one of them works at a time. Three parts: chats turn
    by turn, several streams at once, and the turn after a restart of the side's process.
    """

    peer: Annotated[tuple[str, ...], Option(WHO, metavar="PEER")] = (OWN,)
    part: Annotated[tuple[str, ...], Option("Only this part. [default: all]", type=click.Choice(PARTS))] = ()
    chats: Annotated[int, Option("Chats held turn by turn.", smoke=1)] = 5
    turns: Annotated[int, Option("Turns of each chat.", smoke=2)] = 10
    turn_tokens: Annotated[int, Option("Tokens a user says at a time.", smoke=30)] = 195
    max_tokens: Annotated[int, Option("Most tokens of an answer.", smoke=6)] = 64
    concurrency: Annotated[tuple[int, ...], Option("Streams at once.", smoke=(2,))] = (1, 4, 8)
    rounds: Annotated[int, Option("Turns of every stream.", smoke=1)] = 5
    lengths: Annotated[tuple[int, ...], Option("Tokens held at a restart.", smoke=(60,))] = (1000, 2000)
    restarts: Annotated[int, Option("Times for each length.", smoke=1)] = 5
    corpus: Corpus = "mt-bench"


def _of(
    part: str, read: Callable[[TimedTurn], float | None] | None = None
) -> Callable[[TimedTurn], float | None]:
    of = read or (lambda turn: turn.first_s)
    return lambda turn: of(turn) if turn.facts.get("part") == part else None


FIRST = Measure("first token in a chat", "s", of=_of(CHAT))
PER_TOKEN = Measure("time per token in a chat", "s", of=_of(CHAT, lambda turn: turn.per_token_s))
RATE = Measure("tokens of all streams", "tokens/s", levels="at once")
AFTER = {
    part: Measure(f"first token{after}", "s", of=_of(part), levels="tokens held")
    for part, after in ((WARM, ", warm"), (STOP, " after a restart"), (KILL, " after kill -9"))
}
TIMES = (FIRST, PER_TOKEN, RATE, *AFTER.values())
EVEN = "Every turn adds about as many tokens: a side that starts from what it holds runs level."
READY = "From sending the turn, once the process has answered another, short chat."
PLOTS = (
    Plot("by x", "First token of each turn", (FIRST,), EVEN, x="turn"),
    Plot("cdf", "First token, all turns", (FIRST,), "Each step is a turn."),
    Plot("cdf", "Time per token, all turns", (PER_TOKEN,), "The same, after the first token."),
    Plot("by x", "Throughput against concurrency", (RATE,), "All streams together, prefill included."),
    *(Plot("by x", f"First {one.name[6:]}", (one,), READY, log=True) for one in (AFTER[STOP], AFTER[KILL])),
)


def checks(found: Findings[Plan]) -> Iterator[Check]:
    """Check that all sides held the same conversation; else the ratios between them would be wrong."""
    chat = [turn for turn in found.turns if turn.facts.get("part") == CHAT and turn.prompt_tokens]
    pairs = list(Findings(found.bench, found.plan, chat).pairs(TURNKEEP))
    apart = stats.grouped(
        ((turn.case, turn.block), abs(turn.prompt_tokens / our.prompt_tokens - 1)) for turn, our in pairs
    )
    numbers = stats.grouped((case, max(shares)) for (case, _), shares in apart.items())
    name = f"all sides held the same conversation, contexts within {CONTEXT_BOUND:.0%}"
    same = bounded(name, numbers, at_most=CONTEXT_BOUND, unit="share")
    equal = sum(turn.facts["text"] == our.facts["text"] for turn, our in pairs)
    yield replace(same, detail=f"{same.detail}; {equal:,} of {len(pairs):,} answers equal")


def follows(turns: Sequence[TimedTurn]) -> Iterator[Sample]:
    """Yield the tokens per second of each round of concurrent chats, over all its chats."""
    concurrent = [turn for turn in turns if turn.facts.get("part") == CONCURRENT]
    for place, streams in stats.grouped(((turn.case, *turn.place), turn) for turn in concurrent).items():
        if not any(turn.error for turn in streams):
            seconds = max(turn.at_s + turn.total_s for turn in streams) - min(turn.at_s for turn in streams)
            yield Sample(RATE.name, *place, sum(turn.num_tokens for turn in streams) / seconds)


class Peer:
    """One side: an OpenAI-compatible server, the bench's own `process` or one that was already running.

    The server stores no chat, so every turn sends the whole chat so far.
    """

    def __init__(self, run: BenchRun[Plan], server: Server, process: MlxServer | None = None) -> None:
        self.name = server.name
        self.process: Process | None = process
        self._run, self._server = run, server

    def chat(self) -> Any:
        """Begin a chat; return the object that the other methods take as `chat`. Sends nothing."""
        return []

    async def ask(self, chat: Any, text: str, max_tokens: int) -> TimedTurn:
        """Send a message and time the answer. An error is returned in the turn, and the chat is unchanged."""
        run, messages = self._run, [*chat, {"role": "user", "content": text}]
        with run.timing():
            turn = await self._server.ask(
                messages, max_tokens=max_tokens, timeout_s=TURN_TIMEOUT_S, began_s=run.began_s
            )
        if turn.error is None:
            chat[:] = [*messages, {"role": "assistant", "content": str(turn.facts["text"])}]
        return turn

    async def wait_until_idle(self, chat: Any) -> None:
        """Wait until the side has finished its work after the answer, such as writing snapshots."""

    async def restart(self, *, kill: bool) -> None:
        """End the bench's own process, with `kill` by SIGKILL, and start it again; a running server stays."""
        if isinstance(self.process, MlxServer):
            await asyncio.to_thread(self.process.kill if kill else self.process.stop)
            self.process.start()
            await self.process.ready()

    async def warm_up(self) -> None:
        """Run a short chat, so that the side loads its model. Raises `BenchError` if there is no answer."""
        chat = self.chat()
        turn = await self.ask(chat, "Hello!", 2)
        if turn.error is not None:
            raise BenchError(f"{self.name} does not answer: {turn.error}: {turn.message}")
        await self.wait_until_idle(chat)


class Turnkeep(Peer):
    """The bench's own worker, and its sessions."""

    def __init__(self, run: BenchRun[Plan], client: Client, worker: LocalWorker) -> None:
        self.name, self.process = TURNKEEP, worker
        self._run, self._client, self._worker = run, client, worker

    def chat(self) -> Any:
        """Begin a session."""
        return self._client.session(f"bench-{uuid4().hex[:12]}")

    async def ask(self, chat: Any, text: str, max_tokens: int) -> TimedTurn:
        """Send one generate and time the answer. An error is returned in the turn."""
        said = [{"role": "user", "content": text}]
        return await self._run.ask(chat, texts=True, messages=said, max_tokens=max_tokens, temperature=0.0)

    async def wait_until_idle(self, chat: Any) -> None:
        """Wait until every snapshot is on the disk."""
        with contextlib.suppress(RequestFailedError):  # no session if its first turn failed
            await self._run.wait_for_snapshots(chat)

    async def restart(self, *, kill: bool) -> None:
        """Restart the worker, with `kill` after SIGKILL; the client reconnects by itself."""
        await self._run.restart(self._worker, kill=kill)


async def measure(run: BenchRun[Plan]) -> None:
    """Run the bench: start all sides, then measure the parts that the plan names. Raises `BenchError`."""
    plan, model = run.plan, run.where.model
    names = [TURNKEEP, *(peer if peer == OWN else parse(peer).name for peer in plan.peer)]
    if len(set(names)) < len(names):
        raise BenchError(f"every side needs a name of its own, these are {', '.join(names)}")
    # Keep the weights' dtype, as the peer does with the same folder; only a GGUF file is converted.
    keep = ("--dtype", "keep") if model and not model.endswith(".gguf") else ()
    async with AsyncExitStack() as stack:
        worker, client = await stack.enter_async_context(run.worker(*keep))
        sides: list[Peer] = [Turnkeep(run, client, worker)]
        for peer in plan.peer:
            process = MlxServer(worker.model_folder, like=worker) if peer == OWN else None
            if process is not None:
                stack.enter_context(run.owning(process))
                await process.ready()
            named = parse(peer) if process is None else Server(OWN, process.url, MODEL)
            server = await stack.enter_async_context(named)
            run.facts[f"model of {server.name}"] = server.model
            sides.append(Peer(run, server, process))
        for side in sides:
            await side.warm_up()
        run.facts["BLAS"] = common_blas(*(side.process for side in sides if side.process))
        parts = _Parts(run, sides, Texts(worker.model_folder, _shuffled(run)))
        for part in plan.part or PARTS:
            await {CHAT: parts.chat, CONCURRENT: parts.concurrent, RESTART: parts.restart}[part]()


def _shuffled(run: BenchRun[Plan]) -> Iterator[str]:
    """Yield the corpus's messages in random order, again and again, each after the number of the round.

    So a repeated message begins differently, and no server has its beginning in a cache.
    """
    texts = [said for one in run.corpus.conversations for said in one]
    order = random.Random(0)  # noqa: S311  # an order, no secret
    for number in itertools.count(1):
        yield from (f"{number}. {text}" for text in order.sample(texts, len(texts)))


class _Parts:
    """Runs the three parts of the bench on all sides."""

    def __init__(self, run: BenchRun[Plan], sides: Sequence[Peer], texts: Texts) -> None:
        self._run, self._plan, self._sides, self._texts = run, run.plan, sides, texts

    async def chat(self) -> None:
        """Run the part of single chats: one chat per side at a time, turn by turn."""
        for block in range(self._plan.chats):
            await self._converse(CHAT, 1, [(x, block) for x in range(1, self._plan.turns + 1)])

    async def concurrent(self) -> None:
        """Run the part of concurrent chats, for each number of chats at once."""
        for streams in self._plan.concurrency:
            places = [(streams, block) for block in range(self._plan.rounds)]
            await self._converse(CONCURRENT, streams, places)

    async def _converse(self, part: str, streams: int, places: Sequence[tuple[int, int]]) -> None:
        """Begin chats on every side and run their turns; `places` has the `x` and block of each turn."""
        plan, chats = self._plan, {side: [side.chat() for _ in range(streams)] for side in self._sides}
        for x, block in places:
            texts = [self._texts.next_text(plan.turn_tokens) for _ in range(streams)]
            for side in _rotated(chats, block + x):
                asked = list(zip(chats[side], texts, strict=True))
                await self._ask(part, x, block, side, asked, plan.max_tokens)

    async def restart(self) -> None:
        """Measure a turn before and after restarts of the sides that the bench can restart."""
        plan, most = self._plan, RESTART_ANSWER_TOKENS
        for block, length in itertools.product(range(plan.restarts), plan.lengths):
            chats = {side: side.chat() for side in self._sides if side.process is not None}
            for _ in range(math.ceil(length / plan.turn_tokens)):
                text = self._texts.next_text(min(plan.turn_tokens, length))
                for side in list(chats):
                    if not await self._ask(FILL, length, block, side, [(chats[side], text)], most):
                        del chats[side]  # this side's conversation would be shorter than the others'
            for ending in (WARM, *((STOP, KILL) if block % 2 == 0 else (KILL, STOP))):
                text = self._texts.next_text(RESTART_TURN_TOKENS)
                for side in _rotated(chats, block):
                    if ending != WARM:
                        await side.restart(kill=ending == KILL)
                        await side.warm_up()
                    await self._ask(ending, length, block, side, [(chats[side], text)], most)

    async def _ask(
        self, part: str, x: int, block: int, side: Peer, asked: Sequence[tuple[Any, str]], most: int
    ) -> bool:
        """Run and record concurrent turns of one side; wait until it is idle.

        Return whether all turns were answered.
        """
        turns = await asyncio.gather(*(side.ask(chat, text, most) for chat, text in asked))
        for turn in turns:
            facts = turn.facts | {"part": part}
            self._run.keep(replace(turn, case=side.name, x=x, block=block, facts=facts))
        await side.wait_until_idle(asked[0][0])
        self._run.progress(len(self._run.turns), None, f"{part}, {x:g}, {side.name}")
        return all(turn.error is None for turn in turns)


def _rotated(sides: Collection[Peer], by: int) -> list[Peer]:
    first = by % max(1, len(sides))
    return [*sides, *sides][first : first + len(sides)]


BENCH = Bench(
    name="peers",
    plan=Plan,
    cases=(TURNKEEP, OWN),
    measures=TIMES,
    against=tuple(CaseRatio(one, TURNKEEP) for one in TIMES),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    follows=follows,
    notes=f"Whether a server other than {OWN} runs the same weights is not known.",
)
