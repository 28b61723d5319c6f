"""Tiny random models of each family that sees, as folders, and mlx-vlm's own models of the same weights."""

from __future__ import annotations

import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
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
}
PROCESSORS: dict[str, dict[str, Any]] = {"idefics3": _SPLITS, "smolvlm": _SPLITS}
_MARKS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)),
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)),
)
#: How each family's chat template writes an image.
PLACEHOLDER = {"pixtral": "[IMG]", "mistral3": "[IMG]"}


def _tokenizer() -> Tokenizer:
    """A token for each byte, and the families' marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in _MARKS])
    return made


def write(kind: str, folder: Path) -> Any:
    """Write the folder of a tiny random model; return mlx-vlm's own model with the same weights."""
    tokenizer = _tokenizer()
    image = tokenizer.token_to_id(PLACEHOLDER.get(kind, "<image>"))
    config = {"model_type": kind, "image_token_id": image, "image_token_index": image, **CONFIGS[kind]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[kind]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    module = import_module(f"mlx_vlm.models.{kind.replace('-', '_')}")
    given = module.ModelConfig.from_dict(config)
    given.text_config = module.TextConfig.from_dict(config["text_config"])
    given.vision_config = module.VisionConfig.from_dict(config["vision_config"])
    mx.random.seed(11)
    model = module.Model(given)
    # Livelier than the initial weights, so that every token depends on those before it.
    model.update(tree_map(lambda w: w + mx.random.normal(w.shape) * 0.2, model.parameters()))
    mx.eval(model.parameters())
    weights: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights), metadata={"format": "mlx"})
    return model


def picture(seed: int, width: int = 30, height: int = 20, form: str = "PNG") -> bytes:
    """Return the file of a random picture."""
    shades = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(shades).save(file, form)
    return file.getvalue()
