"""`Routing` and `Owners` of three workers, without a server: whoever gets a delivery, one worker takes it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import product
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from turnkeep_client.log import BUILD_HEADER
from turnkeep_client.subjects import SessionKey
from worker.cluster.owners import Owners
from worker.cluster.routing import Routing
from worker.wire.consistent_reads import StoredMessage
from worker.wire.records import Member

KEY = SessionKey("t", "s")
NAMES = "abc"


class Cluster:
    """Three workers that ask each other without a server. `took` has those that took a delivery."""

    def __init__(self, *, drains: str = "", home: str = "", loads: dict[str, int] | None = None) -> None:
        """`drains` names the workers that drain, `home` the worker of the session's last result."""
        self.home = home
        loads = dict.fromkeys(NAMES, 0) | (loads or {})
        self.members = {name: Member(name, "host", 1, name, f"boot{name}", serves=True) for name in NAMES}
        for name, one in self.members.items():
            self.members[name] = structs.replace(one, load=loads[name], drains=name in drains)
        self.at_work: dict[str, set[SessionKey]] = {name: set() for name in NAMES}
        self.full: set[str] = set()
        self.took: list[str] = []
        self.num_asked = 0
        self.workers: dict[str, Any] = {name: self._worker(name, loads[name]) for name in NAMES}

    def _worker(self, name: str, load: int) -> Any:
        others = {one.worker: one for one in self.members.values() if one.worker != name}
        me = self.members[name]
        members = SimpleNamespace(me=me, others=others, is_held=True, knows=lambda _: True)
        intake = SimpleNamespace(
            at_work=self.at_work[name],
            num_sessions=load,
            room=lambda _: name not in self.full,
            expects=lambda key, *_: key in self.at_work[name],
            deliver_late=self._taken(name),
            note_unbegun=lambda _: None,
            take=lambda delivery, _: self.took.append(name),
        )
        parts: Any = {"nc": None, "members": members, "journal": self, "intake": intake}
        owners: Any = Owners(**parts)
        owners.ask = self._ask
        unused = dict.fromkeys(("subjects", "tasks", "ring", "control", "erase"))
        return Routing(owners=owners, **parts, **unused)  # type: ignore[arg-type]

    def _taken(self, name: str) -> Any:
        async def deliver_late(*_: Any) -> None:
            self.took.append(name)
            self.at_work[name].add(KEY)

        return deliver_late

    server = "s"

    async def unanswered(self) -> list[SessionKey]:
        return [KEY]

    async def last(self, _: SessionKey, kind: str) -> Any:
        if kind == "in":
            return StoredMessage(7, "in", datetime.now(UTC), b"", {})
        return SimpleNamespace(headers={BUILD_HEADER: f"worker={self.home}"}) if self.home else None

    async def first(self, _: Any) -> None:
        return None

    async def _ask(self, member: Member, verb: str, body: bytes, *_: Any) -> bytes:
        if verb != "deliver":
            keys = self.at_work[member.worker] if verb == "at_work" else ()
            return msgspec.json.encode([[key.tenant, key.session] for key in keys])
        self.num_asked += 1
        passed = json.loads(body)
        to = self.workers[member.worker]
        answer = await to._judge(KEY, delivery(), is_sent=passed["is_sent"], sender=passed["sender"])
        if answer.verdict.value == "taken":
            await to._take(KEY, delivery())
        elif answer.boot:
            to._owners.remember(KEY, answer.boot)
        return msgspec.json.encode(answer)

    async def offer(self, name: str) -> bool:
        """Have a worker get a delivery; return whether any worker has taken it."""
        return bool(await self.workers[name]._offer(KEY, delivery(), "s"))

    def remember(self, **places: str) -> None:
        """Have workers, by name, remember the session at other ones."""
        for name, place in places.items():
            self.workers[name]._owners.remember(KEY, place and f"boot{place}")


def delivery() -> Any:
    metadata = SimpleNamespace(num_delivered=1, sequence=SimpleNamespace(stream=7))
    return SimpleNamespace(subject="turnkeep.t.s.in", reply="ack", metadata=metadata)


