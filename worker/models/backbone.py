"""Loads model folders with a decoder but no output head, the usual form of models for embeddings.

Their weights are named as in mlx-lm's inner model, without the prefix `model.`. The token embeddings serve as
the output head, since a trial pass after loading computes logits; no request reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .model_files import check_safetensors, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_FIRST: Final = "embed_tokens.weight"


def is_bare(folder: Path) -> bool:
    """Return whether a folder has only a bare decoder: its weights are named without the prefix `model.`.

    A model whose token embeddings are its output head has the prefix. Raises `ModelError` if a weight file is
    missing or broken.
    """
    return any(_FIRST in check_safetensors(path) for path in weight_files(folder))


def bare_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return a function that makes a model, and the class of its argument, for mlx-lm's `load_model`.

    The model adds the prefix `model.` to the names of the weights that it loads.
    """
    from mlx_lm import utils

    kind, arguments = utils._get_classes(config)  # noqa: SLF001  # the default of `load_model`
    return renaming(kind, lambda weights: {f"model.{name}": one for name, one in weights.items()}), arguments


def renaming(kind: Any, renamed: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
    """Return a function that makes a model of mlx-lm's class `kind`, which loads weights by other names.

    `renamed` returns the weights by the names that `kind` expects.
    """

    def make(given: Any) -> Any:
        model: Any = kind(given)
        theirs = getattr(model, "sanitize", dict)
        model.sanitize = lambda weights: theirs(renamed(weights))
        return model

    return make
