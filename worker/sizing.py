"""Estimates the device memory that a model needs under a policy.

Reads a model's shapes, mostly without its weights, and uses the same estimator as admission control. Imports
MLX. Commands use this module, a running worker does not.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import mlx.core as mx

from cache.kv import layers
from worker.batch.matching import num_sketched
from worker.batch.rows import PrefillPiece
from worker.device import drafting, machine
from worker.device.served_model import estimator
from worker.sessions.limits import misfit

from .batch.batch_kinds import batch_for

if TYPE_CHECKING:
    from collections.abc import Collection

    from cache.kv.size import KvSize
    from cache.names.policy import Policy
    from worker.device.memory import Estimator
    from worker.models.model import LoadedModel

#: More memory than any device has.
_ENDLESS_BYTES: Final = 2**50


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The measured sizes of a model under one policy."""

    policy: Policy
    estimator: Estimator
    kv: KvSize


def measure(
    loaded: LoadedModel,
    policy: Policy,
    *,
    draft: LoadedModel | None = None,
    block: int,
    max_context: int,
    limit_bytes: int | None,
) -> ModelSizes:
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
    if policy.recall and (layers.unsupported(caches) or not layers.layout(caches, list, sketched).sketches):
        raise ValueError(f"this model's keys cannot be sketched; use another policy than {policy.name}")
    reserved_bytes = drafting.checked_bytes(loaded, draft)
    weight_bytes = loaded.weight_bytes + (draft.weight_bytes if draft else 0)
    limit = limit_bytes or machine.default_limit(weight_bytes).size_bytes
    whole = estimator(loaded, caches, limit, sketched, reserved_bytes)
    return ModelSizes(policy, whole, whole.kv.under(policy))


def device_bytes(sized: ModelSizes, kv_bytes: int, *, block: int, max_batch: int, max_context: int) -> int:
    """Return the least device memory, in bytes, that leaves a worker `kv_bytes` for KV."""

    def room(limit_bytes: int) -> int:
        estimated = replace(sized.estimator, limit_bytes=limit_bytes)
        return estimated.kv_limit(max_batch, block, max_context, sized.policy)

    return bisect_left(range(_ENDLESS_BYTES), kv_bytes, key=room)
