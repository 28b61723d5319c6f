"""Runs a model's image tower: from the views of an image to rows of input embeddings. Device thread only.

Towers are mlx-vlm's. Of its models only the towers, projectors and the code that joins them are used; its
language models are never built in memory, as mlx-lm's run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx import nn
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from .families import Qwen3Family

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from .families import Family, View

_LANGUAGE: Final = "language_model"
#: The beginnings of the names of weights that are no tower's.
_OTHERS: Final = (f"{_LANGUAGE}.", "audio_tower.", "embed_audio.")


class _Blank:
    """Stands for mlx-vlm's language model, of which a tower uses the embeddings: they are all zero."""

    embed_scale = 1  # as Gemma 4 names it
    hidden_size_per_layer_input = 0

    def __init__(self, size: int, dtype: mx.Dtype) -> None:
        self.model = self  # some have the embeddings there
        self._size, self._dtype = size, dtype

    def embed_tokens(self, tokens: mx.array) -> mx.array:
        return mx.zeros((*tokens.shape, self._size), self._dtype)

    def get_rope_index(self, *_: Any) -> tuple[None, None]:
        return None, None


class Tower:
    """A loaded tower, with the projector to a language model's hidden size."""

    def __init__(self, model: Any, family: Family) -> None:
        """`model` is mlx-vlm's, whose language model is a `_Blank`."""
        self._model = model
        names = ("image_token_index", "image_token_id")
        self._token = next(int(getattr(model.config, name)) for name in names if hasattr(model.config, name))
        self._outputs = _record_layers(model)
        self.family = family

    @property
    def weights(self) -> list[mx.array]:
        """The tower's weights."""
        leaves: Any = tree_flatten(self._model.parameters())
        return [array for _, array in leaves]

    def stages(self, view: View) -> list[mx.array]:
        """Build a view's rows, (`num_rows`, hidden size), as the last of arrays that are not evaluated.

        Behind each row are its further ones, one for each of the family's deep layers.

        The arrays before them are the layers' outputs. Evaluated in order, none takes longer than a layer,
        and the rows have the same bits as if evaluated at once.
        """
        tokens = mx.full((1, view.num_rows), self._token)
        arrays = {name: mx.array(array) for name, array in view.arrays.items()}
        self._outputs.clear()
        if isinstance(self.family, Qwen3Family):  # mlx-vlm would evaluate them at once
            tower = self._model.vision_tower
            pixels = arrays["pixel_values"].astype(tower.patch_embed.proj.weight.dtype)
            first, deep = tower(pixels, arrays["image_grid_thw"])
            rows = mx.concatenate([first, *deep], axis=-1)
        else:
            seen = mx.ones_like(tokens)
            rows = self._model.get_input_embeddings(tokens, mask=seen, **arrays).inputs_embeds[0]
        used = self._outputs[: len(self._outputs) + 1 + self.family.last_layer]
        self._outputs.clear()
        return [*used, rows / self.family.embedding_scale]


def _record_layers(model: Any) -> list[mx.array]:
    """Patch a tower so that its layers add their outputs to the returned list, in the order of calls.

    The layers are the modules in a list whose class is not one of MLX's own.
    """
    outputs: list[mx.array] = []

    def recorded(kind: Any) -> Any:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            output = kind.__call__(self, *args, **options)
            outputs.append(output)
            return output

        return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})

    layers = [
        layer
        for parent in model.modules()
        for member in parent.values()
        if isinstance(member, list)
        for layer in member
        if isinstance(layer, Module) and not type(layer).__module__.startswith("mlx.")
    ]
    kinds = {kind: recorded(kind) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
    return outputs


def build(family: Family, config: Mapping[str, Any], dtype: mx.Dtype) -> tuple[Any, Any]:
    """Build mlx-vlm's model of a family without a language model; return it, and its module."""
    module = import_module(f"mlx_vlm.models.{family.module}")
    given = module.ModelConfig.from_dict({**config, "audio_config": None})  # a copy, which some change
    text = {k: v for k, v in config.get("text_config", config).items() if k != "rope_scaling"}
    given.text_config = module.TextConfig.from_dict(text)
    given.vision_config = module.VisionConfig.from_dict(config["vision_config"])
    given.hidden_size = given.text_config.hidden_size  # by which Gemma 3 scales rows
    model = module.Model(given)
    size = given.text_config.hidden_size
    model.pop(_LANGUAGE)  # its random weights were never evaluated
    model.language_model = _Blank(size, dtype)
    return model, module


def load(files: list[Path], family: Family, config: Mapping[str, Any], dtype: str) -> Tower:
    """Load a tower from a model's weight files, lazily. `dtype` is that of its weights, or `keep`.

    Raises anything if the weights do not fit.
    """
    from mlx_lm import utils

    weights: dict[str, mx.array] = {}
    is_converted = False
    for path in files:
        found: Any = mx.load(str(path), return_metadata=True)
        weights |= found[0]
        is_converted |= found[1].get("format") == "mlx"
    kept = next((one.dtype for one in weights.values() if mx.issubdtype(one.dtype, mx.floating)), mx.float32)
    model, module = build(family, config, kept if dtype == "keep" else getattr(mx, dtype))
    if not is_converted:
        weights = model.sanitize(weights) if hasattr(model, "sanitize") else weights
        weights = module.VisionModel(model.config.vision_config).sanitize(weights)
    weights = {name: one for name, one in weights.items() if not name.startswith(_OTHERS)}

    def quantised(path: str, part: Any) -> Any:
        return f"{path}.scales" in weights and utils.infer_quant_config(path, part, weights)

    nn.quantize(model, class_predicate=quantised)  # type: ignore[attr-defined]
    model.load_weights(list(weights.items()))
    if dtype != "keep":
        model = utils.dequantize_model(model)
        model.set_dtype(getattr(mx, dtype))
    return Tower(model, family)
