"""Reads GGUF files: fields, tensor offsets and tensor values.

Checks every length against the file, so a truncated or forged file is refused at once (the `gguf` package's
own reader loops for hours over an array length of 2**60). Uses that package only to dequantise blocks.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Must not import MLX.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from .model_files import ModelError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_ROWS_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a GGUF file; `shape` is in numpy's order, `offset` counts from the file's start."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def num_values(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The fields and the tensors of one file."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The model family that the file names; it is also the prefix of the family's fields."""
        return str(self.fields.get("general.architecture"))

    def rows(self, tensor: GgufTensor) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the tensor's values as float32, some rows at a time, to limit memory. Raises `ModelError`."""
        row_values = tensor.shape[-1]
        num_rows = tensor.num_values // row_values
        raw = np.memmap(self.path, np.uint8, "r", tensor.offset, (num_rows, tensor.num_bytes // num_rows))
        step = max(1, _ROWS_BYTES // (4 * row_values))
        for start in range(0, num_rows, step):
            yield _values(tensor, raw[start : start + step])


def read(path: Path) -> GgufFile:
    """Read a file's fields and tensor list; raises `ModelError`."""
    try:
        if not path.stat().st_size:
            raise ModelError(f"{path} is empty; it must be a GGUF file with a model's weights")
        data = np.memmap(path, np.uint8, "r")
    except OSError as error:
        raise ModelError(f"{path} cannot be read as GGUF: {one_line(error)}") from None
    try:
        fields, tensors = _parse(data.data)
    except (struct.error, ValueError, KeyError) as error:
        raise ModelError(f"{path} is truncated or not a GGUF file: {one_line(error)}") from None
    return GgufFile(path, fields, tensors)


def _values(tensor: GgufTensor, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    try:
        # The copy is aligned; a float32 view at the file's offset may not be.
        values: npt.NDArray[np.float32] = dequantize(np.array(rows), tensor.kind)
    except NotImplementedError:
        raise ModelError(
            f"tensor {tensor.name} has type {tensor.kind.name}, which cannot be dequantised"
        ) from None
    return values


class _Cursor:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.offset = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self._read(struct.calcsize("<" + code)))
        return value

    def string(self) -> str:
        return bytes(self._read(self.number("Q"))).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_scalar(kind))
        kind, length = self.number("I"), self.number("Q")
        if kind == _STRING:
            return [self.string() for _ in range(length)]
        code = _scalar(kind)
        return list(struct.unpack(f"<{length}{code}", self._read(length * struct.calcsize("<" + code))))

    def _read(self, size: int) -> memoryview:
        start, end = self.offset, self.offset + size
        if end > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, inside a value that ends at {end}")
        self.offset = end
        return self._data[start:end]


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown field type {kind}")
    return _SCALARS[kind]


def _parse(data: memoryview) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    if bytes(data[:4]) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    cursor = _Cursor(data)
    cursor.offset = 4
    if (version := cursor.number("I")) not in _VERSIONS:
        raise ValueError(f"version {version} is not one of {_VERSIONS}")
    num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
    fields = {}
    for _ in range(num_fields):
        name = cursor.string()
        fields[name] = cursor.value(cursor.number("I"))
    heads = [_tensor_head(cursor) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ValueError(f"its alignment is {alignment!r}")
    start = -(-cursor.offset // alignment) * alignment
    tensors = {}
    for name, kind, shape, offset in heads:
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or 0 in shape or shape[-1] % block_values:
            raise ValueError(f"tensor {name} of type {kind.name} cannot have the shape {shape}")
        num_bytes = math.prod(shape) // block_values * block_bytes
        if start + offset + num_bytes > len(data):
            raise ValueError(
                f"it ends at byte {len(data)}, inside tensor {name} that ends at {start + offset + num_bytes}"
            )
        tensors[name] = GgufTensor(name, kind, shape, start + offset, num_bytes)
    return fields, tensors


def _tensor_head(cursor: _Cursor) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    name = cursor.string()
    if (num_dimensions := cursor.number("I")) > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(num_dimensions)]))
    return name, GGMLQuantizationType(cursor.number("I")), shape, cursor.number("Q")
