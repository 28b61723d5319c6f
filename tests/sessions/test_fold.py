"""The fold: reading a session's log from its beginning gives the state that the session had in memory.

Here the log is a list, and the device's tokens come from a hash; sessions, requests and templates are real.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from anyio import TaskHandle
from hypothesis import given

from cache.names.policy import FULL, Policy
from turnkeep_client.log import BEGAN_HEADER, EXPECT_HEADER, HISTORY_HEADER
from turnkeep_client.messages import (
    Append,
    CachePolicy,
    Chunk,
    Close,
    Closed,
    Failed,
    Generate,
    Message,
    Model,
    Open,
    Reasoning,
    Request,
    Result,
    Rewind,
    Tool,
    ToolFunction,
    decode_result,
    encode,
)
from turnkeep_client.subjects import SessionKey
from worker.device.request import TurnRequest
from worker.engine.port import TurnResult
from worker.models.tokenizer import Tokenizer
from worker.observe.counters import Telemetry
from worker.process.concurrency import Rotation, SharedLock
from worker.sessions import answered_ids
from worker.sessions.answered_ids import AnsweredAt, AnsweredIds
from worker.sessions.cancelling import cancel
from worker.sessions.fold import Fold
from worker.sessions.formats import Formats
from worker.sessions.history import TokenHistory
from worker.sessions.limits import RequestLimits
from worker.sessions.services import Services
from worker.sessions.session import ServedSession
from worker.sessions.shares import Shares
from worker.wire.chunks import PublishedChunks
from worker.wire.consistent_reads import StoredMessage
from worker.wire.fence import FencedError
from worker.wire.intake import Delivery
from worker.wire.retention import Retention

KEY = SessionKey("default", "s")
NO_RESULT = b"not a result"
PAGE = 3  # entries that are read at a time
STORED = datetime(2026, 1, 2, tzinfo=UTC)


class AnswerChunks:
    """A token stream in memory; `looks` has the request ids whose chunks were read."""

    def __init__(self) -> None:
        self.stored: list[Chunk] = []
        self.looks: list[str] = []

    async def publish(self, *_: Any, **__: Any) -> int:
        return 1

    async def seal(self, *_: Any, **__: Any) -> None:
        pass

    async def ids(self, _: SessionKey) -> set[str]:
        return set()

    async def remove(self, *_: Any) -> None:
        pass

    async def read(self, _: SessionKey, request_id: str, __: int, ___: datetime) -> PublishedChunks:
        self.looks.append(request_id)
        return PublishedChunks(self.stored)


class Log:
    """The journal, which reads and writes the log, on a list in memory."""

    server = "one"
    is_alone = True

    def __init__(self) -> None:
        self.entries: list[StoredMessage] = []
        self.asked: list[int] = []  # the sequences of all requests
        self.chunks = AnswerChunks()
        self.notes: list[bytes] = []

    def add(self, kind: Any, body: bytes, headers: dict[str, str] | None = None) -> int:
        self.asked += [len(self.entries) + 1] if kind == "in" else []
        self.entries.append(StoredMessage(len(self.entries) + 1, kind, STORED, body, headers or {}))
        return len(self.entries)

    async def page(self, _: SessionKey, kind: str, after: int) -> tuple[list[StoredMessage], int]:
        found = [entry for entry in self.entries if entry.kind == kind and entry.seq > after]
        return found[:PAGE], len(found[PAGE:])

    async def commit(self, _: SessionKey, body: bytes, after: int, headers: dict[str, str], **__: str) -> int:
        last = max((entry.seq for entry in self.entries if entry.kind == "out"), default=0)
        if last != after:
            raise FencedError(str(last))
        return self.add("out", body, {**headers, EXPECT_HEADER: str(after)})

    async def last_seq(self, _: SessionKey, kind: str) -> int:
        return max((entry.seq for entry in self.entries if entry.kind == kind), default=0)

    async def last(self, _: SessionKey, kind: str) -> StoredMessage | None:
        if kind == "attempt":
            return StoredMessage(1, "out", STORED, self.notes[-1], {}) if self.notes else None
        return next((entry for entry in reversed(self.entries) if entry.kind == kind), None)

    async def is_there(self, _: int) -> bool:
        return True

    async def entry(self, seq: int) -> StoredMessage | None:
        found = self.entries[seq - 1]
        return found if found.kind == "in" else None

    async def append(self, _: SessionKey, kind: str, body: bytes, *__: Any) -> None:
        if kind == "attempt":
            self.notes.append(body)

    async def purge(self, *_: Any) -> None:
        self.notes.clear()

    async def count(self, _: SessionKey) -> int:
        return len(self.entries)

    async def remove(self, *_: Any) -> None:
        pass

    async def delete(self, _: int) -> None:
        pass

    async def get(self, seq: int) -> bytes | None:
        found = self.entries[seq - 1] if 0 < seq <= len(self.entries) else None
        return found.body if found and found.kind in ("in", "out", "checkpoint") else None

    async def store_checkpoint(self, _: SessionKey, body: bytes) -> int:
        return self.add("checkpoint", body)


class Formula:
    """An engine whose next token is a hash of the tokens before it; `cancel_after` ends answers early."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._choices = sorted(tokenizer.eos_ids) + tokenizer.encode("ab \n\u00e9", at_start=False)
        self.cancel_after: int | None = None

    async def run(self, asked: TurnRequest, cancelled: Any, *_: Any, **__: Any) -> TurnResult | None:
        if cancelled():
            return None
        context, answer = asked.context, asked.answer
        tokens = [len(context), *context[max(len(context) - 16, 0) :]]
        while answer is not None and answer.finish_reason is None and self.cancel_after != len(answer.tokens):
            digest = blake2b(str(tokens).encode(), digest_size=4).digest()
            tokens.append(self._choices[int.from_bytes(digest, "big") % len(self._choices)])
            answer.push(tokens[-1])
        return TurnResult(
            complete=True,
            num_cached=0,
            num_prefilled=len(context),
            live_bytes=0,
            prefill_s=0.0,
            started_s=0.0,
            first_token_s=0.0,
        )

    def refusal(self, _: Policy) -> None:
        return None

    def live_bytes(self, *_: Any) -> int:
        return 0

    def size_bytes(self, *_: Any) -> int:
        return 0

    def most_tokens(self, most: int, _: Policy) -> int:
        return most

    def forget(self, _: SessionKey) -> None:
        pass

    async def erase(self, *_: Any) -> Any:
        return SimpleNamespace(num_snapshots=0, settled=True)

    @property
    def max_bytes(self) -> int:
        return 0


