"""Whatever happens to sessions, in whatever order: each answer has the tokens of a run from scratch.

Sessions of several policies grow, rewind, fork and run side by side. Turns are cancelled and resumed, idle
sessions lose their KV, the writer's queue is full, snapshot files are damaged, and processes are restarted.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import engine_process
import mlx.core as mx
import pytest
from engine_process import Process
from naive_window import Naive, kinds_of
from tiny_models import GREEDY, alone, answer, key, prompt

from cache.names.policy import FULL, Policy
from cache.names.tokens import as_tokens
from worker.batch.row_sampler import RowSampling
from worker.device.request import TurnRequest

HOT = RowSampling(0.9, top_p=0.95, seed=77)
WINDOW = Policy(sink=3, window=20)
#: Another window, so that rows with different windows run together.
WIDER = Policy(sink=3, window=28)
#: Attention within chunks of four blocks.
CHUNKED = "llama4_chunks"
#: Models with windows of their own, hybrids, and plain ones, of which a plain reference can mask all layers.
MASKED = [
    *("llama", "exaone4", "gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1"),
    *("granitemoehybrid", "baichuan_m1"),
]
MOST_TOKENS = 150


class FromScratch:
    """Checks answers with runs of their whole sessions, without KV of the worker's making."""

    def __init__(self, kind: str, kv_bits: int | None, model: Any, build_model: Callable[..., Any]) -> None:
        self._kind = kind
        self._model = model
        self._masked: dict[Policy, Naive] = {}
        if kind in MASKED and kv_bits is None:
            kinds = {one: kinds_of(model, one) for one in (FULL, WINDOW, WIDER)}
            self._masked = {one: Naive(model, build_model(kind), kinds[one]) for one in kinds}

    @property
    def policies(self) -> list[Policy]:
        return [WINDOW, WIDER, FULL, FULL] if self._masked else [FULL] * 4

    def check(self, context: list[int], drawn: list[int], sampling: RowSampling, policy: Policy) -> None:
        """Check that `drawn` is the answer to `context`. Nothing else may run: masks replace attention."""
        at = (self._kind, len(context), policy)
        if sampling is not GREEDY or not (self._masked or self._kind == CHUNKED):
            assert drawn == alone(self._model, context, len(drawn), sampling)[0], at
            return
        tokens = [*context, *drawn]
        logits = self._masked[policy].logits(tokens) if self._masked else self._model(mx.array([tokens]))[0]
        assert drawn == logits[len(context) - 1 : -1].argmax(axis=-1).tolist(), at


class Machine:
    """Four sessions, and the steps that a test takes with them at random."""

    def __init__(self, scratch: FromScratch, folder: Path, dice: random.Random) -> None:
        self.policies = dict(zip("abcd", scratch.policies, strict=True))
        self.histories: dict[str, list[int]] = {name: [] for name in self.policies}
        self.taken: Counter[str] = Counter()
        self.num_damaged = 0
        self._scratch = scratch
        self._folder = folder
        self._dice = dice

    async def step(self, process: Process) -> None:
        """Take a random step: often turns, else one of the others."""
        others = [self.rewind, self.fork, self.evict, self.cancel, self.abandon, self.fill_queue, self.damage]
        for one in self._dice.sample(others, self._dice.choice((0, 1, 1))):
            self.taken[one.__name__] += 1
            await one(process)
        await self.turns(process, self._dice.sample(sorted(self.histories), self._dice.randint(1, 4)))

    async def turns(self, process: Process, names: list[str]) -> None:
        """Let these sessions have a turn at the same time, some of them in two requests."""
        done = await asyncio.gather(*(self._turn(process, name) for name in names))
        for name, (context, drawn, sampling) in zip(names, done, strict=True):
            self._scratch.check(context, drawn, sampling, self.policies[name])
            self.histories[name] = [*context, *drawn][-MOST_TOKENS:]

    async def _turn(self, process: Process, name: str) -> tuple[list[int], list[int], RowSampling]:
        policy = self.policies[name]
        context = self.histories[name] + prompt(self._dice.choice((1, 3, 9, 30)), self._dice.randrange(99))
        sampling = self._dice.choice((GREEDY, HOT)) if policy == FULL else GREEDY
        num = self._dice.randrange(1, 12)
        if self._dice.random() < 0.3:
            await process.append(context, name, policy)
        outcome, drawn, _ = await process.generate(context, num, sampling, name, policy)
        assert outcome.num_cached + outcome.num_prefilled == len(context)
        assert len(drawn) == num
        return context, drawn, sampling

    async def cancel(self, process: Process) -> None:
        """Cancel an answer after some tokens, and resume it with these, as after a worker's crash."""
        name = self._dice.choice(sorted(self.histories))
        policy, context = self.policies[name], self.histories[name] + prompt(9)
        sampling = HOT if policy == FULL else GREEDY
        growing, most = answer(500), self._dice.randrange(1, 9)

        async def publish(_: Any) -> None:
            if len(growing.tokens) >= most:
                process.engine.cancel(key(name))

        def request(tokens: list[int], begun: Any) -> TurnRequest:
            return TurnRequest(key(name), as_tokens(tokens), policy, answer=begun, sampling=sampling)

        await process.engine.run(request(context, growing), lambda: len(growing.tokens) >= most, publish)
        begun = growing.tokens[:most]
        resumed = answer(len(begun) + 5, *begun)
        await process.engine.run(request(context + begun, resumed), lambda: False)
        assert len(resumed.tokens) == len(begun) + 5
        self._scratch.check(context, resumed.tokens, sampling, policy)

    async def abandon(self, process: Process) -> None:
        """Start a session's next turn while the device still runs one of other tokens that nobody awaits."""
        name, begun = self._dice.choice(sorted(self.histories)), asyncio.Event()

        async def publish(_: Any) -> None:
            begun.set()

        context = as_tokens(self.histories[name] + prompt(30, salt=7))
        request = TurnRequest(key(name), context, self.policies[name], answer=answer(500))
        running = asyncio.create_task(process.engine.run(request, lambda: False, publish))
        await begun.wait()
        running.cancel()
        await asyncio.wait([running])
        await self.turns(process, [name])

    async def rewind(self, process: Process) -> None:
        history = self.histories[self._dice.choice(sorted(self.histories))]
        del history[self._dice.randint(0, len(history)) :]

    async def fork(self, process: Process) -> None:
        name, other = self._dice.sample(sorted(self.histories), 2)
        parent = self.histories[other]
        self.histories[name] = parent[: self._dice.randint(0, len(parent))]

    async def evict(self, process: Process) -> None:
        process.engine.forget(key(self._dice.choice(sorted(self.histories))))

    async def fill_queue(self, process: Process) -> None:
        """Leave the writer's queue no room, or little, until the next such step; or drop what waits in it."""
        vacant = process.store.queue.vacant_bytes
        process.engine._device.cut_snapshots(self._dice.choice((vacant, vacant, lambda: 0, lambda: 3000)))
        if self._dice.random() < 0.3:
            process.store.queue.free_memory()

    async def damage(self, process: Process) -> None:
        """Truncate, change, exchange, remove or bury up to three of the snapshot files."""
        await process.store.queue.drained(10)
        files = sorted(path for path in (self._folder / "snapshots").iterdir() if path.is_file())
        for path in self._dice.sample(files, min(len(files), self._dice.randint(1, 3))):
            with suppress(OSError):  # it may just be evicted, or moved to quarantine
                content = bytearray(path.read_bytes())
                way = self._dice.randrange(5)
                if way > 2:
                    path.unlink()
                if way == 0:
                    path.write_bytes(content[: self._dice.randrange(len(content))])
                elif way == 1:
                    content[self._dice.randrange(len(content))] ^= 1 << self._dice.randrange(8)
                    path.write_bytes(content)
                elif way == 2:
                    path.write_bytes(self._dice.choice(files).read_bytes())
                elif way == 3:
                    (path / "below").mkdir(parents=True)
                self.num_damaged += 1


