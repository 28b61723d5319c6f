"""Computes stored KV again without a worker, and compares: `turnkeep cache verify --recompute`.

Loads the model of the settings on a device thread, and runs the tokens of each block after those before it.
The KV before a block is computed here too, never read, so wrong KV of a block does not hide that of a later
one. Knows no files: the caller lists blocks, and reads them.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import structlog
from anyio import Event, from_thread
from anyio.lowlevel import current_token

from cache.kv.difference import difference
from cache.names.policy import FULL
from turnkeep_client.subjects import SessionKey

from .device.request import AuditedBlock, NoMemoryError, TurnRequest
from .engine.audit import MOST_DIFFERENCE
from .engine.engine import Engine
from .engine.ledger import Ledger
from .engine.port import DeviceFaultError
from .model_start import ModelStart, WorkerError
from .observe.telemetry import Telemetry
from .process.concurrency import background, in_thread, task_group
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
    from .engine.port import EnginePort
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
    ended, token, faults = Event(), current_token(), list[BaseException]()

    def died(error: BaseException) -> None:
        faults.append(error)
        from_thread.run_sync(ended.set, token=token)

    async def fail() -> None:
        await ended.wait()
        raise WorkerError(f"the device thread ended: {faults[0]!r}")

    async with task_group() as tasks, AsyncExitStack() as stack:
        # Neither a draft model nor a policy of sessions changes this KV.
        settings = replace(settings, draft_model=None, cache_policy=FULL)
        start = ModelStart(settings, CONSTANTS, tasks, progress=show, weights_loaded=lambda: None)
        await start.load(DataDir(settings.data_dir.absolute(), -1, ""), stack, died)
        await stack.enter_async_context(background(fail))
        engine = engine_on(start.device, start.kv_bytes)
        identity = await start.identity()
        num, listed = await in_thread(blocks, identity.digest())

        def following() -> Iterator[StoredBlock]:
            for i, block in enumerate(listed):
                show(i, num, "computing blocks again")
                if start.device.kv(FULL).held(len(block[0]) + 1) <= start.kv_bytes:
                    yield block
            show(num, num, "computing blocks again")

        return await compare(engine, following(), read)


async def compare(
    engine: EnginePort,
    blocks: Iterable[StoredBlock],
    read: Callable[[str], Mapping[str, Tensor] | None],
) -> Recomputation:
    """Compute blocks again and compare them with what `read` returns of their files.

    Blocks that cannot be read or computed, or have nothing that can be compared, are not counted.
    """
    found = Recomputation()
    for tokens, span, file in blocks:
        stored = await in_thread(read, file)
        differs = difference(stored, await _computed(engine, tokens, span)) if stored is not None else None
        if differs is None:
            continue
        found.num_blocks += 1
        if differs > MOST_DIFFERENCE:
            found.wrong.append((file, f"differs from the KV of its tokens by {differs:.2g}"))
    return found


def engine_on(device: Device, kv_bytes: int) -> Engine:
    """Return an engine that stores nothing, for `compare`: its device cuts the KV of audited blocks only."""
    device.cut_snapshots(lambda: sys.maxsize)
    return Engine(device, Ledger(kv_bytes), None, Telemetry(), piece_tokens=CONSTANTS.block_tokens)


async def _computed(engine: EnginePort, tokens: Tokens, span: Span) -> tuple[Tensor, ...]:
    """Compute the KV of the last block of `tokens`, whose place is `span`; empty if the device cannot.

    The session keeps the KV up to the last block.
    """
    block = AuditedBlock(span)
    request = TurnRequest(_SESSION, tokens + tokens[:1], audited=block)  # a context's last token is not run
    try:
        await engine.run(request, lambda: False)
    except (DeviceFaultError, NoMemoryError) as error:
        log.warning("a block could not be computed", error=repr(error))
    return block.tensors