class Outbox:
    """An outbox that records the ends of token streams: the request ids, and text published with the end."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ended: list[str] = []

    async def end(self, _: SessionKey, request_id: str, __: int, rest: Chunk | None) -> None:
        self.texts += [rest.text] if rest else []
        self.ended.append(request_id)


class Tasks:
    """A task group without an end; `started` has its tasks."""

    def __init__(self) -> None:
        self.started: list[asyncio.Task[None]] = []

    def start_soon(self, work: Any, *args: Any, name: str) -> TaskHandle[None]:
        handle: TaskHandle[None] = TaskHandle(work(*args), name)
        self.started.append(asyncio.create_task(handle._run_coro()))
        return handle


async def alone(*_: Any) -> dict[str, bool]:
    """Stands for asking other workers to erase a session: there are none."""
    return {}


async def nothing(*_: Any) -> Any:
    """Stands for questions about other sessions, such as parents: there are none."""
    return 0


class World:
    """A session with its log. `crash` drops the session from memory, and it is read from the log again."""

    max_message_bytes = 2**20

    def __init__(
        self, tokenizer: Tokenizer, model: Model | None = None, others: tuple[Tokenizer, ...] = ()
    ) -> None:
        """`others` are the tokenizers of other models that may serve the session."""
        self.log = Log()
        self.takes_over = True
        self._others = (tokenizer, tokenizer, *others)
        self.serve(tokenizer, model)

    def serve(self, tokenizer: Tokenizer, model: Model | None = None) -> None:
        """Crash, and continue with the model of this tokenizer."""
        self._tokenizer = tokenizer
        self.engine = Formula(tokenizer)
        self.model = model or Model(name="tiny", weights="1", tokenizer=tokenizer.fingerprint.hex())
        self.crash()

    def crash(self, policy: Policy = FULL) -> None:
        """Drop everything except the log, as a new worker with the default cache policy `policy`."""
        self.fold = Fold(self._tokenizer, policy, self.model, takes_over=self.takes_over)
        self.outbox = Outbox()
        self.num_released = 0
        sizes = {
            "context_tokens": 10_000,
            "block_tokens": 32,
            "vocab_size": 2**20,
            "max_result_bytes": self.max_message_bytes,
        }
        retention = Retention(self.log, closed_ttl_s=None, max_bytes=2**30, sync_s=0)  # type: ignore[arg-type]
        self.tasks = Tasks()
        parts: Any = {
            "journal": self.log,
            "engine": self.engine,
            "limits": RequestLimits(self.engine, policy, **sizes),  # type: ignore[arg-type]
            "outbox": self.outbox,
            "erasures": SimpleNamespace(note=nothing),
        }
        services = Services(
            fold=self.fold,
            formats=Formats(self._tokenizer),
            telemetry=Telemetry(),
            asides=self.tasks,
            ack=self._release,
            is_elsewhere=nothing,
            hand_over=nothing,
            erase_elsewhere=alone,
            reading=Rotation(2),
            shares=Shares(4),
            max_attempts=3,
            boot="",
            erases=(),
            runs=nothing,
            num_busy=nothing,
            device_lock=SharedLock(),
            retention=retention,
            own_sampling={},
            token_ttl_s=900.0,
            model="tiny",
            worker="w",
            build="",
            **parts,
        )
        self.session = ServedSession(KEY, services, lambda _: None, parent=nothing, num_shared=nothing)

    async def _release(self, _: SessionKey) -> None:
        self.num_released += 1

    def ring(self, seq: int, body: bytes = b"", *, again: bool = False, first_seq: int = 0) -> None:
        self.session.ring(Delivery(KEY, seq, STORED, body, again, first_seq))

    def publish(self, request: Request | bytes) -> int:
        body = request if isinstance(request, bytes) else encode(request)
        seq = self.log.add("in", body)
        self.ring(seq, body)
        return seq

    async def ask(self, request: Request | bytes) -> Result:
        seq = self.publish(request)
        await self.session.run()
        return self.result(seq)

    def result(self, seq: int) -> Result:
        (found,) = [result for result in self.results if result.seq == seq]
        return found

    @property
    def results(self) -> list[Result]:
        bodies = [entry.body for entry in self.log.entries if entry.kind == "out"]
        return [decode_result(body) for body in bodies if body != NO_RESULT]

    async def refolded(self) -> ServedSession:
        """Return the session as read from its log, up to the first request without a result.

        The default policy there is one that no session here has, so that the log must name the policy.
        """
        other = World(self._tokenizer, self.model)
        other.log = self.log
        other.crash(Policy(9, 999))
        await other.session.log.catch_up()
        return other.session

    def remove(self, share: int) -> None:
        """Remove every `share`-th request with a result from the log, as the retention does in time."""
        seqs = [result.seq for result in self.results][::share]
        gone: Any = "gone"
        self.log.entries = [
            replace(one, kind=gone, body=b"") if one.seq in seqs else one for one in self.log.entries
        ]

    async def assert_fold_is_life(self) -> None:
        live, folded = self.session.log.record, (await self.refolded()).log.record
        assert folded.diverged is None
        assert_same(folded.history, live.history)
        for request_id in {result.id for result in self.results if result.id}:
            assert folded.answered_ids.find(request_id) == live.answered_ids.find(request_id)
        assert len(folded.answered_ids) == len(live.answered_ids)
        assert [(p.seq, p.id) for p in folded.pending] == [(p.seq, p.id) for p in live.pending]
        assert folded.out_seq == live.out_seq


def assert_same(one: TokenHistory, other: TokenHistory) -> None:
    """Assert that two histories are equal; either may have only the last messages of the conversation."""
    assert one.tokens == other.tokens
    assert (one.exists, one.closed, one.model) == (other.exists, other.closed, other.model)
    assert not one.exists or one.policy == other.policy
    steps, others = one.conversation._segments, other.conversation._segments
    num_common = min(len(steps), len(others))
    assert steps[len(steps) - num_common :] == others[len(others) - num_common :]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture
def world(tokenizer) -> World:
    return World(tokenizer)


TEXTS = st.sampled_from(["", "hi", "a b\n", "<|im_end|>", "x<|im_start|>user\n", "\u00e9\u20ac"])
MESSAGES = st.lists(
    st.builds(Message, role=st.sampled_from(["system", "user", "assistant"]), content=TEXTS),
    min_size=1,
    max_size=2,
).map(tuple)
TOKENS = st.lists(st.integers(0, 300), max_size=4).map(tuple)  # 259 and above are outside of the vocabulary
TOOL = Tool(function=ToolFunction(name="look", parameters={"type": "object"}))
EXTRAS = st.sampled_from([{}, {}, {}, {"tools": (TOOL,)}, {"chat_template_kwargs": {"mood": "grim"}}])
INPUTS = st.one_of(
    st.builds(dict.__or__, st.fixed_dictionaries({"messages": MESSAGES}), EXTRAS),
    st.fixed_dictionaries({"text": TEXTS}),
    st.fixed_dictionaries({"tokens": TOKENS}),
)
CACHES = [
    CachePolicy(),
    CachePolicy(policy="full"),
    CachePolicy(policy="sink_window"),
    CachePolicy(policy="sink_window", sink=2, window=40),
    CachePolicy(policy="sink_window", sink=2, window=4),  # a window smaller than a block
]
EXPECTED = st.sampled_from([{}, {}, {}, {"expect_position": 0}, {"expect_position": 40}])
REQUESTS = st.one_of(
    st.builds(lambda given, expected: lambda id_: Append(id=id_, **given, **expected), INPUTS, EXPECTED),
    st.builds(
        lambda given, n, raw, more: (
            lambda id_: Generate(id=id_, max_tokens=n, raw=raw, stop=("ba",), **given, **more)
        ),
        st.one_of(st.just({}), INPUTS),
        st.integers(1, 6),
        st.booleans(),
        st.sampled_from([{}, {}, {"prefix": "so "}, {"reasoning": Reasoning(keep=False)}]),
    ),
    st.builds(lambda position: lambda id_: Rewind(id=id_, position=position), st.integers(0, 60)),
    st.builds(lambda cache: lambda id_: Open(id=id_, cache=cache), st.sampled_from(CACHES)),
    st.sampled_from([lambda id_: Close(id=id_), lambda id_: b'{"type": "' + id_.encode()]),
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), REQUESTS),
        st.tuples(st.just("publish"), REQUESTS),
        st.tuples(st.just("publish and run"), REQUESTS),
        st.tuples(st.just("publish and run"), REQUESTS),
        st.tuples(st.just("repeat"), st.integers(0, 20)),
        st.tuples(st.just("reuse"), st.integers(0, 20)),
        st.tuples(st.just("cancel waiting"), st.integers(0, 5)),
        st.tuples(st.just("run, cancelled after"), st.integers(0, 4)),
        st.tuples(st.just("crash"), st.sampled_from([FULL, FULL, Policy(4, 64)])),
        st.tuples(st.just("remove"), st.integers(1, 3)),
        st.tuples(st.just("serve"), st.integers(0, 4)),
    ),
    max_size=24,
)


@given(operations=OPERATIONS)
def test_reading_the_log_gives_the_state_that_the_session_had_in_memory(tokenizer, operations) -> None:
    """After random valid and invalid requests, repeats, conflicts, cancellations, crashes and removals."""
    asyncio.run(live(World(tokenizer), operations))


async def live(world: World, operations: list[tuple[str, Any]]) -> None:
    requests: list[Request | bytes] = []
    for number, (operation, argument) in enumerate(operations):
        if operation.startswith("publish"):
            requests.append(argument(f"r{number}"))
            world.publish(requests[-1])
        elif operation == "repeat" and requests:
            world.publish(requests[argument % len(requests)])
        elif operation == "reuse" and requests:
            first = requests[argument % len(requests)]
            if not isinstance(first, bytes):
                world.publish(Append(id=first.id, text=f"another request {number}"))
        elif operation == "cancel waiting":
            await world.session.log.catch_up()
            if (waiting := world.session.pending) and (id_ := waiting[argument % len(waiting)].id):
                known = world.session.log.record.answered_ids.find(id_) is not None
                assert isinstance(await cancel(world.session, id_), Failed) == known
        elif operation == "crash":
            world.crash(argument)
        elif operation == "remove":
            world.remove(argument)
        elif operation == "serve":
            tokenizer = world._others[argument % len(world._others)]
            fingerprint = tokenizer.fingerprint.hex()
            world.serve(tokenizer, Model(name="other", weights=str(argument), tokenizer=fingerprint))
        world.engine.cancel_after = argument if operation == "run, cancelled after" else None
        if "run" in operation:
            await world.session.run()
            await world.assert_fold_is_life()
    await world.session.run()
    await world.assert_fold_is_life()
    assert sorted(result.seq for result in world.results) == world.log.asked, "each has exactly one result"


@pytest.mark.parametrize(
    ("stated", "began"),
    [
        ("2020-05-06T07:08:09+00:00", datetime(2020, 5, 6, 7, 8, 9, tzinfo=UTC)),
        ("2020-05-06T07:08:09", STORED),
        ("yesterday", STORED),
        ("", STORED),
    ],
)
async def test_a_copied_session_began_at_the_time_that_its_first_request_states_with_a_time_zone(
    world, stated, began
) -> None:
    world.ring(world.log.add("in", encode(Append(id="a", text="x")), {BEGAN_HEADER: stated}))
    await world.session.run()
    for session in (world.session, await world.refolded()):
        assert session.history.conversation.started == began


async def test_a_request_under_the_id_of_another_request_is_refused_as_a_conflict(world) -> None:
    await world.ask(Append(id="a", text="one"))
    for _ in range(2):
        refused = await world.ask(Append(id="a", text="two"))
        assert (refused.code, refused.id, refused.position) == ("id_conflict", "a", 3)
        world.crash()
    repeated = await world.ask(Append(id="a", text="one"))
    assert repeated.repeat_of == 1, "the first one keeps the id"


async def test_an_append_behind_a_close_is_refused_though_the_log_is_read_anew_during_the_close(
    world, monkeypatch
) -> None:
    append = world.log.append

    async def lose_claim(*args: Any) -> None:
        await append(*args)
        monkeypatch.undo()
        world.session.forget()

    monkeypatch.setattr(world.log, "append", lose_claim)
    world.publish(Close(id="close", cancel=True))
    last = world.publish(Append(id="last", text="two"))
    await world.session.run()
    assert [type(result) for result in world.results] == [Closed, Failed]
    assert world.result(last).code == "unknown_session"
    await world.assert_fold_is_life()


async def test_an_id_that_was_cancelled_behind_a_forgetting_close_stays_answered(world) -> None:
    """Its result is stored before that of the close."""
    await world.ask(Append(id="a", text="one"))
    closing = world.publish(Close(id="close", forget=True))
    late = world.publish(Append(id="late", text="two"))
    assert (await cancel(world.session, "late")).was == "waiting"
    await world.session.run()
    assert [result.seq for result in world.results[1:]] == [late, closing]
    for _ in range(2):  # in memory, and read from the log
        assert (await world.ask(Append(id="late", text="two"))).repeat_of == late
        world.crash()


async def test_a_cancelled_waiting_request_gets_no_result_out_of_order_once_it_is_the_next_one(world) -> None:
    """Another worker may have begun to answer it since it was found to wait."""
    world.publish(Append(id="first", text="one"))
    world.publish(Generate(id="second", max_tokens=3))
    log = world.session.log
    await log.catch_up(beyond_bell=True)
    first, second = log.record.pending
    log.record.pending.remove(first)
    assert await log.commit(second, None, waits=True) is None
    log.record.pending.insert(0, first)
    assert await log.commit(second, None, waits=True) is not None


async def test_a_fenced_result_is_not_stored_after_another_task_has_emptied_the_record(
    world, monkeypatch
) -> None:
    """The log that the session is read from by then may be another server's."""
    world.publish(Append(id="first", text="one"))
    log = world.session.log
    await log.catch_up(beyond_bell=True)
    (first,) = log.record.pending
    commits = []

    async def commit(*_: Any, **__: Any) -> int:
        commits.append(1)
        world.log.add("out", NO_RESULT)
        log.reset()
        raise FencedError("the server has restarted")

    monkeypatch.setattr(world.log, "commit", commit)
    with pytest.raises(FencedError):
        await log.commit(first, None)
    assert len(commits) == 1


