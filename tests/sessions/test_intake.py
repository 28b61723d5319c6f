"""Which deliveries a worker accepts, returns to the server, or passes on, without a NATS server."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from itertools import product
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from anyio import move_on_after
from msgspec import structs
from session_world import STORED

from tests.parts import until
from turnkeep_client.log import BUILD_HEADER
from turnkeep_client.subjects import SessionKey, Subjects
from worker.cluster import overheard
from worker.cluster.owners import Owners
from worker.cluster.routing import Routing
from worker.observe.telemetry import Telemetry
from worker.wire.consistent_reads import StoredMessage
from worker.wire.intake import Intake
from worker.wire.records import Member


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


def intake_for(max_sessions: int, max_sessions_per_tenant: int = 1, nc: Any = None, **journal: Any) -> Any:
    parts: Any = [nc, Subjects(), Telemetry(), SimpleNamespace(server="s", **journal)]
    return Intake(
        *parts,
        ack_wait_s=0.03,
        max_sessions=max_sessions,
        max_sessions_per_tenant=max_sessions_per_tenant,
        max_message_bytes=2**20,
    )


async def test_a_worker_accepts_a_tenants_sessions_up_to_a_limit_or_when_full_up_to_the_tenants_share() -> (
    None
):
    intake, accepted = intake_for(4, 3), []
    tenants = ["loud"] * 4 + ["mid", "loud", "quiet", "quiet", "mid", "new", "new"]
    for seq, tenant in enumerate(tenants):
        await intake.deliver(Delivered(f"s{seq}", seq, tenant=tenant), lambda one: accepted.append(one.seq))
    assert accepted == [0, 1, 2, 4, 6, 9]
    assert (intake.num_returned, intake.sessions_by_tenant["loud"]) == (5, 3)
    for key, end in zip([*intake.at_work], (intake.ack, intake.give_back, intake.ack), strict=False):
        assert not intake.room("loud"), "others have come in its place"
        await end(key)
    assert intake.sessions_by_tenant == {"mid": 1, "quiet": 1, "new": 1}


async def test_the_delay_of_requests_returned_to_nats_grows_with_the_number_returned_of_all_tenants() -> None:
    intake = intake_for(9)
    for seq in range(2_000):
        await intake.deliver(last := Delivered(f"s{seq}", seq, tenant=f"t{seq % 2}"), lambda _: None)
    assert 9 < last.delay_s < 12


async def test_a_worker_lists_per_session_the_first_request_that_only_it_got_and_then_returned_to_nats() -> (
    None
):
    intake, (b, c) = intake_for(9), (SessionKey("t", session) for session in "bc")
    for session, seq, num in (("a", 1, 1), ("b", 5, 1), ("b", 4, 1), ("c", 6, 2), ("c", 7, 1), ("b", 5, 2)):
        await intake.deliver(Delivered(session, seq, num), lambda _: None)
    assert intake.first_returned() == {b: 4}
    assert intake.pass_returned([4, 6, 99]) == [4]
    assert intake.first_returned() == {b: 5, c: 7}


async def test_requests_returned_to_nats_and_not_redelivered_for_long_are_no_longer_counted_as_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.wire.intake._RETURN_S", 0.0)
    intake = intake_for(9)
    for seq, session in enumerate("ab", 1):
        await intake.deliver(Delivered(session, seq), lambda _: None)
    await asyncio.sleep(0.02)
    intake._forget_gone()
    assert intake.num_returned == 1
    monkeypatch.setattr("worker.wire.intake._GONE_S", 0.0)
    intake._forget_gone()
    assert intake.num_returned == 0


async def test_only_the_last_delivery_of_the_newest_request_of_a_session_stays_unacknowledged() -> None:
    intake = intake_for(1)
    deliveries = [Delivered("a", seq, num) for seq, num in ((5, 1), (9, 1), (9, 2), (7, 1))]
    for one in deliveries:
        await intake.deliver(one, lambda _: None)
    assert [one.is_acked for one in deliveries] == [True, False, False, True]
    await intake.ack(SessionKey("t", "a"))
    assert [one.is_acked for one in deliveries] == [True, False, True, True]


async def test_sessions_stop_counting_as_active_once_a_restarted_nats_server_has_lost_their_requests() -> (
    None
):
    stored = {5: STORED, 6: STORED + timedelta(seconds=1)}

    async def entry(seq: int) -> Any:
        return SimpleNamespace(stored=stored[seq]) if seq in stored else None

    intake = intake_for(9, 9, entry=entry)
    for seq in (5, 6, 7):
        await intake.deliver(Delivered(f"s{seq}", seq), lambda _: None)
    intake._journal.server = "the next one"
    await intake.deliver(Delivered("s8", 8), lambda _: None)
    assert [key.session for key in intake.at_work] == ["s5", "s8"]


@pytest.mark.parametrize("told", ["ack", "keep alive", "return"])
async def test_a_worker_sends_a_restarted_nats_server_no_ack_for_deliveries_whose_sequences_may_be_reused(
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


async def test_a_request_under_a_wildcard_session_name_that_is_delivered_twice_gets_one_refusal() -> None:
    refused: list[int] = []

    async def refuse(_subject: str, seq: int, _why: str) -> None:
        refused.append(seq)

    intake = intake_for(1, refuse=refuse)
    deliveries = [Delivered("*", seq, num) for seq, num in ((4, 1), (5, 1), (4, 2))]
    for one in deliveries:
        await intake.deliver(one, lambda _: None)
    assert refused == [4, 5]
    assert all(one.is_terminated for one in deliveries)


async def test_a_redelivery_of_a_request_that_this_worker_returned_is_not_counted_as_a_new_attempt() -> None:
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


class EmptyServer:
    """A connection to a server that ends each pull at once: it has nothing to deliver."""

    is_connected = False

    def new_inbox(self) -> str:
        return "_INBOX.worker"

    async def subscribe(self, _: str, cb: Any) -> Any:
        self.arrived = cb

        async def unsubscribe() -> None:
            pass

        return SimpleNamespace(unsubscribe=unsubscribe)

    async def publish(self, _: str, __: bytes, *, reply: str) -> None:
        await asyncio.sleep(0.005)
        await self.arrived(SimpleNamespace(subject=reply, headers={"Status": "408"}))


@pytest.mark.parametrize("pulls", [True, False], ids=["worker pulls messages", "worker pulls none"])
async def test_a_request_returned_to_nats_is_counted_as_returned_until_nats_no_longer_delivers_it(
    monkeypatch: pytest.MonkeyPatch, pulls: bool
) -> None:
    """It has left the log, as by a close. A worker that stops pulls nothing: it may still be delivered."""
    monkeypatch.setattr("worker.wire.intake._RETURN_S", 0.01)
    monkeypatch.setattr("worker.wire.intake._GONE_S", 0.02)
    intake = intake_for(0, nc=EmptyServer())
    await intake.deliver(Delivered("a", 5), lambda _: None)
    assert intake.num_returned == 1
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(intake.keep_alive())]
        if pulls:
            running.append(tasks.create_task(intake.pull(lambda _: asyncio.sleep(0))))
            await until(lambda: not intake.num_returned)
        else:
            await asyncio.sleep(0.1)
            assert intake.num_returned == 1
        for task in running:
            task.cancel()


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
        members = SimpleNamespace(
            me=me, others=others, has_record=True, knows=lambda _: True, has_reconnected=lambda _: False
        )
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
            return StoredMessage(7, datetime.now(UTC), b"", {})
        return SimpleNamespace(headers={BUILD_HEADER: f"worker={self.home}"}) if self.home else None

    async def first(self, *_: Any) -> None:
        return None

    async def _ask(self, member: Member, verb: str, body: bytes, *_: Any) -> bytes:
        if verb != "deliver":
            keys = self.at_work[member.worker] if verb == "at_work" else ()
            return msgspec.json.encode([[key.tenant, key.session] for key in keys])
        self.num_asked += 1
        passed = json.loads(body)
        to = self.workers[member.worker]
        answer = await to._judge(KEY, delivery(), is_sent=passed["is_sent"], sender=passed["sender"])
        if answer.has_taken:
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
async def test_exactly_one_worker_takes_a_delivery_whatever_owners_of_its_session_the_workers_remember(
    drains: str,
) -> None:
    """One that takes sessions, and after three requests to others at most."""
    for home, places, at in product(["", *NAMES, "gone"], product(["", *NAMES], repeat=3), NAMES):
        cluster = Cluster(drains=drains, home=home)
        cluster.remember(**dict(zip(NAMES, places, strict=True)))
        is_taken = await cluster.offer(at) or await cluster.offer(at)
        assert is_taken, (home, places, at)
        assert (len(cluster.took), cluster.num_asked <= 4) == (1, True)
        assert cluster.took[0] not in drains or drains == NAMES


@pytest.mark.parametrize("home", ["", "a"])
async def test_a_session_stays_at_a_draining_worker_until_that_worker_has_finished_its_requests(
    home: str,
) -> None:
    cluster = Cluster(drains="a", home=home)
    cluster.at_work["a"].add(KEY)
    cluster.remember(b="a", c="" if home else "a")
    assert [await cluster.offer(name) for name in NAMES] == [False] * 3
    cluster.at_work["a"].clear()
    assert [await cluster.offer(name) for name in NAMES] == [True] * 3
    assert len({*cluster.took}) == 1
    assert cluster.took[0] in "bc"


@pytest.mark.parametrize(
    ("home", "takers"), [("", {"b"}), ("a", {"a"})], ids=["new session", "existing session"]
)
async def test_a_new_session_but_no_existing_session_is_moved_to_a_worker_with_far_fewer_active_sessions(
    home: str, takers: set[str]
) -> None:
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


@pytest.mark.parametrize(
    ("mine", "least", "leaves"), [(9, 1, True), (8, 1, False), (24, 16, True), (30, 22, False)]
)
def test_a_new_session_leaves_its_default_worker_if_another_worker_has_at_least_8_and_a_third_fewer_sessions(
    mine: int, least: int, leaves: bool
) -> None:
    cluster = Cluster(loads={"a": mine, "b": least, "c": mine})
    assert cluster.workers["a"]._relief(KEY, "") == ("bootb" if leaves else "")


async def test_a_request_redelivered_while_being_offered_to_its_sessions_worker_is_offered_again() -> None:
    """Of several deliveries of one request only the last can be acknowledged."""
    routing, offered = Cluster().workers["a"], list[Any]()
    first, again = Delivered("s", 7), Delivered("s", 7, 2)

    async def offer(_key: SessionKey, message: Any, _server: str) -> bool:
        offered.append(message)
        routing._routed[KEY][7] = again, "s"
        return True

    routing._offer = offer
    routing._routed[KEY] = {7: (first, "s")}
    await routing._route(KEY)
    assert (offered, routing._routed) == ([first, again], {})


def test_a_worker_lists_per_session_the_first_request_that_only_it_got_and_that_is_still_being_routed() -> (
    None
):
    routing, other = Cluster().workers["a"], SessionKey("other", "s")
    routing._routed[KEY] = {seq: (Delivered("s", seq), "s") for seq in (9, 8)}
    routing._routed[other] = {3: (Delivered("s", 3, 2), "s"), 4: (Delivered("s", 4), "s")}
    assert routing.first_routed() == {KEY: 8}


async def test_a_new_session_whose_chosen_worker_is_full_stays_at_the_worker_that_got_its_request() -> None:
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
async def test_exactly_one_worker_takes_over_a_session_with_unanswered_requests_that_no_worker_is_serving(
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
    on_its_way = Cluster(home=home, drains=drains)
    for one in on_its_way.workers.values():
        one._routed[KEY] = {}
        await one._take_unanswered()
    assert not on_its_way.took


@pytest.mark.parametrize(("has_stopped", "first_seq"), [(True, 1), (False, 0)])
async def test_a_normal_worker_stop_that_leaves_a_request_unanswered_is_not_counted_as_a_crash(
    has_stopped: bool, first_seq: int
) -> None:
    cluster, taken = Cluster(home="a"), list[int]()
    cluster.workers["a"]._intake.take = lambda delivery, _: taken.append(delivery.first_seq)
    await cluster.workers["a"]._take_unanswered(has_stopped=has_stopped)
    assert taken == [first_seq]


def test_a_worker_remembers_only_the_owners_of_the_sessions_that_it_looked_up_most_recently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After it was paused, it remembers none."""
    monkeypatch.setattr("worker.cluster.owners._MAX_REMEMBERED", 2)
    members = SimpleNamespace(
        me=SimpleNamespace(boot="me", drains=False),
        others={"b": None},
        has_record=True,
        has_reconnected=lambda _: False,
    )
    parts: Any = [None, members, None, SimpleNamespace(at_work=set())]
    owners, keys = Owners(*parts), [SessionKey(tenant, "s") for tenant in "xyz"]
    for key in (keys[0], keys[1], keys[0], keys[2]):
        owners.remember(key, "me")
    assert [owners.is_here(key) for key in keys] == [True, False, True]
    members.has_record = False
    assert not owners.is_here(keys[0])
    members.has_record = True
    assert not owners.is_here(keys[2])


async def test_a_worker_keeps_a_limited_number_of_control_requests_that_nobody_begins_and_answers_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("_MAX_KEPT", 2), ("_UNBEGUN_S", 0.0), ("_PERIOD_S", 0.01)):
        monkeypatch.setattr(overheard, name, value)
    heard, answered = list[Any](), list[bytes]()

    async def subscribe(_: str, cb: Any) -> None:
        heard.append(cb)

    async def answer(message: Any) -> None:
        answered.append(message.data)

    other = SimpleNamespace(boot="b", serves=True)
    members = SimpleNamespace(me=SimpleNamespace(boot="me"), others={"b": other}, has_record=True)
    parts: Any = [SimpleNamespace(subscribe=subscribe), members]
    kept = overheard.OverheardRequests(*parts)
    await kept.keep_requests("ctl", answer)
    for number in range(3):
        await heard[0](SimpleNamespace(subject="ctl", reply=f"reply{number}", data=b"%d" % number))
    with move_on_after(0.2):
        await kept.run()
    assert answered == [b"0", b"1"]
