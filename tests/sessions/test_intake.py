"""`Intake`, without a NATS server: which deliveries it accepts, and which it returns to the server."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from anyio import move_on_after
from test_fold import STORED

from turnkeep_client.subjects import SessionKey
from worker.observe.counters import Telemetry
from worker.wire.intake import Intake


class Delivered(SimpleNamespace):
    """A delivery, with the attributes of nats-py's `Msg` that the intake uses."""

    def __init__(self, session: str, seq: int, num_delivered: int = 1, tenant: str = "t") -> None:
        metadata = SimpleNamespace(
            sequence=SimpleNamespace(stream=seq), num_delivered=num_delivered, timestamp=STORED
        )
        super().__init__(subject=f"turnkeep.{tenant}.{session}.in", data=b"", metadata=metadata)

    is_acked = False

    async def ack(self) -> None:
        self.is_acked = True

    async def nak(self, *, delay: float = 0.0) -> None:
        self.delay_s = delay

    async def in_progress(self) -> None:
        self.is_kept = True

    async def term(self) -> None:
        self.is_terminated = True


def intake_for(max_sessions: int, max_sessions_per_tenant: int = 1, **journal: Any) -> Any:
    parts: Any = [None, None, Telemetry(), SimpleNamespace(server="s", **journal)]
    return Intake(
        *parts,
        ack_wait_s=0.03,
        max_sessions=max_sessions,
        max_sessions_per_tenant=max_sessions_per_tenant,
        max_message_bytes=2**20,
    )


async def test_a_tenant_gets_sessions_up_to_its_limit_and_in_a_full_worker_up_to_its_share() -> None:
    intake, accepted = intake_for(4, 3), []
    tenants = ["loud"] * 4 + ["mid", "loud", "quiet", "quiet", "mid", "new", "new"]
    for seq, tenant in enumerate(tenants):
        await intake.deliver(Delivered(f"s{seq}", seq, tenant=tenant), lambda one: accepted.append(one.seq))
    assert accepted == [0, 1, 2, 4, 6, 9]
    assert (intake.num_returned, intake.sessions_by_tenant["loud"]) == (5, 3)
    for key in [*intake.at_work][:3]:
        assert not intake.room("loud"), "others have come in its place"
        await intake.ack(key)
    assert intake.sessions_by_tenant == {"mid": 1, "quiet": 1, "new": 1}


async def test_requests_returned_for_one_tenant_come_back_one_after_another_and_delay_no_other_tenants() -> (
    None
):
    intake = intake_for(9)
    flood = [Delivered(f"s{seq}", seq, tenant="loud") for seq in range(10_000)]
    mine = [Delivered(f"s{seq}", 10_000 + seq, tenant="quiet") for seq in range(3)]
    for one in (*flood, *mine):
        await intake.deliver(one, lambda _: None)
    assert 40 < flood[-1].delay_s < 60
    assert [one.delay_s < 2 for one in mine[1:]] == [True, True]
    assert flood[1].delay_s < flood[5_000].delay_s < flood[-1].delay_s


async def test_only_the_last_delivery_of_a_sessions_newest_request_stays_unacknowledged() -> None:
    intake = intake_for(1)
    deliveries = [Delivered("a", seq, num) for seq, num in ((5, 1), (9, 1), (9, 2), (7, 1))]
    for one in deliveries:
        await intake.deliver(one, lambda _: None)
    assert [one.is_acked for one in deliveries] == [True, False, False, True]
    await intake.ack(SessionKey("t", "a"))
    assert [one.is_acked for one in deliveries] == [True, False, True, True]


async def test_after_a_server_restart_sessions_whose_entry_the_log_lost_are_no_longer_at_work() -> None:
    stored = {5: STORED, 6: STORED + timedelta(seconds=1)}

    async def entry(seq: int) -> Any:
        return SimpleNamespace(stored=stored[seq]) if seq in stored else None

    intake = intake_for(9, 9, entry=entry)
    for seq in (5, 6, 7):
        await intake.deliver(Delivered(f"s{seq}", seq), lambda _: None)
    intake._journal.server = "the next one"
    await intake.deliver(Delivered("s8", 8), lambda _: None)
    assert [key.session for key in intake.at_work] == ["s5", "s8"]


