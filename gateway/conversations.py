"""Answers one tenant's turns: finds the session with most of a conversation, and sends it only the rest.

Each answer has a task, which waits for the result even after its client has disconnected, so the index always
has the session's position. The task survives restarts of the worker and of NATS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from turnkeep_client.calls import expect
from turnkeep_client.errors import (
    MessageTooLargeError,
    RequestFailedError,
    ResultTimeoutError,
    TurnkeepError,
)
from turnkeep_client.messages import (
    Chunk,
    Close,
    Closed,
    Generated,
    decode_request,
)
from turnkeep_client.session import build
from turnkeep_client.session_log import decoded
from turnkeep_client.subjects import session_key

from .answer_feed import AnswerFeed, SessionMatch
from .boundaries import RecentBoundaries
from .idempotency import first_note, state_of
from .index import IndexedRequest, IndexedSession, SessionIndex
from .latest_metrics import LatestMetrics
from .logged_answers import FIRST_PAUSE_S, LAST_PAUSE_S, MISTAKEN, LoggedAnswer, follow
from .planning import new_name, plan_apart
from .planning import plan as make_plan
from .recovery import recover
from .removal import remove, sweep
from .sending import Sender, rendering_of
from .turn import NotStoredError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from turnkeep_client.client import Client

    from .answer_feed import Event
    from .logged_answers import LoggedHeader
    from .planning import How, SendPlan
    from .turn import ClientTurn

log = logging.getLogger(__name__)

#: How long nothing must be stored until clients are told so, and how often that is looked at.
_STORE_S: Final = 10.0
_LOOK_S: Final = 1.0
#: Attempts to send a turn, the last one to a new session.
_ATTEMPTS: Final = 4


class Conversations:
    """The conversations of one tenant with one model, and the sessions that hold them."""

    def __init__(self, client: Client, *, idle_s: float, is_stopping: Callable[[], bool]) -> None:
        """Sessions unused for `idle_s` seconds are removed.

        While `is_stopping()`, answers are not cancelled when their clients disconnect: these may come back.
        """
        self.index = SessionIndex()
        self.client = client
        self._idle_s = idle_s
        self._is_stopping = is_stopping
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading = asyncio.Lock()
        self._is_loaded = False
        self._seen = RecentBoundaries()
        self.latest = LatestMetrics(client)
        self._sender = Sender(client, self.index, self.latest, begin=self._begin, is_stopping=is_stopping)
        #: By `key_id`: the request with this idempotency key, while the log does not have it yet.
        self._beginning: dict[str, AnswerFeed] = {}
        #: The answers whose clients wait.
        self._waiting: set[AnswerFeed] = set()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Fill the index from the log and start to remove idle sessions; later calls do nothing.

        Raises `TurnkeepError` if the log cannot be read; then the next call tries again.
        """
        async with self._loading:
            if not self._is_loaded:
                await recover(self.client, self.index)
                self._is_loaded = True
                self.beside(sweep(self.client, self.index, self.latest, self._idle_s))

    async def count(self, turn: ClientTurn) -> int:
        """Count the tokens of a turn's messages and tools, without running it. Raises `TurnkeepError`."""
        session = self.client.session(new_name())
        rendering = rendering_of(turn.options)
        try:
            num_tokens = (await session.count(messages=turn.messages, text=turn.text, **rendering)).tokens
            if prefix := turn.options.get("prefix"):
                num_tokens += (await session.count(text=prefix, special_tokens=False)).tokens
            return num_tokens
        finally:
            if any(one.files for one in turn.messages or ()):  # which the log has now
                self.beside(self._erase(session.key.session))

    async def _erase(self, session: str) -> None:
        """Erase the images of a session that was only counted."""
        with contextlib.suppress(TurnkeepError):  # until it is removed, it is only in the way
            await self.forget(session)

    async def close(self) -> None:
        """Cancel all tasks and close the connection. The worker completes running answers."""
        self._is_stopping = lambda: True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()

    def answer(
        self,
        turn: ClientTurn,
        on_end: Callable[[How, Generated], None],
        note: LoggedHeader,
        key_id: str = "",
        *,
        stays: bool = False,
    ) -> AnswerFeed:
        """Start a turn's answers and return their feed; each answer's last event is its result or an error.

        The other parameters are those of `AnswerFeed`.
        """
        feed = AnswerFeed(on_end, note, key_id, stays=stays)
        self._wait(feed)
        self.beside(self._answer(turn, 0, feed))
        return feed

    def follow(self, found: LoggedAnswer) -> AnswerFeed:
        """Return a feed with all events of an answer in the log; the answer may still run."""
        feed = AnswerFeed(_ignore, found.note)
        self._wait(feed)
        feed.following = self.beside(self._follow(found, feed))
        return feed

    async def forget(self, session: str) -> None:
        """Delete a session and its content.

        Returns once the worker has done so, or after a few seconds, when it will. Raises `TurnkeepError`.
        """
        if (known := self.index.sessions.get(session)) is not None:
            self.index.drop(known)
        key, most_s = session_key(self.client.tenant, session), LAST_PAUSE_S
        try:
            closing = await self.client.submit(key, build(Close, forget=True), timeout_s=most_s)
        except ResultTimeoutError:
            raise NotStoredError from None
        with contextlib.suppress(ResultTimeoutError):  # the request is in the log: the worker will execute it
            expect(Closed, await closing)

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a background task, until it ends or the gateway closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def leave(self, feed: AnswerFeed) -> None:
        """Note that no client waits for these answers, which go on."""
        self._waiting.discard(feed)

    def abandon(self, feed: AnswerFeed) -> None:
        """Stop waiting for these answers, and cancel each that no other client waits for."""
        self.leave(feed)
        feed.is_abandoned = True
        if feed.following is not None:
            feed.following.cancel()
        for asked in [*feed.running]:
            self._leave(asked, feed)

    def _wait(self, feed: AnswerFeed) -> None:
        """Note that a client waits for these answers, until `leave` or `abandon`."""
        self._waiting.add(feed)
        if self._watching is None or self._watching.done():
            self._watching = self.beside(self._watch())

    async def _watch(self) -> None:
        """Tell the clients that wait, again and again, once nothing was stored for `_STORE_S`."""
        stored_s = time.monotonic()
        while self._waiting:
            await asyncio.sleep(_LOOK_S)
            if (error := await self.latest.not_stored()) is None:
                stored_s = time.monotonic()
            elif time.monotonic() - stored_s > _STORE_S:
                for feed in self._waiting:
                    feed.stop(error)

    async def _answer(self, turn: ClientTurn, number: int, feed: AnswerFeed) -> None:
        has_begun = False

        def tell(event: Event) -> None:
            nonlocal has_begun
            has_begun = has_begun or isinstance(event, Chunk)
            feed.events.put_nowait((number, event))

        for attempt in range(_ATTEMPTS):
            try:
                await self._attempt(turn, number, attempt, feed, tell)
            except RequestFailedError as error:
                is_lost = has_begun or feed.is_abandoned or attempt == _ATTEMPTS - 1
                if error.code in MISTAKEN and not is_lost:
                    continue
                tell(error)
            except TurnkeepError as error:
                tell(error)
            except Exception as error:  # the client must get an answer
                log.exception("an answer failed for an unknown reason")
                tell(TurnkeepError(f"the gateway failed: {type(error).__name__}"))
            finally:
                self._begin(feed)
            return

    async def _attempt(
        self, turn: ClientTurn, number: int, attempt: int, feed: AnswerFeed, tell: Callable[[Event], None]
    ) -> None:
        """Find the answer `number` of a turn in the log, or have it made. Raises `TurnkeepError`."""
        (alone, own), differs = turn.alone(number), None
        plan = await self._plan(alone, own, feed, is_last=attempt == _ATTEMPTS - 1)
        if isinstance(plan, LoggedAnswer):
            feed.note = plan.note
            tell(_found_again(plan))
            result = await follow(self.client, plan, tell)
            feed.on_end("repeated", result)
            tell(result)
            return
        if plan.is_claimed and not number:  # the same answer has the id that its first client knows
            session, request = plan.asked.session.name, str(plan.asked.name)
            feed.note = await first_note(self.client, session, request, feed.note)
        told = turn.messages or ()
        if not attempt and not number:
            differs = self._seen.difference(told, plan.known, plan.num_known)
            for other in range(1, turn.n):  # behind the first, whose session names all of them
                self.beside(self._answer(turn, other, feed))
        match = plan.asked.session.name, plan.how, plan.position, plan.num_known
        tell(SessionMatch(*match, len(told), differs))
        result = await self._carry_out(alone, plan, feed, tell)
        feed.on_end(plan.how, result)
        tell(result)

    async def _plan(
        self, turn: ClientTurn, number: int, feed: AnswerFeed, *, is_last: bool
    ) -> SendPlan | LoggedAnswer:
        """Decide how to send a turn, or find the answer under its idempotency key. Raises `TurnkeepError`."""
        if not feed.key_id:
            return make_plan(self.index, turn, number, is_last=is_last)
        while (other := self._beginning.get(feed.key_id)) is not None:
            await other.begun.wait()
        self._beginning[feed.key_id] = feed
        feed.begun.clear()
        state = await state_of(self.client, feed.key_id, feed.note.body)
        return state.answer or plan_apart(self.index, turn, state)

    def _begin(self, feed: AnswerFeed) -> None:
        """Wake requests that wait for this one with the same key: the log has it now, or never will."""
        feed.begun.set()
        if self._beginning.get(feed.key_id) is feed:
            del self._beginning[feed.key_id]

    async def _follow(self, found: LoggedAnswer, feed: AnswerFeed) -> None:
        def tell(event: Event) -> None:
            feed.events.put_nowait((0, event))

        tell(_found_again(found))
        try:
            tell(await follow(self.client, found, tell))
        except TurnkeepError as error:
            tell(error)

    async def _carry_out(
        self, turn: ClientTurn, plan: SendPlan, feed: AnswerFeed, tell: Callable[[Event], None]
    ) -> Generated:
        """Send a turn as planned, pass its chunks to `tell`, add its result to the index, and return it."""
        asked, is_known = plan.asked, True
        asked.join()
        feed.running.append(asked)
        if feed.is_abandoned:
            self._leave(asked, feed)
        try:
            return await self._sender.send(turn, plan, feed, tell)
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
            asked.end()
            self._leave(asked, feed)
            if plan.how != "repeated":
                # Used until now: an answer may take longer than the idle time.
                self.index.leave(asked.session, time.monotonic())
                if is_known and asked.state != "running":  # else the gateway stops, or the sweep finds it out
                    self._release(turn, asked.session, stays=feed.stays)

    def _release(self, turn: ClientTurn, session: IndexedSession, *, stays: bool) -> None:
        """Close a turn's session if no later turn can continue it."""
        is_useless = not session.marks and session.name in self.index.sessions and not stays
        if turn.messages is None or is_useless:
            self.beside(remove(self.client, self.index, session, forget=turn.messages is not None))

    def _note_failed(self, plan: SendPlan) -> None:
        plan.asked.fail(may_still_run=plan.how == "repeated" and plan.asked.session.num_running > 0)

    def _learnt(self, plan: SendPlan, error: RequestFailedError) -> RequestFailedError:
        """Correct the index after a request was refused; return the error to raise."""
        session = plan.asked.session
        if error.code == "position_conflict":
            self.index.lose(session)  # another gateway has continued it
        elif error.code in MISTAKEN - {"id_conflict"}:
            self.index.drop(session)
            if error.code == "unknown_session" and not plan.is_apart:  # the log has the refused request there
                self.index.move(session, 0)
                self.beside(remove(self.client, self.index, session))
        elif plan.how == "repeated":  # the recorded answer is no longer usable
            return RequestFailedError("id_conflict", error.message, retryable=False)
        return error

    def _leave(self, asked: IndexedRequest, feed: AnswerFeed) -> None:
        if asked not in feed.running:
            return
        feed.running.remove(asked)
        if asked.leave() and not self._is_stopping():
            self.beside(self._cancel(asked))

    async def _cancel(self, asked: IndexedRequest) -> None:
        """Ask the worker repeatedly to cancel an answer, until it ends: no later request here gets it.

        An answer that another gateway's client may wait for goes on.
        """
        pause_s = 0.0
        if asked.opening is not None:
            await asked.opening.wait()
        while asked.state == "running":
            await asyncio.sleep(pause_s)
            pause_s = min(max(2 * pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)
            with contextlib.suppress(TurnkeepError):  # there is no worker now, or it has not read the request
                if await self._is_elsewhere(asked):
                    return
                await self.client.session(asked.session.name).cancel(asked.append or str(asked.name))

    async def _is_elsewhere(self, asked: IndexedRequest) -> bool:
        """Whether another gateway has sent this request too: its client may wait for the answer.

        Raises `TurnkeepError` if the log cannot be read.
        """
        if asked.is_joined or not asked.own_seqs:
            return asked.is_joined
        key = session_key(self.client.tenant, asked.session.name)
        async for _, stored in self.client.stored.every(key, "in", min(asked.own_seqs)):
            request = decoded(decode_request, stored.body)
            is_own = stored.seq in asked.own_seqs
            if not is_own and request is not None and request.id == str(asked.name):
                return True
        return False


def _ignore(_how: How, _result: Generated) -> None:
    pass


def _found_again(found: LoggedAnswer) -> SessionMatch:
    return SessionMatch(found.session, "repeated", 0, 0, 0)
