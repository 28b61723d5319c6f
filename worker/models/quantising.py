"""Quantises a model's weights to few bits, with the functions of mlx-lm's own conversion.

`turnkeep model convert` calls it; the module knows nothing of serving. The new folder is written inside a
hidden one, and moved to its place when complete. If the process is killed, the next conversion to the same
name removes the incomplete files.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
from typing import TYPE_CHECKING, Any, Final

from worker.process.formatting import size

from . import blas
from .misfits import explain
from .model_files import (
    ModelError,
    as_read_by_mlx_lm,
    check_folder,
    check_tokenizer,
    dtype_name,
    num_parameters,
    one_line,
    text_config,
)
from .partial_import import import_mlx_lm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .model_files import Progress

BITS: Final = (2, 3, 4, 5, 6, 8)
_WHAT: Final = "quantising weights"
#: A scale and a bias of 16 bits for each group of 64 weights.
_BITS_OF_SCALES: Final = 0.5


def quantise(source: Path, folder: Path, bits: int, progress: Progress) -> None:
    """Write the model folder `source` to `folder`, with weights of `bits` bits. Raises `ModelError`.

    `progress` counts the bytes of the new weights as they are made.
    """
    config = check_folder(source)
    check_tokenizer(source)
    if "quantization" in config or "quantization_config" in config:
        raise ModelError(f"{source} is quantised already ({dtype_name(config)}); convert the original model")
    if folder.exists():
        raise ModelError(f"{folder} is there already; remove it, or give another name with --name")
    written_bytes = int(num_parameters(source) * (bits + _BITS_OF_SCALES) / 8)
    try:
        with _unfinished(folder) as unfinished:
            if written_bytes > (free := shutil.disk_usage(folder.parent).free):
                raise ModelError(f"{folder} needs {size(written_bytes)} on disk; there are {size(free)}")
            _convert(source, unfinished, bits, config, progress)
            _copy_others(source, unfinished)
            unfinished.rename(folder)
    except OSError as error:
        raise ModelError(f"{source} cannot be converted to {folder}: {one_line(error)}") from None


def _convert(source: Path, unfinished: Path, bits: int, config: dict[str, Any], progress: Progress) -> None:
    blas.preload()
    import_mlx_lm()
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    try:
        # mlx-lm prints its steps.
        with contextlib.redirect_stdout(io.StringIO()), as_read_by_mlx_lm(source) as there:
            model, written = load_model(there, lazy=True)
            _cast(model, config)
            model, written = quantize_model(model, written, None, bits)
            _make(model, progress)
            has_vision = "vision_tower" in getattr(model, "model", {})
            save_model(unfinished, model, donate_model=True)
            save_config(written, unfinished / "config.json", keep_vision_config=has_vision)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  # architectures raise anything for a config that does not fit
        raise ModelError(f"{source} cannot be converted: {explain(text_config(config), error)}") from None


@contextlib.contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """Yield a temporary path for writing `folder`; remove it at the end. Locks other processes out."""
    around = folder.with_name(f".quantising-{folder.name}")
    around.mkdir(parents=True, exist_ok=True)
    fd = os.open(around, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(f"another process is making {folder.name}; wait for it") from None
        unfinished = around / folder.name
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            yield unfinished
        finally:
            shutil.rmtree(around, ignore_errors=True)
    finally:
        os.close(fd)


def _copy_others(source: Path, unfinished: Path) -> None:
    """Copy a folder's other files, such as the tokenizer's.

    They are copied because transformers would save them in another form.
    """
    for path in source.iterdir():
        is_config = path.name == "config.json" or path.name.endswith(".index.json")
        if path.is_file() and path.suffix in {".json", ".jinja", ".model", ".txt"} and not is_config:
            shutil.copyfile(path, unfinished / path.name)


def _cast(model: Any, config: dict[str, Any]) -> None:
    """Cast weights to the dtype that the configuration names, as mlx-lm does."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    name = config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    if name not in {"float16", "bfloat16", "float32"}:
        return
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def cast(path: str, weight: Any) -> Any:
        is_cast = may_cast(path) and mx.issubdtype(weight.dtype, mx.floating)
        return weight.astype(getattr(mx, name)) if is_cast else weight

    model.update(tree_map_with_path(cast, model.parameters()))


def _make(model: Any, progress: Progress) -> None:
    """Evaluate the quantised weights one by one: each original is read when needed, and then freed."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    weights: list[Any] = [*dict(tree_flatten(model.parameters())).values()]
    done, total = 0, sum(weight.nbytes for weight in weights)
    for weight in weights:
        progress(done, total, _WHAT)
        mx.eval(weight)
        done += weight.nbytes
    progress(total, total, _WHAT)
