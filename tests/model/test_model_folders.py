"""Folders and files as other programs leave them are loaded, or refused with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny_gguf import TinyLlama

from worker.models import catalog, model
from worker.models.model import ModelError

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"


def split(folder: Path, names: tuple[str, str]) -> Path:
    """Split the weights in two files, with an index."""
    weights = mx.load(str(folder / MODEL))
    assert isinstance(weights, dict)
    mx.eval(weights)
    (folder / MODEL).unlink()
    files = {name: names[i % 2] for i, name in enumerate(sorted(weights))}
    for file in names:
        part = {name: weights[name] for name in files if files[name] == file}
        mx.save_safetensors(str(folder / file), part, metadata={"format": "mlx"})
    return index(folder, files)


def index(folder: Path, files: dict[str, str]) -> Path:
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return folder


def moved(folder: Path, name: str) -> Path:
    return folder.rename(folder.with_name(name))


def add(folder: Path, name: str) -> Path:
    mx.save_safetensors(str(folder / name), {"mtp.weight": mx.ones((2, 2))})
    return folder


def ended(folder: Path, ends: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def linked(folder: Path) -> Path:
    """Make a snapshot as in the hub's cache: links to files named by digests."""
    blobs, snapshot = folder.with_name("blobs"), folder.with_name("snapshot")
    folder.rename(blobs)
    snapshot.mkdir()
    for i, path in enumerate(sorted(blobs.iterdir())):
        (snapshot / path.name).symlink_to(path.rename(blobs / f"{i:064}"))
    return snapshot


READ: dict[str, Callable[[Path], Path]] = {
    "brackets in the path": lambda f: moved(f, "a[1]b"),
    "brackets in the path of shards": lambda f: moved(
        split(f, ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")), "[x] a*b?"
    ),
    "spaces and other letters": lambda f: moved(f, "mój model (數學) 🙂"),
    "links to digests": linked,
    "shards of other names": lambda f: split(f, ("weights.00.safetensors", "weights.01.safetensors")),
    "a file for drafts beside the model": lambda f: index(
        add(f, "mtp.safetensors"), {"a": MODEL, "mtp.weight": "mtp.safetensors"}
    ),
    "a file for drafts that was not downloaded": lambda f: index(f, {"a": MODEL, "b": "mtp.safetensors"}),
    "an index from before a merge": lambda f: index(f, {"a": "model-00001-of-00002.safetensors"}),
    "an index without names": lambda f: index(f, {}),
    "weights in another form too": lambda f: add(f, "consolidated.safetensors"),
    "a folder named as a file": lambda f: (f / "model-2.safetensors").mkdir() or f,  # type: ignore[func-returns-value]
    "an adapter too": lambda f: add(f, "adapter_model.safetensors"),
    "end tokens as texts": lambda f: ended(f, ["2", 0]),
    "an end token as text": lambda f: ended(f, "2"),
}


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.mark.parametrize("change", READ.values(), ids=READ)
def test_a_folder_as_other_programs_leave_it_is_read(
    tiny_model: Path, folder: Path, tmp_path: Path, change: Callable[[Path], Path]
) -> None:
    changed, tokens = change(folder), mx.array([[3, 4, 5]])
    found = model.load(model.resolve(str(changed), tmp_path, dtype="float32"), dtype="float32")
    expected = model.load(tiny_model, dtype="float32")
    assert mx.array_equal(found.model(tokens), expected.model(tokens))
    assert found.eos_ids >= expected.eos_ids
    entry = catalog.named(str(changed), tmp_path)
    assert (entry.origin, entry.size_bytes >= found.weight_bytes) == ("elsewhere", True)


@pytest.mark.parametrize("name", ["tiny.GGUF", "sha256-0123abcd", "a[1]b/tiny.gguf"])
def test_a_gguf_file_is_known_by_its_name_in_any_case_or_by_its_first_bytes(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    path = TinyLlama().write(tmp_path / name)
    assert catalog.named(str(path), tmp_path).architecture == "llama"
    made = model.resolve(str(path), tmp_path / "data", dtype="float32")
    assert model.load(made, dtype="float32").config["model_type"] == "llama"


def without_weights(folder: Path, name: str) -> None:
    (folder / MODEL).rename(folder / name)


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def quantised_by(folder: Path, method: str) -> None:
    configure(folder, quantization_config={"quant_method": method, "bits": 4})


def add_bits(folder: Path) -> None:
    """Add a scale to the weights, as bitsandbytes does."""
    quantised_by(folder, "bitsandbytes")
    mx.save_safetensors(str(folder / "model-2.safetensors"), {"model.layers.0.absmax": mx.ones((2,))})


def dangle(folder: Path) -> None:
    (folder / MODEL).unlink()
    (folder / MODEL).symlink_to(folder / "nothing")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "GPTQ": (lambda f: quantised_by(f, "gptq"), r"are quantised by gptq; take the original model, or one of"),
    "a method without a name": (
        lambda f: configure(f, quantization_config={"bits": 4}),
        r"are quantised by an unnamed method; take the original",
    ),
    "bitsandbytes": (
        add_bits,
        r"are quantised by bitsandbytes; take the original model, or one of mlx-community$",
    ),
    "an adapter alone": (
        lambda f: without_weights(f, "adapters.safetensors"),
        r"has no model\*\.safetensors; it has adapters\.safetensors: merge this adapter into its base model",
    ),
    "Mistral's own form": (
        lambda f: without_weights(f, "consolidated.safetensors"),
        r"it has consolidated\.safetensors: take the model's version for transformers",
    ),
    "PyTorch's form": (lambda f: without_weights(f, "pytorch_model.bin"), r"convert the weights to safetens"),
    "a GGUF file in a folder": (
        lambda f: without_weights(f, "tiny.Q8_0.gguf"),
        r"it has tiny\.Q8_0\.gguf: give the path of this file$",
    ),
    "a file of another name": (
        lambda f: without_weights(f, "llama.safetensors"),
        r"it has llama\.safetensors: name the file model\.safetensors, if it has all weights$",
    ),
    "an end token as text": (
        lambda f: configure(f, eos_token_id="2"),
        r"config\.json has eos_token_id '2'; it must be a number or a list$",
    ),
    "a link to nothing": (dangle, r"has no model\*\.safetensors; a model folder needs"),
    "a pointer of Git LFS": (
        lambda f: (f / MODEL).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        r"is a pointer of Git LFS; fetch the file with git lfs pull$",
    ),
}


@pytest.mark.parametrize(("change", "why"), REFUSED.values(), ids=REFUSED)
def test_a_folder_without_weights_that_can_be_read_is_refused_with_the_reason(
    folder: Path, tmp_path: Path, change: Callable[[Path], object], why: str
) -> None:
    change(folder)
    with pytest.raises(ModelError, match=why):
        model.load(model.resolve(str(folder), tmp_path, dtype="float32"), dtype="float32")