async def _play(
    kind: str,
    kv_bits: int | None,
    seed: int,
    num_steps: int,
    make_model: Callable[..., Any],
    build_model: Callable[..., Any],
    folder: Path,
    **options: Any,
) -> tuple[Machine, int]:
    """Take random steps, in a new process after each few; return the machine, and the evictions from disk."""
    dice, model, num_evicted = random.Random(f"{kind} {seed}"), make_model(kind, kv_bits), 0
    machine = Machine(FromScratch(kind, kv_bits, model, build_model), folder, dice)
    while num_steps > 0:
        async with engine_process.open_process(model, folder, **options) as process:
            for _ in range(min(num_steps, dice.randint(1, 8))):
                num_steps -= 1
                await machine.step(process)
            assert await process.store.queue.drained(60)  # `close` has no time for a slow disk
            stats = process.store.stats()
            settled = stats.durable + sum(stats.dropped.values()) + stats.failed + stats.cancelled
            assert stats.accepted == settled
            assert machine.num_damaged or not stats.rejected
            num_evicted += stats.evicted
    return machine, num_evicted


#: Kinds whose caches and passes others have, too, run only in `make soak`.
USUAL = ["llama", "exaone4", "gpt_oss", "qwen3_next", "baichuan_m1", CHUNKED, "mamba2"]
KINDS = [*((kind, None) for kind in [*MASKED, CHUNKED, "mamba2"]), ("llama", 8), ("qwen3_next", 4)]


@pytest.mark.parametrize(
    ("kind", "kv_bits"), [one for one in KINDS if one[0] in USUAL and one != ("qwen3_next", None)]
)
async def test_random_turns_forks_rewinds_losses_and_restarts_give_the_tokens_of_a_run_from_scratch(
    make_model, build_model, trials, tmp_path, kind, kv_bits
) -> None:
    machine, _ = await _play(kind, kv_bits, 1, 12, make_model, build_model, tmp_path, trials=trials)
    assert len(machine.taken) > 3


async def test_sessions_whose_snapshots_exceed_the_disk_limit_get_the_tokens_of_a_run_from_scratch(
    make_model, build_model, trials, tmp_path
) -> None:
    """KV from the middle of sessions is evicted; they continue, rewind to before that part, and restart."""
    sizes = {"trials": trials, "max_bytes": 120_000}
    _, num_evicted = await _play("llama", None, 4, 16, make_model, build_model, tmp_path, **sizes)
    assert num_evicted


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("max_bytes", [1 << 30, 120_000])
@pytest.mark.parametrize(("kind", "kv_bits"), KINDS)
@pytest.mark.parametrize("seed", range(100, 150))
async def test_hundreds_of_random_orders_of_turns_and_restarts_give_the_tokens_of_a_run_from_scratch(
    make_model, build_model, trials, tmp_path, kind, kv_bits, max_bytes, seed
) -> None:
    sizes = {"trials": trials, "max_bytes": max_bytes}
    await _play(kind, kv_bits, seed, 60, make_model, build_model, tmp_path, **sizes)
