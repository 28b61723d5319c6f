"""Writes tiny GGUF files for tests: llamas with random weights, or files with given tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Weights = dict[str, npt.NDArray[np.float32]]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 256, 8, 2, 32, 512, 2
TEXT = "The cat sat on the mat. It wasn't 1234 years old!\n\n  Zażółć gęślą jaźń, 数学 🙂. " * 3


def words() -> tuple[list[str], list[str]]:
    """Train a byte-level vocabulary of 320 tokens, the last three special; returns tokens and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=317, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    ids = tokenizer.get_vocab()
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    return [*sorted(ids, key=ids.__getitem__), "<s>", "</s>", "<|eot_id|>"], merges


def weights(vocab: int = 320, *, tied: bool = True, seed: int = 0) -> Weights:
    """Draw random weights for a tiny llama, by their GGUF names."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> npt.NDArray[np.float32]:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    found = {"token_embd.weight": draw(vocab, HIDDEN), "output_norm.weight": 1 + draw(HIDDEN)}
    if not tied:
        found["output.weight"] = draw(vocab, HIDDEN)
    for i in range(LAYERS):
        found |= {
            f"blk.{i}.attn_norm.weight": 1 + draw(HIDDEN),
            f"blk.{i}.attn_q.weight": draw(HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": draw(HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm.weight": 1 + draw(HIDDEN),
            f"blk.{i}.ffn_gate.weight": draw(FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": draw(FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": draw(HIDDEN, FFN),
        }
    return found


TOKENS, MERGES = words()


@dataclass(frozen=True)
class TinyLlama:
    """The contents of a GGUF file; a field with the value None is left out of the file."""

    weights: Weights = field(default_factory=weights)
    kind: Kind = Kind.F32
    architecture: str = "llama"
    fields: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **fields: Any) -> TinyLlama:
        """Return a copy with changed fields; `__` stands for the dots in their names."""
        changed = {name.replace("__", "."): value for name, value in fields.items()}
        return replace(self, fields={**self.fields, **changed})

    def write(self, path: Path) -> Path:
        writer = GGUFWriter(path, self.architecture)
        family = self.architecture
        fields: dict[str, Any] = {
            f"{family}.block_count": LAYERS,
            f"{family}.context_length": 512,
            f"{family}.embedding_length": HIDDEN,
            f"{family}.feed_forward_length": FFN,
            f"{family}.attention.head_count": HEADS,
            f"{family}.attention.head_count_kv": KV_HEADS,
            f"{family}.attention.layer_norm_rms_epsilon": 1e-6,
            f"{family}.rope.freq_base": 50_000.0,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": [1] * 317 + [3] * 3,
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 317,
            "tokenizer.ggml.eos_token_id": 318,
            **self.fields,
        }
        for name, value in fields.items():
            _add(writer, name, value)
        for name, values in self.weights.items():
            # Norms stay in float32, as every converter leaves them.
            kind = self.kind if values.ndim > 1 else Kind.F32
            writer.add_tensor(name, blocks(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def blocks(values: npt.NDArray[np.float32], kind: Kind) -> npt.NDArray[Any]:
    """Quantise weights if the gguf package can; else make up random blocks with finite scales."""
    try:
        return quantize(values, kind)
    except NotImplementedError:
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        shape = (values.shape[0], values.shape[1] // block_values * block_bytes)
        return np.random.default_rng(values.size).integers(0, 64, shape, np.uint8)


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, Sequence):
        writer.add_array(name, value)