async def test_a_repeated_request_cannot_be_cancelled_and_gets_the_recorded_result(world) -> None:
    """An id has only one result, also if it is repeated or cancelled later."""
    first = await world.ask(Append(id="a", text="one"))
    seq = world.publish(Append(id="a", text="one"))
    reply = await cancel(world.session, "a")
    assert isinstance(reply, Failed)
    assert "answered already" in reply.message
    await world.session.run()
    assert world.result(seq) == msgspec.structs.replace(first, seq=seq, repeat_of=first.seq)


async def test_a_session_is_released_once_all_of_its_requests_are_answered(world) -> None:
    """Also if a worker crashed after it stored the results and before it acknowledged the requests."""
    first = world.publish(Append(id="a", text="one"))
    second = world.publish(Append(id="b", text="two"))
    await world.session.run()
    assert world.num_released == 1
    world.crash()
    for seq in (second, first):
        world.ring(seq, again=True)
    await world.session.run()
    assert world.num_released == 1
    assert not world.session.log.has_work


@pytest.mark.parametrize("cancel_after", [None, 4])
async def test_after_a_crash_the_next_worker_ends_the_token_stream_of_an_answered_request(
    world, cancel_after
) -> None:
    """The crash came between the result and the end; text that only a cancel completed is published too."""
    world.engine.cancel_after = cancel_after
    seq = world.publish(Generate(id="g", text="down", max_tokens=6))
    await world.session.run()
    result = world.result(seq)
    said = len(result.text) // 2 if cancel_after else len(result.text)
    world.log.chunks.stored = [Chunk(0, result.tokens, result.text[:said])]
    world.crash()
    world.ring(seq, again=True)
    await world.session.run()
    assert world.outbox.ended == ["g"]
    assert world.outbox.texts == ([result.text[said:]] if cancel_after else [])


