"""`turnkeep bench peers`: the same conversations with a worker and with OpenAI-compatible servers.

The sides take turns with every measurement, each going first as often as the others, and all but one are idle
at any time. A chat, a round of streams and a restart is each a block, which pairs the sides.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import tempfile
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import uuid4

import click
import psutil
from msgspec.structs import replace

from turnkeep_client.errors import TurnkeepError

from . import blas, stats
from .checks import Check, bounded, count
from .faults import BenchError
from .openai import OWN, MlxServer, parse
from .plan import Corpus, Option, Seed, TurnTimeout
from .samples import Sample
from .spec import Against, Bench, Measure, Plot
from .tokens import Texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from turnkeep_client.client import Client

    from .local import LocalWorker, Process
    from .openai import Server
    from .run import Run
    from .samples import Findings, Turn

TURNKEEP: Final = "turnkeep"
CHAT, CONCURRENT, RESTART = PARTS = ("chat", "concurrent", "restart")
WARM, STOP, KILL = "warm", "stop", "kill"
#: A restarted side is asked little, so that a conversation keeps about the length that it is named after.
RESTART_TURN_TOKENS: Final = 30
RESTART_ANSWER_TOKENS: Final = 16
#: Contexts of more than this share apart are not the same conversation.
CONTEXT_BOUND: Final = 0.01
#: A side whose processes use more of a CPU while another one is measured is not idle.
IDLE_BOUND: Final = 0.10

WHO = f"Compare with: {OWN}, started for it, or a running server, NAME=URL or NAME=URL#MODEL."
Peers = Annotated[tuple[str, ...], Option(WHO, metavar="PEER")]
Only = Annotated[tuple[str, ...], Option("Only this part. [default: all]", type=click.Choice(PARTS))]
Several = Annotated[tuple[int, ...], Option("Streams at once.", smoke=(2,))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The same conversations with a worker and with OpenAI-compatible servers.

    The sides take turns with every measurement, and only one of them works at a time. Three parts: chats turn
    by turn, several streams at once, and the turn after a restart of the side's process.
    """

    peer: Peers = (OWN,)
    part: Only = ()
    chats: Annotated[int, Option("Chats held turn by turn.", smoke=1)] = 5
    turns: Annotated[int, Option("Turns of each chat.", smoke=2)] = 10
    turn_tokens: Annotated[int, Option("Tokens a user says at a time.", smoke=30)] = 195
    max_tokens: Annotated[int, Option("Most of one answer.", smoke=6)] = 64
    concurrency: Several = (1, 4, 8)
    rounds: Annotated[int, Option("Turns of every stream.", smoke=1)] = 5
    lengths: Annotated[tuple[int, ...], Option("Tokens held at a restart.", smoke=(60,))] = (1000, 2000)
    restarts: Annotated[int, Option("Times for each length.", smoke=1)] = 5
    turn_timeout: TurnTimeout = 300.0
    seed: Seed = 0
    corpus: Corpus = "mt-bench"


def _of(part: str, read: Callable[[Turn], float | None] | None = None) -> Callable[[Turn], float | None]:
    of = read or (lambda turn: turn.first_s)
    return lambda turn: of(turn) if turn.facts.get("part") == part else None


def _per_token(turn: Turn) -> float | None:
    tokens = turn.fact("tokens") or 0
    return (turn.total_s - turn.first_s) / (tokens - 1) if turn.first_s and tokens > 1 else None


