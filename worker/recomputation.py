"""Computes stored KV again without a worker, and compares: `turnkeep cache verify --recompute`.

Loads the model of the settings on a device thread, and runs the tokens of each block after those before it.
The KV before a block is computed here too, never read, so wrong KV of a block does not hide that of a later
one. Knows no files: the caller lists blocks, and reads them.
"""

from __future__ import annotations

import queue
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import structlog

from cache.kv.difference import difference
from cache.names.policy import FULL
from turnkeep_client.subjects import SessionKey

from .device.request import TurnRequest
from .device.turn import DeviceTurn, FaultedTurn, FinishedTurn, SnapshotCut, TurnPlan
from .engine.audit import MOST_DIFFERENCE
from .model_start import ModelStart, WorkerError
from .process.concurrency import in_thread, task_group
from .process.constants import CONSTANTS
from .process.datadir import DataDir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import TypeAlias

    from cache.names.blocks import Span
    from cache.names.snapshot import Tensor
    from cache.names.tokens import Tokens
    from worker.models.model_files import Progress

    from .device.device import Device
    from .device.turn import StepReport
    from .process.settings import Settings

    #: All tokens up to a block's end, its place in them, and the name of its file.
    StoredBlock: TypeAlias = tuple[Tokens, Span, str]

log = structlog.get_logger()

_SESSION: Final = SessionKey("", "_recomputed")


@dataclass(slots=True)
class Recomputation:
    """The result of computing blocks again."""

    #: How many were compared.
    num_blocks: int = 0
    #: The files of wrong blocks, each with the reason.
    wrong: list[tuple[str, str]] = field(default_factory=list)


async def recompute(
    settings: Settings,
    blocks: Callable[[bytes], tuple[int, Iterable[StoredBlock]]],
    read: Callable[[str], Mapping[str, Tensor] | None],
    show: Progress,
) -> Recomputation:
    """Compute the KV of all blocks of the settings' model again, and compare it with the stored KV.

    `blocks` returns, for the digest of the model's identity, the number of its blocks under the full cache
    policy, and the blocks. `read` reads the file of a block, and returns None if it cannot. Needs no lock.
    Raises `ModelError`, `WorkerError`.
    """
    async with task_group() as tasks, AsyncExitStack() as stack:
        # Neither a draft model nor a policy of sessions changes this KV.
        settings = replace(settings, draft_model=None, cache_policy=FULL)
        start = ModelStart(settings, CONSTANTS, tasks, progress=show, weights_loaded=lambda: None)
        computed = ComputedBlocks()
        await start.load(DataDir(settings.data_dir.absolute(), -1, ""), stack, computed.reports.put)
        computed.take(start.device)
        identity = await start.identity()
        num, listed = await in_thread(blocks, identity.digest())

        def following() -> Iterator[StoredBlock]:
            for i, block in enumerate(listed):
                show(i, num, "computing blocks again")
                if start.device.kv(FULL).held(len(block[0]) + 1) <= start.kv_bytes:
                    yield block
            show(num, num, "computing blocks again")

        return await compare(computed, following(), read)


async def compare(
    computed: ComputedBlocks,
    blocks: Iterable[StoredBlock],
    read: Callable[[str], Mapping[str, Tensor] | None],
) -> Recomputation:
    """Compute blocks again and compare them with what `read` returns of their files.

    Blocks that cannot be read or computed, or have nothing that can be compared, are not counted.
    """
    found = Recomputation()
    for tokens, span, file in blocks:
        stored = await in_thread(read, file)
        differs = difference(stored, await computed.block(tokens, span)) if stored is not None else None
        if differs is None:
            continue
        found.num_blocks += 1
        if differs > MOST_DIFFERENCE:
            found.wrong.append((file, f"differs from the KV of its tokens by {differs:.2g}"))
    return found


class ComputedBlocks:
    """Computes blocks on a device that runs nothing else, and keeps the KV up to the last one."""

    def __init__(self) -> None:
        self._device: Device
        #: The device's reports, and the error that has ended it.
        self.reports: queue.SimpleQueue[StepReport | BaseException] = queue.SimpleQueue()
        #: The tokens whose KV is on the device, and to how few of them it can be truncated.
        self._tokens: Tokens | None = None
        self._earliest = 0

    def take(self, device: Device) -> None:
        """Use this device, which has loaded its model. Call once, before `block`."""
        self._device = device
        device.listen(self.reports.put)
        device.cut_snapshots(lambda: sys.maxsize)

    async def block(self, tokens: Tokens, span: Span) -> tuple[Tensor, ...]:
        """Compute the KV of the last block of `tokens`, whose place is `span`; empty if the device cannot.

        Raises `WorkerError` if the device thread has ended.
        """
        num_kept = 0 if self._tokens is None else min(self._tokens.num_common(tokens), span.start)
        if num_kept < self._earliest:
            num_kept = 0
        # The last token of a context is not run.
        request = TurnRequest(_SESSION, tokens + tokens[:1], audited=span)
        turn = DeviceTurn(request, TurnPlan(num_kept, spans=(span,)))
        self._device.submit(turn)
        found: tuple[Tensor, ...] = ()
        while True:
            report = await in_thread(self.reports.get)
            if isinstance(report, BaseException):
                raise WorkerError(f"the device thread ended: {report!r}")
            for event in report.events:
                match event:
                    case SnapshotCut() if event.turn is turn and event.span == span:
                        found = event.tensors
                    case FinishedTurn() if event.turn is turn:
                        self._tokens, self._earliest = tokens, event.earliest
                        return found
                    case FaultedTurn() if event.turn is turn:
                        log.warning("a block could not be computed", error=repr(event.error))
                        self._tokens = None
                        return ()
                    case _:
                        pass
