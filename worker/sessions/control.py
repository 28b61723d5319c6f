"""Answers control requests (subject `ctl`): cancel, count, embed, info, metrics and rerank."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import UNSET, structs

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import (
    CancelRequest,
    Counted,
    CountRequest,
    EmbedRequest,
    Generate,
    InfoRequest,
    MetricsRequest,
    RerankRequest,
    SessionInfo,
    decode_control,
    failure,
)
from worker.wire.fence import FencedError

from .cancelling import cancel
from .history import RefusedError, cache_field
from .images import SessionImages
from .pending import PendingRequest, pending_at
from .results import rewritten_from

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import UnsetType

    from cache.store import Store
    from turnkeep_client.messages import ControlReply, Failed, Metrics
    from turnkeep_client.subjects import SessionKey, Subjects

    from .embedding import Embedder
    from .history import TokenHistory
    from .services import Services
    from .session import ServedSession
    from .sessions import Sessions


_CONTINUED: Final = "another worker has continued this session; ask again"


class Control:
    """Answers control requests. Event loop only."""

    def __init__(
        self,
        services: Services,
        sessions: Sessions,
        store: Store | None,
        subjects: Subjects,
        embedder: Embedder,
        metrics: Callable[[], Metrics],
    ) -> None:
        """`metrics` returns the worker's current metrics. Without a `store`, replies name no snapshots."""
        self._services = services
        self._engine = services.engine
        self._fold = services.fold
        self._model = services.model
        self._sessions = sessions
        self._store = store
        self._subjects = subjects
        self._embedder = embedder
        self._metrics = metrics

    async def answer(self, subject: str, body: bytes) -> ControlReply:
        """Return the reply to a control request; `Failed` if it is invalid or cannot be carried out."""
        try:
            key, _, _ = self._subjects.parse(subject)
            request = decode_control(body)
        except InvalidMessageError as error:
            return failure(error.request_id, "invalid_request", str(error), field=error.field)
        if isinstance(request, MetricsRequest):
            return self._metrics()
        if isinstance(request, EmbedRequest | RerankRequest):
            return await self._embedder.answer(key.tenant, request)
        with self._sessions.in_use(key) as session:
            return await self._answer(session, request)

    async def _answer(
        self, session: ServedSession, request: InfoRequest | CancelRequest | CountRequest
    ) -> ControlReply:
        key = session.key
        if isinstance(request, CancelRequest):
            try:
                with structlog.contextvars.bound_contextvars(session=str(key), request=request.id):
                    return await cancel(session, request.id)
            except FencedError:
                return failure(request.id, "internal", _CONTINUED)
        try:
            await session.refresh()  # a client may have the last result before this worker has read it
        except FencedError:
            return failure(None, "internal", _CONTINUED)
        history = session.history
        if (why := session.log.record.diverged) is not None:
            return failure(None, "history_diverged", why)
        if isinstance(request, CountRequest):
            return await self._count(key, history, request)
        if history.is_open or session.pending:
            return await self._info(session, request)
        if history.closed:
            return failure(None, "unknown_session", "the session was closed; an open starts it anew")
        return failure(
            None, "unknown_session", "there is no such session; an append or a generate starts one"
        )

    async def _count(self, key: SessionKey, history: TokenHistory, request: CountRequest) -> Counted | Failed:
        """Count the tokens that a generate would add; a closed or unknown session counts as a new one."""
        if not history.is_open:
            history = self._fold.begin(datetime.now(UTC))
        try:
            asked = Generate(id="count", **structs.asdict(request))
            grids = await SessionImages(key, self._services).grids(history, asked, stores=False)
            extended = await self._fold.extend_on_thread(key.tenant, history, asked, grids)
        except RefusedError as error:
            return failure(None, error.code, str(error), field=error.field, limit=error.limit)
        except ValueError as error:  # the input of no generate
            return failure(None, "invalid_request", str(error))
        position = extended.history.position
        return Counted(
            tokens=position - extended.kept,
            position=position,
            rewritten_from=rewritten_from(history, extended),
        )

    async def _info(self, session: ServedSession, request: InfoRequest) -> SessionInfo:
        # All may change during an await.
        history, num_answered = session.history, len(session.log.record.answered_ids)
        key, active, progress = session.key, session.active, self._engine.progress(session.key)
        if history.closed:  # waiting requests belong to the next session of this name
            history = self._fold.begin(datetime.now(UTC))
        waiting, num_waiting = await _waiting(session, active, request.skip, request.limit)
        policy = history.policy
        live_bytes = self._engine.live_bytes(key, history.tokens, policy)
        return SessionInfo(
            tenant=key.tenant,
            session=key.session,
            position=history.position,
            state="running" if progress else "waiting" if active or num_waiting else "idle",
            active=active.id if active else None,
            waiting=tuple(waiting),
            num_waiting=num_waiting,
            requests=num_answered,
            progress=progress,
            resident=live_bytes > 0,
            kv_live_bytes=live_bytes,
            policy=policy.name,
            cache=cache_field(policy) or UNSET,
            capacity_tokens=policy.most_tokens or UNSET,
            visible_tokens=policy.num_visible(history.position) if policy.window else UNSET,
            visible_from=policy.visible_from(history.position) if policy.window else UNSET,
            snapshot=self._snapshot(key, history) if request.snapshot else UNSET,
            parent=history.parent or UNSET,
            tags=history.tags or UNSET,
            answered_by=history.model or UNSET,
            model=self._model,
            worker=self._metrics(),
        )

    def _snapshot(self, key: SessionKey, history: TokenHistory) -> str | UnsetType:
        """Return the digest of the longest stored snapshot of a session's tokens; UNSET if there is none."""
        if self._store is None or self._engine.refusal(history.policy) is not None:
            return UNSET
        tokens = history.tokens
        match = self._store.kv.find(self._store.kv.chain(key.tenant, history.policy, tokens), tokens)
        return match.nodes[-1].digest.hex() if match.nodes else UNSET


async def _waiting(
    session: ServedSession, active: PendingRequest | None, skip: int, limit: int
) -> tuple[list[str], int]:
    """Return the ids of up to `limit` waiting requests after the first `skip`, and how many wait in all.

    The `active` request does not count. The number may include cancelled requests that were not read yet.
    """
    record, page = session.log.record, session.services.journal.page
    names = [pending.id or "" for pending in record.pending if pending is not active]
    after, num_more = record.in_seq, int(bool(record.pending))
    while num_more:
        entries, num_more = await page(session.key, "in", after)
        unread = [entry for entry in entries if not record.has_result(entry.seq)]
        names += [pending_at(entry).id or "" for entry in unread]
        after = entries[-1].seq if entries else after
        if len(names) >= skip + limit:
            break
    return names[skip:][:limit], len(names) + num_more
