"""Computes restored KV again while the worker is idle: a snapshot must be what its tokens give.

A checksum says that a file is as it was written, and its name says of which tokens. Neither would see KV that
was wrong when it was written. So one of a thousand restored blocks is noted, and once no request runs or
waits, its tokens run again after the KV before them. If the result differs by more than rounding, the block
and all that continue it are removed, and the metrics and the log say so.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from cache.kv.difference import difference
from cache.names.blocks import Span
from turnkeep_client.subjects import SessionKey
from worker.device.request import AuditedBlock, TurnRequest

from .port import StoppingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.names.policy import Policy
    from cache.names.snapshot import Tensor
    from cache.names.tokens import Tokens
    from cache.store import Store
    from worker.observe.telemetry import Telemetry

    from .port import EnginePort

log = structlog.get_logger()

#: One in this many restored blocks is computed again.
ONE_IN: Final = 1000
#: The relative difference above which a block is wrong. On a CPU the KV of the same tokens has the same bits,
#: also in bfloat16 and after KV of 4 bits; a GPU may round otherwise for pieces of other lengths. The KV of
#: slightly changed weights differed by 1.5.
MOST_DIFFERENCE: Final = 0.1
#: How often to look whether the worker is idle.
_POLL_S: Final = 0.5
#: The most blocks that wait; the oldest are left out.
_MOST_NOTED: Final = 16
#: The session whose KV an audit uses; no session of a client can have its name.
_SESSION: Final = "_audit"


class _Restored(NamedTuple):
    """A restored block `span`, and all tokens up to its end."""

    tenant: str
    policy: Policy
    tokens: Tokens
    span: Span


class Audit:
    """Computes some restored blocks again, and removes wrong ones. Event loop only."""

    def __init__(
        self,
        engine: EnginePort,
        store: Store,
        telemetry: Telemetry,
        is_idle: Callable[[], bool],
        has_spare: Callable[[int, Policy], bool],
        one_in: int = ONE_IN,
    ) -> None:
        """`is_idle()`: no request runs or waits. `has_spare(n, policy)`: there is room for `n` tokens."""
        self._engine = engine
        self._is_idle = is_idle
        self._has_spare = has_spare
        self._store = store
        self._totals = telemetry.totals
        self._one_in = one_in
        self._noted: deque[_Restored] = deque(maxlen=_MOST_NOTED)
        self._running: SessionKey | None = None
        self._changed = asyncio.Event()

    def note(self, request: TurnRequest, num_tokens: int) -> None:
        """Choose by chance blocks to audit among the `num_tokens` tokens that a turn has restored."""
        chain = self._store.kv.chain(request.tenant, request.policy, request.context)
        for end in range(chain.block, num_tokens + 1, chain.block):
            span = Span(end - chain.block, end)
            has_image = any(image.start < end for image in request.context.spans)
            if not has_image and not random.randrange(self._one_in):  # noqa: S311
                self._noted.append(_Restored(request.tenant, request.policy, request.context[:end], span))
                self._changed.set()

    def interrupt(self) -> None:
        """End the audit that is running, since a request has come; it begins again later."""
        if self._running is not None:
            self._engine.cancel(self._running)

    async def run(self) -> None:
        """Audit the noted blocks while the worker is idle; run until cancelled."""
        while True:
            await self._changed.wait()
            if not self._is_idle():
                await asyncio.sleep(_POLL_S)
                continue
            noted = self._noted.popleft()
            try:
                if not await self._audited(noted):
                    self._noted.append(noted)
            except StoppingError:
                await asyncio.Event().wait()
            except Exception as error:  # noqa: BLE001  # an audit never ends a worker
                log.warning("a snapshot could not be audited", error=repr(error))
            if not self._noted:
                self._changed.clear()

    async def _audited(self, one: _Restored) -> bool:
        """Compute a block again and compare it with the stored one; False if a request has interrupted it."""
        chain = self._store.kv.chain(one.tenant, one.policy, one.tokens)
        if not self._has_spare(len(one.tokens), one.policy):
            return True  # an audit must not displace a session
        stored = await self._store.kv.block(chain, one.tokens, one.span)
        if stored is None:  # evicted
            return True
        computed = await self._compute(one)
        if computed is None:
            return False
        found = difference(stored, computed)
        if found is None:
            return True
        if found > MOST_DIFFERENCE:
            why = f"differs from the KV of its tokens by {found:.2g}"
            file = await self._store.kv.condemn(chain, one.tokens, one.span, why)
            for key in self._engine.let_go(lambda key: key.tenant == one.tenant):
                self._engine.forget(key)  # it may have restored the block: what it adds is not saved
            self._totals.wrong_blocks += 1
            log.error("a snapshot was wrong", file=file, tokens=one.span.end, difference=round(found, 3))
        self._totals.audited_blocks += 1
        return True

    async def _compute(self, one: _Restored) -> tuple[Tensor, ...] | None:
        """Return the KV of the block's tokens after the KV before them; None if a request has interrupted it.

        Empty if the writer's queue had no room for it.
        """
        self._running = key = SessionKey(one.tenant, _SESSION)
        block = AuditedBlock(one.span)
        request = TurnRequest(key, one.tokens + one.tokens[:1], policy=one.policy, audited=block)
        try:
            result = await self._engine.run(request, lambda: not self._is_idle())
            return block.tensors if result is not None and result.complete else None
        finally:
            self._running = None
            self._engine.forget(key)
