"""Tiny random models of each family that sees, as folders, and mlx-vlm's own models of the same weights."""

from __future__ import annotations

import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from worker.models.partial_import import import_mlx_vlm

import_mlx_vlm()

BLOCK = 8
_TEXT = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": 16,
    "layer_norm_eps": 1e-6,
}
_SPLIT = {
    "text_config": {**_TEXT, "model_type": "llama"},
    "vision_config": _VISION,
    "scale_factor": 2,
    "tie_word_embeddings": False,
}
_SPLITS = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}

CONFIGS: dict[str, dict[str, Any]] = {
    "idefics3": {**_SPLIT, "vision_config": {**_VISION, "model_type": "idefics3_vision"}},
    "smolvlm": {**_SPLIT, "vision_config": {**_VISION, "model_type": "smolvlm_vision"}},
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
    "pixtral": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 64},
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8, "image_size": 64},
        "spatial_merge_size": 2,
    },
    "lfm2_vl": {
        "text_config": {
            "model_type": "lfm2",
            "vocab_size": 320,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 32,
            "block_ff_dim": 64,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "rope_theta": 10000.0,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        "vision_config": {**_VISION, "model_type": "siglip2_vision_model", "num_patches": 16},
        "projector_hidden_size": 32,
        "downsample_factor": 2,
    },
}
CONFIGS["qwen2_vl"] = {
    **_TEXT,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 1]},
    "vision_config": {
        "model_type": "qwen2_vl",
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 4,
        "in_channels": 3,
    },
}
CONFIGS["qwen2_5_vl"] = {
    **CONFIGS["qwen2_vl"],
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "num_heads": 4,
        "patch_size": 4,
        "in_channels": 3,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
}
CONFIGS["qwen3_vl"] = {
    "text_config": {
        **_TEXT,
        "model_type": "qwen3_vl_text",
        "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
        "tie_word_embeddings": False,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "num_heads": 4,
        "patch_size": 4,
        "in_channels": 3,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}
_HYBRID = {
    **_TEXT,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "full_attention_interval": 2,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_FLAT_VISION = {**CONFIGS["qwen3_vl"]["vision_config"], "deepstack_visual_indexes": []}
CONFIGS["qwen3_5"] = {
    "text_config": _HYBRID,
    "tie_word_embeddings": False,
    "vision_config": {**_FLAT_VISION, "model_type": "qwen3_5"},
}
CONFIGS["qwen3_5_moe"] = {
    "text_config": {**_HYBRID, **_EXPERTS, "model_type": "qwen3_5_moe_text"},
    "tie_word_embeddings": False,
    "vision_config": {**_FLAT_VISION, "model_type": "qwen3_5_moe"},
}
_GEMMA_TOKENS = {"mm_tokens_per_image": 16}
CONFIGS["gemma3"] = {
    "text_config": {
        **_TEXT,
        **_GEMMA_TOKENS,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "rope_global_base_freq": 10000.0,
        "query_pre_attn_scalar": 8,
        "sliding_window": 24,
        "sliding_window_pattern": 3,
    },
    "vision_config": {**_VISION, "model_type": "siglip_vision_model", "image_size": 32},
    **_GEMMA_TOKENS,
    "vocab_size": 320,
    "hidden_size": 32,
    "pad_token_id": 319,
}
_GEMMA_LAYERS = ["full_attention", "sliding_attention", "full_attention"]
_GEMMA_ROTARY = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}
#: As the models of 26B and 31B: experts, and images that attend in both directions.
CONFIGS["gemma4"] = {
    "model_type": "gemma4",
    "text_config": {
        **_TEXT,
        "model_type": "gemma4_text",
        "num_hidden_layers": 3,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "sliding_window": 24,
        "layer_types": _GEMMA_LAYERS,
        "rope_parameters": _GEMMA_ROTARY,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        **_VISION,
        "model_type": "gemma4_vision",
        "num_key_value_heads": 4,
        "head_dim": 8,
        "position_embedding_size": 512,
        "standardize": True,
    },
    "vocab_size": 320,
}
#: As E2B and E4B: inputs for each layer, layers that use the KV of others, and a tower for sounds.
CONFIGS["gemma4_e"] = {
    "model_type": "gemma4",
    "text_config": {
        **_TEXT,
        "model_type": "gemma4_text",
        "num_hidden_layers": 5,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "num_kv_shared_layers": 2,
        "sliding_window": 24,
        "layer_types": [*_GEMMA_LAYERS, *_GEMMA_LAYERS[1:]],
        "rope_parameters": _GEMMA_ROTARY,
    },
    "vision_config": {**CONFIGS["gemma4"]["vision_config"], "use_clipped_linears": True},
    "audio_config": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "subsampling_conv_channels": [8, 4],
    },
    "vocab_size": 320,
}
FAMILIES = [*CONFIGS]
#: Heads of a size that can be quantised.
CONFIGS["wide"] = {
    **_SPLIT,
    "model_type": "smolvlm",
    "text_config": {**_TEXT, "model_type": "llama", "hidden_size": 128, "head_dim": 32},
    "vision_config": {**_VISION, "model_type": "smolvlm_vision"},
}
#: An image has more tokens than a ring has places besides its window.
CONFIGS["large"] = CONFIGS["gemma4"]
CONFIGS["bright"] = {**CONFIGS["smolvlm"], "model_type": "smolvlm"}
_SQUARE = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
PROCESSORS: dict[str, dict[str, Any]] = {
    "idefics3": _SPLITS,
    "smolvlm": _SPLITS,
    "wide": _SPLITS,
    "bright": {**_SPLITS, "image_mean": [0.1, 0.1, 0.1]},
    "llava": _SQUARE,
    "gemma3": {"size": {"height": 32, "width": 32}},
    "gemma4": {"patch_size": 4, "max_soft_tokens": 70},
    "gemma4_e": {"patch_size": 4, "max_soft_tokens": 70},
    "large": {"patch_size": 4, "max_soft_tokens": 280},
    "pixtral": {"size": {"longest_edge": 24}},
    "mistral3": {"size": {"longest_edge": 40}},
    "qwen2_vl": {
        "patch_size": 4,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    },
    "lfm2_vl": {
        "encoder_patch_size": 4,
        "tile_size": 16,
        "min_image_tokens": 2,
        "max_image_tokens": 4,
        "max_tiles": 4,
    },
}
PROCESSORS |= {kind: PROCESSORS["qwen2_vl"] for kind in FAMILIES if kind.startswith("qwen")}
_MARKS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)),
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<|image_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)),
    "<|image>",
    "<|image|>",
    "<image|>",
)
#: How each family's chat template writes an image.
PLACEHOLDER = {
    "gemma3": "<start_of_image>",
    **dict.fromkeys(("gemma4", "gemma4_e", "large"), "<|image|>"),
    "pixtral": "[IMG]",
    "mistral3": "[IMG]",
    **{kind: "<|vision_start|><|image_pad|><|vision_end|>" for kind in FAMILIES if kind.startswith("qwen")},
}


