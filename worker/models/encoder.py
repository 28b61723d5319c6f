"""Implements BERT-like encoders (attention in both directions): embeddings of texts, or scores of text pairs.

A worker prefills a prompt in pieces. An encoder's states all depend on the last token, so they cannot be
cached. Instead, the cache holds the token ids, and each pass defines the states of the whole text up to its
end; MLX is lazy, and computes these for the last piece only. Modules are named as in the weight files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx.nn.layers.activations import gelu
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm
from mlx_lm.models.cache import KVCache

from .model_files import ModelError, read_json
from .pooling import is_cross_encoder

if TYPE_CHECKING:
    from pathlib import Path

_MEAN: Final = "pooling_mode_mean_tokens"
_FIRST: Final = "pooling_mode_cls_token"
_SEPARATOR: Final = "[SEP]"


@dataclass
class EncoderArguments:
    """What determines an encoder, besides its weights."""

    #: The contents of config.json.
    config: dict[str, Any]
    #: The id of the token between two texts; -1 if there is none.
    separator: int
    #: Whether a text's vector is the mean of its tokens' states; otherwise it is its first token's state.
    takes_mean: bool
    #: Whether the model is a cross-encoder, which computes a score from this vector.
    is_cross: bool

    @classmethod
    def of_folder(cls, folder: Path, config: dict[str, Any]) -> EncoderArguments:
        """Read the arguments from a model folder. Raises `ModelError` for unsupported encoders."""
        path, is_cross = folder / "1_Pooling" / "config.json", is_cross_encoder(config)
        said = read_json(path) if path.exists() else {_MEAN: not is_cross, _FIRST: is_cross}
        if bool(said.get(_MEAN)) is bool(said.get(_FIRST)):
            raise ModelError("its vectors are neither the mean of its tokens nor the first one's state")
        if is_cross and len(config.get("id2label", {0: ""})) != 1:
            raise ModelError("it tells classes apart; a cross-encoder has one")
        for name, known in (("hidden_act", "gelu"), ("position_embedding_type", "absolute")):
            if config.get(name, known) != known:
                raise ModelError(f"{name} {config[name]} is not supported in an encoder")
        added = read_json(folder / "tokenizer.json").get("added_tokens", ())
        separator = next((one["id"] for one in added if one["content"] == _SEPARATOR), -1)
        return cls(config, separator, bool(said.get(_MEAN)), is_cross)


class _Encoder(Module):
    def __init__(self, given: EncoderArguments) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        config, self._given = given.config, given
        size, inner, eps = config["hidden_size"], config["intermediate_size"], config["layer_norm_eps"]
        self.embeddings: dict[str, Any] = {
            "word_embeddings": Embedding(config["vocab_size"], size),
            "position_embeddings": Embedding(config["max_position_embeddings"], size),
            "token_type_embeddings": Embedding(config["type_vocab_size"], size),
            "LayerNorm": LayerNorm(size, eps),
        }
        layers: list[dict[str, Any]] = [
            {
                "attention": {
                    "self": {name: Linear(size, size) for name in ("query", "key", "value")},
                    "output": {"dense": Linear(size, size), "LayerNorm": LayerNorm(size, eps)},
                },
                "intermediate": {"dense": Linear(size, inner)},
                "output": {"dense": Linear(inner, size), "LayerNorm": LayerNorm(size, eps)},
            }
            for _ in range(config["num_hidden_layers"])
        ]
        self.encoder = {"layer": layers}
        if given.is_cross:
            self.pooler = {"dense": Linear(size, size)}

    def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:
        """Return each text's vector, repeated for each of its new tokens: (texts, tokens, size)."""
        ids = tokens[:, None, :, None].astype(mx.float32)
        known, _ = cache[0].update_and_fetch(ids, ids)  # type: ignore[no-untyped-call]
        states = self._states(known[:, 0, :, 0].astype(mx.int32))
        pooled = states.mean(axis=1, keepdims=True) if self._given.takes_mean else states[:, :1]
        if self._given.is_cross:
            pooled = mx.tanh(self.pooler["dense"](pooled))
        return mx.repeat(pooled, tokens.shape[1], axis=1)

    def _states(self, tokens: mx.array) -> mx.array:
        own, ends = self.embeddings, tokens == self._given.separator
        x: mx.array = own["word_embeddings"](tokens) + own["position_embeddings"](mx.arange(tokens.shape[1]))
        kinds = mx.minimum(ends.cumsum(axis=1) - ends, 1)  # 1 after the first separator
        x = own["LayerNorm"](x + own["token_type_embeddings"](kinds))
        for layer in self.encoder["layer"]:
            attention, after, output = layer["attention"], layer["intermediate"], layer["output"]
            x = attention["output"]["LayerNorm"](x + self._attended(attention, x))
            x = output["LayerNorm"](x + output["dense"](gelu(after["dense"](x))))
        return x

    def _attended(self, layer: dict[str, Any], x: mx.array) -> mx.array:
        num, length, size = x.shape
        shape = (num, length, self._given.config["num_attention_heads"], -1)
        heads = [layer["self"][one](x).reshape(shape).swapaxes(1, 2) for one in ("query", "key", "value")]
        scale = heads[0].shape[-1] ** -0.5
        found = mx.fast.scaled_dot_product_attention(*heads, scale=scale).swapaxes(1, 2)
        seen: mx.array = layer["output"]["dense"](found.reshape(num, length, size))
        return seen


class EncoderModel(Module):
    """An encoder with the interface of mlx-lm's models; in place of logits it returns a score or a vector."""

    def __init__(self, given: EncoderArguments) -> None:
        """Create the modules, with no weights loaded."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = _Encoder(given)
        if given.is_cross:
            self.classifier = Linear(given.config["hidden_size"], 1)

    @property
    def layers(self) -> list[Module]:
        """The modules that have a cache: one, the whole encoder."""
        return [self.model]

    def make_cache(self) -> list[KVCache]:
        """Return one cache, in which the encoder keeps a text's token ids."""
        return [KVCache()]  # type: ignore[no-untyped-call]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return weights under this module's names, without those that it does not use."""
        parts = ("embeddings", "encoder", *(("pooler", "classifier") if "classifier" in self else ()))
        named = {name.removeprefix("bert."): one for name, one in weights.items()}
        return {
            name if name.startswith("classifier") else f"model.{name}": one
            for name, one in named.items()
            if name.startswith(parts) and not name.endswith("position_ids")
        }

    def __call__(self, tokens: mx.array, cache: list[KVCache] | None = None) -> mx.array:
        """Return a text's score or vector, repeated for each new token: (texts, tokens, 1 or size)."""
        pooled = self.model(tokens, cache or self.make_cache())
        scored: mx.array = self.classifier(pooled) if "classifier" in self else pooled
        return scored


def encoder_classes(folder: Path) -> Any:
    """Return, for mlx-lm's `load_model`, a function that returns the classes of a folder's encoder."""
    arguments = SimpleNamespace(from_dict=partial(EncoderArguments.of_folder, folder))
    return lambda config: (EncoderModel, arguments)  # noqa: ARG005