@pytest.mark.parametrize("known", [3, 6])
async def test_the_usage_of_an_answer_resumed_from_published_tokens_adds_up(world, known) -> None:
    """Tokens published before do not count as prompt. If all were published, `prompt_tokens` is 0."""
    whole = await world.ask(Generate(id="whole", text="down", max_tokens=6))
    await world.ask(Rewind(id="back", position=0))
    seq = world.log.entries[-1].seq + 1
    world.log.chunks.stored = [Chunk(0, whole.tokens[:known], "", seq)]
    usage = (await world.ask(Generate(id="again", text="down", max_tokens=6))).usage
    assert usage.prompt_tokens == usage.cached_tokens + usage.prefilled_tokens == (4 if known < 6 else 0)
    assert usage.completion_tokens == 6


async def test_a_result_that_the_log_rejects_is_not_counted_as_a_failed_attempt(world, monkeypatch) -> None:
    """The worker still runs, so the request, which was delivered before, did not crash it."""
    commit, num_lost = world.log.commit, 0

    async def lost(*arguments: Any, **named: Any) -> int:
        nonlocal num_lost
        num_lost += 1
        if num_lost <= 8:
            raise FencedError("lost")
        return await commit(*arguments, **named)

    monkeypatch.setattr(world.log, "commit", lost)
    seq = world.log.add("in", encode(Append(id="a", text="one")))
    world.ring(seq, again=True)
    await world.session.run()
    assert world.result(seq).position == 3
    assert not world.log.notes


