"""General rules: at rest, parts of the program hold nothing, and their counts agree with what they count.

`held` walks through parts and all that they have, and lists what is in their collections, counters, locks,
futures and subscriptions. Once nothing is left to do, all of it is gone, except what `STAYS` names. So a new
field falls under this rule by itself. `unbalanced` compares sums with what they add up, which agree always.

Tests use them wherever parts come to rest: at the end of simulated histories and state machines, and in the
fixtures that stop workers, gateways and stores.
"""

from __future__ import annotations

import asyncio
import queue
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec

_ROOMS: Final = ("worker.", "cache.", "gateway.", "turnkeep_client.")
#: Names of numbers that go back to 0.
_COUNTED: Final = re.compile(r"_?num(_|$)|_?(holds|users|publishing)$|.*_bytes$")
#: How long parts may take to come to rest, with work that may not end and without.
_BUSY_S: Final = 1.0
_IDLE_S: Final = 60.0
#: Subjects of subscriptions that end with one request: `turnkeep.tenant.session.out`, not `turnkeep._serve`.
_OF_A_REQUEST: Final = re.compile(r"(?!.*\._)[^$_*>][^*>]*$")

#: The fields that stay at rest, by class. Those of a class with `*` are not looked at.
STAYS: Final = {
    # Set once.
    **dict.fromkeys(("Settings", "Constants", "RequestLimits", "Discovery", "ServedModel", "Keys"), "*"),
    **dict.fromkeys(("Tokenizer", "Estimator", "KvSize", "DeviceOptions", "Prefixes", "IoThreads"), "*"),
    **dict.fromkeys(("ModelStart", "LoadedModel", "Batch", "Shape"), "*"),
    "Access": "_key_headers _cors_names",
    "Connections": "_conversations",
    "Conversations": "_tasks",  # the sweep
    "Cutter": "queue_bytes",
    "Endpoints": "_subscriptions",
    "Erasures": "_copies",
    "Gateway": "routes",
    "Groundwork": "copies",
    "Intake": "_fetch_bytes _num_to_come",
    "Ledger": "max_bytes kv_on_device",
    "NatsWire": "_num_to_try",
    "Quota": "max_bytes min_free_bytes _most_queued_bytes",
    "Retention": "max_bytes",
    "Services": "own_sampling",
    "StoredKv": "_identities _prefixes _markers",
    **dict.fromkeys(("SharedDirectory", "TierEraser"), "*"),
    "TierAccess": "_there _identities _num_forgotten",
    "WriteQueue": "queue_bytes",
    # What is known of the log and the disk, of other workers, and of clients.
    "AnsweredIds": "_found",
    "DiskWork": "noted",
    "Eraser": "_identities _progress",
    "IndexedRequest": "bases",
    "IndexedSession": "marks asked",
    "Intake.": "_dues _refused",
    "Members": "others _misses _ended",
    "OpenDirectory": "*",
    "Owners": "_boots",
    "RecentBoundaries": "_young _old",
    "Record": "*",
    "Retention.": "num_bytes _stripped _forgotten",
    "SessionIndex": "sessions asked _by_boundary",
    "Checkpoint": "*",
    "Sessions": "_sessions _size_bytes",
    "ServedSession": "counted_bytes",
    "SnapshotIndex": "_nodes _children _due _uses stored_bytes",
    "SyncedEntries": "_seen",
    "WriteQueue.": "free_bytes quarantined_bytes",
    # The KV of idle sessions on the device.
    **dict.fromkeys(("KvOnDevice", "ResidentKv", "Tokens", "Chain"), "*"),
    "IdleKv": "_resident",
    **dict.fromkeys(("Engine", "KvFinder"), "_kv_on_device"),
    "UnsavedKv": "_lacking _kv_on_device",
    # What has a rule below.
    "Cutter.": "taken_bytes _cut_bytes",
    "_Tenant": "waiting at_work",
    # What is computed once and used again.
    "Grammars": "_kept",
    "Vision": "_kept",
    # What was measured.
    **dict.fromkeys(("Telemetry", "Distribution", "StepReport", "StepFigures", "PrefillBudget"), "*"),
    **dict.fromkeys(("Speculation", "RestoreTimes", "StepTimes", "Counts", "RemoteCounts"), "*"),
    "Audit": "_noted",
    "Counters": "requests answers tokens num_resumed",
    "Device": "resident _disk",  # the simulation's
    "Shares": "_present",
    "StoredKv.": "restored_bytes",
}


