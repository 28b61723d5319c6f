"""Converted GGUF files of each family give the logits and the tokens of the original models."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import MODEL_ARCH, get_tensor_name_map
from mlx.utils import tree_flatten
from tiny_gguf import FFN, HEADS, HIDDEN, KV_HEADS, TinyLlama

from worker.models import gguf_file, gguf_model, model
from worker.models.gguf_family import mlx_name, quantisation_of
from worker.models.tokenizer import Tokenizer

COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rope_theta": 50_000.0,
}
#: For each family: mlx-lm's model and configuration, and the GGUF fields with the same values.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {"num_hidden_layers": 2, "tie_word_embeddings": False}, {}),
    "qwen3": (
        "qwen3",
        {"num_hidden_layers": 2, "tie_word_embeddings": True, "head_dim": 64},
        {"attention.key_length": 64},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "sliding_window": 16,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "block_count": 7,
            "attention.key_length": 64,
            "attention.sliding_window": 16,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
}


def twin(kind: str, config: dict[str, Any]) -> tuple[Any, dict[str, mx.array]]:
    """Make mlx-lm's model with random weights; return the model, and the weights by their names."""
    module = import_module(f"mlx_lm.models.{kind}")
    made = module.Model(module.ModelArgs.from_dict({"model_type": kind, **COMMON, **config}))
    mx.random.seed(3)
    tied = config.get("tie_word_embeddings", True)
    drawn = {
        name: mx.random.normal(array.shape) * 0.1
        for name, array in tree_flatten(made.parameters())
        if not (tied and name.startswith("lm_head"))
    }
    made.load_weights([*made.sanitize(dict(drawn)).items()])
    return made, drawn


@pytest.mark.parametrize("family", CASES)
def test_a_converted_gguf_model_computes_the_same_logits_as_mlx_lm_with_the_same_weights(
    tmp_path: Path, family: str
) -> None:
    kind, config, fields = CASES[family]
    original, drawn = twin(kind, config)
    names = get_tensor_name_map(MODEL_ARCH[family.upper()], 7)  # the table of the usual converters
    weights = {str(names.get_name(name, (".weight", ".bias"))): np.array(drawn[name]) for name in drawn}
    if family == "gemma3":  # the usual converter adds 1
        weights |= {name: array + 1 for name, array in weights.items() if name.endswith("norm.weight")}
    written = {f"{family}.{name}": value for name, value in fields.items()}
    path = TinyLlama(weights, architecture=family, fields=written).write(tmp_path / "tiny.gguf")
    found = model.load(gguf_model.convert(path, tmp_path / "models", dtype="float32"), dtype="float32")
    tokens = mx.array([[*range(5, 45)]])  # more than the window
    np.testing.assert_allclose(np.array(found.model(tokens)), np.array(original(tokens)), atol=2e-4)
    assert found.context_tokens == 512


def test_gemma_3_with_62_layers_scales_queries_by_its_hidden_size_per_head(tmp_path: Path) -> None:
    fields = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 62,
        "gemma3.attention.sliding_window": 8,
    }
    file = gguf_file.GgufFile(tmp_path, fields, {})
    assert gguf_model._gemma3(file, 5376 // 32, 128)["query_pre_attn_scalar"] == 168


def test_a_run_of_spaces_is_one_token_if_the_vocabulary_defines_it(tmp_path: Path) -> None:
    """Gemma's tokenizer matches such tokens before it merges, after it has replaced the spaces."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_, "\u2581", "a", "b", "ab", "\u2581ab"]
    tokens += ["\u2581" * 2, "\u2581" * 3, "\n\n", "<turn>"]
    kinds = [3, 3, 3, 2, *[6] * 256, *[1] * 5, *[4] * 3, 3]
    kinds += [1] * (320 - len(tokens))
    tokens += [f"<more{i}>" for i in range(320 - len(tokens))]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-float(i) for i in range(320)],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    path = TinyLlama(fields=fields).write(tmp_path / "tiny.gguf")
    tokenizer = Tokenizer.from_folder(gguf_model.convert(path, tmp_path / "models", dtype="float32"))
    text = "ab ab   b\n\na<turn>"
    ids = tokenizer.encode(text, at_start=True)
    assert [tokens[i] for i in ids] == [
        *("<bos>", "ab", "\u2581ab", "\u2581" * 3, "b", "\n\n", "a", "<turn>"),
    ]
    assert tokenizer.decode(ids[1:]) == text


@pytest.mark.parametrize(
    ("file", "quantisation", "name"),
    [
        ("Qwen3-4B-Instruct-2507-Q4_K_M", "Q4_K_M", "mlx-community/Qwen3-4B-Instruct-2507-4bit"),
        ("phi-4.q8_0", "Q8_0", "mlx-community/phi-4-8bit"),
        ("gpt-oss-20b-UD-Q6_K_XL", "Q6_K_XL", "mlx-community/gpt-oss-20b-6bit"),
        ("olmo-2-1b-IQ2_XXS", "IQ2_XXS", "mlx-community/olmo-2-1b-4bit"),
        ("olmo-2-1b-bf16", "BF16", "mlx-community/olmo-2-1b-bf16"),
        ("olmo-2-1b-f32", "F32", "mlx-community/olmo-2-1b-4bit"),
        ("plain", "plain", "mlx-community/plain-4bit"),
    ],
)
def test_a_gguf_file_name_gives_the_quantisation_and_the_usual_mlx_model_name(
    file: str, quantisation: str, name: str
) -> None:
    assert quantisation_of(file) == quantisation
    assert mlx_name(f"org/{file}.gguf") == name
