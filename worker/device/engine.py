"""The event loop's side of the device: which KV is where, who may run, and what became of it.

It owns the ledger of device memory and the record of which tokens have KV on the device. It brings a turn's
KV together (device, then SSD), submits it, and passes on what comes back. It knows nothing of messages,
the log or the order of a session's requests; the session sees to it that it has one turn under way.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from dataclasses import dataclass
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from cache.blocks import as_tokens
from cache.store import Forgotten
from worker.batch.sampling import Sampling

from .admission import place
from .memory import GROWTH_TOKENS, grown
from .turn import (
    Cut,
    Event,
    Faulted,
    Finished,
    NoRoomError,
    Prefilled,
    Report,
    Sampled,
    Spilled,
    Starved,
    Turn,
    num_common,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from cache.blocks import Tokens
    from cache.kv_size import KvSize
    from cache.store import Held, Store
    from turnkeep_client.subjects import SessionKey
    from worker.telemetry import Telemetry
    from worker.text.answer import Answer

    from .admission import Ledger
    from .device import Device

    Publish: TypeAlias = Callable[[int, list[int], str], Awaitable[None]]


log = structlog.get_logger()

#: What is on the device is given up for a longer prefix on SSD only if that spares enough: a restore reads
#: the whole prefix, and reading a token is about this much faster than computing it.
_RESTORE_GAIN = 16
#: Of a chain with a doubtful file, what is before that may still be of use.
_RESTORE_TRIES = 2

#: Fewer tokens are not worth the copy of another session's KV, nor the wait for it.
LEAST_SHARED = 32


class DeviceFaultError(Exception):
    """The forward pass failed; the session's tokens are as they were."""


class NoMemoryError(Exception):
    """The device had no room for the next piece of the prompt; the session's tokens are as they were."""


class StoppingError(Exception):
    """The worker is going down: the turn was ended and its request stays unanswered."""