def _tokenizer() -> Tokenizer:
    """A token for each byte, and the families' marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in _MARKS])
    return made


#: How transformers names the weights: by the beginnings of mlx-vlm's names.
_SPLIT_NAMES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.text_model.",
    "vision_model.": "model.vision_model.",
    "connector.": "model.connector.",
}
NAMES: dict[str, dict[str, str]] = {
    "idefics3": _SPLIT_NAMES,
    "smolvlm": _SPLIT_NAMES,
    "llava": {},
    "gemma3": {},
    "pixtral": {"vision_tower.vision_model.": "vision_tower."},
    "mistral3": {"vision_tower.vision_model.": "vision_tower."},
    "qwen2_vl": {
        "language_model.lm_head.": "lm_head.",
        "language_model.model.": "model.",
        "vision_tower.": "visual.",
    },
    "lfm2_vl": {
        "language_model.model.": "model.language_model.",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
}


NAMES["qwen2_5_vl"] = NAMES["qwen2_vl"]
NAMES["qwen3_vl"] = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.visual.",
}
NAMES["gemma4"] = NAMES["gemma4_e"] = {
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "embed_vision.": "model.embed_vision.",
    "audio_tower.": "model.audio_tower.",
    "embed_audio.": "model.embed_audio.",
}
NAMES["qwen3_5"] = NAMES["qwen3_5_moe"] = NAMES["qwen3_vl"]


def _as_transformers(kind: str, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return weights as transformers names and turns them."""
    found = {}
    for name, array in weights.items():
        prefix = next((prefix for prefix in NAMES[kind] if name.startswith(prefix)), None)
        axes = list(range(array.ndim))
        if array.ndim == 5:
            axes = [0, 4, 1, 2, 3]
        elif array.ndim == 4:
            axes = [0, 3, 1, 2]
        elif name.endswith("conv.conv.weight"):
            axes = [0, 2, 1]
        renamed = name if prefix is None else NAMES[kind][prefix] + name.removeprefix(prefix)
        found[renamed] = mx.contiguous(array.transpose(axes))
    return found


