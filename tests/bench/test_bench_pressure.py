"""`bench pressure`: what it makes of requests and readings, and whether it catches a worker that lies."""

from __future__ import annotations

import gc
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from bench_runs import PATIENCE_S, turnkeep

from bench.old import report
from bench.old.pressure.checks import checks
from bench.old.pressure.measure import PressureBench
from bench.old.pressure.plan import Dice, Plan, Wanted, kind_of
from bench.old.pressure.summary import PressureReport, Sizes, summarise
from bench.old.pressure.turns import Answers, Reading, Replayed, Sent
from bench.old.run import Run, Where
from turnkeep_client.client import connect
from worker.device import resident, runner
from worker.device.admission import Claim, Ledger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from turnkeep_client.client import Client
    from turnkeep_client.subjects import SessionKey

ROOM = 640
MIB = 2**20
#: KV of a token of the tiny model, as tests/conftest.py makes it.
TINY_KV_BYTES = 2 * 2 * 16 * 4 * 2
SIZES = Sizes(bytes_per_token=1024, fixed_bytes=0, idle_bytes=MIB, beside_bytes=3 * MIB)
LIMIT = 3 * MIB + ROOM * 1024
(ALLOCATED, KV, LIMITS, REFUSED, TAKEN, OTHERS, ONCE, CONTEXTS, ALONE, NEAR, PROCESS) = range(11)


def plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "duration_s": 3.0,
        "room": ROOM,
        "clients": 12,
        "rows": 4,
        "sample": 8,
        "turn_timeout_s": 60.0,
        "seed": 0,
    }
    return Plan(**(fields | changes))


def make_sent(size: int = 100, **changes: Any) -> Sent:
    fields: dict[str, Any] = {
        "session": 0,
        "verb": "generate",
        "kind": kind_of(size, ROOM),
        "at_s": 1.0,
        "latency_s": 0.1,
        "size": size,
        "cancelled": False,
        "outcome": "ok",
        "expected": 90,
        "prompt": 90,
    }
    return Sent(**(fields | changes))


def make_reading(**changes: Any) -> Reading:
    fields: dict[str, Any] = {
        "at_s": 1.0,
        "active_bytes": 2 * MIB,
        "peak_bytes": LIMIT,
        "kv_bytes": ROOM * 1024,
        "process_bytes": 80 * MIB,
        "device_limit_bytes": LIMIT,
        "kv_limit_bytes": ROOM * 1024,
        "running": 1,
        "waiting": 0,
        "waiting_for_memory": 0,
        "resident_sessions": 1,
        "restored_bytes": 0,
    }
    return Reading(**(fields | changes))


def verdicts(**changes: Any) -> list[bool | None]:
    never = make_sent(ROOM + 1, outcome="memory_exceeded", expected=0, prompt=0)
    fields: dict[str, Any] = {
        "sent": [make_sent(), make_sent(ROOM), never],
        "readings": [make_reading()],
        "process_bytes": [70 * MIB, 80 * MIB],
        "answers": Answers(requests=3, unanswered=0, repeated=0),
        "replayed": [Replayed(session=0, answers=2, tokens=10, differs_at=None)],
    }
    fields |= changes
    summary = summarise(
        fields.pop("sent"),
        fields.pop("readings"),
        room=ROOM,
        sizes=SIZES,
        device_limit_bytes=LIMIT,
        **fields,
    )
    return [check.passed for check in checks(summary)]


def test_a_good_run_keeps_every_promise():
    assert verdicts() == [True] * 11


def test_nothing_is_promised_of_a_run_that_has_not_begun():
    found = verdicts(sent=[], readings=[], process_bytes=[], answers=None, replayed=[])
    assert found == [None] * 11


@pytest.mark.parametrize(
    ("broken", "changes"),
    [
        (ALLOCATED, {"readings": [make_reading(peak_bytes=LIMIT + 1)]}),
        (KV, {"readings": [make_reading(kv_bytes=ROOM * 1024 + 1)]}),
        (LIMITS, {"readings": [make_reading(), make_reading(kv_limit_bytes=1)]}),
        (REFUSED, {"sent": [make_sent(ROOM, outcome="memory_exceeded", prompt=0, expected=0)]}),
        (TAKEN, {"sent": [make_sent(ROOM + 1)]}),
        (OTHERS, {"sent": [make_sent(), make_sent(outcome="internal", prompt=0, expected=0)]}),
        (OTHERS, {"sent": [make_sent(), make_sent(outcome="expired", prompt=0, expected=0)]}),
        (ONCE, {"answers": Answers(requests=3, unanswered=1, repeated=0)}),
        (ONCE, {"answers": Answers(requests=3, unanswered=0, repeated=1)}),
        (CONTEXTS, {"sent": [make_sent(prompt=89)]}),
        (ALONE, {"replayed": [Replayed(session=0, answers=2, tokens=10, differs_at=2)]}),
        (NEAR, {"readings": [make_reading(kv_bytes=ROOM * 512)]}),
        (NEAR, {"readings": [make_reading(active_bytes=MIB + 1)]}),
        (PROCESS, {"process_bytes": [70 * MIB, 400 * MIB]}),
    ],
)
def test_a_broken_promise_is_told_apart(broken: int, changes: dict[str, Any]) -> None:
    found = verdicts(**changes)
    assert [i for i, passed in enumerate(found) if passed is False] == [broken]


