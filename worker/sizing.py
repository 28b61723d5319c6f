"""Estimates what a number of sessions needs: device memory, disk, and bytes written to the disk.

Reads a model's shapes, mostly without its weights. Uses the same estimator as admission control, and the
exact sizes of snapshot files. Imports MLX. Commands use this module, a running worker does not.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import mlx.core as mx

from cache.kv import layers
from cache.names.blocks import Span, tail_start
from cache.names.identity import Identity
from cache.names.policy import FULL
from cache.names.snapshot import GROWING, ITEM_BYTES, ModelLayout, Name, Tensor, carried
from cache.store import file_bytes
from worker.batch.matching import num_sketched
from worker.batch.rows import PrefillPiece
from worker.device import drafting, machine
from worker.device.served_model import estimator
from worker.sessions.policies import misfit

from .batch.batch_kinds import batch_for

if TYPE_CHECKING:
    from collections.abc import Collection

    from cache.kv.size import KvSize
    from cache.names.policy import Policy
    from worker.device.memory import Estimator
    from worker.models.model import LoadedModel


_DAY_H: Final = 24
#: More memory than any device has.
_ENDLESS_BYTES: Final = 2**50


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The sessions to plan for. Each turn adds a prompt and an answer.

    A session ends at `context_tokens`, and a new one takes its place.
    """

    sessions: int
    turns_per_hour: float
    prompt_tokens: int
    answer_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Sized:
    """The measured sizes of a model under one policy. `layout` is None if its KV cannot be kept on disk."""

    policy: Policy
    estimator: Estimator
    kv: KvSize
    layout: ModelLayout | None
    identity: Identity

    def file_bytes(self, num_new: int, at: int) -> int:
        """Return the bytes of a snapshot file for the last `num_new` tokens before position `at`."""
        layout = self.layout or ModelLayout(())
        seen = min(at, max((window.num_tokens for window in self.kv.windows), default=at))
        kv = (
            (name, dtype, (1, shape[0], num_new, shape[1]), reach)
            for (name, dtype, shape), reach in zip(layout.kv, layout.reaches, strict=True)
        )
        states = (
            (name, dtype, (*shape[:GROWING], seen, *shape[GROWING + 1 :]) if -1 in shape else shape, FULL)
            for name, dtype, shape in layout.states
        )
        more = carried(Span(at - num_new, at), self.identity.block_tokens)
        others = (
            (name, dtype, (1, heads, more.num_tokens if more else 0, width), FULL)
            for name, dtype, (heads, width) in (layout.carried if more else ())
        )
        tensors = tuple(_blank(*one) for one in (*kv, *others, *states))
        return file_bytes(Name(bytes(32), at - num_new, bytes(4 * num_new)), self.identity, tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The estimated needs of a `Load`, with all sessions at their full context.

    Fields about the disk are None without snapshots.
    """

    weight_bytes: int
    device_memory_bytes: int
    kv_limit_bytes: int
    session_kv_bytes: int
    sessions_on_device: int
    sessions_off_device: int
    session_disk_bytes: int | None
    sessions_on_disk: int | None
    sessions_nowhere: int
    disk_bytes: int | None
    written_bytes_per_turn: float | None
    written_bytes_per_day: float | None
    wanted_generated_tokens_per_s: float
    wanted_prefilled_tokens_per_s: float


def measure(
    loaded: LoadedModel,
    policy: Policy,
    *,
    draft: LoadedModel | None = None,
    block: int,
    max_context: int,
    limit_bytes: int | None,
) -> Sized:
    """Measure the sizes of a lazily loaded model; run a forward pass only if it has sliding windows.

    `block` and `max_context` are tokens. Raises `ValueError`, with the reason, if the model cannot have
    sessions under this policy.
    """
    model = loaded.model
    if (why := misfit(policy, block_tokens=block, context_tokens=max_context)) is not None:
        raise ValueError(why)
    layers.make(model, policy)
    if loaded.kv.windows:
        batch = batch_for(model)
        caches = layers.make(model, rings=batch.windows_are_rings, block_tokens=block)
        batch.step([PrefillPiece(caches, 0, [0])])
        sketched: Collection[int] = batch.sketched
    else:
        caches = layers.make(model)
        model(mx.array([[0]]), cache=caches)
        sketched = range(num_sketched(len(caches)))  # their number; a trial chooses the layers
    layout = layers.layout(caches, list, sketched) if layers.unsupported(caches) is None else None
    if policy.recall and not (layout and layout.sketches):
        raise ValueError(f"this model's keys cannot be sketched; use another policy than {policy.name}")
    reserved_bytes = drafting.checked_bytes(loaded, draft)
    weight_bytes = loaded.weight_bytes + (draft.weight_bytes if draft else 0)
    limit = limit_bytes or machine.default_limit(weight_bytes).size_bytes
    identity = Identity.of_no_model(
        kv_dtype="float32",
        block_tokens=block,
        caches=layers.describe(caches),
        policy=layout.name(policy) if layout else str(policy),
    )
    whole = estimator(loaded, caches, limit, sketched, reserved_bytes)
    return Sized(policy, whole, whole.kv.under(policy), layout and layout.under(policy), identity)


def device_bytes(sized: Sized, kv_bytes: int, *, block: int, max_batch: int, max_context: int) -> int:
    """Return the least device memory, in bytes, that leaves a worker `kv_bytes` for KV."""

    def room(limit_bytes: int) -> int:
        estimated = replace(sized.estimator, limit_bytes=limit_bytes)
        return estimated.kv_limit(max_batch, block, max_context, sized.policy)

    return bisect_left(range(_ENDLESS_BYTES), kv_bytes, key=room)


def plan(
    sized: Sized,
    load: Load,
    *,
    block: int,
    max_batch: int,
    max_context: int,
    max_memory: int | None,
    max_disk: int,
) -> Plan:
    """Compute the needs of `load`; `max_memory` and `max_disk` are bytes. `max_disk` 0 means no snapshots."""
    estimated = sized.estimator
    room = estimated.kv_limit(max_batch, block, max_context, sized.policy)
    room = min(max_memory or room, room)
    session_bytes = sized.kv.held(load.context_tokens)
    on_device = min(load.sessions, room // max(session_bytes, 1))
    per_s = load.sessions * load.turns_per_hour / 3600
    written = disk = on_disk = None
    if max_disk and sized.layout is not None:
        written, disk = _life(sized, load, block)
        on_disk = min(load.sessions, max_disk // max(disk, 1))
    return Plan(
        weight_bytes=estimated.weight_bytes,
        device_memory_bytes=estimated.limit_bytes,
        kv_limit_bytes=room,
        session_kv_bytes=session_bytes,
        sessions_on_device=on_device,
        sessions_off_device=load.sessions - on_device,
        session_disk_bytes=disk,
        sessions_on_disk=on_disk,
        sessions_nowhere=load.sessions - max(on_device, on_disk or 0),
        disk_bytes=None if disk is None else disk * load.sessions,
        written_bytes_per_turn=written,
        written_bytes_per_day=None if written is None else written * per_s * 3600 * _DAY_H,
        wanted_generated_tokens_per_s=per_s * load.answer_tokens,
        wanted_prefilled_tokens_per_s=per_s * load.prompt_tokens,
    )


def _life(sized: Sized, load: Load, block: int) -> tuple[float, int]:
    """Return a session's mean bytes written to disk per turn, and the bytes of its files at its end.

    Assumes the same files as a worker's: one for each full block, and at the end of each turn one for the
    tokens of the unfinished block, or for its last part (`tail_start`).
    """
    at = written = kept = num_turns = 0
    edges, sizes = [0], [0]  # the positions of the tail's pieces, and the bytes of each
    while at < load.context_tokens:
        num_turns += 1
        start, at = at, min(at + load.prompt_tokens + load.answer_tokens, load.context_tokens)
        for end in range(start - start % block + block, at + 1, block):
            size = sized.file_bytes(block, end)
            written, kept = written + size, kept + size
            edges, sizes = [end], [0]  # a full block replaces its pieces
        begin = tail_start(edges, at)
        if begin < at:
            size = sized.file_bytes(at - begin, at)
            written += size
            num_kept = edges.index(begin) + 1
            edges, sizes = [*edges[:num_kept], at], [*sizes[:num_kept], size]
    return written / max(num_turns, 1), kept + sum(sizes)


def _blank(name: str, dtype: str, shape: tuple[int, ...], reach: Policy) -> Tensor:
    size = ITEM_BYTES[dtype]
    for number in shape:
        size *= number
    return Tensor(name, dtype, shape, memoryview(bytes(size)), reach)