def tampered(entries: list[StoredMessage], index: int, **fields: Any) -> list[StoredMessage]:
    """Change fields of the `index`-th result; `headers` are merged."""
    outs = [entry for entry in entries if entry.kind == "out"]
    changed = dict(fields)
    if "headers" in changed:
        changed["headers"] = {**outs[index].headers, **changed["headers"]}
    return [
        StoredMessage(**{**{name: getattr(entry, name) for name in StoredMessage.__slots__}, **changed})
        if entry is outs[index]
        else entry
        for entry in entries
    ]


async def diverged(world: World, entries: list[StoredMessage]) -> str:
    """Read the session from these entries; return the message with which it refuses a new request."""
    world.log.entries = entries
    world.crash()
    before = world.publish(Append(id="new", text="more"))
    await world.session.run()
    refused = world.result(before)
    assert refused.code == "history_diverged"
    assert not refused.retryable
    assert "go on in a new session" in refused.message
    return refused.message


async def test_a_session_whose_tokens_do_not_match_the_digest_in_its_last_result_is_not_continued(
    world,
) -> None:
    """Repeats of its earlier requests still get their recorded results."""
    await world.ask(Append(id="a", text="one"))
    await world.ask(Append(id="b", text="two"))
    entries = tampered(world.log.entries, -1, headers={HISTORY_HEADER: "0" * 32})
    assert "continued from sequence 4 on" in await diverged(world, entries)
    repeated = await world.ask(Append(id="a", text="one"))
    assert repeated.repeat_of == 1


