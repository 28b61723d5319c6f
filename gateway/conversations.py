"""Answers turns of one tenant: finds the session that has most of a conversation, and sends it only the rest.

Each answer is a task of its own, which runs to its result even if nobody listens any more, so that the index
always knows where its session stands. It waits across restarts of worker and NATS: only a client that goes
away ends an answer early.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import structs

from turnkeep_client.calls import expect
from turnkeep_client.errors import (
    MessageTooLargeError,
    NoServerError,
    NoWorkerError,
    RequestFailedError,
    ResultTimeoutError,
    TurnkeepError,
)
from turnkeep_client.messages import (
    UNLOADED,
    Append,
    Appended,
    Chunk,
    Close,
    Failed,
    ForkPoint,
    Generated,
    Open,
)
from turnkeep_client.session import build
from turnkeep_client.subjects import session_key

from . import recorded
from .index import Asked, Held, Index, append_id, tags
from .pieces import ahead
from .planning import new_name
from .planning import plan as make_plan
from .recovery import recover
from .seen import Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Message, Metrics

    from .planning import How, Plan
    from .recorded import Note, Recorded
    from .turn import Turn

log = logging.getLogger(__name__)

#: How long an answer of the worker to `metrics` holds.
_SEEN_S: Final = 1.0
#: Between two looks for a worker.
_BETWEEN_S: Final = 0.1
#: Attempts to send a turn, the last one to a new session.
_ATTEMPTS: Final = 4
#: Failures that say that a session is not what the index holds of it.
_MISTAKEN: Final = {"position_conflict", "unknown_session", "history_diverged", "id_conflict"}
_SWEEP_S: Final = 60.0
#: Between two attempts to cancel an answer.
_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 5.0


class Found(NamedTuple):
    """The session that answers, and what it is to the conversation.

    It has `num_known` of the conversation's messages, which are `position` tokens. `differs` is the first
    message that is in no known conversation, if a session should have it: by number, role and size.
    """

    session: str
    how: How
    position: int
    num_known: int
    num_messages: int
    differs: str | None = None

    def __str__(self) -> str:
        found = f"{self.how}; session={self.session}; messages={self.num_known}/{self.num_messages}"
        return f"{found}; tokens={self.position}; differs={self.differs or 'none'}"


Event = Found | Chunk | Generated | TurnkeepError


class _Sent(NamedTuple):
    """What was appended before a generate; `position` is where the session is then."""

    num_messages: int
    position: int
    num_prefilled: int
    warnings: tuple[str, ...] = ()


class Answering:
    """The answers to one turn. `events` has them as they come, each with its number among the answers."""

    def __init__(self, on_end: Callable[[How, Generated], None], note: Note | None) -> None:
        """`on_end` gets each answer, also if nobody listens. `note` is kept with the request in the log."""
        self.on_end = on_end
        self.note = note
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.running: set[Asked] = set()
        self.is_abandoned = False


class Conversations:
    """The conversations of one tenant."""

    def __init__(self, client: Client, *, idle_s: float, is_stopping: Callable[[], bool]) -> None:
        """Sessions that were not used for `idle_s` are removed.

        While `is_stopping`, answers whose clients are gone are not cancelled: the clients may come back.
        """
        self.index = Index()
        self.client = client
        self._idle_s = idle_s
        self._is_stopping = is_stopping
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading = asyncio.Lock()
        self._is_loaded = False
        self._seen = Seen()
        self._metrics: Metrics | None = None
        self._seen_s = float("-inf")

    async def start(self) -> None:
        """Read from the log what the index should know, once. Raises `TurnkeepError`."""
        async with self._loading:
            if not self._is_loaded:
                await recover(self.client, self.index)
                self._is_loaded = True
                self._start(self._sweep())

    async def worker(self, *, patience_s: float = 0.0, now: bool = False) -> Metrics:
        """Return what a worker said of itself within the last second, or says `now`.

        Waits up to `patience_s` for one that was there before. Raises `NoWorkerError`.
        """
        if now:
            self._seen_s = float("-inf")
            return await self._while_connected(self.worker())
        until_s = time.monotonic() + (0.0 if self._metrics is None else patience_s)
        while self._metrics is None or time.monotonic() - self._seen_s > _SEEN_S:
            try:
                self._metrics = await self.client.worker_metrics()
            except NoWorkerError:
                if time.monotonic() >= until_s:
                    raise
                await asyncio.sleep(_BETWEEN_S)
            else:
                self._seen_s = time.monotonic()
        return self._metrics

    async def _while_connected(self, asking: Coroutine[Any, Any, Metrics]) -> Metrics:
        """Wait for an answer while it can come. Raises `NoWorkerError`."""
        task = asyncio.create_task(asking)
        try:
            while self.client.connected and not task.done():
                await asyncio.wait([task], timeout=_BETWEEN_S)
            if task.done():
                return task.result()
            raise NoServerError("the connection to the NATS server is lost")
        finally:
            task.cancel()

    def _max_body_bytes(self, note: Note | None) -> int:
        # Workers of earlier versions do not say it.
        most = (self._metrics.max_message_bytes if self._metrics else 0) or sys.maxsize
        return most if note is None else most - min(recorded.MOST_BYTES, most // 2)

    async def count(self, turn: Turn) -> int:
        """Count the tokens of a turn's messages and tools, without running it. Raises `TurnkeepError`."""
        session = self.client.session(new_name())
        rendering = _rendering(turn.options)
        num_tokens = (await session.count(messages=turn.messages, text=turn.text, **rendering)).tokens
        if prefix := turn.options.get("prefix"):
            num_tokens += (await session.count(text=prefix, special_tokens=False)).tokens
        return num_tokens

    async def close(self) -> None:
        """End all tasks and the connection; the answers go on in the worker."""
        self._is_stopping = lambda: True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()

    def answer(
        self, turn: Turn, on_end: Callable[[How, Generated], None], note: Note | None = None
    ) -> Answering:
        """Start answering; the last event of each answer is its result or an error."""
        answering = Answering(on_end, note)
        for number in range(turn.n):
            self._start(self._answer(turn, number, answering))
        return answering

    async def recorded(self, answer_ids: set[str]) -> dict[str, Recorded]:
        """Find answers in the log, by their ids. Raises `TurnkeepError`."""
        return await recorded.find(self.client, answer_ids)

    async def cancel(self, answer_id: str) -> Recorded | None:
        """Stop an answer if it runs, and return what the log has of it. Raises `TurnkeepError`."""
        pause_s = _FIRST_PAUSE_S
        while True:
            found = (await self.recorded({answer_id})).get(answer_id)
            if found is None or found.result is not None or pause_s > _LAST_PAUSE_S:
                return found
            with contextlib.suppress(RequestFailedError):  # the worker has not read it yet, or has ended it
                await self.client.session(found.session).cancel(found.request_id)
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def forget(self, session: str) -> None:
        """Remove a session with its content. Raises `TurnkeepError`."""
        if (held := self.index.sessions.get(session)) is not None:
            self.index.drop(held)
        with contextlib.suppress(ResultTimeoutError):  # the log has the request: the worker will come to it
            await self.client.session(session).close(forget=True, timeout_s=_LAST_PAUSE_S)

    def abandon(self, answering: Answering) -> None:
        """Cancel answers that nobody else waits for."""
        answering.is_abandoned = True
        for asked in [*answering.running]:
            self._leave(asked, answering)

    async def _answer(self, turn: Turn, number: int, answering: Answering) -> None:
        has_begun, differs = False, None

        def tell(event: Event) -> None:
            nonlocal has_begun
            has_begun = has_begun or isinstance(event, Chunk)
            answering.events.put_nowait((number, event))

        for attempt in range(_ATTEMPTS):
            try:
                plan = make_plan(self.index, turn, number, is_last=attempt == _ATTEMPTS - 1)
                if not attempt and not number:
                    differs = self._missing(turn, plan)
                told = len(turn.messages or ())
                tell(Found(plan.asked.held.name, plan.how, plan.position, plan.num_known, told, differs))
                result = await self._carry_out(turn, plan, answering, tell)
                answering.on_end(plan.how, result)
                tell(result)
            except RequestFailedError as error:
                is_lost = has_begun or answering.is_abandoned or attempt == _ATTEMPTS - 1
                if error.code in _MISTAKEN and not is_lost:
                    continue
                tell(error)
            except TurnkeepError as error:
                tell(error)
            except Exception as error:  # the client must get an answer
                log.exception("an answer failed for an unknown reason")
                tell(TurnkeepError(f"the gateway failed: {type(error).__name__}"))
            return

    def _missing(self, turn: Turn, plan: Plan) -> str | None:
        """Name, and log, what keeps a conversation that goes on from being found to its last answer."""
        told, differs = turn.messages or (), None
        num_seen = self._seen.add(plan.known) - 1
        num_old = max((at for at, one in enumerate(told, 1) if one.role == "assistant"), default=0)
        if plan.num_known >= num_old:
            return None
        if num_seen < 0:
            differs = "tools"
        elif num_seen < num_old:
            first = told[num_seen]
            differs = f"messages[{num_seen}] ({first.role}, {len(first.content or '')} characters)"
        why = f"{differs} differs from all known" if differs else "no session has the others"
        log.info("%d of a conversation's %d messages were found: %s", plan.num_known, len(told), why)
        return differs

    async def _carry_out(
        self, turn: Turn, plan: Plan, answering: Answering, tell: Callable[[Event], None]
    ) -> Generated:
        """Send a turn as planned, and return its result. The index knows it then."""
        asked, held = plan.asked, plan.asked.held
        asked.num_users += 1
        answering.running.add(asked)
        if answering.is_abandoned:
            self._leave(asked, answering)
        try:
            messages = () if turn.messages is None else turn.messages[plan.num_known :]
            pieces = ahead(messages, plan.options, self._max_body_bytes(answering.note))
            await self._open(plan)
            sent = await self._append(plan, pieces)
            generation = self.client.session(held.name).generate(
                messages=messages[sent.num_messages :] or None,
                text=turn.text,
                tokens=turn.tokens,
                request_id=str(asked.name),
                expect_position=sent.position,
                headers=_headers(turn, plan, sent, answering.note),
                **plan.options,
            )
            async for chunk in generation:
                tell(chunk)
            result = generation.result
            if asked.state == "running":
                self.index.answer(asked, result)
        except RequestFailedError as error:
            self._note_failed(plan)
            raise self._learnt(plan, error) from None
        except TurnkeepError as error:
            self._note_failed(plan)
            if not isinstance(error, MessageTooLargeError):  # which nobody has got
                self.index.drop(held)  # whether it was answered is unknown
            raise
        else:
            return _with_appended(result, sent)
        finally:
            self._note_opened(asked)
            self._leave(asked, answering)
            if plan.how != "repeated":
                held.num_running -= 1
                if turn.messages is None:
                    self._start(self._remove(held, forget=False))
                elif not held.marks and held.name in self.index.sessions:
                    self._start(self._remove(held))

    async def _append(self, plan: Plan, pieces: list[Sequence[Message]]) -> _Sent:
        """Append messages that do not fit in the generate. Raises `TurnkeepError`."""
        asked, held = plan.asked, plan.asked.held
        sent = _Sent(0, plan.position, 0)
        for piece in pieces:
            if not asked.num_users and not self._is_stopping():
                raise RequestFailedError("expired", "its client has gone away", retryable=True)
            boundary = plan.known[plan.num_known + sent.num_messages + len(piece)]
            rendering = {} if sent.num_messages else _rendering(plan.options)
            appended = await self._append_piece(asked, boundary, sent.position, piece, rendering)
            self.index.append(held, boundary, appended)
            num_new = 0 if appended.repeat_of is not None else appended.prefilled_tokens
            sent = _Sent(
                sent.num_messages + len(piece),
                appended.position,
                sent.num_prefilled + num_new,
                sent.warnings + appended.warnings,
            )
            asked.bases, asked.expected = {boundary}, sent.position
        asked.appending = None
        return sent

    async def _append_piece(
        self,
        asked: Asked,
        boundary: bytes,
        position: int,
        piece: Sequence[Message],
        rendering: Mapping[str, Any],
    ) -> Appended:
        """Append messages, under an id under which no earlier attempt has failed. Raises `TurnkeepError`."""
        key, attempt = session_key(self.client.tenant, asked.held.name), 0
        while True:
            asked.appending = append_id(boundary, position, attempt)
            request = build(Append, asked.appending, messages=piece, expect_position=position, **rendering)
            result = await (await self.client.submit(key, request))
            if not isinstance(result, Failed) or result.repeat_of is None:
                return expect(Appended, result)
            attempt += 1

    async def _open(self, plan: Plan) -> None:
        """Fork the session, where that is planned; the first request begins one. Raises `TurnkeepError`."""
        asked = plan.asked
        if plan.how == "repeated":
            if asked.opening is not None:
                await asked.opening.wait()
            if asked.state == "failed":
                raise RequestFailedError("id_conflict", "the first request failed", retryable=True)
        elif plan.how == "begun":
            asked.held.position = 0
        elif plan.how == "forked" and plan.parent is not None:
            point = ForkPoint(plan.parent.name, plan.position, plan.parent_position)
            names = tags(next(iter(asked.bases), b""))
            try:
                await self.client.session(asked.held.name).open(fork_of=point, tags=names)
            except RequestFailedError as error:
                if error.code == "position_conflict":
                    await self._catch_up(plan.parent, plan.parent_position)
                    raise
                self.index.drop(plan.parent)
                raise RequestFailedError("unknown_session", error.message, retryable=False) from None
            asked.held.position = plan.position
        self._note_opened(asked)

    async def _catch_up(self, held: Held, position: int | None) -> None:
        """Wait for the result, which is on its way, of the request that has moved a session."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEEN_S):
                while held.num_running and held.position == position:  # noqa: ASYNC110  # its task tells nobody
                    await asyncio.sleep(_FIRST_PAUSE_S)
        if held.position == position:
            self._note_moved(held)

    def _note_moved(self, held: Held) -> None:
        """Note that another gateway has gone on in a session; earlier positions may be forked."""
        if self.index.rewrites:
            self.index.drop(held)
        else:
            held.position = None

    def _note_opened(self, asked: Asked) -> None:
        if asked.opening is not None:
            asked.opening.set()
            asked.opening = None

    def _note_failed(self, plan: Plan) -> None:
        """Never repeat a request again. The first one may still run if a repeated one failed."""
        plan.asked.is_certain, plan.asked.claim_until_s = False, 0.0
        if plan.how != "repeated":
            plan.asked.state = "failed"

    def _learnt(self, plan: Plan, error: RequestFailedError) -> RequestFailedError:
        """Correct the index after a refused request, whose session is as it was; return what to raise."""
        held = plan.asked.held
        if error.code == "position_conflict":
            self._note_moved(held)
        elif error.code in _MISTAKEN - {"id_conflict"}:
            self.index.drop(held)
        elif plan.how == "repeated":  # what was recorded is of no use any more
            return RequestFailedError("id_conflict", error.message, retryable=False)
        return error

    def _leave(self, asked: Asked, answering: Answering) -> None:
        if asked not in answering.running:
            return
        answering.running.discard(asked)
        asked.num_users -= 1
        if asked.num_users == 0 and asked.state == "running" and not self._is_stopping():
            self._start(self._cancel(asked))

    async def _cancel(self, asked: Asked) -> None:
        """Ask the worker to stop an answer until it has, or somebody wants it again."""
        pause_s = 0.0
        if asked.opening is not None:
            await asked.opening.wait()
        while asked.state == "running" and asked.num_users == 0:
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LAST_PAUSE_S)
            with contextlib.suppress(TurnkeepError):  # there is no worker now, or it has not read the request
                await self.client.session(asked.held.name).cancel(asked.appending or str(asked.name))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._idle_s / 4))
            for held in self.index.old(time.time() - self._idle_s):
                if await self._is_loaded_now():  # else it would be loaded for that
                    await self._remove(held)

    async def _is_loaded_now(self) -> bool:
        try:
            return (await self.worker()).device != UNLOADED
        except NoWorkerError:
            return True

    async def _remove(self, held: Held, *, forget: bool = True) -> None:
        """Close a session, unless another gateway has used it since."""
        self.index.drop(held)
        if held.position is None:
            return
        key = session_key(self.client.tenant, held.name)
        with contextlib.suppress(TurnkeepError):
            if not held.position:  # its first request was refused: only what is open can be forgotten
                await self.client.submit(key, build(Open))
            await self.client.submit(key, build(Close, forget=forget or None, expect_position=held.position))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _headers(turn: Turn, plan: Plan, sent: _Sent, note: Note | None) -> dict[str, str] | None:
    if note is None:
        return None
    # A fork's log has no messages of its parent, and a repeated request may be a fork's.
    has_parent = plan.how in {"forked", "repeated"}
    num_before = plan.num_known + sent.num_messages
    return recorded.headers(note, (turn.messages or ())[:num_before] if has_parent else None)


def _rendering(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a generate's options an append or a count has too, as it belongs to the prompt."""
    return {name: options.get(name) for name in ("tools", "chat_template_kwargs")}


def _with_appended(result: Generated, sent: _Sent) -> Generated:
    """Count tokens that were appended for an answer as prefilled, and not as cached; add their warnings."""
    used = result.usage
    num_new = min(sent.num_prefilled, used.cached_tokens)
    counts = {"cached_tokens": -num_new, "prefilled_tokens": num_new}
    changed = {name: getattr(used, name) + count for name, count in counts.items()}
    warnings = tuple(dict.fromkeys(sent.warnings + result.warnings))
    return structs.replace(result, usage=structs.replace(used, **changed), warnings=warnings)
