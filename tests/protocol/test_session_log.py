"""A log as clients read it: requests with their results, in the order of the results."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nats.errors
import pytest

from turnkeep_client import session_log
from turnkeep_client.direct import DirectGets
from turnkeep_client.history import read_history
from turnkeep_client.log import Stored, derived_seed
from turnkeep_client.session_log import (
    SessionLog,
    find_request,
    first,
    last_change,
    paired,
    queued,
    read,
    tails,
)
from turnkeep_client.stream import LogStream
from turnkeep_client.subjects import SessionKey, Subjects, session_key

RECORDED: Any = json.loads(
    (Path(__file__).parents[2] / "protocol" / "typescript" / "tests" / "logs.json").read_text()
)
GARDEN = SessionKey("default", "garden")


class RecordedWire:
    """Answers batched gets from the recorded entries, `batch` at a time."""

    subjects = Subjects()

    def __init__(self, lost: tuple[int, ...] = ()) -> None:
        self.num_read = 0
        self._entries = [one for one in RECORDED["entries"] if one["seq"] not in lost]

    async def batches(self, _stream: str, request: dict[str, Any]) -> AsyncIterator[list[Stored]]:
        found = [self._stored(one) for one in self._entries if one["seq"] >= request["seq"]]
        found = [one for one in found if one.headers["Nats-Subject"] == request["next_by_subj"]]
        for start in range(0, len(found), request["batch"]):
            self.num_read += len(found[start : start + request["batch"]])
            yield found[start : start + request["batch"]]

    async def leader_seq(self, _stream: str, _subject: str) -> int:
        return 0

    def _stored(self, one: dict[str, Any]) -> Stored:
        own = {"Nats-Subject": f"turnkeep.default.{one['subject']}", "Nats-Time-Stamp": one["stored"]}
        return Stored(one["seq"], one["body"].encode(), one["headers"] | own)


class AnsweringWire(RecordedWire):
    """Answers the last request between two reads: its result is stored, and it leaves the queue."""

    def __init__(self, asked: int, answered: int) -> None:
        super().__init__()
        self._after = [one for one in self._entries if one["seq"] != asked]
        self._entries = [one for one in self._entries if one["seq"] < answered]

    async def batches(self, stream: str, request: dict[str, Any]) -> AsyncIterator[list[Stored]]:
        try:
            async for batch in super().batches(stream, request):
                yield batch
        finally:
            self._entries = self._after


class LaggingWire(RecordedWire):
    """Asks a replica first that has nothing yet."""

    async def batches(self, stream: str, request: dict[str, Any]) -> AsyncIterator[list[Stored]]:
        lags, self.num_read = not self.num_read, 1
        async for batch in super().batches(stream, request):
            if not lags:
                yield batch

    async def leader_seq(self, _stream: str, _subject: str) -> int:
        return 26


def stream(*lost: int) -> LogStream:
    return LogStream(RecordedWire(lost))  # type: ignore[arg-type]


def pairs(log: SessionLog) -> list[list[int]]:
    return [[one.asked.seq, one.answered.seq] for one in log.exchanges]


@pytest.mark.parametrize("name", RECORDED["sessions"])
async def test_the_python_client_reads_recorded_session_logs_into_the_same_history_as_the_typescript_client(
    name: str,
) -> None:
    """With a repeat, a failure, answers cancelled before and after their first token, a rewind and a fork."""
    expected, key = RECORDED["sessions"][name], SessionKey("default", name)
    log = await read(stream(), key)
    assert pairs(log) == expected["exchanges"]
    assert [one.entry.seq for one in log.waiting] == expected["waiting"]
    history = await read_history(stream(), key)
    assert [[one.role, one.content] for one in history.messages] == expected["messages"]
    assert (history.is_whole, history.position) == (expected["is_whole"], expected["position"])


async def test_reading_a_part_of_a_session_log_returns_the_results_and_unanswered_requests_of_that_part() -> (
    None
):
    whole = await read(stream(), GARDEN)
    for start in range(1, 25):
        for end in range(start, 25):
            part = await read(stream(), GARDEN, start, end)
            wanted = [[asked, seq] for asked, seq in pairs(whole) if start <= seq < end]
            assert pairs(part) == wanted, (start, end)
            answered = {asked for asked, _ in wanted}
            later = [one.entry.seq for one in whole.asked if start <= one.entry.seq < end]
            assert [one.entry.seq for one in part.waiting] == [seq for seq in later if seq not in answered]


async def test_reading_a_session_log_from_its_end_reads_parts_of_growing_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_log, "TAIL", 2)
    parts = [part async for part in tails(stream(), GARDEN, 24)]
    assert [part.start for part in parts] == [22, 16, 1]
    assert [pairs(part) for part in parts[:2]] == [[[22, 23]], [[15, 16], [22, 23]]]
    assert parts[-1] == await read(stream(), GARDEN)


async def test_reading_a_session_log_includes_a_request_that_is_answered_during_the_read() -> None:
    whole = await read(stream(), GARDEN)
    (*_, (asked, answered)) = pairs(whole)
    wire: Any = AnsweringWire(asked, answered)
    assert pairs(await read(LogStream(wire), GARDEN)) == pairs(whole)
    wire = AnsweringWire(asked, answered)
    assert pairs(await first(LogStream(wire), GARDEN, 99)) == pairs(whole)


async def test_a_log_entry_that_only_a_lagging_replica_lacks_is_not_reported_as_removed() -> None:
    wire: Any = LaggingWire()
    assert await LogStream(wire).get(SessionKey("default", "running"), "in", 26) is not None


async def test_of_two_results_of_a_request_in_a_session_log_the_history_has_only_the_first() -> None:
    log = await read(stream(), GARDEN)
    entries = [*(one.entry for one in log.asked), *(one.entry for one in log.answers)]
    twice = log.answers[1].entry._replace(seq=99)
    assert paired(GARDEN, [*entries, twice]).exchanges == log.exchanges


async def test_a_session_log_is_read_the_same_after_its_answered_requests_were_removed_from_the_log() -> None:
    whole = await read(stream(), GARDEN)
    answered = [one.asked.seq for one in whole.exchanges]
    assert await read(stream(*answered), GARDEN) == whole
    assert await queued(stream(*answered), GARDEN) == await queued(stream(), GARDEN) == whole.waiting
    for seq in answered:
        found = await find_request(stream(*answered), GARDEN, seq)
        assert found == await find_request(stream(), GARDEN, seq)
    assert await find_request(stream(), GARDEN, 99) is None
    last = last_change(await read(stream(), GARDEN, end=13))
    assert last is not None
    assert last.entry.seq == 12, "the result at 11 is of a request that was cancelled before its first token"


def test_the_sampling_seed_derived_from_a_request_equals_the_value_recorded_for_all_versions() -> None:
    """A worker continues answers that an older version began with this seed, and replays logs with it."""
    assert derived_seed(session_key("t1", "s1"), 1) == 10658773766922296
    assert derived_seed(session_key("default", "garden"), 2**40) == 44001429195367002


def sent(seq: int, before: int) -> Any:
    return SimpleNamespace(headers={"Nats-Sequence": str(seq), "Nats-Last-Sequence": str(before)})


WHOLE = [sent(5, 0), sent(7, 5), sent(9, 7)]
END = SimpleNamespace(headers={"Status": "204", "Nats-Num-Pending": "3", "Nats-Last-Sequence": "9"})


class Connection:
    """Answers each direct get with these messages."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages

    def new_inbox(self) -> str:
        return "_INBOX.x"

    async def subscribe(self, _: str, cb: Any) -> None:
        self._arrived = cb

    async def publish(self, _subject: str, _body: bytes, reply: str) -> None:
        for one in self._messages:
            one.subject = reply
            await self._arrived(one)


@pytest.mark.parametrize("missing", [None, 0, 1, 2])
async def test_a_batch_read_of_the_log_raises_a_timeout_error_if_the_connection_lost_one_of_the_messages(
    missing: int | None,
) -> None:
    messages = [one for n, one in enumerate(WHOLE) if n != missing]
    gets = DirectGets(Connection([*messages, END]), timeout_s=1)  # type: ignore[arg-type]
    if missing is None:
        assert await gets.read("log", {}) == (WHOLE, 3)
        return
    with pytest.raises(nats.errors.TimeoutError):
        await gets.read("log", {})