async def test_a_wrong_position_in_a_logged_result_stops_the_session(world) -> None:
    await world.ask(Append(id="a", text="one"))
    await world.ask(Append(id="b", text="two"))
    for index in (0, 1):
        entries = world.log.entries[:4]
        body = json.loads([entry for entry in entries if entry.kind == "out"][index].body)
        body["position"] += 1
        message = await diverged(world, tampered(entries, index, body=json.dumps(body).encode()))
        assert "position" in message


async def test_a_logged_result_of_another_type_than_its_request_stops_the_session(world) -> None:
    await world.ask(Append(id="a", text="one"))
    await world.ask(Rewind(id="r", position=1))
    rewound, appended = (json.loads(world.log.entries[at].body) for at in (-1, 1))
    body = json.dumps(rewound | {"seq": 1, "asked": appended["asked"]}).encode()
    entries = tampered(world.log.entries[:2], 0, body=body)
    assert "of an Append is no such result: Rewound" in await diverged(world, entries)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kept": 9}, "keeps more tokens than there are"),
        ({"kept": 0, "input": "gA=="}, "cut off"),
        ({"kept": 0, "input": "//////8B"}, "too large"),
        ({"kept": 0, "input": "?"}, "cannot be read"),
        (None, "is no such result: Appended"),
    ],
)
async def test_a_logged_result_with_an_invalid_change_field_stops_the_session(
    world, change: Any, why: str
) -> None:
    await world.ask(Append(id="a", tokens=(1, 2)))
    body = json.loads(world.log.entries[-1].body)
    body["change"] = change
    entries = tampered(world.log.entries, -1, body=json.dumps(body).encode())
    assert why in await diverged(world, entries)