def _fields(one: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for name in _slots(type(one)) if hasattr(one, name)} | getattr(
        one, "__dict__", {}
    )


@cache
def _slots(kind: type) -> list[str]:
    return [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]


@cache
def _stay(name: str) -> set[str]:
    return {*STAYS.get(name, "").split(), *STAYS.get(f"{name}.", "").split()}


@cache
def _is_part(kind: type) -> bool:
    """Whether objects of a class are parts of the program, and no values."""
    is_value = issubclass(kind, type | msgspec.Struct | BaseException | tuple | Enum)
    is_model = kind.__module__.startswith("worker.models.")  # nothing of a request
    is_ours = kind.__module__.startswith(_ROOMS) and not is_model and "*" not in _stay(kind.__qualname__)
    return (is_ours and not is_value) or hasattr(kind, "_remove_sub")


def parts_of(*roots: Any) -> Iterator[Any]:
    """Yield these parts, and all that they have, each once."""
    seen, waiting = set[int](), [*roots]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        for value in _fields(one).values():
            inside = value.values() if isinstance(value, dict) else value
            inside = inside if isinstance(value, dict | list | set | deque) else (value,)
            waiting += [part for part in inside if _is_part(type(part))]


def held(*roots: Any) -> Counter[str]:
    """Count what these parts hold that goes at rest, by the names of classes and fields."""
    found: Counter[str] = Counter()
    for one in parts_of(*roots):
        if hasattr(one, "_subs"):
            found.update(_held_by_connection(one))
            continue
        kind = type(one).__qualname__
        for name, value in _fields(one).items():
            if name not in _stay(kind):
                found[f"{kind}.{name}"] += _amount(name, value)
    found.update(_wrong_sums(_ALWAYS | _REST, *roots))
    return +found


def _amount(name: str, value: Any) -> int:
    match value:
        case dict() | list() | set() | deque():
            return len(value)
        case asyncio.Queue() | queue.SimpleQueue():
            return value.qsize()
        case anyio.Lock() | asyncio.Lock():
            return int(value.locked())
        case asyncio.Future():
            return int(not value.done())
        case int():
            return abs(value) if _COUNTED.match(name) and not isinstance(value, bool) else 0
    return 0


def _held_by_connection(nats: Any) -> Counter[str]:
    """Count the replies that a connection waits for, and its subscriptions for one request."""
    subjects = Counter(one.subject for one in nats._subs.values())
    found = Counter({f"subscription {one}": n for one, n in subjects.items() if _OF_A_REQUEST.match(one)})
    found["replies"] = len(getattr(nats, "_replies", None) or getattr(nats, "_resp_map", None) or ())
    return found


async def come_to_rest(*roots: Any, is_busy: Callable[[], bool] = bool) -> None:
    """Wait until these parts hold nothing, longer than any request to the server may take, and assert it.

    Parts with work that does not end within a second (`is_busy`), such as an answer without end, need only be
    balanced.
    """
    clock = asyncio.get_running_loop().time
    began_s = clock()
    while (left := held(*roots)) and clock() < began_s + (_BUSY_S if is_busy() else _IDLE_S):  # noqa: ASYNC110
        await asyncio.sleep(_BUSY_S / 50)
    assert is_busy() or not left, left
    assert not unbalanced(*roots)


def unbalanced(*roots: Any) -> list[str]:
    """Return one line for each sum that differs from what it adds up."""
    return _wrong_sums(_ALWAYS, *roots)


def _wrong_sums(sums: Mapping[str, Callable[[Any], _Sums]], *roots: Any) -> list[str]:
    return [
        f"{what} of {type(one).__qualname__}: {number}, which must be {right}"
        for one in parts_of(*roots)
        for what, number, right in sums.get(type(one).__qualname__, _nothing)(one)
        if number != right
    ]


#: What a number or set of a part is called, its value, and the value that it must have.
_Sums = Iterator[tuple[str, Any, Any]] if TYPE_CHECKING else Any


