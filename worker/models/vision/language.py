"""Loads the language model of a folder whose architecture, with images, mlx-lm does not know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from worker.models.backbone import renaming
from worker.models.model_files import check_safetensors, weight_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

#: By `model_type`: the architecture of the language model, unless config.json names it.
LANGUAGE: Final = {
    "idefics3": "llama",
    "smolvlm": "llama",
    "lfm2_vl": "lfm2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}
#: How transformers and mlx-vlm name its weights, and how mlx-lm does. All other weights are the tower's.
_NAMES: Final = {
    "model.text_model.": "model.",
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
    "lm_head.": "lm_head.",
    "model.embed_tokens.": "model.embed_tokens.",
    "model.layers.": "model.layers.",
    "model.norm.": "model.norm.",
}


def language_classes(folder: Path) -> Any:
    """Return, for mlx-lm's `load_model`, a function that returns the classes of a folder's language model."""
    from mlx_lm import utils

    has_head = any(
        "lm_head.weight" in name for path in weight_files(folder) for name in check_safetensors(path)
    )

    def classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
        family = config["model_type"]
        text = {"model_type": LANGUAGE[family], **config.get("text_config", config)}
        if text["model_type"].startswith(family):  # the family's own name for it
            text["model_type"] = LANGUAGE[family]
        text["tie_word_embeddings"] = not has_head
        kind, arguments = utils._get_classes(text)  # noqa: SLF001  # the default of `load_model`
        return renaming(kind, _named), SimpleNamespace(from_dict=lambda _: arguments.from_dict(text))

    return classes


def _named(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of the language model, as mlx-lm names them."""
    found = {}
    for name, array in weights.items():
        prefix = next((prefix for prefix in _NAMES if name.startswith(prefix)), None)
        if prefix is not None:
            found[_NAMES[prefix] + name.removeprefix(prefix)] = array
    return found
