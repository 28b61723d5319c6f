"""The ledger of device memory against a model of itself, and the queue before it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiny_models import key, loaded, prompt

from cache.blocks import as_tokens
from worker.device.admission import PRIORITY_S, Ledger, place
from worker.device.device import Device
from worker.device.engine import Engine
from worker.telemetry import Telemetry

CAPACITY = 100
NAMES = st.sampled_from("abcdef")
SIZES = st.integers(1, CAPACITY + 10)


class LedgerMachine(RuleBasedStateMachine):
    """The ledger beside two plain dicts: what runs, and what is idle in the order of its last use."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(CAPACITY)
        self.reserved: dict[str, int] = {}
        self.idle: OrderedDict[str, int] = OrderedDict()

    @rule(name=NAMES, size=SIZES)
    def reserve(self, name: str, size: int) -> None:
        if name in self.reserved:
            return
        victims = self.ledger.reserve(key(name), size)
        running = sum(self.reserved.values())
        if running + size > CAPACITY:
            assert victims is None
            return
        self.idle.pop(name, None)
        gone = []
        while running + sum(self.idle.values()) + size > CAPACITY:
            gone.append(key(self.idle.popitem(last=False)[0]))
        assert victims == gone, "the least recently used leave, and no more than needed"
        self.reserved[name] = size

    @rule(name=NAMES, share=st.floats(0, 1))
    def settle(self, name: str, share: float) -> None:
        if name in self.reserved:
            held = int(self.reserved.pop(name) * share)
            self.ledger.settle(key(name), held)
            if held:
                self.idle[name] = held

    @rule(name=NAMES)
    def forget(self, name: str) -> None:
        if name not in self.reserved:
            self.ledger.forget(key(name))
            self.idle.pop(name, None)

    @invariant()
    def free_and_reserved_and_idle_make_the_capacity(self) -> None:
        free = CAPACITY - self.ledger.used_bytes
        assert free >= 0
        assert free + sum(self.reserved.values()) + sum(self.idle.values()) == CAPACITY
        assert self.ledger.num_resident == len(self.reserved) + len(self.idle)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


def test_what_could_never_run_is_told_apart_from_what_has_to_wait() -> None:
    ledger = Ledger(CAPACITY)
    assert ledger.ever_fits(CAPACITY)
    assert not ledger.ever_fits(CAPACITY + 1)
    assert ledger.reserve(key("a"), 60) == []
    assert ledger.reserve(key("b"), 60) is None
    ledger.settle(key("a"), 60)
    assert ledger.reserve(key("b"), 60) == [key("a")]


@pytest.fixture
async def make_engine(make_model):
    """Start an engine on a device of its own, with memory for a number of tokens and no snapshots."""
    devices = []

    async def make(num_tokens: int) -> Engine:
        model = loaded(make_model("llama"))
        loop = asyncio.get_running_loop()
        device = Device(
            lambda: model,
            lambda report: loop.call_soon_threadsafe(engine.handle, report) and None,
            lambda error: None,
            block_tokens=8,
            max_batch=8,
            stall_s=0.25,
        )
        devices.append(device)
        ledger = Ledger(model.kv.held(num_tokens))
        engine = Engine(device, ledger, None, Telemetry(), kv=model.kv, piece_tokens=8)
        await asyncio.to_thread(device.start)
        return engine

    yield make
    for device in devices:
        assert device.stop()


async def test_a_large_turn_is_not_starved_by_small_ones(make_engine) -> None:
    """First come, first served: small turns that would fit do not overtake a large one that waits."""
    engine = await make_engine(600)
    order: list[str] = []

    async def run(name: str, num_tokens: int) -> None:
        await engine.run(key(name), as_tokens(prompt(num_tokens)), lambda: False)
        order.append(name)

    tasks = [asyncio.create_task(run("first", 400))]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(run("large", 500)))
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(run(f"small{i}", 110)) for i in range(5)]
    await asyncio.sleep(0)
    assert (engine.num_running, engine.num_waiting) == (1, 6)
    await asyncio.gather(*tasks)
    assert order[:2] == ["first", "large"]
    assert engine.num_waiting == 0


async def test_a_higher_priority_waits_less_for_memory(make_engine) -> None:
    engine = await make_engine(300)
    order: list[str] = []

    async def run(name: str, priority: int) -> None:
        await engine.run(key(name), as_tokens(prompt(250)), lambda: False, priority=priority)
        order.append(name)

    tasks = []
    for name, priority in (("first", 0), ("low", -1), ("none", 0), ("high", 5), ("higher", 6), ("late", 0)):
        tasks.append(asyncio.create_task(run(name, priority)))
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    assert order == ["first", "higher", "high", "none", "late", "low"]


def test_what_waits_long_enough_is_overtaken_by_nobody() -> None:
    waiting = place(100.0, 0)
    assert place(100.0 + 3 * PRIORITY_S - 1, 3) < waiting < place(100.0 + 3 * PRIORITY_S + 1, 3)


async def test_a_cancelled_waiter_leaves_the_queue_to_those_behind_it(make_engine) -> None:
    """Also where what is free has long been enough for them. A turn takes what caches allocate for it."""
    engine = await make_engine(1024)
    running = asyncio.create_task(engine.run(key("running"), as_tokens(prompt(590)), lambda: False))
    await asyncio.sleep(0)
    cancelled = False
    large = asyncio.create_task(engine.run(key("large"), as_tokens(prompt(500)), lambda: cancelled))
    small = asyncio.create_task(engine.run(key("small"), as_tokens(prompt(10)), lambda: False))
    await asyncio.sleep(0)
    assert engine.num_waiting == 2
    cancelled = True
    engine.cancel(key("large"))
    assert await large is None
    assert engine.num_waiting == 0, "256 tokens had been free all the time"
    assert await small is not None
    assert await running is not None


async def test_a_rewound_session_counts_with_what_it_held_until_its_turn_is_over(make_engine) -> None:
    engine = await make_engine(300)
    await engine.run(key("rewound"), as_tokens(prompt(250)), lambda: False)
    turn = asyncio.create_task(engine.run(key("rewound"), as_tokens(prompt(10)), lambda: False))
    await asyncio.sleep(0)
    assert engine.ledger.used_bytes == engine.size_bytes(256), "caches grow by so many tokens"
    await turn
    assert engine.ledger.used_bytes == engine.size_bytes(9), "the last one waits for an answer"


async def test_the_ledger_never_exceeds_its_limit_under_random_turns(make_engine) -> None:
    """Rewinds, cancellations before and on the device, and more sessions than fit."""
    engine = await make_engine(300)
    over: list[int] = []
    watched = engine.ledger.reserve

    def watch(*arguments):
        victims = watched(*arguments)
        over.append(max(engine.ledger.used_bytes - engine.ledger.max_bytes, 0))
        return victims

    engine.ledger.reserve = watch  # type: ignore[method-assign]

    async def session(index: int) -> None:
        name = key(f"s{index}")
        for turn in range(6):
            num_tokens = (index * 53 + turn * 71) % 250 + 1
            cancelled = (index + turn) % 3 == 0
            if (index + turn) % 4 == 0:
                asyncio.get_running_loop().call_later(0.002, engine.cancel, name)
            await engine.run(name, as_tokens(prompt(num_tokens)), lambda cancelled=cancelled: cancelled)
            over.append(max(engine.ledger.used_bytes - engine.ledger.max_bytes, 0))

    await asyncio.gather(*(session(index) for index in range(6)))
    assert max(over) == 0
    assert engine.num_running == engine.num_waiting == 0