def write(kind: str, folder: Path, layout: str = "mlx") -> Any:
    """Write the folder of a tiny random model; return mlx-vlm's own model with the same weights.

    The `layout` of the weights is mlx-vlm's, transformers' (`pt`), or mlx-vlm's in four bits (`4-bit`).
    """
    tokenizer = _tokenizer()
    mark = "<|image_pad|>" if kind.startswith("qwen") else PLACEHOLDER.get(kind, "<image>")
    mark = "<image_soft_token>" if kind == "gemma3" else mark
    mark = "<|image|>" if CONFIGS[kind].get("model_type") == "gemma4" else mark
    image, start = tokenizer.token_to_id(mark), tokenizer.token_to_id("<|vision_start|>")
    config = {"model_type": kind, "image_token_id": image, "image_token_index": image, **CONFIGS[kind]}
    config["vision_start_token_id"] = start
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    module = import_module(f"mlx_vlm.models.{config['model_type']}")
    given = module.ModelConfig.from_dict(dict(config))
    given.text_config = module.TextConfig.from_dict(config.get("text_config", config))
    given.vision_config = module.VisionConfig.from_dict(config["vision_config"])
    if "audio_config" in config:
        given.audio_config = module.AudioConfig.from_dict(config["audio_config"])
    mx.random.seed(11)
    model = module.Model(given)
    # Livelier than the initial weights, so that every token depends on those before it.
    model.update(tree_map(lambda w: w + mx.random.normal(w.shape) * 0.2, model.parameters()))
    if config["model_type"] == "gemma4":  # whose head is its embeddings: it would repeat each token
        model.language_model.model.embed_tokens.weight *= 0.1
        model.vision_tower.patch_embedder.position_embedding_table *= 0.1  # and see hardly more than places
    mx.eval(model.parameters())
    if layout == "4-bit":
        nn.quantize(model, group_size=32, bits=4, class_predicate=_can_quantise)
        (folder / "config.json").write_text(
            json.dumps({**config, "quantization": {"group_size": 32, "bits": 4}})
        )
    weights: Any = dict(tree_flatten(model.parameters()))
    if layout == "pt":
        weights = _as_transformers(kind, weights)
    form = "pt" if layout == "pt" else "mlx"
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": form})
    return model


def _can_quantise(path: str, part: Any) -> bool:
    fits = hasattr(part, "to_quantized") and part.weight.shape[-1] % 32 == 0
    return fits and "position_embedding" not in path  # which mlx-vlm reads as an array


def picture(seed: int, width: int = 30, height: int = 20, form: str = "PNG") -> bytes:
    """Return the file of a random picture."""
    shades = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(shades).save(file, form)
    return file.getvalue()
