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
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Protocol
from uuid import uuid4

import click
import psutil
from msgspec.structs import replace

from turnkeep_client.errors import TurnkeepError

from . import blas, stats
from .checks import Check, bounded, count
from .faults import BenchError
from .openai import OWN, MlxServer, Server, parse
from .plan import Corpus, Option, Seed, TurnTimeout
from .spec import Against, Bench, Measure, Plot
from .tokens import Texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from turnkeep_client.client import Client

    from .local import LocalWorker
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

Several = Annotated[tuple[int, ...], Option("Streams at once.", smoke=(2,))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The same conversations with a worker and with OpenAI-compatible servers.

    The sides take turns with every measurement, and only one of them works at a time. Three parts: chats turn
    by turn, several streams at once, and the turn after a restart of the side's process.
    """

    peer: Annotated[
        tuple[str, ...],
        Option(
            f"Compare with: {OWN}, which is started for it, or a running server as NAME=URL (NAME=URL#MODEL"
            " where it has several models).",
            metavar="PEER",
        ),
    ] = (OWN,)
    part: Annotated[
        tuple[str, ...], Option("Only this part. [default: all of them]", type=click.Choice(PARTS))
    ] = ()
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


def _of(part: str, read: Callable[[Turn], float | None]) -> Callable[[Turn], float | None]:
    return lambda turn: read(turn) if turn.facts.get("part") == part else None


def _first(turn: Turn) -> float | None:
    return turn.first_s


def _per_token(turn: Turn) -> float | None:
    tokens = turn.fact("tokens") or 0
    return (turn.total_s - turn.first_s) / (tokens - 1) if turn.first_s and tokens > 1 else None


FIRST = Measure("first token in a chat", "s", of=_of(CHAT, _first))
PER_TOKEN = Measure("time per token in a chat", "s", of=_of(CHAT, _per_token))
WHOLE = Measure("whole turn in a chat", "s", of=_of(CHAT, lambda turn: turn.total_s))
GROWTH = Measure("first token in a chat, for 1,000 more tokens of it", "s", log=False)
RATE = Measure("tokens of all streams", "tokens/s", "higher", levels="at once")
AFTER = {
    part: Measure(f"first token{after}", "s", of=_of(part, _first), levels="tokens held")
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
        share = abs(turn.prompt_tokens - our.prompt_tokens) / our.prompt_tokens
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


class Chat(Protocol):
    """One conversation with one side."""

    async def ask(self, text: str, max_tokens: int) -> Turn:
        """Say something and time the answer. An error is an outcome, and leaves the chat as it was."""

    async def rest(self) -> None:
        """Wait until the side has nothing left to do for it."""

    async def close(self) -> None:
        """End it."""


class Side(Protocol):
    """One of those compared; `pid` is of the process of its model, where the bench runs it."""

    name: str
    library: str | None

    @property
    def pid(self) -> int | None: ...

    def chat(self) -> Chat: ...

    def check(self) -> None: ...

    async def restart(self, *, kill: bool) -> None: ...

    async def describe(self) -> str: ...


class Session:
    """A session of the worker."""

    def __init__(self, run: Run[Plan], client: Client) -> None:
        self._run = run
        self._session = client.session(f"bench-{uuid4().hex[:12]}")

    async def ask(self, text: str, max_tokens: int) -> Turn:
        said = [{"role": "user", "content": text}]
        turn = await self._run.ask(
            self._session, texts=True, messages=said, max_tokens=max_tokens, temperature=0.0
        )
        return replace(turn, facts=turn.facts | {"tokens": len(turn.tokens)})

    async def rest(self) -> None:
        with contextlib.suppress(TurnkeepError):  # where its first turn failed there is none
            await self._run.settle(self._session)

    async def close(self) -> None:
        with contextlib.suppress(TurnkeepError):
            await self._session.close(timeout_s=self._run.plan.turn_timeout)


class Turnkeep:
    """The bench's own worker."""

    name = TURNKEEP
    library: str | None = None

    def __init__(self, run: Run[Plan], client: Client, worker: LocalWorker) -> None:
        self._run, self._client, self._worker = run, client, worker

    @property
    def pid(self) -> int | None:
        return self._worker.pid

    def chat(self) -> Session:
        return Session(self._run, self._client)

    def check(self) -> None:
        """The run itself notices that it has died."""

    async def restart(self, *, kill: bool) -> None:
        await self._run.restart(self._worker, kill=kill)

    async def describe(self) -> str:
        metrics = self._run.metrics
        return f"turnkeep {metrics.version}, model {metrics.model}" if metrics else "turnkeep"


class Messages:
    """A conversation with a server that keeps none: the whole of it goes along with every turn."""

    def __init__(self, run: Run[Plan], server: Server) -> None:
        self._run, self._server = run, server
        self._messages: list[dict[str, str]] = []

    async def ask(self, text: str, max_tokens: int) -> Turn:
        run, messages = self._run, [*self._messages, {"role": "user", "content": text}]
        with run.timing():
            turn = await self._server.ask(
                messages, max_tokens=max_tokens, timeout_s=run.plan.turn_timeout, began_s=run.began_s
            )
        if turn.error is None:
            self._messages = [*messages, {"role": "assistant", "content": str(turn.facts["text"])}]
        return turn

    async def rest(self) -> None:
        """Nothing is known of it."""

    async def close(self) -> None:
        """It keeps nothing."""


class Peer:
    """An OpenAI-compatible server: one that was running, or the bench's own `process`."""

    library: str | None = None

    def __init__(self, run: Run[Plan], server: Server, process: MlxServer | None = None) -> None:
        self.name = server.name
        self._run, self._server, self._process = run, server, process

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def chat(self) -> Messages:
        return Messages(self._run, self._server)

    def check(self) -> None:
        if self._process is not None:
            self._process.check()

    async def restart(self, *, kill: bool) -> None:
        if self._process is not None:
            await asyncio.to_thread(self._process.stop, kill=kill)
            await self._process.start()

    async def describe(self) -> str:
        own = "started for this" if self._process else "was running"
        return f"{own}, model {await self._server.model()}"


async def measure(run: Run[Plan]) -> None:
    """Start the sides and run the parts."""
    plan, model = run.plan, run.where.model
    names = [TURNKEEP, *(peer if peer == OWN else parse(peer).name for peer in plan.peer)]
    if len(set(names)) < len(names):
        raise BenchError(f"every side needs a name of its own, these are {', '.join(names)}")
    # Weights as they are: what the peer does with the same folder.
    keep = ("--dtype", "keep") if model and not Path(model).expanduser().is_file() else ()
    async with AsyncExitStack() as stack:
        worker, client = await stack.enter_async_context(run.worker(*keep))
        sides: list[Side] = [Turnkeep(run, client, worker)]
        for peer in plan.peer:
            sides.append(await _start(run, peer, worker, stack))
        parts = _Parts(run, sides, Texts(worker.model_folder, _shuffled(run)))
        for side in sides:
            await parts.meet(side)
            run.facts[side.name] = f"{await side.describe()}, {side.library or 'library not known'}"
        for part in plan.part or PARTS:
            await {CHAT: parts.chats, CONCURRENT: parts.concurrent, RESTART: parts.restarts}[part]()


async def _start(run: Run[Plan], peer: str, worker: LocalWorker, stack: AsyncExitStack) -> Peer:
    process = None
    if peer == OWN:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnkeep-bench-peer-")))
        # The same arithmetic: what the worker has not loaded the peer does not get either.
        process = MlxServer(worker.model_folder, folder, blas.preload_of(blas.mapped(worker.pid)))
        stack.callback(process.stop)
        await process.start()
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

    def __init__(self, run: Run[Plan], sides: Sequence[Side], texts: Texts) -> None:
        self._run, self._plan, self._sides, self._texts = run, run.plan, sides, texts
        self._rotations = self._conversations = self._steps = 0

    async def meet(self, side: Side) -> None:
        """Hold a short chat, so that the model is loaded. Raises `BenchError` where there is no answer."""
        chat = side.chat()
        turn = await chat.ask("Hello!", 2)
        await chat.rest()
        await chat.close()
        side.check()
        if turn.error is not None:
            raise BenchError(f"{side.name} does not answer: {turn.error}: {turn.message}")
        side.library = blas.names(blas.mapped(side.pid)) if side.pid else None

    async def chats(self) -> None:
        """Hold chats turn by turn."""
        for block in range(self._plan.chats):
            chats, begin = self._begin(self._sides), len(self._run.turns)
            for x in range(1, self._plan.turns + 1):
                text = self._say(x == 1, self._plan.turn_tokens)
                for side in self._in_turn(self._sides):
                    turn = await self._ask(side, chats[side.name], text, self._plan.max_tokens)
                    self._take(side, CHAT, x, block, turn)
            for chat in chats.values():
                await chat.close()
            for side in self._sides:
                done = [turn for turn in self._run.turns[begin:] if turn.case == side.name and turn.first_s]
                points = [(block, turn.prompt_tokens / 1000, turn.first_s or 0.0) for turn in done]
                for slope in stats.slopes(points):
                    self._run.sample(GROWTH, side.name, None, block, slope)

    async def concurrent(self) -> None:
        """Hold several chats at once."""
        for streams in self._plan.concurrency:
            chats = [self._begin(self._sides) for _ in range(streams)]
            for block in range(self._plan.rounds):
                texts = [self._say(block == 0, self._plan.turn_tokens) for _ in chats]
                for side in self._in_turn(self._sides):
                    some, began_s = [chat[side.name] for chat in chats], time.monotonic()
                    asked = (
                        chat.ask(text, self._plan.max_tokens) for chat, text in zip(some, texts, strict=True)
                    )
                    turns = await asyncio.gather(*asked)
                    seconds = time.monotonic() - began_s
                    for chat in some:
                        await chat.rest()
                    for turn in turns:
                        self._take(side, CONCURRENT, streams, block, turn)
                    if all(turn.error is None for turn in turns):
                        tokens = sum(turn.fact("tokens") or 0 for turn in turns)
                        self._run.sample(RATE, side.name, streams, block, tokens / seconds)
            for one in chats:
                for chat in one.values():
                    await chat.close()

    async def restarts(self) -> None:
        """Measure a turn before, and after restarts of the sides that the bench can restart."""
        for block in range(self._plan.restarts):
            for length in self._plan.lengths:
                await self._restart(length, block)

    async def _restart(self, length: int, block: int) -> None:
        sides = [side for side in self._sides if side.pid is not None]
        chats, answer = self._begin(sides), min(RESTART_ANSWER_TOKENS, self._plan.max_tokens)
        for i in range(math.ceil(length / self._plan.turn_tokens)):
            text = self._say(i == 0, min(self._plan.turn_tokens, length))
            for side in list(sides):
                turn = await self._ask(side, chats[side.name], text, answer)
                if turn.error is not None:  # its conversation would be shorter than the others'
                    self._take(side, WARM, length, block, turn)
                    sides.remove(side)
        for ending in (WARM, *((STOP, KILL) if block % 2 == 0 else (KILL, STOP))):
            text = self._say(False, RESTART_TURN_TOKENS)
            for side in self._in_turn(sides):
                began_s = time.monotonic()
                if ending != WARM:
                    await side.restart(kill=ending == KILL)
                    await self.meet(side)
                ready_s = time.monotonic() - began_s
                turn = await self._ask(side, chats[side.name], text, answer)
                facts = turn.facts | ({"ready_s": ready_s} if ending != WARM else {})
                self._take(side, ending, length, block, replace(turn, facts=facts))
        for chat in chats.values():
            await chat.close()

    def _begin(self, sides: Sequence[Side]) -> dict[str, Chat]:
        return {side.name: side.chat() for side in sides}

    def _say(self, begins: bool, tokens: int) -> str:
        """Return about so many tokens; no two conversations share a beginning that a server may remember."""
        text = self._texts.say(tokens)
        self._conversations += begins
        return f"[{self._conversations}] {text}" if begins else text

    async def _ask(self, side: Side, chat: Chat, text: str, max_tokens: int) -> Turn:
        """Time one turn, with an eye on the processes that should be idle, and let the side come to rest."""
        others = [other.pid for other in self._sides if other is not side and other.pid is not None]
        before_s = _cpu_s(others)
        turn = await chat.ask(text, max_tokens)
        used_s = _cpu_s(others) - before_s
        await chat.rest()
        busy = max(0.0, used_s) / turn.total_s if others else None
        return replace(turn, facts=turn.facts | {"others_busy": busy})

    def _take(self, side: Side, part: str, x: float, block: int, turn: Turn) -> None:
        facts = turn.facts | {"part": part, "blas": side.library}
        self._run.take(replace(turn, case=side.name, x=x, block=block, facts=facts))
        side.check()
        self._steps += 1
        self._run.step(self._steps, None, f"{part}, {x:g}, {side.name}: {turn.error or 'answered'}")

    def _in_turn(self, sides: Sequence[Side]) -> list[Side]:
        first = self._rotations % max(1, len(sides))
        self._rotations += 1
        return [*sides[first:], *sides[:first]]


def _cpu_s(pids: Sequence[int]) -> float:
    """Return the CPU time that processes and their children have used so far."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
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
    notes=notes,
)
