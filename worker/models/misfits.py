"""Explains in one line why a model's config.json, weights and tokenizer cannot be loaded together.

Must not import MLX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .model_files import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .tokenizer import Tokenizer

#: The quantisation methods of other libraries that mlx-lm reads; it takes GPTQ's weights for AWQ's.
_METHODS: Final = frozenset(("awq", "bitnet", "compressed-tensors", "fp8", "modelopt", "mxfp4", "mxfp8"))
#: The most characters of an error of MLX, which may list a hundred tensors.
_MOST: Final = 240


def explain(config: Mapping[str, Any], error: Exception) -> str:
    """Return one line that explains a loading error; `config` is the language model's configuration."""
    said = one_line(error)
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method", "an unnamed method") if isinstance(quantised, dict) else None
    if method and method not in _METHODS and "quantization" not in config:
        return f"its weights are quantised by {method}; take the original model, or one of mlx-community"
    if "trust_remote_code" in said:
        return f"it needs its own code, {config.get('model_file')}, which is not run; take another model"
    if "not supported" in said:  # the architecture
        return said
    said = f"{said[:_MOST]} ..." if len(said) > _MOST else said
    return f"{type(error).__name__}: {said}; config.json must be that of these weights"


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
