"""Checks the files of a model folder before MLX reads them, and owns `ModelError`.

MLX does not check offsets in a safetensors file and reads lazily, so a truncated file would fail late or give
wrong weights. Knows file formats only; must not import MLX. A folder in use is locked (`Hold`).
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import glob
import json
import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from turnkeep_client.errors import TurnkeepError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: `(done_bytes, total_bytes, what)`; called on the thread that does the work.
Progress = Callable[[int, int, str], None]

#: Files that may define a tokenizer; current models have the first.
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_CONTEXT_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
)
#: The context of architectures without positions: only memory limits it.
UNBOUNDED: Final = 2**31 - 1
#: The names of weight files, as mlx-lm searches them.
_WEIGHTS: Final = "model*.safetensors"
#: The names of GGUF files, in any case, without those (`._NAME`) that macOS adds on disks of other systems.
GGUF_NAMES: Final = "[!.]*.[gG][gG][uU][fF]"
#: The first bytes of such a file.
_GGUF: Final = b"GGUF"
#: Weights that cannot be read, and what to do.
_UNREADABLE: Final = {
    "adapter_model.safetensors": "merge this adapter into its base model",
    "adapters.safetensors": "merge this adapter into its base model, with mlx_lm.fuse",
    "consolidated*.safetensors": "take the model's version for transformers, or one of mlx-community",
    "*.bin": "convert the weights to safetensors, or take a model of mlx-community",
    "*.gguf": "give the path of this file",
    "*.safetensors": "name the file model.safetensors, if it has all weights",
}
_LENGTH_BYTES: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors library


def silent(_done: int, _total: int, _what: str) -> None:
    """Report no progress."""


class ModelError(TurnkeepError):
    """A model cannot be used. The message is one line with the fault and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))  # names in a broken file may contain line breaks


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises `ModelError` naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}; a model folder needs one") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, it holds {type(content).__name__}")
    return content


def check_folder(folder: Path) -> dict[str, Any]:
    """Return the config of a model folder; raises `ModelError` if a file is missing or incomplete."""
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder; a model is a folder with config.json and model*.safetensors"
        )
    config = read_json(folder / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{folder / 'config.json'} names no model_type; it must say which architecture this is"
        )
    ends = config.get("eos_token_id")
    if isinstance(ends, str):  # transformers would call the tokenizer broken
        raise ModelError(f"{folder / 'config.json'} has eos_token_id {ends!r}; it must be a number or a list")
    for path in weight_files(folder):
        check_safetensors(path)
    return config


def check_tokenizer(folder: Path) -> None:
    """Raise `ModelError` if a folder has no tokenizer file."""
    if not any((folder / name).exists() for name in _TOKENIZERS):
        raise ModelError(f"{folder} has no tokenizer.json; a model folder needs its tokenizer")


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of a model folder; raises `ModelError` if one is missing.

    They are all model*.safetensors, as in mlx-lm; only without such files those of other names in the index.
    An index that does not name the file model.safetensors is one from before the weights were merged.
    """
    there = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    index = folder / "model.safetensors.index.json"
    found = read_json(index).get("weight_map") if index.exists() else None
    named = set(map(str, found.values())) if isinstance(found, dict) else set()
    wanted = {*fnmatch.filter(named, _WEIGHTS)} or named
    if missing := sorted(wanted - there):
        if "model.safetensors" not in there - wanted:
            raise ModelError(
                f"{folder} lacks {missing[0]}, which its index names ({len(missing)} missing in all)"
            )
        wanted = {"model.safetensors"}
    elif usual := fnmatch.filter(there, _WEIGHTS):
        wanted = {*usual}
    if not wanted:
        raise ModelError(f"{folder} has no {_WEIGHTS}; {_other_weights(folder)}")
    return sorted(folder / name for name in wanted)


def _other_weights(folder: Path) -> str:
    """Return what to do with a folder without weights that can be read, given the files that it has."""
    names = sorted(path.name for path in folder.glob("[!.]*") if path.exists())
    for pattern, advice in _UNREADABLE.items():
        if found := fnmatch.filter(names, pattern):
            return f"it has {found[0]}: {advice}"
    return "a model folder needs its weights in this format"


@contextlib.contextmanager
def as_read_by_mlx_lm(folder: Path) -> Iterator[Path]:
    """Yield a folder in which mlx-lm finds the model's `weight_files`: a temporary one with links, if needed.

    mlx-lm searches files by a pattern, and takes brackets in the folder's path for a part of the pattern.
    """
    files = weight_files(folder)
    if sorted(glob.glob(str(folder / _WEIGHTS))) == [str(path) for path in files]:  # noqa: PTH207
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        links = {path.name: path for path in folder.glob("*.json")}
        links |= {f"model-{i:05}.safetensors": path for i, path in enumerate(files)}
        for name, path in links.items():
            (Path(made) / name).symlink_to(path.absolute())
        yield Path(made)


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, by its name or its first bytes: Ollama's have no suffix."""
    if fnmatch.fnmatch(path.name, GGUF_NAMES):
        return True
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_GGUF)) == _GGUF
    return False


