"""Admission of turns to device memory, on a simulated device and on a real one."""

from __future__ import annotations

import asyncio
import gc
import random
from contextlib import suppress
from unittest.mock import Mock

import hypothesis.strategies as st
import mlx.core as mx
import pytest
import structlog
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiny_models import alone, answer, key, loaded, prompt

from cache.names.policy import FULL, Policy
from cache.names.tokens import as_tokens
from tests.matrices import first
from tests.parts import until
from turnkeep_client.subjects import SessionKey
from worker.batch.row_sampler import RowSampling
from worker.device.device import Device
from worker.device.request import PRIORITY_S, TurnRequest, place
from worker.device.served_model import DeviceOptions
from worker.engine.admission import Admission, Decision
from worker.engine.engine import Engine
from worker.engine.kv_on_device import NO_KV, KvOnDevice
from worker.engine.ledger import Claim, Ledger
from worker.engine.port import DeviceFaultError
from worker.observe.telemetry import Telemetry

CAPACITY = 100
NAMES = st.sampled_from("abcdef")
TENANTS = "wxyz"


class Turn:
    """A simulated turn: what the engine and the device would know of it."""

    def __init__(self, name: str, need: int, tenant: str, priority: int, arrived: int) -> None:
        self.claim = Claim(SessionKey(tenant, name), priority, place(arrived, priority))
        self.need = need
        self.has = 0  # KV so far, and what may be kept of it behind a pause
        self.granted = 0
        self.is_paused = False

    def likely(self) -> int:
        return min(self.has + 1 + self.need // 4, self.need)


class AdmissionMachine(RuleBasedStateMachine):
    """Simulates turns that arrive, grow, pause and end in any order, on a device that obeys all decisions."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(CAPACITY)
        self.admission = Admission(self.ledger)
        self.turns: dict[Claim, Turn] = {}
        self.resident: dict[SessionKey, int] = {}
        self.now = 0

    def carry_out(self, decision: Decision) -> None:
        for gone in decision.dropped:
            del self.resident[gone]
        for claim in decision.granted:
            turn = self.turns[claim]
            turn.granted = self.ledger.reserved(claim)
            self.resident.pop(claim.key, None)
        oldest = min((claim.age for claim in self.turns if claim.age is not None), default=None)
        for claim in decision.paused:
            assert claim.age != oldest, "the oldest always goes on"
            assert self.ledger.reserved(claim)
            assert not self.turns[claim].is_paused, "nobody is told twice"
            self.turns[claim].is_paused = True

    def running(self) -> list[Turn]:
        return [turn for turn in self.turns.values() if turn.granted]

    def stop(self, turn: Turn) -> None:
        """End a turn, or put it back into the queue."""
        key, is_over = turn.claim.key, turn.has == turn.need
        turn.granted, turn.is_paused = 0, False
        if turn.has:
            self.resident[key] = turn.has
            self.ledger.kv_on_device[key] = KvOnDevice(as_tokens([0]), turn.has)
        if is_over:
            del self.turns[turn.claim]
            self.carry_out(self.admission.release(turn.claim))
        else:
            self.carry_out(self.admission.begin(turn.claim, turn.likely()))

    def step(self, turn: Turn, num: int) -> None:
        """Run up to `num` tokens of a turn. It asks for more memory in time, and stops if it has got none."""
        turn.has = min(turn.has + num, turn.granted)
        if turn.is_paused or turn.has in (turn.granted, turn.need):
            self.stop(turn)
        elif turn.granted - turn.has < 4 and not turn.claim.wanted and turn.granted < turn.need:
            self.carry_out(self.admission.grow(turn.claim, min(turn.granted + 5, turn.need)))

    @rule(
        name=NAMES, tenant=st.sampled_from(TENANTS), need=st.integers(1, CAPACITY), priority=st.integers(0, 2)
    )
    def come(self, name: str, tenant: str, need: int, priority: int) -> None:
        turn = Turn(name, need, tenant, priority, self.now)
        if any(other.claim.key == turn.claim.key for other in self.turns.values()):
            return
        self.now += 1
        self.turns[turn.claim] = turn
        self.carry_out(self.admission.begin(turn.claim, turn.likely()))

    @rule(index=st.integers(0, 50), num=st.integers(1, 9))
    def run_one(self, index: int, num: int) -> None:
        if running := self.running():
            self.step(running[index % len(running)], num)

    @rule(index=st.integers(0, 50))
    def give_up(self, index: int) -> None:
        """A client cancels a turn: a running one leaves its KV on the device, a waiting one nothing."""
        if self.turns:
            turn = list(self.turns.values())[index % len(self.turns)]
            if turn.granted:
                turn.need = max(turn.has, 1)
                turn.has = turn.need
                self.stop(turn)
            else:
                del self.turns[turn.claim]
                self.carry_out(self.admission.release(turn.claim))

    @rule(num_dropped=st.integers(1, 4))
    def lose(self, num_dropped: int) -> None:
        """The device is short of memory and drops some sessions' KV."""
        for key_ in [*self.ledger.kv_on_device][:num_dropped]:
            self.resident.pop(key_, None)
            self.ledger.kv_on_device.pop(key_)

    @invariant()
    def free_and_reserved_and_idle_make_the_capacity(self) -> None:
        free = CAPACITY - self.ledger.used_bytes
        assert free >= 0
        reserved = sum(turn.granted for turn in self.running())
        assert free + reserved + sum(self.resident.values()) == CAPACITY
        assert self.ledger.num_resident == len(self.running()) + len(self.resident)
        assert self.admission.num_waiting == len(self.turns) - len(self.running())

    @invariant()
    def somebody_runs_where_anybody_wants_to(self) -> None:
        assert self.running() or not self.turns

    def teardown(self) -> None:
        """Run all running turns in rotation, and check that every turn ends."""
        steps = 0
        while self.turns:
            for turn in self.running():
                if turn.granted:
                    self.step(turn, 2)
                    self.free_and_reserved_and_idle_make_the_capacity()
            self.somebody_runs_where_anybody_wants_to()
            steps += 1
            assert steps < 20 * CAPACITY


test_random_turns_keep_the_memory_accounting_of_admission_exact_and_every_turn_ends = (
    AdmissionMachine.TestCase
)
AdmissionMachine.TestCase.settings = settings(stateful_step_count=50)


def begin(admission: Admission, name: str, size: int, *, tenant: str = "t", priority: int = 0) -> Claim:
    claim = Claim(SessionKey(tenant, name), priority, place(0.0, priority))
    claims[claim] = name
    told(admission.begin(claim, size))
    return claim


def leave(admission: Admission, claim: Claim, size: int = 0) -> list[str]:
    """End or pause a turn, which leaves `size` bytes of idle KV; return the decisions that follow."""
    idle(admission, claim, size)
    return told(admission.release(claim))


def idle(admission: Admission, claim: Claim, size: int) -> None:
    if size:
        admission._ledger.kv_on_device[claim.key] = KvOnDevice(as_tokens([0]), size)


#: The names of a test's turns, and its latest decisions in words.
claims: dict[Claim, str] = {}
said: list[str] = []


def told(decision: Decision) -> list[str]:
    said.clear()
    said.extend(claims[claim] for claim in decision.granted)
    said.extend(f"drop {gone.session}" for gone in decision.dropped)
    said.extend(f"pause {claims[claim]}" for claim in decision.paused)
    return list(said)


def test_admission_drops_the_kv_of_as_few_idle_sessions_as_needed_least_recently_used_first() -> None:
    admission = Admission(Ledger(CAPACITY))
    for name in "abcd":
        leave(admission, begin(admission, name, 25), 25)
    begin(admission, "e", 40)
    assert said == ["e", "drop a", "drop b"]


def test_turns_that_wait_for_kv_memory_are_admitted_in_rotation_among_tenants() -> None:
    admission = Admission(Ledger(CAPACITY))
    running = begin(admission, "running", CAPACITY)
    for i in range(20):
        begin(admission, f"many{i}", 60, tenant="many")
    for i in range(2):
        begin(admission, f"one{i}", 60, tenant="one")
    order: list[str] = []
    while admission.num_waiting:
        order += leave(admission, running)
        running = next(claim for claim, name in claims.items() if name == order[-1])
    assert order[:5] == ["many0", "one0", "many1", "one1", "many2"]
    assert sorted(order[5:]) == sorted(f"many{i}" for i in range(3, 20))


def test_small_turns_overtake_a_waiting_large_turn_until_pausing_them_lets_the_large_turn_start() -> None:
    """Until older turns have freed enough for the large one, small turns use the free memory."""
    admission = Admission(Ledger(CAPACITY))
    for _ in range(2):  # a second large turn is not forgotten either
        older = begin(admission, "older", 60)
        large = begin(admission, "large", 90)
        small = [begin(admission, f"small{i}", 10) for i in range(4)]
        assert admission.num_waiting == 1, "what is free is used"
        assert leave(admission, older) == ["pause small3", "pause small2", "pause small1"]
        late = begin(admission, "late", 10)
        assert said == [], "nobody passes any more"
        for claim in (small[3], small[2]):
            assert told(admission.begin(claim, 10)) == []
        assert told(admission.begin(small[1], 10)) == ["large"]
        for claim in (large, *small, late):
            leave(admission, claim)


def test_a_growing_answer_takes_memory_from_idle_sessions_first_and_then_pauses_the_youngest_turn() -> None:
    admission = Admission(Ledger(CAPACITY))
    old = begin(admission, "old", 30)
    young = begin(admission, "young", 30)
    leave(admission, begin(admission, "idle", 30), 30)
    assert told(admission.grow(old, 60)) == ["old", "drop idle"]
    assert told(admission.grow(young, 50)) == [], "older ones do not make way"
    assert told(admission.grow(old, 80)) == ["pause young"]
    assert told(admission.begin(young, 20)) == ["old", "young"]
    assert told(admission.grow(old, 90)) == ["pause young"], "although it was paused before"
    idle(admission, young, 30)
    assert told(admission.begin(young, 40)) == ["old", "drop young"]
    assert leave(admission, old, 80) == ["young", "drop old"]


@pytest.fixture
async def make_engine(make_model, trials):
    """Return a function that starts an engine with memory for a number of tokens, and without snapshots."""
    devices = []

    async def make(num_tokens: int, *, limit_bytes: int | None = None) -> Engine:
        model = loaded(make_model("llama"))
        device = Device(
            lambda: model,
            lambda error: None,
            DeviceOptions(block_tokens=8, max_batch=8, stall_s=0.25, limit_bytes=limit_bytes, trials=trials),
        )
        devices.append(device)
        ledger = Ledger(model.kv.held(num_tokens))
        engine = Engine(device, ledger, None, Telemetry(), piece_tokens=8)
        await asyncio.to_thread(device.start)
        return engine

    yield make
    for device in devices:
        assert device.stop()


def test_a_tenants_turns_are_admitted_up_to_its_share_of_memory_and_a_lone_turn_may_exceed_the_share() -> (
    None
):
    ledger = Ledger(1000)
    admission = Admission(ledger, 300)

    def claim(tenant: str, name: str) -> Claim:
        return Claim(SessionKey(tenant, name), 0, place(0.0, 0))

    large, small, other, late = (claim(*names) for names in (("a", "1"), ("a", "2"), ("b", "1"), ("a", "3")))
    assert admission.begin(large, 400).granted == [large], "alone it may be larger than its share"
    assert admission.begin(small, 100).granted == []
    assert admission.begin(other, 100).granted == [other]
    assert admission.release(large).granted == [small]
    assert admission.begin(late, 200).granted == [late]
    assert admission.num_waiting == 0


def test_a_turn_that_waits_for_its_tenants_memory_share_is_overtaken_only_for_a_limited_time() -> None:
    ledger = Ledger(1000)
    admission = Admission(ledger, 300)

    def claim(arrived_s: float, tenant: str = "a") -> Claim:
        return Claim(SessionKey(tenant, str(arrived_s)), 0, place(arrived_s, 0))

    first, large, soon, larger, late = (claim(arrived_s) for arrived_s in (0.0, 1.0, 2.0, 9.0, 12.0))
    other = claim(99.0, "b")
    assert admission.begin(first, 200).granted == [first]
    assert admission.begin(large, 250).granted == []
    assert admission.begin(soon, 50).granted == [soon]
    assert admission.begin(larger, 250).granted == []
    assert admission.begin(late, 50).granted == [], (
        "else a tenant with many small turns never starts a large one"
    )
    assert admission.begin(other, 50).granted == [other]
    assert admission.release(first).granted == [large]
    assert admission.release(soon).granted == [late]
    assert admission.release(large).granted == [larger]


async def test_a_session_can_start_a_turn_while_the_device_still_runs_its_cancelled_turn(make_engine) -> None:
    """The new turn must not wait to share the prefill of its own session's old turn."""
    engine = await make_engine(20_000)
    context = as_tokens(prompt(900))
    for _ in range(3):
        given_up = asyncio.create_task(engine.run(TurnRequest(key("s"), context), lambda: False))
        while not engine._turns:  # noqa: ASYNC110
            await asyncio.sleep(0)
        given_up.cancel()
        async with asyncio.timeout(20):
            turn = await engine.run(TurnRequest(key("s"), context), lambda: False)
        assert turn.complete
        engine.forget(key("s"))


async def test_a_turn_after_a_rewind_reserves_memory_for_all_kv_that_the_session_still_holds(
    make_engine,
) -> None:
    """To trim its KV frees nothing."""
    engine = await make_engine(20_000)
    await engine.run(TurnRequest(key("s"), as_tokens(prompt(900))), lambda: False)
    asked = TurnRequest(key("s"), as_tokens([*prompt(900)[:40], 5]), answer=answer(3))
    running = asyncio.create_task(engine.run(asked, lambda: False))
    while not engine._turns:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert engine.ledger.used_bytes >= engine.size_bytes(900)
    assert (await running).complete


async def test_dropping_the_kv_of_chosen_sessions_spares_sessions_with_a_running_turn(make_engine) -> None:
    engine = await make_engine(20_000)
    context = as_tokens(prompt(900))
    for name in ("idle", "busy", "other"):
        await engine.run(TurnRequest(key(name), context), lambda: False)
    running = asyncio.create_task(engine.run(TurnRequest(key("busy"), context + context), lambda: False))
    while not engine._turns:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert engine.let_go(lambda one: one != key("other")) == {key("busy")}
    assert (await running).num_cached > 0
    assert set(engine._kv_on_device) == {key("busy"), key("other")}
    assert engine.let_go(lambda one: one != key("other")) == set()
    assert [*engine._kv_on_device] == [key("other")]


async def test_turns_of_higher_priority_that_wait_for_kv_memory_are_admitted_first(make_engine) -> None:
    engine = await make_engine(300)
    order: list[str] = []

    async def run(name: str, priority: int) -> None:
        await engine.run(TurnRequest(key(name), as_tokens(prompt(250)), priority=priority), lambda: False)
        order.append(name)

    tasks = []
    for name, priority in (("first", 0), ("low", -1), ("none", 0), ("high", 5), ("higher", 6), ("late", 0)):
        tasks.append(asyncio.create_task(run(name, priority)))
        await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    assert order == ["first", "higher", "high", "none", "late", "low"]


def test_a_turn_that_has_waited_long_enough_precedes_later_turns_of_higher_priority() -> None:
    waiting = place(100.0, 0)
    assert place(100.0 + 3 * PRIORITY_S - 1, 3) < waiting < place(100.0 + 3 * PRIORITY_S + 1, 3)


async def test_a_turn_cancelled_while_it_waits_for_kv_memory_leaves_the_queue(make_engine) -> None:
    """Caches grow by 256 tokens: the running turn reserves 768 of 1,024, so only the small one fits."""
    engine = await make_engine(1024)
    running = asyncio.create_task(
        engine.run(TurnRequest(key("running"), as_tokens(prompt(590))), lambda: False)
    )
    await asyncio.sleep(0)
    large = asyncio.create_task(engine.run(TurnRequest(key("large"), as_tokens(prompt(500))), lambda: False))
    small = asyncio.create_task(engine.run(TurnRequest(key("small"), as_tokens(prompt(10))), lambda: False))
    await asyncio.sleep(0)
    assert (engine.num_running, engine.num_waiting) == (2, 1)
    engine.cancel(key("large"))
    assert await large is None
    assert (engine.num_waiting, running.done()) == (0, False)
    assert await small is not None
    assert await running is not None


def answered(engine: Engine, name: str, num_prompt: int, num_tokens: int, sampling: RowSampling):
    """Start an answer of up to `num_tokens` tokens; return the answer and the task that waits for it."""
    given = answer(num_tokens)
    run = engine.run(
        TurnRequest(
            key(name), as_tokens(prompt(num_prompt, salt=len(name))), answer=given, sampling=sampling
        ),
        lambda: False,
    )
    return given, asyncio.create_task(run)


@pytest.mark.parametrize(
    "sampling", first([RowSampling(1.0, seed=7), RowSampling()]), ids=["temperature 1", "greedy"]
)
async def test_when_answers_outgrow_memory_the_youngest_pauses_and_each_gets_the_same_tokens_as_alone(
    make_engine, make_model, sampling
) -> None:
    """Two answers of 530 tokens, in memory for 1,100 tokens, get the same tokens as alone."""
    engine = await make_engine(1100)
    await engine.run(TurnRequest(key("idle"), as_tokens(prompt(60))), lambda: False)
    with structlog.testing.capture_logs() as lines:
        runs = [answered(engine, "x" * i, 20 * i, 530 - 20 * i, sampling) for i in (1, 2)]
        await asyncio.sleep(0)
        assert engine.num_waiting == 0, "they begin together: none needs all of it yet"
        outcomes = await asyncio.gather(*(task for _, task in runs))
    paused = [line["session"] for line in lines if line["event"].startswith("pausing")]
    assert paused
    assert str(key("x")) not in paused, "the oldest goes on"
    assert engine.ledger.num_resident <= 2
    for i, (given, _), outcome in zip((1, 2), runs, outcomes, strict=True):
        expected, _ = alone(make_model("llama"), prompt(20 * i, salt=i), 530 - 20 * i, sampling)
        assert given.tokens == expected
        assert (outcome.complete, outcome.num_cached + outcome.num_prefilled) == (True, 20 * i)
        assert outcome.live_bytes == engine.size_bytes(529)
    assert engine.num_running == engine.num_waiting == 0


def held_by(engine: Engine) -> set[SessionKey]:
    return set(engine._device._runner.idle_kv._resident)


@pytest.mark.parametrize("seed", first(range(3)))
async def test_after_random_turns_the_event_loop_and_the_device_thread_agree_which_sessions_have_kv(
    make_engine, make_model, seed
) -> None:
    """Turns grow, fork, rewind, fail and are cancelled, while the device is always short of memory."""
    gc.collect()
    engine = await make_engine(2500, limit_bytes=mx.get_active_memory() + 2**19)
    room = engine._device._runner.idle_kv
    drops = Mock(wraps=room._dropped)
    room._dropped = drops  # type: ignore[method-assign]
    dice, common = random.Random(seed), prompt(120, salt=99)
    answers: list[tuple[list[int], list[int]]] = []

    async def session(index: int) -> None:
        for _ in range(8):
            context = common[: dice.choice((0, 50, 120))] + prompt(dice.randrange(1, 200), salt=index)
            given = answer(dice.randrange(1, 30))
            if dice.random() < 0.2:
                asyncio.get_running_loop().call_later(dice.random() / 50, engine.cancel, key(f"s{index}"))
            await engine.run(TurnRequest(key(f"s{index}"), as_tokens(context), answer=given), lambda: False)
            answers.append((context, given.tokens))
            if dice.random() < 0.2:
                engine.forget(key(f"s{index}"))
        if index % 2:  # a turn that fails leaves no KV
            wrong = TurnRequest(key(f"s{index}"), as_tokens([*context, 10**6, 1]))
            with suppress(DeviceFaultError):  # it may be cancelled
                await engine.run(wrong, lambda: False)

    await asyncio.gather(*(session(index) for index in range(8)))
    assert drops.call_count > 5
    idle = set(engine.ledger.kv_on_device)
    await until(lambda: held_by(engine) == idle)  # what was dropped last
    assert engine.num_running == engine.num_waiting == 0
    held = [engine.ledger.kv_on_device[key].tokens for key in idle]
    assert engine.ledger.used_bytes == sum(engine.size_bytes(len(tokens)) for tokens in held)
    for context, tokens in answers:
        assert tokens == alone(make_model("llama"), context, len(tokens))[0]


def test_kv_on_the_device_is_reused_only_under_its_own_cache_policy_and_up_to_a_trimmable_position() -> None:
    held = KvOnDevice(as_tokens(range(10)), 100, earliest=4, policy=FULL)
    other = Policy(sink=4, window=128)
    assert [held.num_usable(num, FULL) for num in (3, 4, 10, 11)] == [0, 4, 10, 0]
    assert held.num_usable(4, other) == NO_KV.num_usable(4, FULL) == 0