async def test_a_worker_that_stops_returns_what_it_has_not_answered() -> None:
    intake, deliveries = intake_for(9, 9), [Delivered(f"s{seq}", seq) for seq in (5, 6)]
    for one in deliveries:
        await intake.deliver(one, lambda _: None)
    await intake.return_anchors()
    assert [one.delay_s for one in deliveries] == [0, 0]
    assert not intake.at_work


@pytest.mark.parametrize("told", ["ack", "keep alive", "return"])
async def test_a_restarted_server_hears_nothing_of_deliveries_whose_sequences_it_may_have_used_again(
    told: str,
) -> None:
    """The last three deliveries are lost: there another session's request may have been delivered."""
    stored = {5: STORED, 6: STORED + timedelta(seconds=1), 8: STORED + timedelta(seconds=2)}

    async def entry(seq: int) -> Any:
        return SimpleNamespace(stored=stored[seq]) if seq in stored else None

    intake = intake_for(9, 9, entry=entry)
    deliveries = [Delivered(f"s{seq}", seq) for seq in (5, 6, 7)]
    late = Delivered("s8", 8)
    for one in deliveries:
        await intake.deliver(one, lambda _: None)
    intake._journal.server = "the next one"
    if told == "ack":
        for key in [*intake.at_work]:
            await intake.ack(key)
    elif told == "keep alive":
        with move_on_after(0.1):
            await intake.keep_alive()
    else:
        await intake.return_anchors()
    heard = [hasattr(one, "delay_s") or hasattr(one, "is_kept") or one.is_acked for one in deliveries]
    assert heard == [told != "return", False, False]
    await intake.deliver_late(late, lambda _: None, "s")
    assert SessionKey("t", "s8") not in intake.at_work


async def test_a_request_with_an_invalid_name_is_refused_once_even_if_it_is_delivered_twice() -> None:
    refused: list[int] = []

    async def refuse(_subject: str, seq: int, _why: str) -> None:
        refused.append(seq)

    intake = intake_for(1, refuse=refuse)
    deliveries = [Delivered("*", seq, num) for seq, num in ((4, 1), (5, 1), (4, 2))]
    for one in deliveries:
        await intake.deliver(one, lambda _: None)
    assert refused == [4, 5]
    assert all(one.is_terminated for one in deliveries)


async def test_a_returned_request_counts_as_redelivered_only_if_it_was_redelivered_before() -> None:
    rung: list[Any] = []
    intake = intake_for(1)
    for delivered in (Delivered("a", 9), Delivered("b", 5, 2), Delivered("c", 10)):
        await intake.deliver(delivered, rung.append)
    assert (intake.num_sessions, intake.num_returned) == (1, 2)
    for session, seq, num_delivered in (("b", 5, 3), ("c", 10, 2)):
        await intake.ack(rung[-1].key)
        await intake.deliver(Delivered(session, seq, num_delivered), rung.append)
    assert [(one.seq, one.again, one.first_seq) for one in rung] == [
        (9, False, 9),
        (5, True, 9),
        (10, False, 9),
    ]


async def test_a_returned_request_that_is_removed_from_the_log_no_longer_counts_as_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A close removes such requests. If they counted as returned for ever, they would delay all others."""
    monkeypatch.setattr("worker.wire.intake._RETURN_S", 0.01)
    monkeypatch.setattr("worker.wire.intake._GONE_S", 0.02)
    intake = intake_for(0)
    await intake.deliver(Delivered("a", 5), lambda _: None)
    assert intake.num_returned == 1
    keeping = asyncio.create_task(intake.keep_alive())
    async with asyncio.timeout(5):
        while intake.num_returned:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    keeping.cancel()