class Hold:
    """Marks a model folder as in use, for all processes. Raises `OSError` if it has no config.json.

    The mark ends with `close`, with the deletion of this object, or with the process.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "config.json", os.O_RDONLY)
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the folder. Later calls do nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = close


def is_held(folder: Path) -> bool:
    """Return whether a process on this machine uses a model folder (`Hold`). Raises `OSError`."""
    with (folder / "config.json").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
    return False


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's configuration; in a multimodal config, its part overrides the top level."""
    key = text_part(config)
    return {**config, **(config[key] if key else {})}


def text_part(config: Mapping[str, Any]) -> str | None:
    """Return the key of the language model's part of a multimodal config; None if it is not multimodal."""
    keys = ("text_config", "language_config", "llm_config")
    return next((key for key in keys if isinstance(config.get(key), dict)), None)


def dtype_name(config: dict[str, Any]) -> str:
    """Return the dtype of a model's weights from its configuration: `float16`, or `4-bit` if quantised."""
    text = text_config(config)
    quantization = config.get("quantization")
    if isinstance(quantization, dict) and "bits" in quantization:
        return f"{quantization['bits']}-bit"
    return str(text.get("dtype") or text.get("torch_dtype") or "unknown")


def weight_bits(config: dict[str, Any]) -> int | None:
    """Return the bits per weight from a model's configuration; None if it does not state them."""
    found = re.search(r"\d+", dtype_name(config))
    return int(found[0]) if found else None


def context_tokens(config: dict[str, Any]) -> int:
    """Return a model's context length in tokens from its configuration; `UNBOUNDED` if it has none."""
    text = text_config(config)
    return next((text[key] for key in _CONTEXT_KEYS if isinstance(text.get(key), int)), UNBOUNDED)


def num_parameters(folder: Path) -> int:
    """Count the weights of a model folder; a number into which several weights are packed counts for each."""
    bits = weight_bits(read_json(folder / "config.json")) or 32
    num = 0
    for path in weight_files(folder):
        for name, entry in check_safetensors(path).items():
            if name != "__metadata__" and not name.endswith((".scales", ".biases")):
                values = math.prod(entry["shape"])
                num += values * 32 // bits if entry["dtype"] == "U32" else values
    return num


def check_safetensors(path: Path) -> dict[str, Any]:
    """Return a weight file's header; raises `ModelError` if the file is truncated or broken."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if header_bytes == int.from_bytes(b"version ", "little"):
            raise ModelError(f"{path} is a pointer of Git LFS; fetch the file with git lfs pull")
        if size < _LENGTH_BYTES or header_bytes > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise ModelError(
                f"{path} is truncated or not a safetensors file: its header does not fit its {size} bytes"
            )
        try:
            header = json.loads(file.read(header_bytes))
            entries = [entry for name, entry in header.items() if name != "__metadata__"]
            end = max((int(entry["data_offsets"][1]) for entry in entries), default=0)
            sum(math.prod(entry["shape"]) for entry in entries)  # raises for one without a shape
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
            raise ModelError(f"{path} is broken: its safetensors header cannot be read") from None
    expected = _LENGTH_BYTES + header_bytes + end
    if size != expected:
        raise ModelError(f"{path} is truncated or broken: it has {size} bytes, its header says {expected}")
    return dict(header)


def one_line(error: BaseException) -> str:
    """Return the error's text as one line."""
    return " ".join(str(error).split()) or type(error).__name__
