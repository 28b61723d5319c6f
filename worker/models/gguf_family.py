"""The families of models whose GGUF files can be used, and names of files and models. Reads no file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_QUANTISATION: Final = re.compile(r"(?i)[-._](?:UD-)?((?:I?Q\d\w*)|F16|BF16|F32|MXFP4)$")
#: Bits of the weights of the usual conversions for MLX.
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
class Family:
    """How one family's tensors become those of mlx-lm's `model_type`.

    `parts` maps the names of a layer's tensors. With `is_paired`, the rows of q and k are in pairs, for
    interleaved rotation. With `norms_have_one`, GGUF's norms are by one larger than mlx-lm's.
    """

    model_type: str
    parts: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    is_paired: bool = False
    norms_have_one: bool = False


#: By the architecture that a file names.
FAMILIES: Final[Mapping[str, Family]] = {
    "gemma3": Family(
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
    "llama": Family("llama", is_paired=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3", {**_LAYER, **_HEAD_NORMS}),
}


def unsupported(source: str, architecture: object, file_name: str) -> str:
    """Say that a file's family cannot be used, and which model to take instead."""
    return (
        f"{source} has the architecture {architecture!r}; GGUF files of the families {', '.join(FAMILIES)}"
        f" can be used, and for MLX this model is usually named {mlx_name(file_name)} on the hub"
    )


def quantisation_of(stem: str) -> str:
    """Return the quantisation that a GGUF file's name ends with, or else the whole name."""
    found = _QUANTISATION.search(stem)
    return found[1].upper() if found else stem


def mlx_name(name: str) -> str:
    """Return the name that the same model usually has where it is converted for MLX."""
    stem = name.rpartition("/")[2].removesuffix(".gguf")
    quantisation = quantisation_of(stem) if _QUANTISATION.search(stem) else ""
    stem = re.sub(r"(?i)[-._]gguf$", "", _QUANTISATION.sub("", stem))
    digit = re.match(f"I?Q([{_MLX_BITS}])", quantisation)
    bits = "bf16" if quantisation.endswith("F16") else f"{digit[1] if digit else 4}bit"
    return f"mlx-community/{stem}-{bits}"
