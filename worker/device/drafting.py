"""Checks whether one model can draft for another; sizes the draft model. Device thread and CLI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from cache.kv import layers
from cache.kv.ring import RingCache
from cache.kv.states import leaves
from worker.batch.batch_kinds import draft_model_for
from worker.batch.draft_model import MOST_HELD, MOST_SHADOWS
from worker.batch.speculation import MOST_PIECE, MOST_TOKENS
from worker.models.backbone import is_bare
from worker.models.model_files import ModelError

from . import machine
from .memory import Estimator, shape_of

if TYPE_CHECKING:
    from worker.batch.draft_model import DraftModel
    from worker.batch.trials import Trials
    from worker.models.model import LoadedModel

#: Tokens beyond `MOST_HELD` for which a draft model's KV has memory: a draft, and one growth of its caches.
_SPARE: Final = 512


def draft_model(loaded: LoadedModel, draft: LoadedModel, trials: Trials) -> DraftModel:
    """Make a drafter for `loaded` that uses the model `draft`; raise `ModelError` if `draft` is unfit."""
    check(loaded, draft)
    share = draft.weight_bytes / max(loaded.weight_bytes, 1)
    try:
        return draft_model_for(draft.model, share, (loaded.vocab_size, draft.vocab_size), trials)
    except ValueError as error:
        raise ModelError(f"draft_model {draft.name} cannot draft: {error}; take another") from None


def check(loaded: LoadedModel, draft: LoadedModel) -> None:
    """Raise `ModelError` if the two models' files show that `draft` cannot draft for `loaded`.

    Models that pass may still fail the test runs of `draft_model_for`.
    """
    if is_bare(draft.folder):
        raise ModelError(
            f"draft_model {draft.name} has no output head: it is made for embeddings; take another"
        )
    if not loaded.tokenizer.has_tokens_of(draft.tokenizer):
        raise ModelError(
            f"draft_model {draft.name} has other tokens than {loaded.name}; take one with the same tokenizer"
        )
    if _lasting(loaded):
        raise ModelError(f"{loaded.name} cannot undo a draft; leave draft_model out")
    if lasting := _lasting(draft):
        raise ModelError(
            f"draft_model {draft.name} cannot draft: its layers of {lasting} cannot undo a draft;"
            " take another"
        )


def _lasting(loaded: LoadedModel) -> str:
    """Name the cache classes of a model that cannot remove their last tokens; empty if all of them can."""
    kinds = {type(leaf) for _, leaf in leaves(layers.make(loaded.model, rings=True))}
    return ", ".join(sorted(kind.__name__ for kind in kinds - {KVCache, QuantizedKVCache, RingCache}))


def checked_bytes(loaded: LoadedModel, draft: LoadedModel | None) -> int:
    """Check that `draft` can draft for `loaded`; return `reserved_bytes(draft)`, 0 without a draft model."""
    if draft is None:
        return 0
    check(loaded, draft)
    return reserved_bytes(draft)


def reserved_bytes(draft: LoadedModel) -> int:
    """Return the bytes of a draft model: its weights, its KV, and temporary arrays while it drafts."""
    kept = machine.profile().kept_layers
    step = Estimator(shape_of(draft.config), 0, draft.weight_bytes, draft.kv, kept, False, kept_layers=kept)
    scratch_bytes = step.scratch_bytes(MOST_SHADOWS + MOST_TOKENS, [(MOST_PIECE, MOST_HELD)])
    return draft.weight_bytes + MOST_SHADOWS * draft.kv.held(MOST_HELD + _SPARE) + scratch_bytes