FIRST = Measure("first token in a chat", "s", of=_of(CHAT))
PER_TOKEN = Measure("time per token in a chat", "s", of=_of(CHAT, _per_token))
WHOLE = Measure("whole turn in a chat", "s", of=_of(CHAT, lambda turn: turn.total_s))
GROWTH = Measure("first token in a chat, for 1,000 more tokens of it", "s", log=False)
RATE = Measure("tokens of all streams", "tokens/s", "higher", levels="at once")
AFTER = {
    part: Measure(f"first token{after}", "s", of=_of(part), levels="tokens held")
    for part, after in ((WARM, ", warm"), (STOP, " after a restart"), (KILL, " after kill -9"))
}
BUSY = Measure("CPU used by idle sides", "share", of=lambda turn: turn.fact("others_busy"), log=False)
TIMES = (FIRST, PER_TOKEN, WHOLE, RATE, *AFTER.values())
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
    """Hold the run against what its ratios rest on."""
    chat = [turn for turn in found.turns if turn.facts.get("part") == CHAT and turn.prompt_tokens]
    ours = {turn.place: turn for turn in chat if turn.case == TURNKEEP}
    pairs = [(turn, ours[turn.place]) for turn in chat if turn.case != TURNKEEP and turn.place in ours]
    apart: dict[str, dict[int, float]] = {turn.case: {} for turn, _ in pairs}
    for turn, our in pairs:
        share = abs(turn.prompt_tokens / our.prompt_tokens - 1)
        apart[turn.case][turn.block] = max(share, apart[turn.case].get(turn.block, 0.0))
    numbers = {case: list(some.values()) for case, some in apart.items()}
    name = f"all sides held the same conversation, contexts within {CONTEXT_BOUND:.0%}"
    same = bounded(name, numbers, at_most=CONTEXT_BOUND, unit="share")
    equal = sum(turn.facts["text"] == our.facts["text"] for turn, our in pairs)
    yield replace(same, detail=f"{same.detail}; {equal:,} of {len(pairs):,} answers equal")
    busy = {case: list(found.blocks(BUSY, case).values()) for case in found.cases(BUSY)}
    name = f"a side is idle while another is measured, under {IDLE_BOUND:.0%} of a CPU"
    yield bounded(name, busy, at_most=IDLE_BOUND, unit="share")
    linked = [turn for turn in found.turns if turn.facts.get("blas")]
    other = [turn for turn in linked if turn.facts["blas"] != linked[0].facts["blas"]]
    yield count("all processes multiply with the same library", other, linked)


def notes(plan: Plan) -> Iterator[str]:
    """Say what is not known."""
    if others := [peer.partition("=")[0] for peer in plan.peer if peer != OWN]:
        yield f"Whether {', '.join(others)} runs the same weights is not known."


class Peer:
    """One side: an OpenAI-compatible server, the bench's own `process` or one that was running.

    It keeps no chat: the whole of it, so far, goes along with every turn.
    """

    def __init__(self, run: Run[Plan], server: Server, process: MlxServer | None = None) -> None:
        self.name = server.name
        self.process: Process | None = process
        self.library: str | None = None
        self._run, self._server = run, server

    def chat(self) -> Any:
        """Begin a chat, to be handed to the other methods."""
        return []

    async def ask(self, chat: Any, text: str, max_tokens: int) -> Turn:
        """Say something and time the answer. An error is an outcome, and leaves the chat as it was."""
        run, messages = self._run, [*chat, {"role": "user", "content": text}]
        with run.timing():
            turn = await self._server.ask(
                messages, max_tokens=max_tokens, timeout_s=run.plan.turn_timeout, began_s=run.began_s
            )
        if turn.error is None:
            chat[:] = [*messages, {"role": "assistant", "content": str(turn.facts["text"])}]
        return turn

    async def rest(self, chat: Any) -> None:
        """Wait until nothing is left to do for a chat."""

    async def close(self, chat: Any) -> None:
        """End a chat."""

    async def restart(self, *, kill: bool) -> None:
        """End its process and start it again."""
        if isinstance(self.process, MlxServer):
            await asyncio.to_thread(self.process.kill if kill else self.process.stop)
            self.process.start()
            await self.process.ready()

    async def describe(self) -> str:
        """Say what it is."""
        return f"{'started' if self.process else 'running'}, model {await self._server.model()}"


class Turnkeep(Peer):
    """The bench's own worker, and its sessions."""

    def __init__(self, run: Run[Plan], client: Client, worker: LocalWorker) -> None:
        self.name, self.process, self.library = TURNKEEP, worker, None
        self._run, self._client, self._worker = run, client, worker

    def chat(self) -> Any:
        """Begin a session."""
        return self._client.session(f"bench-{uuid4().hex[:12]}")

    async def ask(self, chat: Any, text: str, max_tokens: int) -> Turn:
        """Send one generate."""
        said = [{"role": "user", "content": text}]
        turn = await self._run.ask(chat, texts=True, messages=said, max_tokens=max_tokens, temperature=0.0)
        return replace(turn, facts=turn.facts | {"tokens": len(turn.tokens)})

    async def rest(self, chat: Any) -> None:
        """Wait until every snapshot is on the disk."""
        with contextlib.suppress(TurnkeepError):  # where its first turn failed there is no session
            await self._run.settle(chat)

    async def close(self, chat: Any) -> None:
        """Close the session."""
        with contextlib.suppress(TurnkeepError):
            await chat.close(timeout_s=self._run.plan.turn_timeout)

    async def restart(self, *, kill: bool) -> None:
        """End and start the worker; the connection comes back by itself."""
        await self._run.restart(self._worker, kill=kill)

    async def describe(self) -> str:
        """Say what the worker has told of itself."""
        metrics = self._run.metrics
        return f"turnkeep {metrics.version}, model {metrics.model}" if metrics else ""


