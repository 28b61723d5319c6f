"""Answers one tenant's turns: finds the session with most of a conversation, and sends it only the rest.

Each answer has a task, which waits for the result even after its client has disconnected, so the index always
has the session's position. The task survives restarts of the worker and of NATS: an answer ends early only if
its client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from turnkeep_client.calls import expect
from turnkeep_client.errors import (
    MessageTooLargeError,
    RequestFailedError,
    ResultTimeoutError,
    TurnkeepError,
)
from turnkeep_client.messages import (
    Append,
    Appended,
    Chunk,
    Close,
    Closed,
    Failed,
    ForkPoint,
    Generated,
    Open,
)
from turnkeep_client.session import build
from turnkeep_client.subjects import session_key

from . import recorded
from .answering import Answering, Begun, Found
from .following import FIRST_PAUSE_S, LAST_PAUSE_S, MISTAKEN, first_copy, first_note, follow, standing
from .index import Index, IndexedRequest, IndexedSession, append_id, tags
from .pieces import ahead
from .planning import new_name, plan_apart
from .planning import plan as make_plan
from .presence import Presence
from .recorded import Recorded
from .recovery import recover
from .removal import remove, sweep
from .seen import Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Message

    from .answering import Event
    from .planning import How, Plan
    from .recorded import Note
    from .turn import Turn

log = logging.getLogger(__name__)

#: How long to wait for the result of another request that has changed a session's position.
_CATCH_UP_S: Final = 1.0
#: Attempts to send a turn, the last one to a new session.
_ATTEMPTS: Final = 4


class Conversations:
    """The conversations of one tenant with one model, and the sessions that hold them."""

    def __init__(self, client: Client, *, idle_s: float, is_stopping: Callable[[], bool]) -> None:
        """Sessions unused for `idle_s` seconds are removed.

        While `is_stopping()`, answers are not cancelled when their clients disconnect: these may come back.
        """
        self.index = Index()
        self.client = client
        self._idle_s = idle_s
        self._is_stopping = is_stopping
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading = asyncio.Lock()
        self._is_loaded = False
        self._seen = Seen()
        self.presence = Presence(client)
        #: By `key_id`: the request with this idempotency key, while the log does not have it yet.
        self._beginning: dict[str, Answering] = {}

    async def start(self) -> None:
        """Fill the index from the log and start to remove idle sessions; later calls do nothing.

        Raises `TurnkeepError`.
        """
        async with self._loading:
            if not self._is_loaded:
                await recover(self.client, self.index)
                self._is_loaded = True
                self.beside(sweep(self.client, self.index, self.presence, self._idle_s))

    async def count(self, turn: Turn) -> int:
        """Count the tokens of a turn's messages and tools, without running it. Raises `TurnkeepError`."""
        session = self.client.session(new_name())
        rendering = _rendering(turn.options)
        num_tokens = (await session.count(messages=turn.messages, text=turn.text, **rendering)).tokens
        if prefix := turn.options.get("prefix"):
            num_tokens += (await session.count(text=prefix, special_tokens=False)).tokens
        return num_tokens

    async def close(self) -> None:
        """Cancel all tasks and close the connection; running answers go on in the worker."""
        self._is_stopping = lambda: True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()

    def answer(
        self,
        turn: Turn,
        on_end: Callable[[How, Generated], None],
        note: Note,
        key_id: str = "",
        *,
        stays: bool = False,
    ) -> Answering:
        """Start a turn's answers; each answer's last event is its result or an error. See `Answering`."""
        answering = Answering(on_end, note, key_id, stays=stays)
        self.beside(self._answer(turn, 0, answering))
        return answering

    async def recorded(self, answer_ids: set[str], *, conversation: bool = True) -> dict[str, Recorded]:
        """Find answers in the log by id, with the `conversation` before each. Raises `TurnkeepError`."""
        return await recorded.find(self.client, answer_ids, conversation=conversation)

    def follow(self, found: Recorded) -> Answering:
        """Start to queue the events, from the first on, of an answer that is in the log."""
        answering = Answering(_ignore, found.note)
        answering.following = self.beside(self._follow(found, answering))
        return answering

    async def forget(self, session: str) -> None:
        """Delete a session and its content. Raises `TurnkeepError`."""
        if (held := self.index.sessions.get(session)) is not None:
            self.index.drop(held)
        key, most_s = session_key(self.client.tenant, session), LAST_PAUSE_S
        await self.client.submit(key, build(Open), timeout_s=most_s)  # only an open session can be forgotten
        closing = await self.client.submit(key, build(Close, forget=True), timeout_s=most_s)
        with contextlib.suppress(ResultTimeoutError):  # the request is in the log: the worker will execute it
            expect(Closed, await closing)

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a background task, until it ends or the gateway closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def abandon(self, answering: Answering) -> None:
        """Stop waiting for these answers, and cancel each that no other client waits for."""
        answering.is_abandoned = True
        if answering.following is not None:
            answering.following.cancel()
        for asked in [*answering.running]:
            self._leave(asked, answering)

    async def _answer(self, turn: Turn, number: int, answering: Answering) -> None:
        has_begun, differs = False, None
        alone, own = turn.alone(number)

        def tell(event: Event) -> None:
            nonlocal has_begun
            has_begun = has_begun or isinstance(event, Chunk)
            answering.events.put_nowait((number, event))

        for attempt in range(_ATTEMPTS):
            try:
                plan = await self._plan(alone, own, answering, is_last=attempt == _ATTEMPTS - 1)
                if isinstance(plan, Recorded):
                    answering.note = plan.note
                    tell(_found_again(plan))
                    result = await follow(self.client, plan, tell)
                    answering.on_end("repeated", result)
                    tell(result)
                    return
                if plan.is_claimed and not number:  # the same answer has the id that its first client knows
                    session, request = plan.asked.session.name, str(plan.asked.name)
                    answering.note = await first_note(self.client, session, request, answering.note)
                if not attempt and not number:
                    differs = self._missing(turn, plan)
                    for other in range(1, turn.n):  # behind the first, whose session names all of them
                        self.beside(self._answer(turn, other, answering))
                told = len(turn.messages or ())
                tell(Found(plan.asked.session.name, plan.how, plan.position, plan.num_known, told, differs))
                result = await self._carry_out(alone, plan, answering, tell)
                answering.on_end(plan.how, result)
                tell(result)
            except RequestFailedError as error:
                is_lost = has_begun or answering.is_abandoned or attempt == _ATTEMPTS - 1
                if error.code in MISTAKEN and not is_lost:
                    continue
                tell(error)
            except TurnkeepError as error:
                tell(error)
            except Exception as error:  # the client must get an answer
                log.exception("an answer failed for an unknown reason")
                tell(TurnkeepError(f"the gateway failed: {type(error).__name__}"))
            finally:
                self._begin(answering)
            return

    async def _plan(self, turn: Turn, number: int, answering: Answering, *, is_last: bool) -> Plan | Recorded:
        """Decide how to send a turn, or find the answer under its idempotency key. Raises `TurnkeepError`."""
        if not answering.key_id:
            return make_plan(self.index, turn, number, is_last=is_last)
        while (other := self._beginning.get(answering.key_id)) is not None:
            await other.begun.wait()
        self._beginning[answering.key_id] = answering
        answering.begun.clear()
        stands = await standing(self.client, answering.key_id, answering.note.body)
        return stands.answer or plan_apart(self.index, turn, stands)

    def _begin(self, answering: Answering) -> None:
        """Wake requests that wait for this one with the same key: the log has it now, or never will."""
        answering.begun.set()
        if self._beginning.get(answering.key_id) is answering:
            del self._beginning[answering.key_id]

    async def _follow(self, found: Recorded, answering: Answering) -> None:
        def tell(event: Event) -> None:
            answering.events.put_nowait((0, event))

        tell(_found_again(found))
        try:
            tell(await follow(self.client, found, tell))
        except TurnkeepError as error:
            tell(error)

    def _missing(self, turn: Turn, plan: Plan) -> str | None:
        """If no session has a conversation's last answer, log and return where the conversation differs."""
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
        """Send a turn as planned, pass its chunks to `tell`, add its result to the index, and return it."""
        asked, is_known = plan.asked, True
        asked.join()
        answering.running.add(asked)
        if answering.is_abandoned:
            self._leave(asked, answering)
        try:
            return await self._send(turn, plan, answering, tell)
        except RequestFailedError as error:
            self._note_failed(plan)
            raise self._learnt(plan, error) from None
        except Exception as error:
            self._note_failed(plan)
            is_known = isinstance(error, MessageTooLargeError)  # such a request was never sent
            if not is_known:
                self.index.lose(asked.session, history=True)
            raise
        finally:
            asked.end_opening()
            self._leave(asked, answering)
            if plan.how != "repeated":
                self.index.leave(asked.session, time.time())  # an answer may take longer than the idle time
                if is_known and asked.state != "running":  # else the gateway stops, or the sweep finds it out
                    self._release(turn, asked.session, stays=answering.stays)

    async def _send(
        self, turn: Turn, plan: Plan, answering: Answering, tell: Callable[[Event], None]
    ) -> Generated:
        """Open the session, append what does not fit in the generate request, and send that request."""
        messages = () if turn.messages is None else turn.messages[plan.num_known :]
        most = self.presence.max_message_bytes or sys.maxsize
        header_bytes = min(recorded.num_bytes(answering.note), most // 2)
        pieces = ahead(messages, plan.options, most, header_bytes)
        await self._open(plan)
        plan, appended = await self._append(plan, pieces)
        asked = plan.asked
        generation = self.client.session(asked.session.name).generate(
            messages=(turn.messages or ())[plan.num_known :] or None,
            text=turn.text,
            tokens=turn.tokens,
            request_id=str(asked.name),
            expect_position=plan.position,
            headers=_headers(turn, plan, answering.note),
            **plan.options,
        )
        if answering.stays:
            await generation.send()
            if answering.key_id:  # another gateway may have stored the request before
                first = await first_copy(self.client, answering.key_id)
                answering.note = first.note if first else answering.note
            self._begin(answering)
            tell(Begun())
        async for chunk in generation:
            tell(chunk)
        if asked.state == "running":
            self.index.answer(asked, generation.result)
        return _with_appended(generation.result, appended)

    def _release(self, turn: Turn, session: IndexedSession, *, stays: bool) -> None:
        """Close a turn's session if no later turn can continue it."""
        is_useless = not session.marks and session.name in self.index.sessions and not stays
        if turn.messages is None or is_useless:
            self.beside(remove(self.client, self.index, session, forget=turn.messages is not None))

    async def _append(self, plan: Plan, pieces: list[Sequence[Message]]) -> tuple[Plan, list[Appended]]:
        """Append messages that do not fit in the generate request; return the plan for what is left.

        Raises `TurnkeepError`.
        """
        asked, results = plan.asked, list[Appended]()
        for piece in pieces:
            if not asked.num_users and not self._is_stopping():
                raise RequestFailedError("expired", "its client has gone away", retryable=True)
            num_known = plan.num_known + len(piece)
            rendering = {} if results else _rendering(plan.options)
            results.append(await self._append_piece(plan, plan.known[num_known], piece, rendering))
            plan = plan._replace(num_known=num_known, position=results[-1].position)
        return plan, results

    async def _append_piece(
        self, plan: Plan, boundary: bytes, piece: Sequence[Message], rendering: Mapping[str, Any]
    ) -> Appended:
        """Append messages up to a boundary; if an append with the same id has failed before, use a new id.

        Raises `TurnkeepError`.
        """
        asked, position, attempt = plan.asked, plan.position, 0
        while True:
            asked.begin_append(append_id(boundary, position, attempt))
            request = build(Append, asked.append, messages=piece, expect_position=position, **rendering)
            key = session_key(self.client.tenant, asked.session.name)
            result = await (await self.client.submit(key, request))
            if not isinstance(result, Failed) or result.repeat_of is None:
                appended = expect(Appended, result)
                self.index.append(asked.session, boundary, appended)
                asked.end_append(boundary, appended.position)
                return appended
            attempt += 1

    async def _open(self, plan: Plan) -> None:
        """Fork or reopen the session as planned. For a repeated request, wait until the first has done so.

        Raises `TurnkeepError`.
        """
        asked = plan.asked
        if plan.how == "repeated":
            if asked.opening is not None:
                await asked.opening.wait()
            if asked.state == "failed":
                raise RequestFailedError("id_conflict", "the first request failed", retryable=True)
        elif plan.how == "begun":
            if plan.reopens:
                await self.client.session(asked.session.name).open(request_id=f"open-{asked.name.nonce}")
            self.index.move(asked.session, 0)
        elif plan.how == "forked" and plan.parent is not None:
            await self._fork(plan, plan.parent)
            self.index.move(asked.session, plan.position)
        asked.end_opening()

    async def _fork(self, plan: Plan, parent: IndexedSession) -> None:
        """Open the session as a fork; correct the index if that is refused. Raises `TurnkeepError`."""
        asked = plan.asked
        point = ForkPoint(parent.name, plan.position, plan.parent_position)
        names, own = tags(next(iter(asked.bases), b"")), f"open-{asked.name.nonce}"
        try:
            await self.client.session(asked.session.name).open(fork_of=point, tags=names, request_id=own)
        except RequestFailedError as error:
            if plan.is_apart and error.code in {"id_conflict", "invalid_request"}:
                # Another gateway forked it first.
                raise RequestFailedError("id_conflict", error.message, retryable=True) from None
            if error.code == "position_conflict":
                await self._catch_up(parent, plan.parent_position)
            if error.code == "position_conflict" or error.retryable:
                raise
            self.index.drop(parent)
            raise RequestFailedError("unknown_session", error.message, retryable=False) from None

    async def _catch_up(self, held: IndexedSession, position: int | None) -> None:
        """Wait up to a second for the result of another request, which moves a session's position.

        Without a result, record that the position is unknown.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CATCH_UP_S):
                while held.num_running and held.position == position:  # noqa: ASYNC110  # its task signals nobody
                    await asyncio.sleep(FIRST_PAUSE_S)
        if held.position == position:
            self.index.lose(held)

    def _note_failed(self, plan: Plan) -> None:
        plan.asked.fail(runs=plan.how == "repeated" and plan.asked.session.num_running > 0)

    def _learnt(self, plan: Plan, error: RequestFailedError) -> RequestFailedError:
        """Correct the index after a request was refused; return the error to raise."""
        held = plan.asked.session
        if error.code == "position_conflict":
            self.index.lose(held)  # another gateway has continued it
        elif error.code in MISTAKEN - {"id_conflict"}:
            self.index.drop(held)
            if error.code == "unknown_session" and not plan.is_apart:  # the log has the refused request there
                self.index.move(held, 0)
                self.beside(remove(self.client, self.index, held))
        elif plan.how == "repeated":  # the recorded answer is no longer usable
            return RequestFailedError("id_conflict", error.message, retryable=False)
        return error

    def _leave(self, asked: IndexedRequest, answering: Answering) -> None:
        if asked not in answering.running:
            return
        answering.running.discard(asked)
        if asked.leave() and not self._is_stopping():
            self.beside(self._cancel(asked))

    async def _cancel(self, asked: IndexedRequest) -> None:
        """Ask the worker repeatedly to cancel an answer, until the answer ends or a client wants it again."""
        pause_s = 0.0
        if asked.opening is not None:
            await asked.opening.wait()
        while asked.state == "running" and asked.num_users == 0:
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)
            with contextlib.suppress(TurnkeepError):  # there is no worker now, or it has not read the request
                await self.client.session(asked.session.name).cancel(asked.append or str(asked.name))


def _ignore(_how: How, _result: Generated) -> None:
    pass


def _found_again(found: Recorded) -> Found:
    return Found(found.session, "repeated", 0, 0, 0)


def _headers(turn: Turn, plan: Plan, note: Note) -> dict[str, str]:
    # A fork's log has no messages of its parent, and a repeated request may be a fork's.
    has_parent = plan.how in {"forked", "repeated"}
    return recorded.headers(note, (turn.messages or ())[: plan.num_known] if has_parent else None)


def _rendering(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generate options that change the prompt; append and count requests have them too."""
    return {name: options.get(name) for name in ("tools", "chat_template_kwargs")}


def _with_appended(result: Generated, appended: Sequence[Appended]) -> Generated:
    """Add a turn's appends to its result: count their tokens as prefilled, not cached; add their warnings."""
    used = result.usage
    num_prefilled = sum(one.prefilled_tokens for one in appended if one.repeat_of is None)
    num_new = min(num_prefilled, used.cached_tokens)
    counts = {"cached_tokens": -num_new, "prefilled_tokens": num_new}
    changed = {name: getattr(used, name) + count for name, count in counts.items()}
    warnings = dict.fromkeys(
        one for some in (*(one.warnings for one in appended), result.warnings) for one in some
    )
    return structs.replace(result, usage=structs.replace(used, **changed), warnings=tuple(warnings))
