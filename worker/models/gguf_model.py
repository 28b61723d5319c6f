"""Converts a GGUF file of a known family to a model folder that MLX reads.

Dequantises the weights some rows at a time into one safetensors file, so memory stays far below the model's
size. A folder gets its final name only when it is complete. Must not import MLX.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from gguf.constants import GGMLQuantizationType

from worker.process.formatting import size

from . import gguf_file, gguf_tokenizer, tokenizer_files
from .converted import folder_of
from .gguf_family import FAMILIES, GgufFamily, unsupported
from .model_files import ModelError, one_line, silent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from .gguf_file import GgufFile, GgufTensor
    from .model_files import Progress

WeightDtype = Literal["float32", "float16", "bfloat16"]

_UNFINISHED: Final = ".unfinished-"
_SAFETENSORS_DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

_OUTER_PARTS: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS: Final = "rope_freqs.weight"
#: The number of layers of Gemma 3 27B, whose queries have another scale; its files do not state it.
_GEMMA3_27B_LAYERS: Final = 62


def convert(source: Path, models_dir: Path, *, dtype: str, progress: Progress = silent) -> Path:
    """Return the model folder made from a GGUF file; convert the file unless that folder is there.

    `dtype` is float32, float16, bfloat16, or keep: the type nearest to the types in the file. Raises
    `ModelError`.
    """
    try:
        folder = folder_of(source, models_dir, dtype)  # from before: the file may be replaced meanwhile
        if folder.is_dir():
            return folder
        conversion = _prepare(source, dtype)
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir):
            if not folder.is_dir():  # otherwise another process has just written it
                _write(conversion, folder, progress)
                tokenizer_files.keep(
                    conversion.tokenizer.tokenizer, conversion.tokenizer.config, folder, models_dir
                )
    except OSError as error:
        raise ModelError(f"{source} cannot be converted into {models_dir}: {one_line(error)}") from None
    return folder


def check_room(source: Path, data_dir: Path, *, dtype: str) -> None:
    """Raise `ModelError` if `convert` would find no room in a data directory for a GGUF file's weights.

    The directory may not exist yet.
    """
    there = next(folder for folder in (data_dir, *data_dir.parents) if folder.exists())
    try:
        _check_room(_prepare(source, dtype), there)
    except OSError as error:
        raise ModelError(f"{source} cannot be converted into {data_dir}: {one_line(error)}") from None


@dataclass(frozen=True, slots=True)
class _Conversion:
    file: GgufFile
    family: GgufFamily
    dtype: WeightDtype
    config: dict[str, Any]
    tokenizer: gguf_tokenizer.GgufTokenizer
    names: dict[str, GgufTensor]  # by the name in the MLX model

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def num_bytes(self) -> int:
        return self.itemsize * sum(tensor.num_values for tensor in self.names.values())


def _prepare(source: Path, dtype: str) -> _Conversion:
    file = gguf_file.read(source)
    if not file.tensors:
        raise ModelError(f"{source} has no tensors; it must be a whole model")
    weights = _weight_dtype(dtype, file)
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise ModelError(unsupported(str(file.path), file.architecture, file.path.name))
    try:
        names = _names(file, family)
        tokenizer = gguf_tokenizer.build(file.fields, file.architecture)
        config = _config(file, family, names, tokenizer, weights)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ModelError(
            f"{file.path} does not describe a {file.architecture} model: {one_line(error)}"
        ) from None
    return _Conversion(file, family, weights, config, tokenizer, names)


def _check_room(conversion: _Conversion, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if conversion.num_bytes > free:
        raise ModelError(
            f"converting {conversion.file.path} needs {size(conversion.num_bytes)} in {folder};"
            f" it has {size(free)}"
        )


def _names(file: GgufFile, family: GgufFamily) -> dict[str, GgufTensor]:
    layers = [str(i) for i in range(min(_number(file, "block_count"), len(file.tensors)))]
    names = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS and family.is_paired:
            continue
        stem, _, suffix = name.rpartition(".")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            known = part in family.parts and layer in layers
            target = f"model.layers.{layer}.{family.parts[part]}" if known else None
        else:
            target = _OUTER_PARTS.get(stem)
        if target is None or suffix not in {"weight", "bias"}:
            raise ModelError(
                f"{file.path} has a tensor {name}, which a dense {file.architecture} model does not have"
            )
        names[f"{target}.{suffix}"] = tensor
    needed = [f"model.layers.{layer}.{part}.weight" for layer in layers for part in family.parts.values()]
    missing = [n for n in ("model.embed_tokens.weight", "model.norm.weight", *needed) if n not in names]
    if missing:
        raise ModelError(f"{file.path} lacks the tensor for {missing[0]} ({len(missing)} missing in all)")
    return names


def _config(
    file: GgufFile,
    family: GgufFamily,
    names: Mapping[str, GgufTensor],
    tokenizer: gguf_tokenizer.GgufTokenizer,
    dtype: WeightDtype,
) -> dict[str, Any]:
    hidden, heads = _number(file, "embedding_length"), _number(file, "attention.head_count")
    head_dim = _number(file, "attention.key_length", hidden // heads)
    rope_dim = _number(file, "rope.dimension_count", head_dim)
    if rope_dim != head_dim:
        raise ModelError(
            f"{file.path} rotates {rope_dim} of {head_dim} dimensions of a head; it must rotate all"
        )
    return {
        "model_type": family.model_type,
        "_name_or_path": file.path.stem,
        "hidden_size": hidden,
        "num_hidden_layers": _number(file, "block_count"),
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": float(_field(file, "attention.layer_norm_rms_epsilon", 1e-5)),
        "vocab_size": names["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": _number(file, "context_length"),
        "rope_theta": float(_field(file, "rope.freq_base", 10_000.0)),
        "rope_traditional": family.is_paired,
        "rope_scaling": _rope_scaling(file, head_dim),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in names,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in names,
        "tie_word_embeddings": "lm_head.weight" not in names,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids),
        "torch_dtype": dtype,
        **(_gemma3(file, hidden // heads, head_dim) if family.model_type == "gemma3_text" else {}),
    }


def _gemma3(file: GgufFile, share: int, head_dim: int) -> dict[str, Any]:
    """Return the config.json fields of Gemma 3's windows and heads; `share` is hidden size / heads."""
    is_27b = _number(file, "block_count") == _GEMMA3_27B_LAYERS
    return {
        "sliding_window": _number(file, "attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": float(_field(file, "rope.freq_base_swa", 10_000.0)),
        "query_pre_attn_scalar": share if is_27b else head_dim,
    }


def _rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    if _ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, head_dim)
    kind = _field(file, "rope.scaling.type", "none")
    factor = float(_field(file, "rope.scaling.factor", _field(file, "rope.scale_linear", 1.0)))
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = _number(file, "rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ModelError(f"{file.path} scales rope by {kind!r}; none, linear, yarn and Llama 3 are supported")


def _llama3_scaling(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """Recover Llama 3's `rope_scaling` from the divisor of each frequency, all that a GGUF file has of it.

    The other constants are the same in all published Llama 3 models. The formula comes from transformers'
    `_compute_llama3_parameters`.
    """
    factors = np.concatenate([rows.ravel() for rows in file.rows(file.tensors[_ROPE_FACTORS])])
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    theta = float(_field(file, "rope.freq_base", 10_000.0))
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(f"{file.path} has rope factors that are not Llama 3's; only those are supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _field(file: GgufFile, key: str, default: Any = None) -> Any:
    key = f"{file.architecture}.{key}"
    value = file.fields.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:  # one number for each layer
        value = value[0]
    if value is None or isinstance(value, list):
        raise ModelError(f"{file.path} has no single value for {key}, which its family needs")
    return value


def _number(file: GgufFile, key: str, default: int | None = None) -> int:
    value = _field(file, key, default)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(
            f"{file.path} has {file.architecture}.{key} = {value!r}; it must be a positive whole number"
        )
    return value


def _weight_dtype(dtype: str, file: GgufFile) -> WeightDtype:
    if dtype in {"float32", "float16", "bfloat16"}:
        return dtype  # type: ignore[return-value]  # checked in the line above
    if dtype != "keep":
        raise ModelError(f"the weights' dtype is {dtype!r}; it must be keep, float32, float16 or bfloat16")
    kind = max(file.tensors.values(), key=lambda tensor: tensor.num_values).kind
    if kind == GGMLQuantizationType.F32:
        return "float32"
    return "bfloat16" if kind == GGMLQuantizationType.BF16 else "float16"


def _write(conversion: _Conversion, folder: Path, progress: Progress) -> None:
    _check_room(conversion, folder.parent)
    unfinished = folder.with_name(_UNFINISHED + folder.name)
    unfinished.mkdir()
    try:
        conversion.tokenizer.save(unfinished)
        _write_json(unfinished / "config.json", conversion.config)
        ends = {key: conversion.config[key] for key in ("bos_token_id", "eos_token_id")}
        _write_json(unfinished / "generation_config.json", ends)
        _write_weights(unfinished / "model.safetensors", conversion, progress)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_weights(path: Path, conversion: _Conversion, progress: Progress) -> None:
    """Write a safetensors file: the header's length, the header, the tensors' bytes without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, tensor in conversion.names.items():
        start, end = end, end + tensor.num_values * conversion.itemsize
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[conversion.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    progress(done, conversion.num_bytes, "converting weights")
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in conversion.names.values():
            is_norm = conversion.family.norms_have_one and tensor.name.endswith("norm.weight")
            for rows in conversion.file.rows(tensor):
                values = rows - 1 if is_norm else rows
                done += file.write(_cast(values, conversion.dtype, tensor.name).data)
                progress(done, conversion.num_bytes, "converting weights")
        file.flush()
        os.fsync(file.fileno())


def _cast(values: npt.NDArray[np.float32], dtype: WeightDtype, name: str) -> npt.NDArray[Any]:
    if dtype == "float32":
        return np.ascontiguousarray(values)
    if dtype == "bfloat16":  # numpy has no such type: round a float32 to its upper half, ties to even
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    try:
        with np.errstate(over="raise"):
            return np.ascontiguousarray(values.astype(np.float16))
    except FloatingPointError:
        raise ModelError(f"tensor {name} has values beyond float16; use bfloat16 or float32") from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


@contextmanager
def _locked(models_dir: Path) -> Iterator[None]:
    """Lock the models folder against other processes, and remove unfinished folders of earlier ones."""
    with (models_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for unfinished in models_dir.glob(_UNFINISHED + "*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        yield