def follows(turns: Sequence[Turn]) -> Iterator[Sample]:
    """Make a chat's growth of its turns, and a round's tokens a second of its streams."""
    found: defaultdict[tuple[str, str, float, int], list[Turn]] = defaultdict(list)
    for turn in turns:
        part = str(turn.facts.get("part"))
        x = turn.x if part == CONCURRENT and turn.x else 0.0
        found[part, turn.case, x, turn.block].append(turn)
    for (part, case, x, block), some in found.items():
        if part == CHAT:
            points = [(block, t.prompt_tokens / 1000, t.first_s) for t in some if t.first_s and not t.error]
            yield from (Sample(GROWTH.name, case, None, block, slope) for slope in stats.slopes(points))
        elif part == CONCURRENT and not any(turn.error for turn in some):
            seconds = max(turn.at_s + turn.total_s for turn in some) - min(turn.at_s for turn in some)
            tokens = sum(turn.fact("tokens") or 0 for turn in some)
            yield Sample(RATE.name, case, x, block, tokens / seconds)


async def measure(run: Run[Plan]) -> None:
    """Start the sides and run the parts."""
    plan, model = run.plan, run.where.model
    names = [TURNKEEP, *(peer if peer == OWN else parse(peer).name for peer in plan.peer)]
    if len(set(names)) < len(names):
        raise BenchError(f"every side needs a name of its own, these are {', '.join(names)}")
    # Weights as they are: what the peer does with the same folder. A GGUF file is converted.
    keep = ("--dtype", "keep") if model and not model.endswith(".gguf") else ()
    async with AsyncExitStack() as stack:
        worker, client = await stack.enter_async_context(run.worker(*keep))
        others = [await _start(run, peer, worker, stack) for peer in plan.peer]
        sides = [Turnkeep(run, client, worker), *others]
        parts = _Parts(run, sides, Texts(worker.model_folder, _shuffled(run)))
        for side in sides:
            await parts.meet(side)
            run.facts[side.name] = f"{await side.describe()}, {side.library or 'library not known'}"
        for part in plan.part or PARTS:
            await {CHAT: parts.chats, CONCURRENT: parts.concurrent, RESTART: parts.restarts}[part]()


async def _start(run: Run[Plan], peer: str, worker: LocalWorker, stack: AsyncExitStack) -> Peer:
    process = None
    if peer == OWN:
        log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        # The same arithmetic: what the worker has not loaded the peer does not get either.
        process = MlxServer(worker.model_folder, log, blas.preload_of(blas.mapped(worker.pid)))
        stack.enter_context(run.owning(process))
        await process.ready()
    server = parse(peer) if process is None else process.server
    stack.push_async_callback(server.close)
    return Peer(run, server, process)


def _shuffled(run: Run[Plan]) -> Iterator[str]:
    texts = [said.text for one in run.corpus.conversations for said in one.utterances]
    order = random.Random(run.plan.seed)  # noqa: S311  # an order, no secret
    while True:
        yield from order.sample(texts, len(texts))


