"""Loads folders that hold a decoder without its output head, as models for embeddings come.

Their weights are those of mlx-lm's inner model, without the prefix `model.`. The head is then that of the
token embeddings: nobody asks such a model for logits, but a pass at the start computes some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .model_files import check_safetensors, weight_files

if TYPE_CHECKING:
    from pathlib import Path

_FIRST: Final = "embed_tokens.weight"


def is_bare(folder: Path) -> bool:
    """Whether the weights of a model folder are those of an inner model alone. Raises `ModelError`."""
    return any(_FIRST in check_safetensors(path) for path in weight_files(folder))


def bare_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return, for `load_model` of mlx-lm, what makes a model of bare weights, and its arguments' class."""
    from mlx_lm import utils

    kind, arguments = utils._get_classes(config)  # noqa: SLF001  # what `load_model` takes by itself

    def make(given: Any) -> Any:
        model: Any = kind(given)
        theirs = getattr(model, "sanitize", dict)
        model.sanitize = lambda weights: theirs({f"model.{name}": one for name, one in weights.items()})
        return model

    return make, arguments
