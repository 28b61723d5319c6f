"""Explains in one sentence why config.json, weights and tokenizer do not match, and which field to correct.

The errors of MLX and mlx-lm name classes, arguments and a hundred tensors. This module parses such errors;
the text of an unknown error stays unchanged. Must not import MLX.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from .model_files import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .tokenizer import Tokenizer

_SHAPE: Final = re.compile(
    r"Expected shape \(([\d, ]+)\) but received shape \(([\d, ]+)\) for parameter (\S+)"
)
_OTHERS: Final = re.compile(r"(Received|Missing) (\d+) parameters[^:]*:\s*(.*)")
_LACKING: Final = re.compile(r"missing \d+ required positional arguments?: (.*)")
_LAYER: Final = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
_NUM_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
#: For each projection, the fields of config.json whose product is a dimension of its weights.
_HEADS: Final = {
    "q_proj": ("num_attention_heads", "head_dim"),
    "o_proj": ("num_attention_heads", "head_dim"),
    "k_proj": ("num_key_value_heads", "head_dim"),
    "v_proj": ("num_key_value_heads", "head_dim"),
}
#: Fields that must be numbers in every architecture that has them.
_NUMBERS: Final = (
    *_NUM_LAYERS,
    *("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "sliding_window", "rms_norm_eps", "max_position_embeddings", "rope_theta"),
)
#: The quantisation methods of other libraries that mlx-lm reads; it takes GPTQ's weights for AWQ's.
_METHODS: Final = frozenset(("awq", "bitnet", "compressed-tensors", "fp8", "modelopt", "mxfp4", "mxfp8"))
#: Fields that give the pattern of kinds of layers: a number, or a list with an item for each layer.
_PATTERNS: Final = ("sliding_window_pattern", "layer_types", "full_attention_interval", "block_types")


def explain(config: Mapping[str, Any], error: Exception) -> str:
    """Return one sentence that explains a loading error; `config` is the language model's configuration."""
    said = one_line(error)
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method", "an unnamed method") if isinstance(quantised, dict) else None
    if method and method not in _METHODS and "quantization" not in config:
        return f"its weights are quantised by {method}; take the original model, or one of mlx-community"
    if "trust_remote_code" in said:
        return f"it needs its own code, {config.get('model_file')}, which is not run; take another model"
    for name in _NUMBERS:
        if isinstance(config.get(name), str | dict) or (
            type(config.get(name)) is list and name != "rope_theta"
        ):
            return f"config.json has {name} {config[name]!r}; it must be a number"
    if found := _SHAPE.search(said):
        expected, received = ([int(n) for n in shape.split(",") if n.strip()] for shape in found.group(1, 2))
        return _shape(config, expected, received, found[3])
    if found := _OTHERS.search(said):
        return _others(config, found[1] == "Received", int(found[2]), found[3].split(", "))
    if isinstance(error, IndexError) or " is not in list" in said:
        return _kinds_of_layers(config) or said
    if "rope_theta" in config and config["rope_theta"] is None:
        return "config.json has rope_theta null; it must be a number"
    lacking = _LACKING.search(said)
    missing = re.findall(r"\w+", lacking[1].replace(" and ", " ")) if lacking else []
    missing = missing or [
        name for name in _NUMBERS if name in config and config[name] is None and "NoneType" in said
    ]
    if missing:
        return f"config.json lacks {missing[0]}; a {config.get('model_type')} model needs it"
    return said


def _kinds_of_layers(config: Mapping[str, Any]) -> str | None:
    """Explain that config.json's number of layers contradicts its pattern of layer kinds, or return None."""
    field = next((name for name in _NUM_LAYERS if isinstance(config.get(name), int)), "")
    if not field:
        return None
    for name in _PATTERNS:
        value = config.get(name)
        length = len(value) if isinstance(value, str | list) else value if isinstance(value, int) else 0
        if length > config[field] or (name == "layer_types" and 0 < length < config[field]):
            return f"config.json has {field} {config[field]}, and {length} in its {name}; they must agree"
    kind = config.get("model_type")
    return f"config.json has {field} {config[field]}, too few for the kinds of layers of a {kind} model"


def surplus_tokens(num_rows: int, tokenizer: Tokenizer) -> str | None:
    """Explain that a tokenizer has ids beyond a model's `num_rows` embeddings; None if that is harmless.

    An added token without an embedding is harmless if the template never writes it, as Gemma 3's for images.
    """
    template = tokenizer.template or ""
    for token in range(num_rows, tokenizer.vocab_size):
        text = tokenizer.decode([token])
        if token not in tokenizer.added_ids or text in template or token in tokenizer.eos_ids:
            return (
                f"config.json has vocab_size {num_rows}, its tokenizer has {tokenizer.vocab_size} tokens"
                f" ({text!r} is {token}); they must agree"
            )
    return None


def _shape(config: Mapping[str, Any], expected: Sequence[int], received: Sequence[int], tensor: str) -> str:
    fields = next((list(names) for part, names in _HEADS.items() if f".{part}." in tensor), [])
    different = [(e, r) for e, r in zip(expected, received, strict=False) if e != r]
    direct = [
        (name, there)
        for name, value in config.items()
        for ours, there in different
        if value == ours
        and type(value) is int
        and name in _NUMBERS
        and (name != "intermediate_size" or "mlp" in tensor)
    ]
    if len(direct) == 1 and not fields:
        ((name, there),) = direct
        return f"config.json has {name} {config[name]}, the weights have {there} ({tensor}); they must agree"
    fields = fields or [name for name, _ in direct]
    which = f"check {' and '.join(fields)}" if fields else "they belong to different models"
    return (
        f"config.json makes {tensor} of shape {tuple(expected)}, the weights have {tuple(received)}; {which}"
    )


def _others(config: Mapping[str, Any], surplus: bool, num: int, tensors: Sequence[str]) -> str:
    layers = [int(found[1]) for found in map(_LAYER.search, tensors) if found]
    field = next((name for name in _NUM_LAYERS if isinstance(config.get(name), int)), None)
    if field and len(layers) == len(tensors):
        there = max(layers) + 1 if surplus else min(layers)
        if (there > config[field]) if surplus else (0 < there < config[field]):
            return (
                f"config.json has {field} {config[field]}, the weights have {there} layers; they must agree"
            )
    what = f"the weights have {tensors[0]}, which a {config.get('model_type')} model of this config.json"
    many = f" ({num} such tensors)" if num > 1 else ""
    return f"{what} does not have{many}" if surplus else f"the weights lack {tensors[0]}{many}"
