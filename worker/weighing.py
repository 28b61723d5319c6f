"""Computes the memory that a model needs, from its shapes, mostly without its weights. Imports MLX.

Uses the same estimator as admission control. For a supervisor of several models and `turnkeep doctor`; a
running worker does not use it.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import mlx.core as mx

from cache.kv import layers
from worker.batch.matching import num_sketched
from worker.batch.rows import PrefillPiece
from worker.device import drafting, machine, vision
from worker.device.served_model import estimator
from worker.sessions.limits import misfit

from .batch.batch_kinds import batch_for
from .observe.progress import terminal_progress
from .process.constants import CONSTANTS
from .process.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Collection

    from cache.kv.size import KvSize
    from cache.names.policy import Policy
    from worker.device.memory import Estimator

    from .models.model import LoadedModel
    from .models.vision.families import Family
    from .process.settings import Settings
    from .reports import Needs

#: A supervisor gives each model enough memory for one session of this length.
_USUAL_TOKENS: Final = 32_768


def weigh(settings: Settings) -> Needs:
    """Return the memory that a model needs with its draft model. Raises `ModelError`, `SettingsError`."""
    from .reports import Needs

    machine.check_memory(settings)
    loaded, draft = _loaded(settings)
    max_context = min(settings.max_context or loaded.context_tokens, loaded.context_tokens)
    block, sizes = CONSTANTS.block_tokens, {"max_batch": settings.max_batch, "max_context": max_context}
    policy = settings.cache_policy
    try:
        sized = measure(loaded, policy, draft=draft, block=block, max_context=max_context, limit_bytes=None)
    except ValueError as error:
        raise SettingsError(f"cache_policy: {error}") from None
    least = sized.estimator.kv.held(block, ahead=block)
    usual = max(least, sized.kv.held(min(max_context, _USUAL_TOKENS), ahead=block))
    return Needs(
        folder=str(loaded.folder.absolute()),
        context_tokens=max_context,
        **loaded.described(),
        least_bytes=device_bytes(sized, least, block=block, **sizes),
        usual_bytes=device_bytes(sized, usual, block=block, **sizes),
        memory_bytes=sized.estimator.limit_bytes,
        draft_folder=str(draft.folder.absolute()) if draft is not None else None,
    )


def _loaded(settings: Settings) -> tuple[LoadedModel, LoadedModel | None]:
    """Load the model and the draft model, without their weights."""
    from .models import model as models

    dtype = settings.dtype if settings.dtype != "auto" else models.default_dtype()

    def load(spec: str | None, kv_bits: int | None) -> LoadedModel:
        with terminal_progress(lambda what: sys.stderr.write(f"{what}\n")) as progress:
            folder = models.resolve(spec, settings.data_dir, dtype=dtype, progress=progress)
        return models.load(folder, dtype=dtype, kv_bits=kv_bits, lazy=True)

    draft = load(settings.draft_model, None) if settings.draft_model is not None else None
    return load(settings.model, settings.kv_bits), draft


#: More memory than any device has.
_ENDLESS_BYTES: Final = 2**50


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The measured sizes of a model under one policy. `estimator` counts no memory for images of `family`."""

    policy: Policy
    estimator: Estimator
    kv: KvSize
    family: Family | None


def measure(
    loaded: LoadedModel,
    policy: Policy,
    *,
    draft: LoadedModel | None = None,
    block: int,
    max_context: int,
    limit_bytes: int | None,
) -> ModelSizes:
    """Measure the sizes of a lazily loaded model; read its weights only if it has sliding windows.

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
    seen_by = loaded.vision_model
    family = None if isinstance(seen_by, str) else seen_by.tower.family
    return ModelSizes(policy, whole, whole.kv.under(policy), family)


def device_bytes(sized: ModelSizes, kv_bytes: int, *, block: int, max_batch: int, max_context: int) -> int:
    """Return the least device memory, in bytes, that leaves a worker `kv_bytes` for KV."""

    def room(limit_bytes: int) -> int:
        images_bytes = vision.reserved_bytes(sized.family, limit_bytes) if sized.family else 0
        weight_bytes = sized.estimator.weight_bytes + images_bytes
        estimated = replace(sized.estimator, limit_bytes=limit_bytes, weight_bytes=weight_bytes)
        return estimated.kv_limit(max_batch, block, max_context, sized.policy)

    return bisect_left(range(_ENDLESS_BYTES), kv_bytes, key=room)
