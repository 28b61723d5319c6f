"""One session with its log, which is a list; the device's tokens come from a hash. All else is real."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from anyio import TaskHandle

from cache.names.policy import FULL, Policy
from turnkeep_client.log import EXPECT_HEADER
from turnkeep_client.messages import (
    Append,
    CachePolicy,
    Chunk,
    Close,
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
from worker.observe.telemetry import Telemetry
from worker.process.concurrency import Rotation, SharedLock
from worker.sessions import attachments, record
from worker.sessions.cancelling import cancel
from worker.sessions.fold import Fold
from worker.sessions.formats import Formats
from worker.sessions.history import TokenHistory
from worker.sessions.limits import RequestLimits
from worker.sessions.services import Services
from worker.sessions.session import ServedSession
from worker.sessions.shares import Shares
from worker.text import segments
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


@dataclass(frozen=True, slots=True)
class LogEntry(StoredMessage):
    """An entry of `Log`, with the kind of its subject."""

    kind: str


class Log:
    """The journal, which reads and writes the log, on a list in memory."""

    server = "one"

    def __init__(self) -> None:
        self.entries: list[LogEntry] = []
        self.asked: list[int] = []  # the sequences of all requests
        self.chunks = AnswerChunks()
        self.notes: list[bytes] = []

    def add(self, kind: Any, body: bytes, headers: dict[str, str] | None = None) -> int:
        self.asked += [len(self.entries) + 1] if kind == "in" else []
        self.entries.append(LogEntry(len(self.entries) + 1, STORED, body, headers or {}, kind))
        return len(self.entries)

    async def page(self, _: SessionKey, kind: str, after: int) -> tuple[list[LogEntry], int]:
        found = [entry for entry in self.entries if entry.kind == kind and entry.seq > after]
        return found[:PAGE], len(found[PAGE:])

    async def every(self, key: SessionKey, kind: str, after: int) -> AsyncIterator[LogEntry]:
        more = 1
        while more:
            entries, more = await self.page(key, kind, after)
            for entry in entries:
                after = entry.seq
                yield entry

    async def commit(self, _: SessionKey, body: bytes, after: int, headers: dict[str, str], **__: str) -> int:
        last = max((entry.seq for entry in self.entries if entry.kind == "out"), default=0)
        if last != after:
            raise FencedError(str(last))
        return self.add("out", body, {**headers, EXPECT_HEADER: str(after)})

    async def last_seq(self, _: SessionKey, kind: str) -> int:
        return max((entry.seq for entry in self.entries if entry.kind == kind), default=0)

    async def last(self, _: SessionKey, kind: str) -> StoredMessage | None:
        if kind == "attempt":
            return StoredMessage(1, STORED, self.notes[-1], {}) if self.notes else None
        return next((entry for entry in reversed(self.entries) if entry.kind == kind), None)

    async def entry(self, seq: int) -> StoredMessage | None:
        found = (one for one in self.entries if one.seq == seq and one.kind in ("in", "out", "checkpoint"))
        return next(found, None)

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


def tampered(entries: list[LogEntry], index: int, **fields: Any) -> list[LogEntry]:
    """Change fields of the `index`-th result; `headers` are merged."""
    outs = [entry for entry in entries if entry.kind == "out"]
    changed = dict(fields)
    if "headers" in changed:
        changed["headers"] = {**outs[index].headers, **changed["headers"]}
    return [replace(entry, **changed) if entry is outs[index] else entry for entry in entries]


#: How many results come between two checkpoints under `make_often`.
EVERY = 4


def make_often(patch: pytest.MonkeyPatch) -> None:
    """Let sessions store checkpoints often, in small messages."""
    patch.setattr(record, "_CHECKPOINT_EVERY", EVERY)
    patch.setattr(attachments, "_PART_BYTES", 700)
    patch.setattr("cache.names.tokens._PART", 8)
    patch.setattr(segments, "_PART", 3)