@dataclass(slots=True)
class Progress:
    """How far a turn has come, for `info`: tokens of its context with KV, and tokens of its answer."""

    num_cached: int
    num_context: int
    num_generated: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a turn cost. `num_cached` tokens of the prompt had KV, `num_prefilled` were run.

    `complete` says that the whole context got its KV: no cancel came before.

    `started_s` and `first_token_s` are readings of the monotonic clock.
    """

    complete: bool
    num_cached: int
    num_prefilled: int
    live_bytes: int
    prefill_s: float
    started_s: float
    first_token_s: float


@dataclass(slots=True, eq=False)
class _Running:
    turn: Turn
    progress: Progress
    events: asyncio.Queue[Sampled | Finished | Faulted]
    submitted: bool = False
    held: Held | None = None
    room: asyncio.Future[bool] | None = None


@dataclass(slots=True, eq=False)
class _Waiter:
    key: SessionKey
    size_bytes: int
    place_s: float
    admitted: asyncio.Future[bool]


class Engine:
    """Runs turns on the device; event loop only."""

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        store: Store | None,
        telemetry: Telemetry,
        *,
        kv: KvSize,
        piece_tokens: int,
        has_unopened: bool = False,
    ) -> None:
        """`kv` says what a session's KV takes; prompts run in pieces of up to `piece_tokens`.

        `has_unopened` says that without a store there are snapshots all the same, which nobody looks at.
        """
        self.ledger = ledger
        self._device = device
        self._store = store
        self._telemetry = telemetry
        self._kv = kv
        self._piece_tokens = piece_tokens
        self._has_unopened = has_unopened
        self._resident: dict[SessionKey, Tokens] = {}
        self._running: dict[SessionKey, _Running] = {}
        self._waiters: list[_Waiter] = []
        self._stopping = False
        self.active_bytes = 0
        self.peak_bytes = 0
        #: What the largest step was thought to need beside weights and KV, and what it did need.
        self.estimated_bytes = 0
        self.measured_bytes = 0

    @property
    def num_running(self) -> int:
        """Turns on the device."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Turns that wait for device memory."""
        return len(self._waiters)

    def size_bytes(self, num_tokens: int) -> int:
        """Count the device memory that the KV of `num_tokens` takes."""
        return self._kv.held(num_tokens)

    def live_bytes(self, key: SessionKey, tokens: Tokens) -> int:
        """Count what the device holds of the KV of a session with these tokens."""
        return self.size_bytes(num_common(self._resident.get(key, as_tokens()), tokens))

    def progress(self, key: SessionKey) -> Progress | None:
        """Say how far a session's turn has come, if it runs one."""
        running = self._running.get(key)
        return running.progress if running else None

    async def run(
        self,
        key: SessionKey,
        context: Tokens,
        cancelled: Callable[[], bool],
        *,
        priority: int = 0,
        answer: Answer | None = None,
        sampling: Sampling | None = None,
        max_new: int = 0,
        publish: Publish | None = None,
    ) -> Outcome | None:
        """Bring the KV of `context` onto the device, then sample up to `max_new` tokens into `answer`.

        `publish(index, tokens, text)` is awaited for the answer's new tokens, several at a time where it is
        slower than the device. Of turns that wait, those of a higher `priority` come first. Returns None if
        the turn was `cancelled()` before it was on the device; after that, `cancel` ends it with what there
        is. Raises `DeviceFaultError`, and `StoppingError` where the worker stops before the turn is over.
        """
        # A rewound session holds what it held until its turn is over: trimming frees nothing.
        num_tokens = max(len(context) + max_new, len(self._resident.get(key, [])))
        # Caches grow by more than a token at a time: many short prompts would hold far more than they say.
        allocated = self._kv.held(grown(num_tokens), ahead=self._piece_tokens)
        allocated = min(allocated, self.ledger.max_bytes)
        needed = max(allocated, self.size_bytes(num_tokens))
        if cancelled() or not await self._admitted(key, needed, priority):
            return None
        turn = Turn(key, context, answer=answer, sampling=sampling or Sampling(), priority=priority)
        running = _Running(turn, Progress(0, len(context)), asyncio.Queue())
        self._running[key] = running
        try:
            await self._find_kv(running)
            started_s = monotonic()
            if self._stopping:
                raise StoppingError
            if cancelled():
                return None
            self._device.submit(turn)
            running.submitted = True
            first_token_s, live_bytes = await self._follow(running, publish)
        finally:
            del self._running[key]
            if self._store is not None and running.held is not None:
                self._store.release(running.held)
            if running.room is not None:
                self._device.release(key)
            self.ledger.settle(key, self.size_bytes(len(self._resident.get(key, []))))
            self._admit_waiting()
        num_cached = min(turn.num_reused, turn.num_prompt)
        self._telemetry.cached_tokens += num_cached
        self._telemetry.prefilled_tokens += turn.num_prefilled
        return Outcome(
            complete=turn.num_cached >= turn.target,
            num_cached=num_cached,
            num_prefilled=turn.num_prefilled,
            live_bytes=live_bytes,
            prefill_s=turn.prefill_s,
            started_s=started_s,
            first_token_s=first_token_s,
        )

    def cancel(self, key: SessionKey) -> None:
        """End the session's turn as soon as the step that is running is over.

        A turn that is not on the device yet has to say so by its `cancelled`.
        """
        running = self._running.get(key)
        if running is not None:
            self._device.cancel(running.turn)
            _answer(running.room, granted=False)
        for waiter in self._waiters:
            if waiter.key == key and not waiter.admitted.done():
                waiter.admitted.set_result(False)

    def forget(self, key: SessionKey) -> None:
        """Drop a session's KV from the device. Its snapshots stay on SSD."""
        if self._resident.pop(key, None) is not None:
            self._device.drop(key)
        self.ledger.forget(key)
        self._admit_waiting()

    async def erase(self, key: SessionKey, tokens: Tokens) -> Forgotten:
        """Drop a session's KV from the device and from SSD. Takes 2 s at most."""
        self.forget(key)
        if self._store is None:
            return Forgotten(0, settled=not self._has_unopened)
        return await self._store.erase(key.tenant, tokens)

    def stop(self) -> None:
        """End every turn; their `run` raises `StoppingError`, after their tails were cut for the SSD."""
        self._stopping = True
        for key in list(self._running):
            self.cancel(key)
        for waiter in self._waiters:
            if not waiter.admitted.done():
                waiter.admitted.set_exception(StoppingError())

    def handle(self, report: Report) -> None:
        """Take in what the device thread did in one step."""
        self.active_bytes, self.peak_bytes = report.active_bytes, report.peak_bytes
        if report.measured_bytes > self.measured_bytes:
            self.estimated_bytes, self.measured_bytes = report.estimated_bytes, report.measured_bytes
        if report.num_rows:
            self._telemetry.batch_size.observe(report.num_rows)
            per_token_s = report.step_s * report.num_rows / max(report.num_decoded, 1)
            self._telemetry.time_per_output_token.observe(per_token_s, report.num_decoded)
        self._telemetry.draft_tokens = report.num_drafted
        self._telemetry.accepted_draft_tokens = report.num_accepted
        for event in report.events:
            self._handle_event(event)

    def _handle_event(self, event: Event) -> None:
        if isinstance(event, Cut):
            self._save(event)
            return
        if isinstance(event, Starved):
            if self._store is not None:
                self._store.free_memory()
            return
        if isinstance(event, Spilled):
            self._resident.pop(event.key, None)
            if event.key not in self._running:
                self.ledger.forget(event.key)
            return
        running = self._running.get(event.turn.key)
        if running is None:  # its run was cancelled at the end of a stop
            return
        match event:
            case Prefilled(_, num_cached):
                running.progress.num_cached = num_cached
                return
            case Sampled(_, index):
                running.progress.num_generated = index + 1
                self._telemetry.generated_tokens += 1
            case Finished(turn, num_cached):
                self._resident.pop(turn.key, None)
                if num_cached:
                    self._resident[turn.key] = turn.tokens(num_cached)
            case Faulted(turn):
                self._resident.pop(turn.key, None)
        running.events.put_nowait(event)

    async def _follow(self, running: _Running, publish: Publish | None) -> tuple[float, int]:
        """Pass on tokens until the turn is over; returns when the first one came, and the KV's bytes."""
        first_token_s: float | None = None
        while True:
            events = [await running.events.get()]
            while not running.events.empty():
                events.append(running.events.get_nowait())
            sampled = [event for event in events if isinstance(event, Sampled)]
            if sampled:
                first_token_s = first_token_s or monotonic()
                if publish is not None:
                    tokens = [event.token for event in sampled]
                    await publish(sampled[0].index, tokens, "".join(event.text for event in sampled))
            match events[-1]:
                case Faulted(_, NoRoomError() as error):
                    raise NoMemoryError(str(error)) from error
                case Faulted(_, error):
                    raise DeviceFaultError(repr(error)) from error
                case Finished(turn, _, live_bytes):
                    over = turn.answer is None or turn.answer.finish_reason is not None
                    if self._stopping and not (over and turn.num_cached >= turn.target):
                        raise StoppingError
                    return first_token_s or monotonic(), live_bytes

    async def _find_kv(self, running: _Running) -> None:
        """Give the turn the longest KV there is: its own, another session's, or what the SSD has more of."""
        turn = running.turn
        resident = self._resident.get(turn.key, as_tokens())
        turn.num_kept = num_common(resident, turn.context)
        # Where KV cannot be trimmed it is of use as a whole, and the last token is left for the turn to run.
        num_usable = len(turn.context) - (not self._device.trimmable)
        if not self._device.trimmable and not turn.num_kept == len(resident) <= num_usable:
            turn.num_kept = 0
        turn.source, num_shared = self._share(turn)
        if self._store is None:
            return
        found = max(turn.num_kept, num_shared)
        least = found + found // _RESTORE_GAIN
        turn.chain = self._store.chain(turn.key.tenant)
        for _ in range(_RESTORE_TRIES):
            if num_usable <= least:  # as in most turns of a session that is in memory
                break
            match = self._store.match(turn.chain, turn.context[:num_usable])
            # With room for what the turn runs first, so that it need not copy the KV to grow.
            room_tokens = min(len(turn.context) + 1, match.num_tokens + GROWTH_TOKENS)
            if match.num_tokens <= least or not await self._has_room(turn.key, room_tokens):
                self._store.release(match)
                break
            restored = await self._store.load(match, room_tokens=room_tokens)
            if restored is not None:
                if restored.num_tokens > found:
                    turn.restored, turn.num_restored = restored.tensors, restored.num_tokens
                    turn.source = None
                break
        # Held until the turn is over: what it cuts continues what is there now.
        running.held = self._store.hold(turn.chain, turn.context)
        turn.edges = running.held.edges
        # An append ends, and cuts its tail, before the last token.
        end = len(turn.context) - (turn.answer is None)
        # What is held is there; but of layers with states, the end of an append is looked for before that.
        start = turn.edges[0] if self._device.trimmable else 0
        turn.spans = self._store.wanted(turn.chain, turn.context, start, end)
        running.progress.num_cached = max(turn.num_kept, turn.num_restored)

    def _share(self, turn: Turn) -> tuple[SessionKey | None, int]:
        """Find the tenant's session whose KV, here or about to be, has the most of the turn's context.

        Of those that have as much, one that is idle, or else was submitted first, is the furthest.
        """
        if not self._device.trimmable:  # such KV cannot be cut to a beginning
            return None, 0
        found, most = None, turn.num_kept + LEAST_SHARED - 1
        idle = ((key, tokens) for key, tokens in self._resident.items() if key not in self._running)
        running = ((key, other.turn.context) for key, other in self._running.items() if other.submitted)
        for key, tokens in chain(idle, running):
            if key.tenant != turn.key.tenant or min(len(tokens), len(turn.context)) <= most:
                continue
            # Most others differ in the one token that would have to be the same.
            if tokens[most] == turn.context[most] and (num := num_common(tokens, turn.context)) > most:
                found, most = key, num
        return found, most if found else 0

    async def _has_room(self, key: SessionKey, num_tokens: int) -> bool:
        """Wait until the device has room for a restore; False where it has not, or the turn is cancelled.

        What has left the ledger is on the device until the step that runs is over.
        """
        if 2 * self.ledger.used_bytes <= self.ledger.max_bytes:
            return True
        loop = asyncio.get_running_loop()
        room: asyncio.Future[bool] = loop.create_future()
        self._running[key].room = room

        def answer(granted: bool) -> None:
            loop.call_soon_threadsafe(lambda: _answer(room, granted=granted))

        self._device.hold(key, num_tokens, answer)
        return await room

    def _save(self, cut: Cut) -> None:
        if self._store is None:
            return
        if cut.tensors is None or cut.state_lost:
            self._store.skip(1)
        if cut.tensors is None:
            return
        try:
            tokens = cut.turn.tokens(cut.span.end)
            self._store.save(cut.turn.chain or cut.turn.tenant, tokens, cut.span, cut.tensors)
        except Exception:
            # The turn's end may be the next event: it must not get lost for the sake of a snapshot.
            log.exception("a snapshot was not saved", session=str(cut.turn.key))

    async def _admitted(self, key: SessionKey, size_bytes: int, priority: int) -> bool:
        """Wait for room in the ledger, behind those who come first; False if cancelled meanwhile."""
        if self._stopping:
            raise StoppingError
        place_s = place(monotonic(), priority)
        waiter = _Waiter(key, size_bytes, place_s, asyncio.get_running_loop().create_future())
        insort(self._waiters, waiter, key=lambda waiter: waiter.place_s)
        self._admit_waiting()
        try:
            return await waiter.admitted
        finally:
            self._waiters.remove(waiter)
            self._admit_waiting()  # one that gave up may have been all that stood before others

    def _admit_waiting(self) -> None:
        for waiter in self._waiters:
            if waiter.admitted.done():
                continue  # it leaves the queue when its task runs
            victims = self.ledger.reserve(waiter.key, waiter.size_bytes)
            if victims is None:
                return
            for victim in victims:
                self._resident.pop(victim, None)
                self._device.drop(victim)
            waiter.admitted.set_result(True)


def _answer(room: asyncio.Future[bool] | None, *, granted: bool) -> None:
    if room is not None and not room.done():
        room.set_result(granted)
