"""Sends planned turns: opens or forks the session, appends what does not fit, and follows the answer."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from turnkeep_client.calls import expect
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.images import images_in
from turnkeep_client.messages import Append, Appended, CachePolicy, Failed, ForkPoint, Generated
from turnkeep_client.session import build
from turnkeep_client.subjects import session_key

from . import logged_answers
from .answer_feed import Receipt
from .idempotency import first_note
from .images import attach
from .index import append_id, tags
from .logged_answers import FIRST_PAUSE_S
from .planning import groups_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Message

    from .answer_feed import AnswerFeed, Event
    from .index import IndexedRequest, IndexedSession, SessionIndex
    from .latest_metrics import LatestMetrics
    from .logged_answers import LoggedHeader
    from .planning import SendPlan
    from .turn import ClientTurn

#: How long to wait for the result of another request that has changed a session's position.
_CATCH_UP_S: Final = 1.0
#: No gateway takes longer to cancel an answer, once it has seen that no other one's client waits for it.
_JOIN_S: Final = 1.0


class Sender:
    """Sends the planned turns of one tenant's conversations, and keeps the index true to what was stored."""

    def __init__(
        self,
        client: Client,
        index: SessionIndex,
        latest: LatestMetrics,
        *,
        begin: Callable[[AnswerFeed], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        """Calls `begin` once the log has a request whose answer stays."""
        self._client = client
        self._index = index
        self._latest = latest
        self._begin = begin
        self._is_stopping = is_stopping

    async def send(
        self, turn: ClientTurn, plan: SendPlan, feed: AnswerFeed, tell: Callable[[Event], None]
    ) -> Generated:
        """Open the session, append what does not fit in the generate request, and send that request.

        Passes the answer's chunks to `tell` and returns its result. Raises `TurnkeepError`.
        """
        messages = () if turn.messages is None else turn.messages[plan.num_known :]
        most = self._latest.max_message_bytes or sys.maxsize
        header_bytes = min(logged_answers.num_bytes(feed.note), most // 2)
        pieces = groups_ahead(messages, plan.options, most, header_bytes)
        await self._open(plan, None if turn.has_snapshots else CachePolicy(snapshots="none"))
        await _find_images(turn, messages)
        plan, appended = await self._append(plan, pieces)
        asked = plan.asked
        generation = self._client.session(asked.session.name).generate(
            messages=(turn.messages or ())[plan.num_known :] or None,
            text=turn.text,
            tokens=turn.tokens,
            request_id=str(asked.name),
            expect_position=plan.position,
            headers=_headers(turn, plan, feed.note),
            **plan.options,
        )
        asked.send(generation)
        if plan.is_claimed and asked.state == "running":
            await generation.send()
            await self._check_joined(asked, feed)
        if feed.stays:
            await generation.send()
            if feed.key_id:  # another gateway may have stored the request before
                first = first_note(self._client, asked.session.name, str(asked.name), feed.note)
                feed.note = await first
            self._begin(feed)
            tell(Receipt())
        try:
            async for chunk in generation:
                tell(chunk)
            result = generation.result
        except RequestFailedError as error:
            raise error.behind(plan.num_known, "messages") from None
        if asked.state == "running":
            self._index.answer(asked, result)
        return _with_appended(result, appended)

    async def _check_joined(self, asked: IndexedRequest, feed: AnswerFeed) -> None:
        """Wait until each gateway sees that a client here waits for the answer, which another one may cancel.

        Raises `RequestFailedError` if one has cancelled it before; then the request is sent anew.
        """
        await asyncio.sleep(_JOIN_S)
        wanted = logged_answers.answer_id(asked.session.name, feed.note)
        found = (await logged_answers.find(self._client, {wanted}, conversation=False)).get(wanted)
        if found and isinstance(found.result, Generated) and found.result.finish_reason == "cancelled":
            raise RequestFailedError("id_conflict", "another gateway has cancelled it", retryable=True)

    async def _append(
        self, plan: SendPlan, pieces: list[Sequence[Message]]
    ) -> tuple[SendPlan, list[Appended]]:
        """Append messages that do not fit in the generate request; return the plan for what is left.

        Raises `TurnkeepError`.
        """
        asked, results = plan.asked, list[Appended]()
        for piece in pieces:
            if not asked.num_users and not self._is_stopping():
                raise RequestFailedError("expired", "its client has gone away", retryable=True)
            num_known = plan.num_known + len(piece)
            rendering = {} if results else rendering_of(plan.options)
            try:
                results.append(await self._append_piece(plan, plan.known[num_known], piece, rendering))
            except RequestFailedError as error:
                raise error.behind(plan.num_known, "messages") from None
            plan = plan._replace(num_known=num_known, position=results[-1].position)
        return plan, results

    async def _append_piece(
        self, plan: SendPlan, boundary: bytes, piece: Sequence[Message], rendering: Mapping[str, Any]
    ) -> Appended:
        """Append messages up to a boundary; if an append with the same id has failed before, use a new id.

        Raises `TurnkeepError`.
        """
        asked, position, attempt = plan.asked, plan.position, 0
        while True:
            asked.begin_append(append_id(boundary, position, attempt))
            request = build(Append, asked.append, messages=piece, expect_position=position, **rendering)
            key = session_key(self._client.tenant, asked.session.name)
            result = await (await self._client.submit(key, request))
            if not isinstance(result, Failed) or result.repeat_of is None:
                appended = expect(Appended, result)
                self._index.append(asked.session, boundary, appended)
                asked.end_append(boundary, appended.position)
                return appended
            attempt += 1

    async def _open(self, plan: SendPlan, cache: CachePolicy | None) -> None:
        """Fork or reopen the session as planned; a new session is opened only if it needs a policy `cache`.

        For a repeated request, wait until the first has done so.

        Raises `TurnkeepError`.
        """
        asked = plan.asked
        if plan.how == "repeated":
            if asked.opening is not None:
                await asked.opening.wait()
            if asked.state == "failed":
                raise RequestFailedError("id_conflict", "the first request failed", retryable=True)
        elif plan.how == "begun":
            if plan.closed_seq or cache is not None:
                session = self._client.session(asked.session.name)
                await session.open(cache, request_id=f"open-{plan.closed_seq}")  # the same id in each attempt
            self._index.move(asked.session, 0)
        elif plan.how == "forked" and plan.parent is not None:
            await self._fork(plan, plan.parent)
            self._index.move(asked.session, plan.position)
        asked.end_opening()

    async def _fork(self, plan: SendPlan, parent: IndexedSession) -> None:
        """Open the session as a fork; correct the index if that is refused. Raises `TurnkeepError`."""
        asked = plan.asked
        point = ForkPoint(parent.name, plan.position, plan.parent_position)
        names, own = tags(next(iter(asked.bases), b"")), f"open-{asked.name.nonce}"
        try:
            await self._client.session(asked.session.name).open(fork_of=point, tags=names, request_id=own)
        except RequestFailedError as error:
            if plan.is_apart and error.code in {"id_conflict", "invalid_request"}:
                # Another gateway forked it first.
                raise RequestFailedError("id_conflict", error.message, retryable=True) from None
            if error.code == "position_conflict":
                await self._catch_up(parent, plan.parent_position)
            if error.code == "position_conflict" or error.retryable:
                raise
            self._index.drop(parent)
            raise RequestFailedError("unknown_session", error.message, retryable=False) from None

    async def _catch_up(self, session: IndexedSession, position: int | None) -> None:
        """Wait up to a second for the result of another request, which moves a session's position.

        Without a result, record that the position is unknown.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CATCH_UP_S):
                while session.num_running and session.position == position:  # noqa: ASYNC110  # its task signals nobody
                    await asyncio.sleep(FIRST_PAUSE_S)
        if session.position == position:
            self._index.lose(session)


def rendering_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the generate options that change the prompt; append and count requests have them too."""
    return {name: options.get(name) for name in ("tools", "chat_template_kwargs")}


async def _find_images(turn: ClientTurn, messages: Sequence[Message]) -> None:
    """Read the files of images in messages of an earlier answer's conversation, which the request only names.

    Raises `TurnkeepError`.
    """
    if turn.earlier_image is not None:
        missing = {
            one for message in messages for one in images_in(message.content) if one not in message.files
        }
        attach(messages, {one: await turn.earlier_image(one) for one in missing})


def _headers(turn: ClientTurn, plan: SendPlan, note: LoggedHeader) -> dict[str, str]:
    # A fork's log has no messages of its parent, and a repeated request may be a fork's.
    has_parent = plan.how in {"forked", "repeated"}
    return logged_answers.headers(note, (turn.messages or ())[: plan.num_known] if has_parent else None)


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
