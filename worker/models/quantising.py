"""Makes a model with weights of few bits from another one, by mlx-lm's own conversion.

`turnkeep model convert` calls it. It knows nothing of how the result is served. The result appears in the
models' folder as a whole: until then it is in a hidden one, which the next conversion to this name removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import threading
from typing import TYPE_CHECKING, Any, Final

from worker.process.formatting import size

from . import blas
from .misfits import explain
from .model_files import (
    ModelError,
    check_folder,
    check_tokenizer,
    dtype_name,
    num_parameters,
    one_line,
    text_config,
    weight_files,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .model_files import Progress

BITS: Final = (2, 3, 4, 5, 6, 8)
_POLL_S: Final = 0.2
#: A scale and a bias of 16 bits for each group of 64 weights.
_BITS_OF_SCALES: Final = 0.5


def quantise(source: Path, folder: Path, bits: int, progress: Progress) -> None:
    """Write the model folder `source` to `folder`, with weights of so many bits. Raises `ModelError`.

    `progress` counts the bytes of the weights that are read and written, on a thread of its own.
    """
    config = check_folder(source)
    check_tokenizer(source)
    if "quantization" in config or "quantization_config" in config:
        raise ModelError(f"{source} is quantised already ({dtype_name(config)}); convert the original model")
    if folder.exists():
        raise ModelError(f"{folder} is there already; remove it, or give another name with --name")
    read_bytes = sum(path.stat().st_size for path in weight_files(source))
    written_bytes = int(num_parameters(source) * (bits + _BITS_OF_SCALES) / 8)
    try:
        with _unfinished(folder) as unfinished:
            if written_bytes > (free := shutil.disk_usage(folder.parent).free):
                raise ModelError(f"{folder} needs {size(written_bytes)} on disk; there are {size(free)}")
            with _counted(unfinished, read_bytes, written_bytes, progress):
                _convert(source, unfinished, bits, config)
            _copy_others(source, unfinished)
            unfinished.rename(folder)
    except OSError as error:
        raise ModelError(f"{source} cannot be converted to {folder}: {one_line(error)}") from None


def _convert(source: Path, unfinished: Path, bits: int, config: dict[str, Any]) -> None:
    blas.preload()
    from mlx_lm.convert import convert

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its steps
            convert(str(source), str(unfinished), quantize=True, q_bits=bits)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  # architectures raise anything for a config that does not fit
        raise ModelError(f"{source} cannot be converted: {explain(text_config(config), error)}") from None


@contextlib.contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """Yield where to write a folder; what is left there at the end is removed. One process at a time."""
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
    """Copy all but config and weights: transformers writes a tokenizer as it has understood it."""
    for path in source.iterdir():
        is_config = path.name == "config.json" or path.name.endswith(".index.json")
        if path.is_file() and path.suffix in {".json", ".jinja", ".model", ".txt"} and not is_config:
            shutil.copyfile(path, unfinished / path.name)


@contextlib.contextmanager
def _counted(unfinished: Path, read_bytes: int, written_bytes: int, progress: Progress) -> Iterator[None]:
    """Report progress while a block runs: mlx-lm itself says nothing of it."""
    import psutil

    process, done = psutil.Process(), threading.Event()
    total, what = read_bytes + written_bytes, "quantising weights"

    def read() -> int:  # macOS does not count it
        return process.io_counters().read_chars if hasattr(process, "io_counters") else 0

    before = read()

    def watch() -> None:
        while not done.wait(_POLL_S):
            written = sum(path.stat().st_size for path in unfinished.glob("*.safetensors"))
            progress(min(read() - before, read_bytes) + min(written, written_bytes - 1), total, what)

    progress(0, total, what)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    progress(total, total, what)
