"""Models are found, loaded and described, also as other programs leave them; broken ones raise an error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny_gguf import TinyLlama

from worker.models import catalog, gguf_model, model
from worker.models.model_files import ModelError
from worker.models.own_sampling import own_sampling


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return gguf_model.convert(TinyLlama().write(folder / "tiny.gguf"), folder / "models", dtype="float32")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "model")


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.model
def test_the_packaged_model_knows_the_capital_of_france(packaged_folder: Path) -> None:
    from mlx_lm.models.cache import make_prompt_cache

    reports: list[tuple[int, int, str]] = []
    found = model.load(packaged_folder, dtype="float32", progress=lambda *report: reports.append(report))
    assert found.name == "SmolLM2-135M-Instruct.Q4_1"
    assert found.kv.bytes_per_token == 46_080
    assert found.context_tokens == 8192
    assert found.vocab_size == 49_152
    assert 2 in found.tokenizer.eos_ids
    assert len(reports) > 3
    assert reports[-1][:2] == (found.weight_bytes, found.weight_bytes)
    cache = make_prompt_cache(found.model)
    tokens = found.tokenizer.encode("The capital of France is", at_start=True)
    answer: list[int] = []
    for _ in range(2):
        answer.append(int(mx.argmax(found.model(mx.array([tokens]), cache=cache)[0, -1]).item()))
        tokens = answer[-1:]
    assert found.tokenizer.decode(answer) == " Paris."


def test_a_model_with_a_rope_scaling_that_mlx_lm_would_ignore_is_refused(folder: Path) -> None:
    change(folder, rope_scaling={"type": "yarn", "factor": 4.0}, model_type="gemma", head_dim=32)
    with pytest.raises(
        ModelError, match=r"has a rope_scaling of type yarn, but mlx-lm's gemma has none; take"
    ):
        model.load(folder, dtype="keep")


@pytest.mark.model
def test_loading_a_model_prints_nothing_and_gives_no_warning(packaged_folder: Path) -> None:
    code = (
        "import sys, pathlib\nfrom worker.models import model\n"
        "model.load(pathlib.Path(sys.argv[1]), dtype=model.default_dtype())"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(packaged_folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def quantised(folder: Path) -> Path:
    """The tiny model in 4 bits, as mlx-lm saves it."""
    from mlx_lm import utils

    found, config = utils.load_model(folder)
    found, config = utils.quantize_model(found, config, group_size=32, bits=4)
    utils.save_model(folder, found)
    utils.save_config(config, folder / "config.json")
    return folder


def test_loading_a_quantised_model_with_dtype_float32_converts_its_layers_to_float32(quantised: Path) -> None:
    kept, cast = (model.load(quantised, dtype=dtype) for dtype in ("keep", "float32"))
    assert kept.weight_bytes < cast.weight_bytes / 4
    assert {array.dtype for _, array in tree_flatten(cast.model.parameters())} == {mx.float32}
    tokens = mx.array([[3, 1, 4, 1, 5]])
    assert mx.allclose(kept.model(tokens), cast.model(tokens), atol=1e-2)


def write_junk(folder: Path, name: str) -> None:
    (folder / name).write_text("{not json")


def truncate(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])


def name_a_missing_shard(folder: Path) -> None:
    there = (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": there.name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shorten_vocabulary(folder: Path, num_rows: int) -> None:
    path = str(folder / "model.safetensors")
    weights: dict[str, mx.array] = mx.load(path)  # type: ignore[assignment]
    table = "model.embed_tokens.weight"
    mx.save_safetensors(path, {name: w[:num_rows] if name == table else w for name, w in weights.items()})
    change(folder, vocab_size=num_rows)


def write_header(folder: Path, **changes: Any) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], **changes}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


BREAKAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "junk config": (lambda f: write_junk(f, "config.json"), r"config\.json cannot be read as JSON"),
    "list as config": (
        lambda f: (f / "config.json").write_text("[]"),
        "must hold a JSON object, it holds list",
    ),
    "no type": (lambda f: change(f, model_type=None), "names no model_type"),
    "unknown type": (
        lambda f: change(f, model_type="hal9000"),
        r"cannot be loaded: Model type hal9000 not supported\.$",
    ),
    "a type that lacks a package": (
        lambda f: change(f, model_type="olmo"),
        "cannot be loaded: the code of its model_type olmo needs a package",
    ),
    "a smaller vocabulary": (
        lambda f: shorten_vocabulary(f, 300),
        r"has vocab_size 300, its tokenizer has 320 tokens \('.+' is 300\); they must agree$",
    ),
    "a smaller vocabulary but for the end token": (
        lambda f: shorten_vocabulary(f, 318),
        r"has vocab_size 318, its tokenizer has 320 tokens \('</s>' is 318\); they must agree$",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"has no model\*\.safetensors"),
    "missing shard": (name_a_missing_shard, r"lacks model-00001-of-00002\.safetensors"),
    "empty weights": (lambda f: truncate(f, 0), "truncated or not a safetensors"),
    "half a header": (lambda f: truncate(f, 100), "truncated or not a safetensors"),
    "half the weights": (
        lambda f: truncate(f, 500_000),
        r"or broken: it has 500000 bytes, its header says \d+",
    ),
    "a byte too few": (lambda f: truncate(f, -1), r"truncated or broken: it has \d+ bytes"),
    "a header with a text as an offset": (
        lambda f: write_header(f, data_offsets=[0, "x"]),
        "its safetensors header cannot be read",
    ),
    "a header without a shape": (
        lambda f: write_header(f, shape=None),
        "its safetensors header cannot be read",
    ),
    "junk weights": (lambda f: write_junk(f, "model.safetensors"), "truncated or not a safetensors"),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        r"has no tokenizer\.json; a model folder needs its tokenizer$",
    ),
    "junk tokenizer": (lambda f: write_junk(f, "tokenizer.json"), "has no tokenizer that can be read"),
}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": "256"}, "Error: "),
        ({"intermediate_size": 64}, r"\(64, 256\) but .* \(512, 256\) for parameter model\.layers\.0\.mlp"),
        ({"num_hidden_layers": 1}, r"parameters not in model: .*layers\.1\."),
        ({"num_hidden_layers": 40}, r"Missing \d+ parameters: .*layers\.10\..* \.\.\."),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_model_config_that_does_not_match_the_weights_is_refused_in_one_short_line(
    folder: Path, fields: dict[str, Any], said: str
) -> None:
    change(folder, **fields)
    match = f"cannot be loaded: .*{said}.*; config.json must be that of these weights$"
    with pytest.raises(ModelError, match=match) as caught:
        model.load(folder, dtype="float32")
    assert len(str(caught.value).partition("cannot be loaded")[2]) < 400


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_model_folder_with_missing_or_damaged_files_is_refused_in_one_line(folder: Path, name: str) -> None:
    damage, complaint = BREAKAGES[name]
    damage(folder)
    with pytest.raises(ModelError, match=complaint) as caught:
        model.load(folder, dtype="float32")
    assert "\n" not in str(caught.value)


def test_loading_a_model_with_an_unknown_dtype_raises_an_error(tiny: Path) -> None:
    with pytest.raises(
        ModelError, match="dtype is 'int3'; it must be one of keep, float32, float16, bfloat16"
    ):
        model.load(tiny, dtype="int3")


@pytest.mark.parametrize("spec", ["nothing/here/at-all", "missing.gguf", "gpt"])
def test_loading_a_missing_model_raises_an_error_that_lists_the_accepted_kinds_of_names(
    spec: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"give a model folder, a \.gguf file or a hub id"):
        model.resolve(spec, tmp_path, dtype="float32")


def test_loading_a_text_file_as_a_model_raises_an_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ModelError, match=r"neither a model folder nor a \.gguf file"):
        model.resolve(str(path), tmp_path, dtype="float32")


def in_hub_cache(cache: Path, tiny: Path) -> Path:
    repository = cache / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    return shutil.copytree(tiny, repository / "snapshots" / ("a" * 40))


def test_a_loaded_model_is_named_after_its_folder_symbolic_link_or_gguf_file(
    tiny: Path, tmp_path: Path
) -> None:
    """A base model that is named in config.json does not change the name."""
    for name in ("first", "second"):
        folder = shutil.copytree(tiny, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"_name_or_path": "org/base"}))
        assert model.load(folder, dtype="keep").name == name
    (tmp_path / "linked").symlink_to(tmp_path / "first")
    assert model.load(tmp_path / "linked", dtype="keep").name == "linked"
    made = shutil.copytree(tiny, tmp_path / "Tiny.Q4_0-float32-0123456789abcdef")
    assert model.load(made, dtype="keep").name == "Tiny.Q4_0", "the GGUF file that it was made from"


def test_the_model_list_has_packaged_converted_and_hub_models_but_none_with_unreadable_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    in_hub_cache(tmp_path / "hub", tiny)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    data_dir = tiny.parent.parent
    (data_dir / "models" / "empty").mkdir()
    for name, changes in {"broken": {"data_offsets": [0, "x"]}, "odd": {}}.items():
        made = data_dir / "models" / name
        made.mkdir()
        (made / "config.json").write_text('{"model_type": "llama", "quantization": 3}')
        write_header(made, **changes)
    TinyLlama().but(tokenizer__ggml__tokens=3).write(data_dir / "models" / "strange.gguf")
    packaged, odd, strange, converted, hub = catalog.list_models(data_dir)
    assert (odd.name, odd.dtype, strange.name) == ("odd", "unknown", "strange")
    assert (packaged.name, packaged.origin) == ("SmolLM2-135M-Instruct.Q4_1", "packaged")
    assert catalog.named("packaged", data_dir) == packaged, "as settings name it"
    assert (converted.name, converted.origin, converted.path, converted.dtype) == (
        "tiny",
        "converted",
        tiny,
        "float32",
    )
    assert (hub.name, hub.origin) == ("org/name", "hub")
    assert hub.size_bytes == converted.size_bytes > 1_000_000


MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"


def split(tiny_copy: Path, names: tuple[str, str]) -> Path:
    """Split the weights in two files, with an index."""
    weights = mx.load(str(tiny_copy / MODEL))
    assert isinstance(weights, dict)
    mx.eval(weights)
    (tiny_copy / MODEL).unlink()
    files = {name: names[i % 2] for i, name in enumerate(sorted(weights))}
    for file in names:
        part = {name: weights[name] for name in files if files[name] == file}
        mx.save_safetensors(str(tiny_copy / file), part, metadata={"format": "mlx"})
    return index(tiny_copy, files)


def index(tiny_copy: Path, files: dict[str, str]) -> Path:
    (tiny_copy / INDEX).write_text(json.dumps({"weight_map": files}))
    return tiny_copy


def moved(tiny_copy: Path, name: str) -> Path:
    return tiny_copy.rename(tiny_copy.with_name(name))


def add(tiny_copy: Path, name: str) -> Path:
    mx.save_safetensors(str(tiny_copy / name), {"mtp.weight": mx.ones((2, 2))})
    return tiny_copy


def ended(tiny_copy: Path, ends: Any) -> Path:
    (tiny_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return tiny_copy


def linked(tiny_copy: Path) -> Path:
    """Make a snapshot as in the hub's cache: links to files named by digests."""
    blobs, snapshot = tiny_copy.with_name("blobs"), tiny_copy.with_name("snapshot")
    tiny_copy.rename(blobs)
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
def tiny_copy(tiny_model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.mark.parametrize("change", READ.values(), ids=READ)
def test_a_model_folder_in_any_layout_that_other_programs_write_is_loaded_with_the_same_logits(
    tiny_model: Path, tiny_copy: Path, tmp_path: Path, change: Callable[[Path], Path]
) -> None:
    changed, tokens = change(tiny_copy), mx.array([[3, 4, 5]])
    found = model.load(model.resolve(str(changed), tmp_path, dtype="float32"), dtype="float32")
    expected = model.load(tiny_model, dtype="float32")
    assert mx.array_equal(found.model(tokens), expected.model(tokens))
    assert found.tokenizer.eos_ids >= expected.tokenizer.eos_ids
    entry = catalog.named(str(changed), tmp_path)
    assert (entry.origin, entry.size_bytes >= found.weight_bytes) == ("elsewhere", True)


@pytest.mark.parametrize("name", ["tiny.GGUF", "sha256-0123abcd", "a[1]b/tiny.gguf"])
def test_a_gguf_file_is_recognised_by_its_name_in_any_case_or_by_its_first_bytes(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    path = TinyLlama().write(tmp_path / name)
    assert catalog.named(str(path), tmp_path).architecture == "llama"
    made = model.resolve(str(path), tmp_path / "data", dtype="float32")
    assert model.load(made, dtype="float32").config["model_type"] == "llama"


def without_weights(tiny_copy: Path, name: str) -> None:
    (tiny_copy / MODEL).rename(tiny_copy / name)


def configure(tiny_copy: Path, **fields: Any) -> None:
    path = tiny_copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def quantised_by(tiny_copy: Path, method: str) -> None:
    configure(tiny_copy, quantization_config={"quant_method": method, "bits": 4})


def add_bits(tiny_copy: Path) -> None:
    """Add a scale to the weights, as bitsandbytes does."""
    quantised_by(tiny_copy, "bitsandbytes")
    mx.save_safetensors(str(tiny_copy / "model-2.safetensors"), {"model.layers.0.absmax": mx.ones((2,))})


def dangle(tiny_copy: Path) -> None:
    (tiny_copy / MODEL).unlink()
    (tiny_copy / MODEL).symlink_to(tiny_copy / "nothing")


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
    "a file that macOS writes on disks of other systems": (
        lambda f: without_weights(f, "._adapters.safetensors"),
        "; a model folder needs its weights in this format$",
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
def test_a_model_folder_without_readable_weights_is_refused_with_the_reason(
    tiny_copy: Path, tmp_path: Path, change: Callable[[Path], object], why: str
) -> None:
    change(tiny_copy)
    with pytest.raises(ModelError, match=why):
        model.load(model.resolve(str(tiny_copy), tmp_path, dtype="float32"), dtype="float32")


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ({"eos_token_id": 2}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "top_k": None}, {"temperature": 0.6, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 40}, {"temperature": 0.0, "top_k": 40}),
        ({"temperature": -1, "top_p": "x", "top_k": 1.5, "min_p": [], "repetition_penalty": 0}, {}),
    ],
)
def test_sampling_options_of_a_models_generation_config_are_used_unless_out_of_range_or_mistyped(
    tmp_path: Path, config: dict[str, object], own: dict[str, float]
) -> None:
    assert own_sampling(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert own_sampling(tmp_path) == own