def _nothing(_: Any) -> _Sums:
    yield from ()


def _intake(one: Any) -> _Sums:
    yield "sessions by tenant", dict(one._tenants), dict(Counter(key.tenant for key in one._anchors))


def _sessions(one: Any) -> _Sums:
    yield "bytes", one._size_bytes, sum(session.counted_bytes for session in one._sessions.values())


def _sessions_at_rest(one: Any) -> _Sums:
    yield from _sessions(one)
    for key, session in one._sessions.items():
        yield f"bytes of {key}", session.counted_bytes, session.log.record.size_bytes


def _tenant(one: Any) -> _Sums:
    yield "sessions", (one.at_work.total(), one.num_waiting), (0, 0)


def _index_of_sessions(one: Any) -> _Sums:
    sessions = one.sessions.values()
    marks = {(mark, session.name) for session in sessions for mark in session.marks}
    yield "boundaries", {(mark, session.name) for mark, session in one._by_boundary.items()}, marks
    asked = {(key, session.name) for session in sessions for key in session.asked}
    yield "requests", {(key, request.session.name) for key, request in one.asked.items()}, asked


def _engine_at_rest(one: Any) -> _Sums:
    on_device = {key: len(kv.tokens) for key, kv in one._device._runner.idle_kv._resident.items()}
    yield "KV on the device", {key: len(kv.tokens) for key, kv in one._kv_on_device.items()}, on_device
    cutter = one._device._runner.cutter
    yield "bytes of snapshots taken from the device", cutter.taken_bytes, cutter._cut_bytes


def _unsaved_kv(one: Any) -> _Sums:
    announced = sum(cut.size_bytes for cut, _ in one._early)
    yield "announced bytes", one._store.queue.announced_bytes, announced


def _store(one: Any) -> _Sums:
    nodes, stats, queued = [*one._index._nodes.values()], one.stats(), one.queue
    durable = [node.size_bytes for node in nodes if node.durable]
    yield "stored snapshots", (stats.stored, stats.stored_bytes), (len(durable), sum(durable))
    settled = stats.durable + sum(stats.dropped.values()) + stats.failed + stats.cancelled
    yield "accepted snapshots", stats.accepted, settled + stats.in_flight
    yield "snapshots in flight", stats.in_flight, len(queued._in_flight)
    in_flight = sum(write.row.size_bytes for write in queued._in_flight.values())
    yield "bytes in flight", stats.in_flight_bytes, in_flight
    # A snapshot that was cancelled during its write takes room until the writer has finished with it.
    lost = in_flight - sum(node.size_bytes for node in nodes if not node.durable)
    in_use = sum(node.size_bytes for node in nodes if not node.evictable)
    yield "held bytes", stats.held_bytes, in_use + lost
    yield "evictable bytes", stats.evictable_bytes, sum(node.size_bytes for node in nodes if node.evictable)
    yield "capacity", stats.capacity_bytes, stats.free_bytes + stats.held_bytes + stats.evictable_bytes
    on_disk = stats.stored_bytes + queued.free_bytes + queued.unlinking_bytes - one.quota.min_free_bytes
    yield "capacity", stats.capacity_bytes, min(one.quota.max_bytes - queued.quarantined_bytes, on_disk)


def _store_at_rest(one: Any) -> _Sums:
    yield from _store(one)
    nodes = [*one._index._nodes.values()]
    yield "snapshots in use", [node for node in nodes if node.holds or node.doomed], []
    yield (
        "snapshots to evict",
        {node.digest for due in one._index._due.values() for node in due},
        {*one._index._nodes},
    )


#: Sums that agree at any time between two steps of the event loop, by class.
_ALWAYS: Final[dict[str, Callable[[Any], _Sums]]] = {
    "Intake": _intake,
    "SessionIndex": _index_of_sessions,
    "Sessions": _sessions,
    "Store": _store,
    "UnsavedKv": _unsaved_kv,
}
#: Sums that agree at rest.
_REST: Final[dict[str, Callable[[Any], _Sums]]] = {
    "Engine": _engine_at_rest,
    "Sessions": _sessions_at_rest,
    "Store": _store_at_rest,
    "_Tenant": _tenant,
}
