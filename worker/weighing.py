"""What `turnkeep serve --weigh` prints and `turnkeep doctor` checks: the memory that a model needs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from .observe.progress import terminal_progress
from .process.constants import CONSTANTS
from .process.settings import SettingsError

if TYPE_CHECKING:
    from .models.model import LoadedModel
    from .process.settings import Settings
    from .reports import Needs

#: A supervisor gives each model enough memory for one session of this length.
_USUAL_TOKENS: Final = 32_768


def weigh(settings: Settings) -> Needs:
    """Return the memory that a model needs with its draft model. Raises `ModelError`, `SettingsError`."""
    from .reports import Needs
    from .sizing import device_bytes, measure

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