def without(entries: list[StoredMessage], *seqs: int) -> list[StoredMessage]:
    """Return the entries as if the log had removed those at these sequences."""
    gone: Any = "gone"
    return [replace(entry, kind=gone, body=b"") if entry.seq in seqs else entry for entry in entries]


async def test_a_session_whose_log_has_lost_a_result_is_not_continued(world) -> None:
    """A server that lost a part of its files reports nothing, but each result names the result before it."""
    for id_ in "abc":
        await world.ask(Append(id=id_, text="one"))
    why = await diverged(world, without(world.log.entries, 4))
    assert "has lost the result at sequence 4" in why
    carried_out = [result.id for result in world.results if not isinstance(result, Failed)]
    assert len(carried_out) == len(set(carried_out)), "nothing is answered twice"


async def test_a_session_is_not_continued_if_the_result_right_behind_another_one_is_lost(world) -> None:
    for id_ in "abc":
        seq = world.log.add("in", encode(Append(id=id_, text="one")))
    world.ring(seq)
    await world.session.run()
    assert [entry.kind for entry in world.log.entries] == ["in"] * 3 + ["out"] * 3
    why = await diverged(world, without(world.log.entries, 5))
    assert "has lost the result at sequence 5" in why


@pytest.mark.parametrize("lost", [(2,), (4,), (6,), (2, 4), (4, 6), (2, 4, 6)])
async def test_a_closed_session_is_known_to_be_closed_whichever_results_before_the_close_are_lost(
    world, lost: tuple[int, ...]
) -> None:
    for id_ in "abc":
        await world.ask(Append(id=id_, text="one"))
    await world.ask(Close(id="close"))
    world.log.entries = without(world.log.entries, *lost)
    world.crash()
    assert (await world.ask(Append(id="late", text="more"))).code == "unknown_session"
    await world.ask(Open(id="o"))
    await world.ask(Append(id="d", text="one"))
    await world.assert_fold_is_life()


@pytest.mark.parametrize("seed", range(4))
def test_looking_up_an_id_finds_the_first_of_its_results_that_were_not_dropped(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(answered_ids, "_FEW", 5)
    dice, ids, left = random.Random(seed), AnsweredIds(), {f"r{n}": list[AnsweredAt]() for n in range(12)}
    for number in range(1, 300):
        name = dice.choice([*left])
        if left[name] and dice.random() < 0.5:
            ids.drop(name)
            del left[name][0]
        else:
            left[name].append(AnsweredAt(number, number + 1))
            for _ in range(2 if len(left[name]) == 1 else 1):  # the log may be read again
                ids.add(name, left[name][-1])
        if dice.random() < 0.1:
            ids.load(ids.pack())
        assert {name: ids.find(name) for name in left} == {name: (*of, None)[0] for name, of in left.items()}
        assert len(ids) == sum(map(len, left.values()))
