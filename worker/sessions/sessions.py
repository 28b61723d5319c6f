"""Keeps the sessions in this worker's memory: starts their tasks, and evicts idle sessions.

An evicted session is read from its log again when its next request arrives. A session asks here for
the history of a fork's parent, and for the length of the longest prefix that another session shares with it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
from anyio import Event, move_on_after, sleep

from turnkeep_client.subjects import SessionKey
from worker.engine.port import StoppingError
from worker.process.clock import monotonic
from worker.wire.fence import FencedError

from .dead_letters import excuse
from .execution import erase_all
from .history import RefusedError
from .session import ServedSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from anyio.abc import TaskGroup

    from cache.names.tokens import Tokens
    from turnkeep_client.messages import ForkPoint, Parent
    from worker.wire.intake import Delivery

    from .history import TokenHistory
    from .services import Services

log = structlog.get_logger()

_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
#: Pause before reading a session again that another worker has continued.
_OVERTAKEN_S: Final = 0.05
#: Minimum pause between two sweeps, as the idle timeout may be 0.
_LEAST_SWEEP_S = 0.1
#: Memory limit of all sessions; above it, the least recently used idle sessions are evicted.
_MAX_IDLE_BYTES = 64 * 2**20
#: So many sessions stay, the most recently used ones. Else one that is larger than all may be, after some
#: 40,000 turns, would be read from its log at each turn.
_NUM_KEPT = 1


class Sessions:
    """Keeps the sessions in memory, by name. Event loop only."""

    def __init__(self, services: Services, tasks: TaskGroup, *, history_idle_timeout_s: float) -> None:
        """`tasks` runs one task per session at work; these tasks end by themselves after `stop`."""
        self._services = services
        self._tasks = tasks
        self._history_idle_timeout_s = history_idle_timeout_s
        self._sessions: dict[SessionKey, ServedSession] = {}
        self._size_bytes = 0  # the sum of all `counted_bytes`
        self._at_work: set[SessionKey] = set()
        self._stopping = Event()

    def __len__(self) -> int:
        return len(self._sessions)

    def by_policy(self) -> dict[str, int]:
        """Count the open sessions by their cache policy."""
        histories = (session.history for session in self._sessions.values())
        return dict(Counter(one.policy.name for one in histories if one.is_open))

    def ring(self, delivery: Delivery) -> None:
        """Pass a delivery to its session. The session refuses requests if its name breaks the rule for ids.

        A redelivery to a session that is at work here does not mean that a worker has crashed.
        """
        again = delivery.again and delivery.key not in self._at_work
        self._get(delivery.key).ring(replace(delivery, again=again))

    @contextlib.contextmanager
    def in_use(self, key: SessionKey) -> Iterator[ServedSession]:
        """Yield a session, which may not be read yet, or not exist; keep it in memory in the block."""
        session = self._get(key)
        session.num_users += 1
        try:
            yield session
        finally:
            session.num_users -= 1
            self._update_size(session)
            if self._is_idle(key) and not (session.history.exists or session.history.closed):
                self._evict(key)  # else control requests for unknown names would fill the memory

    async def erase(self, key: SessionKey) -> bool:
        """Drop the KV of a session that another worker forgets; return whether no KV of it is left here."""
        with self.in_use(key) as session:
            await self._read(session)
            had = await session.log.all_tokens()
            shared = partial(self._num_shared, key, parent=session.history.parent)
            # A turn that still runs here may have stored KV that continues these tokens. Then a note tells
            # this worker to erase all of it after the turn; see `erasures`.
            is_all = session.is_read and session.active is None
            _, settled, _ = await erase_all(self._services.engine, key, had, shared)
            session.forget()
            return is_all and settled

    def let_go(self, is_meant: Callable[[SessionKey], bool]) -> set[SessionKey]:
        """Drop what idle sessions for which `is_meant` is true have in memory, and their KV on the device.

        Returns the sessions at work for which it is true; these stay. The device may also have KV of sessions
        that are no longer in memory.
        """
        busy = self._services.engine.let_go(is_meant) | set(filter(is_meant, self._at_work))
        for key in set(filter(is_meant, self._sessions)) - busy:
            with self.in_use(key) as session:  # its bytes no longer count
                session.forget()
        return busy

    async def sweep(self) -> None:
        """Until cancelled, evict the sessions that have been idle for the idle timeout.

        An evicted session is read from its log when it is next needed. Its KV stays on the device as long as
        there is room.
        """
        while True:
            await sleep(min(max(self._history_idle_timeout_s / 4, _LEAST_SWEEP_S), 30.0))
            horizon_s = monotonic() - self._history_idle_timeout_s
            for key, session in list(self._sessions.items()):
                if session.used_s < horizon_s and self._is_idle(key):
                    self._evict(key)

    async def excuse(self, returned: Mapping[SessionKey, int], keys: Iterable[SessionKey]) -> None:
        """Store that nobody has begun the first requests of sessions, unless they may have crashed a worker.

        Call this once the worker has stopped and all tasks have ended. `keys` are the sessions whose
        deliveries this worker had; `returned` are the first requests of sessions that are not in memory.
        """
        firsts = {key: self._sessions[key].log.first_waiting for key in keys if key in self._sessions}
        await excuse(
            self._services, {**returned, **{key: seq for key, seq in firsts.items() if seq is not None}}
        )

    def stop(self) -> None:
        """Start no more tasks. Running turns continue until the engine is stopped."""
        self._stopping.set()
        self._services.shares.stop()

    def _get(self, key: SessionKey) -> ServedSession:
        session = self._sessions.pop(key, None) or ServedSession(
            key, self._services, self._wake, self._parent, self._num_shared
        )
        self._bound_memory()
        self._sessions[key] = session  # last in the order of eviction
        session.used_s = monotonic()
        return session

    async def _parent(self, key: SessionKey, of: ForkPoint) -> TokenHistory:
        """Return the whole history of the session that `key` is forked from. Raises `RefusedError`."""
        if of.session == key.session:
            raise RefusedError("invalid_request", "a session cannot be forked from itself")
        with self.in_use(SessionKey(key.tenant, of.session)) as parent:
            while True:
                try:
                    await parent.refresh()  # the client may have received its last result already
                    break
                except FencedError:  # its task has not noticed yet that another worker continued it
                    await sleep(_OVERTAKEN_S)
            if (why := parent.log.record.diverged) is not None:
                raise RefusedError("history_diverged", f"{of.session} cannot be forked: {why}")
            history = parent.history
            if not history.is_open:
                gone = "was closed" if history.closed else "does not exist"
                raise RefusedError(
                    "unknown_session", f"the session {of.session} {gone}: only an open session can be forked"
                )
            return history

    async def _num_shared(self, key: SessionKey, tokens: Tokens, parent: Parent | None) -> int:
        """Count the first tokens of a session that another open session has too; valid until the next await.

        Compares with the sessions in memory, and with the parent, which is read from its log for this.
        """
        use = self.in_use(SessionKey(key.tenant, parent.session)) if parent else contextlib.nullcontext()
        with use as first:
            other: ServedSession | None = first
            read: set[ServedSession | None] = {None}
            while True:
                if other is not None:
                    await self._read(other)
                    read.add(other)
                num, other = self._most_shared(key, tokens)
                if other in read:
                    return num

    def _most_shared(self, key: SessionKey, tokens: Tokens) -> tuple[int, ServedSession | None]:
        """Find the session that shares the longest prefix of these tokens; return its length and the session.

        Compares with the tenant's other open sessions in memory, without those that are being closed.
        """
        most, found = 0, None
        for other in self._sessions.values():
            if most == len(tokens):
                break
            if other.key.tenant != key.tenant or other.key == key or (needed := other.needed) is None:
                continue
            if len(needed) <= most or needed[most] != tokens[most]:
                continue  # an exact count takes many times as long, and sessions may be thousands
            if (num := needed.num_common(tokens)) > most:
                most, found = num, other
        return most, found

    async def _read(self, session: ServedSession) -> None:
        """Read a session's log to its end. If that fails, log it; the session's `needed` is then None."""
        try:
            await session.read_closing()
        except FencedError:
            pass  # its own task reads it anew
        except Exception:
            log.exception("a session could not be read that may share tokens with a forgotten one")
        finally:
            self._update_size(session)

    def _bound_memory(self) -> None:
        """Evict idle sessions but the last `_NUM_KEPT`, the least recently used first, above the limit."""
        if self._size_bytes <= _MAX_IDLE_BYTES:
            return
        for key in list(self._sessions)[: len(self._sessions) - _NUM_KEPT]:
            if self._is_idle(key):
                self._evict(key)
                if self._size_bytes <= _MAX_IDLE_BYTES:
                    return

    def _evict(self, key: SessionKey) -> None:
        session = self._sessions.pop(key)
        self._size_bytes -= session.counted_bytes
        session.counted_bytes = 0

    def _update_size(self, session: ServedSession) -> None:
        """Update the counted size of a session after it was read or has answered."""
        size_bytes = session.log.record.size_bytes if self._sessions.get(session.key) is session else 0
        self._size_bytes += size_bytes - session.counted_bytes
        session.counted_bytes = size_bytes

    def _is_idle(self, key: SessionKey) -> bool:
        session = self._sessions[key]
        return not (key in self._at_work or session.log.has_work or session.num_users)

    def _wake(self, session: ServedSession) -> None:
        if session.key not in self._at_work and session.log.has_work and not self._stopping.is_set():
            self._at_work.add(session.key)
            self._tasks.start_soon(self._run, session, name=str(session.key))

    async def _run(self, session: ServedSession) -> None:
        """Run a session until it has no work.

        After an unexpected error, log it and start again from the session's log.
        """
        pause_s = _RETRY_S
        try:
            while not self._stopping.is_set():
                with structlog.contextvars.bound_contextvars(session=str(session.key)):
                    try:
                        return await session.run()
                    except StoppingError:
                        break
                    except Exception as error:
                        log.exception("a session failed; trying again from its log")
                        await session.fail(error)
                with move_on_after(pause_s):
                    await self._stopping.wait()
                pause_s = min(pause_s * 2, _MAX_RETRY_S)
        finally:
            self._at_work.discard(session.key)
            self._update_size(session)
            self._bound_memory()
