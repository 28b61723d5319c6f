"""Requests device memory for runs from `admission`, and applies its decisions to the device.

`engine` calls it when a run begins, grows and ends. Event loop only.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from worker.device.memory import GROWTH_TOKENS, capacity

from .admission import Admission
from .kv_on_device import NO_KV
from .run import Run, resolve

if TYPE_CHECKING:
    from worker.device.device import Device

    from .admission import Decision
    from .ledger import Claim, Ledger

log = structlog.get_logger()

#: Tokens that an answer reserves at first, and again whenever half of them or fewer are left.
LIKELY_TOKENS = GROWTH_TOKENS


class Grants:
    """The engine's runs, and the memory that each has or requests."""

    def __init__(
        self,
        device: Device,
        ledger: Ledger,
        piece_tokens: int,
        max_tenant_bytes: int | None,
    ) -> None:
        self.runs: dict[Claim, Run] = {}
        self._device = device
        self._ledger = ledger
        self._piece_tokens = piece_tokens
        self.admission = Admission(ledger, max_tenant_bytes)

    def ask(self, run: Run) -> None:
        """Request memory for a run's next turn, in place of the run's reservation; `wait` waits for it.

        What fits is granted at once. To make room, idle sessions' KV may be dropped and younger turns paused.
        """
        num_likely = capacity(len(run.request.context) + LIKELY_TOKENS)
        run.is_halted = False
        run.num_granted, run.num_asked = 0, min(num_likely, run.num_most)
        run.admitted = asyncio.get_running_loop().create_future()
        self._apply(self.admission.begin(run, self._price(run)))

    async def wait(self, run: Run) -> bool:
        """Wait for the memory that `ask` has requested; return False if the run is cancelled meanwhile."""
        try:
            return run.admitted is not None and await run.admitted
        finally:
            run.admitted = None

    def _price(self, run: Run) -> int:
        """Return the bytes to request for a run: the size of its KV at `num_asked` tokens."""
        # A rewound session keeps its memory until its turn ends: trimming frees nothing.
        num_tokens = max(run.num_asked, len(self._ledger.kv_on_device.get(run.key, NO_KV).tokens))
        # Caches grow by more than a token at a time: many short prompts hold more than their tokens' KV.
        kv = self._device.kv(run.request.policy)
        allocated = kv.held(capacity(num_tokens), ahead=self._piece_tokens)
        return max(min(allocated, self._ledger.max_bytes), kv.held(num_tokens))

    def grow(self, run: Run, num_tokens: int) -> None:
        """Request more memory for a run at `num_tokens` tokens, if it may soon need more than it has.

        A turn that reaches the end of its granted memory pauses.
        """
        has_asked = run.num_asked > run.num_granted
        if has_asked or run.num_granted == run.num_most or run.num_granted - num_tokens > LIKELY_TOKENS // 2:
            return
        run.num_asked = min(run.num_granted + LIKELY_TOKENS, run.num_most)
        self._apply(self.admission.grow(run, self._price(run)))

    def release(self, run: Run) -> None:
        """Release a run's memory; its session now counts as idle, with its resident KV."""
        self._apply(self.admission.release(run))

    def stop(self, run: Run) -> None:
        """End a run's turn and keep the tokens drawn; a turn not yet submitted is never submitted."""
        run.is_halted = True
        if run.turn is not None:
            self._device.cancel(run.turn)
        resolve(run.room, granted=False)

    def _apply(self, decision: Decision) -> None:
        for key in decision.dropped:
            self._device.drop(key)
        for claim in decision.granted:
            run = self.runs[claim]
            run.num_granted = run.num_asked
            resolve(run.admitted, granted=True)
            if run.turn is not None:
                self._device.grant(run.turn, run.num_granted)
        for claim in decision.paused:
            run = self.runs[claim]
            log.info("pausing a turn for want of memory", session=str(claim.key))
            self.stop(run)
