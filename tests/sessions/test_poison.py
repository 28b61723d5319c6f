"""A request that ends every worker, or fails for no known reason, is given up; others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import nats
import pytest
from raw_wire import append, generate

from worker.sessions import sessions
from worker.sessions.fold import Fold
from worker.sessions.session import Session

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from nats.js import JetStreamContext
    from raw_wire import Wire

    from worker.sessions.record import Pending

PROGRAM = str(Path(__file__).with_name("poisoned_worker.py"))


class Lives:
    """One worker process after another, each started when the one before has ended."""

    def __init__(self, process: Any, js: JetStreamContext) -> None:
        self.process = process
        self.js = js
        self.num = 1

    async def publish(self, session: str, body: dict[str, Any]) -> int:
        raw = json.dumps(body).encode()
        return int((await self.js.publish(f"turnkeep.default.{session}.in", raw)).seq)

    async def results(self) -> dict[int, dict[str, Any]]:
        """Read all results, by the sequence of their requests."""
        state = (await self.js.stream_info("turnkeep_log")).state
        found = {}
        for seq in range(max(state.first_seq, 1), state.last_seq + 1):
            try:
                message = await self.js.get_msg("turnkeep_log", seq)
            except nats.js.errors.NotFoundError:
                continue
            if str(message.subject).endswith(".out"):
                result = json.loads(message.data or b"")
                assert result["seq"] not in found
                found[result["seq"]] = result
        return found

    async def until_answered(self, seqs: list[int]) -> dict[int, dict[str, Any]]:
        async with asyncio.timeout(120):
            found: dict[int, dict[str, Any]] = {}
            while not set(seqs) <= set(found):
                with contextlib.suppress(nats.errors.Error):  # its server may be on its way down or up
                    found = await self.results()
                if not self.process.running:
                    self.process.start()
                    self.num += 1
                await asyncio.sleep(0.2)
        return found

    async def letters(self, session: str) -> list[dict[str, Any]]:
        subscription = await self.js.subscribe(f"turnkeep.default.{session}.dead", ordered_consumer=True)
        found = []
        try:
            while True:
                found.append(json.loads((await subscription.next_msg(timeout=1)).data))
        except nats.errors.TimeoutError:
            return found


@pytest.fixture
async def lives(worker_process: Callable[..., Any]) -> AsyncIterator[Lives]:
    # The server is not the worker's: it goes on when the worker ends.
    process = worker_process("--ack-wait-s", "1")
    process.command[1:3] = [PROGRAM]
    process.start()
    await (await process.client()).close()
    nc = await nats.connect(process.url)
    async with asyncio.timeout(60):
        while '"ready"' not in process.log:  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.1)
    yield Lives(process, nc.jetstream())
    await nc.close()
    process.command[1:2] = ["-m", "commands"]


@pytest.mark.process
async def test_a_request_that_ends_every_worker_is_given_up_after_three(lives: Lives) -> None:
    """And nobody else's, though they were being answered whenever it struck."""
    others = [await lives.publish(f"o{n}", generate("g", text="eee", max_tokens=1500)) for n in range(3)]
    before = await lives.publish("s", append("before"))
    poison = await lives.publish("s", append("poison", "POISON"))
    behind = await lives.publish("s", append("behind"))
    results = await lives.until_answered([*others, before, poison, behind])
    assert lives.num == 4
    assert (results[poison]["type"], results[poison]["code"], results[poison]["id"]) == (
        "failed",
        "internal",
        "poison",
    )
    assert "3 attempts" in results[poison]["message"]
    assert [results[seq]["type"] for seq in (*others, before, behind)] == ["generated"] * 3 + ["appended"] * 2
    (letter,) = await lives.letters("s")
    assert (letter["seq"], letter["id"], letter["attempts"]) == (poison, "poison", 3)
    assert not [line for line in lives.process.log.splitlines() if "a session failed" in line]


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_RETRY_S", 0.02)
    monkeypatch.setattr(sessions, "log", Mock())  # a traceback with its variables takes seconds to print


@pytest.mark.usefixtures("_soon")
async def test_a_request_that_fails_for_no_known_reason_is_given_up_by_the_worker_itself(
    wire: Callable[..., Awaitable[Wire]], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, bitten = Session._attempt, 0

    async def venomous(session: Session, pending: Pending) -> Any:
        nonlocal bitten
        if pending.id == "venom":
            bitten += 1
            raise LookupError("bitten")
        return await attempt(session, pending)

    monkeypatch.setattr(Session, "_attempt", venomous)
    one = await wire()
    letters = await one.nc.subscribe(one.subject("s", "dead"))
    poison = await one.publish("s", append("venom"))
    behind = await one.publish("s", append("behind"))
    failed = await one.result(poison)
    assert (failed["code"], (await one.result(behind))["type"]) == ("internal", "appended")
    assert "LookupError: bitten" in failed["message"]
    assert bitten == 3
    assert json.loads((await letters.next_msg(timeout=5)).data)["id"] == "venom"


@pytest.mark.usefixtures("_soon")
async def test_a_session_whose_log_cannot_be_read_says_so(
    wire: Callable[..., Awaitable[Wire]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await wire()
    await one.send("s", append("a", "BANE"))
    await one.worker.stop()
    replay = Fold.replay

    def baneful(fold: Fold, history: Any, request: Any, *result: Any) -> Any:
        if request.id == "a":
            raise OverflowError("too much")
        return replay(fold, history, request, *result)

    monkeypatch.setattr(Fold, "replay", baneful)
    two = await wire()
    second, other = await two.publish("s", append("b")), await two.publish("other", append("b"))
    failed = await two.result(second)
    assert failed["code"] == "history_diverged"
    assert "go on in a new session" in failed["message"]
    assert (await two.result(other))["type"] == "appended"


@pytest.mark.parametrize(("word", "num_lives"), [("BANE", 2), ("CURSE", 3)])
async def test_a_fork_is_forgotten_though_its_parent_cannot_be_read(
    lives: Lives, word: str, num_lives: int
) -> None:
    await lives.until_answered([await lives.publish("s", append("a", word))])
    fork = await lives.publish("fork", {"type": "open", "id": "o", "from": {"session": "s"}})
    await lives.until_answered([fork])
    lives.process.kill()
    forget = await lives.publish("fork", {"type": "close", "id": "c", "forget": True})
    closed = (await lives.until_answered([forget]))[forget]
    assert (closed["type"], closed.get("settled", True), lives.num) == ("closed", True, num_lives)


async def test_orderly_stops_are_no_attempts(local_worker: Callable[..., Any], nats_url: str) -> None:
    """Four of them in the middle of one prompt's answer, which goes on each time."""
    worker = await local_worker(ack_wait_s=1.0)
    prefix = worker.settings.prefix
    nc = await nats.connect(nats_url)
    chunks = await nc.subscribe(f"{prefix}.default.s.tok.g")
    results = await nc.subscribe(f"{prefix}.default.s.out")
    await nc.flush()
    body = generate("g", text="eee", max_tokens=1900)
    await nc.jetstream().publish(f"{prefix}.default.s.in", json.dumps(body).encode())
    for _ in range(4):
        await chunks.next_msg(timeout=60)
        await worker.stop()
        while chunks.pending_msgs:  # what it said before it stopped
            await chunks.next_msg()
        assert not results.pending_msgs
        worker = await local_worker(ack_wait_s=1.0)
    assert json.loads((await results.next_msg(timeout=60)).data)["type"] == "generated"
    await nc.close()