@pytest.mark.parametrize("drains", ["", "a", "ab", "abc"])
async def test_one_worker_takes_a_delivery_whatever_workers_remember_and_whichever_drain(drains: str) -> None:
    """One that takes sessions, and after three requests to others at most."""
    for home, places, at in product(["", *NAMES, "gone"], product(["", *NAMES], repeat=3), NAMES):
        cluster = Cluster(drains=drains, home=home)
        cluster.remember(**dict(zip(NAMES, places, strict=True)))
        is_taken = await cluster.offer(at) or await cluster.offer(at)
        assert is_taken, (home, places, at)
        assert (len(cluster.took), cluster.num_asked <= 4) == (1, True)
        assert cluster.took[0] not in drains or drains == NAMES


@pytest.mark.parametrize("home", ["", "a"])
async def test_a_session_at_work_at_a_worker_that_drains_waits_there(home: str) -> None:
    cluster = Cluster(drains="a", home=home)
    cluster.at_work["a"].add(KEY)
    cluster.remember(b="a", c="" if home else "a")
    assert [await cluster.offer(name) for name in NAMES] == [False] * 3
    cluster.at_work["a"].clear()
    assert [await cluster.offer(name) for name in NAMES] == [True] * 3
    assert len({*cluster.took}) == 1
    assert cluster.took[0] in "bc"


@pytest.mark.parametrize(("home", "takers"), [("", {"b"}), ("a", {"a"})])
async def test_only_a_new_session_goes_to_a_worker_with_far_less_work(home: str, takers: set[str]) -> None:
    """And its later requests too, although none of its results names the worker yet."""
    loads = {"a": 20, "b": 1, "c": 18}
    for at in NAMES:
        cluster = Cluster(home=home, loads=loads)
        cluster.remember(a="a" if home else "")
        if not home:
            chosen = (await cluster.workers[at]._owners.owner(KEY)).member.worker
            takers = {"b"} if loads[chosen] > 8 else {chosen}
        assert await cluster.offer(at)
        assert {*cluster.took} == takers
        for name in NAMES:
            assert await cluster.offer(name)
        assert {*cluster.took} == takers


async def test_a_worker_without_room_leaves_a_new_session_to_the_worker_that_got_its_request() -> None:
    cluster = Cluster()
    owner = (await cluster.workers["a"]._owners.owner(KEY)).member.worker
    cluster.full.add(owner)
    sender = next(name for name in NAMES if name != owner)
    assert await cluster.offer(sender)
    assert cluster.took == [sender]
    settled = Cluster(home=owner)
    settled.full.add(owner)
    assert await settled.offer(sender)
    assert settled.took == [owner], "which has its KV, and returns the request until it has room"


@pytest.mark.parametrize("drains", ["", "a", "b"])
@pytest.mark.parametrize("home", ["", "a", "gone"])
async def test_exactly_one_worker_takes_over_a_session_that_no_other_is_at_work_on(
    home: str, drains: str
) -> None:
    cluster = Cluster(home=home, drains=drains)
    cluster.remember(a="b", b="c", c="a")
    for one in cluster.workers.values():
        await one._take_unanswered()
    assert len(cluster.took) == 1
    assert cluster.took[0] not in drains
    for name in NAMES:
        busy = Cluster(home=home, drains=drains)
        busy.at_work[name].add(KEY)
        for one in busy.workers.values():
            await one._take_unanswered()
        assert not busy.took


@pytest.mark.parametrize(("has_stopped", "first_seq"), [(True, 1), (False, 0)])
async def test_a_request_left_by_a_worker_that_stopped_in_order_does_not_count_as_its_crash(
    has_stopped: bool, first_seq: int
) -> None:
    cluster, taken = Cluster(home="a"), list[int]()
    cluster.workers["a"]._intake.take = lambda delivery, _: taken.append(delivery.first_seq)
    await cluster.workers["a"]._take_unanswered(has_stopped=has_stopped)
    assert taken == [first_seq]