def test_a_cancelled_request_may_end_withdrawn():
    withdrawn = make_sent(outcome="expired", cancelled=True, prompt=0, expected=0)
    assert verdicts(sent=[make_sent(), withdrawn])[OTHERS] is True


def test_the_requests_come_to_all_sizes_and_to_the_very_limit():
    dice, kinds, sizes, verbs = Dice(plan(), 0), set(), set(), set()
    held = 0
    for _ in range(2000):
        wanted = dice.next(held)
        verbs.add(wanted.verb)
        if wanted.verb in ("append", "generate"):
            size = wanted.holds(held)
            assert size >= held + 2
            assert wanted.tokens
            assert (wanted.max_tokens > 0) == (wanted.verb == "generate")
            kinds.add(kind_of(size, ROOM))
            sizes.add(size)
            held = size if size <= ROOM else held
        else:
            held = wanted.position if wanted.verb == "rewind" else 0
    assert kinds == {"short", "long", "alone", "never"}
    assert verbs == {"append", "generate", "rewind", "close"}
    assert {ROOM, ROOM + 1} <= sizes


def test_the_same_seed_draws_the_same_requests():
    def drawn(seed: int) -> list[Wanted]:
        dice = Dice(plan(seed=seed), 1)
        return [dice.next(0) for _ in range(20)]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.fixture
def measure(local_worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the bench with a worker in this process, whose parts a test may bend."""

    class Own:
        pid = os.getpid()
        exit_code = None

        def __init__(self, settings: Any) -> None:
            self._settings = settings

        async def ready(self, tenant: str) -> Client:
            return await connect(self._settings.nats, prefix=self._settings.prefix, tenant=tenant)

    @asynccontextmanager
    async def worker(run: Run, *options: str, where: Where) -> AsyncIterator[tuple[Own, Client]]:
        gc.collect()
        left = mx.get_active_memory()  # by other tests; a worker of its own has a process to itself
        named = dict(zip(options[::2], options[1::2], strict=True))
        local = await local_worker(
            metrics_interval_s=0.1,
            max_batch=int(named["--max-batch"]),
            max_context=int(named["--max-context"]),
            device_memory=left + int(named.get("--device-memory", 2**30)),
            max_memory=ROOM * TINY_KV_BYTES if "--device-memory" in named else None,
        )
        try:
            yield Own(local.settings), local.client
        finally:
            await local.stop()

    monkeypatch.setattr(Run, "worker", worker)

    async def run(wanted: Plan) -> PressureReport:
        return await Run().conduct(PressureBench(wanted, Where()))

    return run


def failed(found: PressureReport) -> list[str]:
    return [check.name for check in found.checks if check.passed is False]


async def test_a_worker_that_refuses_what_fits_is_caught(measure, monkeypatch):
    monkeypatch.setattr(Ledger, "ever_fits", lambda self, size: size <= 0.9 * self.max_bytes)
    assert "no request that fits was refused" in failed(await measure(plan(sample=1)))


async def test_a_worker_that_exceeds_its_memory_is_caught(measure, monkeypatch):
    """It never lets go of an idle session, and its device sees to nothing either."""

    def hold(self: Ledger, claim: Claim, size_bytes: int) -> list[SessionKey]:
        self.forget(claim.key)
        self._reserved_bytes += size_bytes - self._reserved.pop(claim, 0)
        self._reserved[claim] = size_bytes
        return []

    monkeypatch.setattr(Ledger, "excess", lambda *_: 0)
    monkeypatch.setattr(Ledger, "reserve", hold)
    monkeypatch.setattr(resident.Resident, "make_room", lambda self, size, **_: True)
    found = failed(await measure(plan(clients=32, sample=1)))
    assert "KV stays within max_memory" in found


async def test_a_worker_that_restores_another_kv_is_caught(measure, monkeypatch):
    rebuild = runner.layers.rebuild

    def garble(tensors: Any, caches: Any, num_tokens: int) -> Any:
        return rebuild({name: array * 0.5 for name, array in tensors.items()}, caches, num_tokens)

    monkeypatch.setattr(runner.layers, "rebuild", garble)
    assert "answers are those of the same sessions alone" in failed(await measure(plan(sample=20)))


@pytest.mark.process
def test_the_smoke_form_ends_well(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep("pressure", "--smoke", "--out", tmp_path, model=tiny_model)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err + out
    found = report.read(next(tmp_path.glob("pressure-*.json")), PressureReport)
    assert found.complete
    assert [check.passed for check in found.checks if check.exact] == [True] * 9
    assert {one.kind for one in found.summary.kinds if one.sent} == {"short", "long", "alone", "never"}
    page = next(tmp_path.glob("pressure-*.html")).read_text()
    assert page.count("<svg") == 4