class _Parts:
    """The three parts, on the sides that there are."""

    def __init__(self, run: Run[Plan], sides: Sequence[Peer], texts: Texts) -> None:
        self._run, self._plan, self._sides, self._texts = run, run.plan, sides, texts
        self._rotations = self._conversations = 0

    async def meet(self, side: Peer) -> None:
        """Hold a short chat, so that the model is loaded. Raises `BenchError` where there is no answer."""
        chat = side.chat()
        turn = await side.ask(chat, "Hello!", 2)
        await side.rest(chat)
        await side.close(chat)
        if turn.error is not None:
            raise BenchError(f"{side.name} does not answer: {turn.error}: {turn.message}")
        side.library = blas.names(blas.mapped(side.process.pid)) if side.process else None

    async def chats(self) -> None:
        """Hold chats turn by turn."""
        plan = self._plan
        for block in range(plan.chats):
            chats = {side: side.chat() for side in self._sides}
            for x in range(1, plan.turns + 1):
                text = self._say(plan.turn_tokens, begins=x == 1)
                for side in self._in_turn(self._sides):
                    turn = await self._ask(side, chats[side], text, plan.max_tokens)
                    self._take(side, CHAT, x, block, turn)
            await _close(chats)

    async def concurrent(self) -> None:
        """Hold several chats at once."""
        plan = self._plan
        for streams in plan.concurrency:
            chats = [{side: side.chat() for side in self._sides} for _ in range(streams)]
            for block in range(plan.rounds):
                texts = [self._say(plan.turn_tokens, begins=block == 0) for _ in chats]
                for side in self._in_turn(self._sides):
                    some = [(chat[side], text) for chat, text in zip(chats, texts, strict=True)]
                    turns = await asyncio.gather(*(side.ask(*one, plan.max_tokens) for one in some))
                    for chat, _ in some:
                        await side.rest(chat)
                    self._take(side, CONCURRENT, streams, block, *turns)
            await _close(*chats)

    async def restarts(self) -> None:
        """Measure a turn before and after restarts of the sides that the bench can restart."""
        for block in range(self._plan.restarts):
            for length in self._plan.lengths:
                await self._restart(length, block)

    async def _restart(self, length: int, block: int) -> None:
        plan, sides = self._plan, [side for side in self._sides if side.process is not None]
        chats, answer = {side: side.chat() for side in sides}, min(RESTART_ANSWER_TOKENS, plan.max_tokens)
        for i in range(math.ceil(length / plan.turn_tokens)):
            text = self._say(min(plan.turn_tokens, length), begins=i == 0)
            for side in list(sides):
                turn = await self._ask(side, chats[side], text, answer)
                if turn.error is not None:  # its conversation would be shorter than the others'
                    self._take(side, WARM, length, block, turn)
                    sides.remove(side)
        for ending in (WARM, *((STOP, KILL) if block % 2 == 0 else (KILL, STOP))):
            text = self._say(RESTART_TURN_TOKENS)
            for side in self._in_turn(sides):
                if ending != WARM:
                    await side.restart(kill=ending == KILL)
                    await self.meet(side)
                self._take(side, ending, length, block, await self._ask(side, chats[side], text, answer))
        await _close(chats)

    def _say(self, tokens: int, *, begins: bool = False) -> str:
        """Return about so many tokens; no two conversations share a beginning that a server may remember."""
        self._conversations += begins
        return f"[{self._conversations}] " * begins + self._texts.say(tokens)

    async def _ask(self, side: Peer, chat: Any, text: str, max_tokens: int) -> Turn:
        """Time one turn, with an eye on the processes that should be idle, and let the side come to rest."""
        others = [other.process for other in self._sides if other is not side and other.process]
        before_s = sum(map(_cpu_s, others))
        turn = await side.ask(chat, text, max_tokens)
        used_s = sum(map(_cpu_s, others)) - before_s
        await side.rest(chat)
        busy = max(0.0, used_s) / turn.total_s if others else None
        return replace(turn, facts=turn.facts | {"others_busy": busy})

    def _take(self, side: Peer, part: str, x: float, block: int, *turns: Turn) -> None:
        told = {"part": part, "blas": side.library}
        self._run.take(*(replace(t, case=side.name, x=x, block=block, facts=t.facts | told) for t in turns))
        self._run.step(len(self._run.turns), None, f"{part}, {x:g}, {side.name}")

    def _in_turn(self, sides: Sequence[Peer]) -> list[Peer]:
        first = self._rotations % max(1, len(sides))
        self._rotations += 1
        return [*sides[first:], *sides[:first]]


async def _close(*chats: dict[Peer, Any]) -> None:
    for one in chats:
        for side, chat in one.items():
            await side.close(chat)


def _cpu_s(of: Process) -> float:
    """Return the CPU time that a process and its children have used so far."""
    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(of.pid)
        for one in (process, *process.children(recursive=True)):
            times = one.cpu_times()
            total += times.user + times.system
    return total


BENCH = Bench(
    name="peers",
    title="The same conversations with other servers",
    plan=Plan,
    cases=(TURNKEEP, OWN),
    measures=(*TIMES, GROWTH, BUSY),
    against=(*(Against(one, TURNKEEP) for one in TIMES), Against(GROWTH, TURNKEEP, "difference")),
    plots=PLOTS,
    checks=checks,
    measure=measure,
    follows=follows,
    notes=notes,
)
