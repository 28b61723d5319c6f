"""Defines the supported families of GGUF models, and derives names of models. Reads no file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_QUANTISATION: Final = re.compile(r"(?i)[-._](?:UD-)?((?:I?Q\d\w*)|F16|BF16|F32|MXFP4)$")
#: The usual bits per weight of models converted for MLX.
_MLX_BITS: Final = "34568"

_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How to convert one family's tensors to those of mlx-lm's `model_type`."""

    model_type: str
    #: GGUF's names of a layer's tensors, and mlx-lm's for each.
    parts: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    #: Whether the rows of q and k are in pairs, for interleaved rotation.
    is_paired: bool = False
    #: Whether norm weights are larger by one in GGUF.
    norms_have_one: bool = False


#: Supported families, by the architecture that a GGUF file names.
FAMILIES: Final[Mapping[str, GgufFamily]] = {
    "gemma3": GgufFamily(
        "gemma3_text",
        {
            **_LAYER,
            **_HEAD_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norms_have_one=True,
    ),
    "llama": GgufFamily("llama", is_paired=True),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3", {**_LAYER, **_HEAD_NORMS}),
}


def unsupported(source: str, architecture: object, file_name: str) -> str:
    """Return the error message for a GGUF file of an unsupported family; it suggests an MLX model instead."""
    return (
        f"{source} has the architecture {architecture!r}; GGUF files of the families {', '.join(FAMILIES)}"
        f" can be used, and for MLX this model is usually named {mlx_name(file_name)} on the hub"
    )


def quantisation_of(stem: str) -> str:
    """Return the quantisation at the end of a GGUF file's name; without one, the whole name."""
    found = _QUANTISATION.search(stem)
    return found[1].upper() if found else stem


def mlx_name(name: str) -> str:
    """Return the usual hub name of the MLX conversion of a GGUF model."""
    stem = re.sub(r"(?i)\.gguf$", "", name.rpartition("/")[2])
    quantisation = quantisation_of(stem) if _QUANTISATION.search(stem) else ""
    stem = re.sub(r"(?i)[-._]gguf$", "", _QUANTISATION.sub("", stem))
    digit = re.match(f"I?Q([{_MLX_BITS}])", quantisation)
    bits = "bf16" if quantisation.endswith("F16") else f"{digit[1] if digit else 4}bit"
    return f"mlx-community/{stem}-{bits}"
