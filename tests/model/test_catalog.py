"""Models on this machine and known good ones are listed and described, and downloaded for the console."""

from __future__ import annotations

import csv
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import TinyLlama

from commands.servable_models import ServableModels
from worker.models import architectures, catalog, gguf_model, hub, known, model
from worker.models.model_files import ModelError
from worker.process.settings import Settings

TABLE = Path(__file__).parents[2] / "docs" / "architectures.csv"


@pytest.fixture(autouse=True)
def _no_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_models_in_the_data_directory_as_folders_gguf_files_or_links_are_found_and_removed_by_name(
    tmp_path: Path, tiny_model: Path
) -> None:
    models = tmp_path / "models"
    shutil.copytree(tiny_model, models / "folder")
    shutil.copytree(tiny_model, tmp_path / "elsewhere")  # others may use the fixture's folder
    (models / "linked").symlink_to(tmp_path / "elsewhere")
    file = TinyLlama().write(models / "file.gguf")
    assert model.resolve("folder", tmp_path, dtype="keep") == models / "folder"
    assert model.resolve("linked", tmp_path, dtype="keep") == models / "linked"
    made = model.resolve("file", tmp_path, dtype="float32")
    other = made.with_name(made.name.replace("file-", "file-b-"))
    shutil.copytree(made, other)
    found = {e.name: e for e in catalog.list_models(tmp_path) if e.origin != "packaged"}
    assert sorted(found) == ["file", "file-b", "folder", "linked"]
    assert found["file"].conversions == (made,)
    places = [catalog.located(name, tmp_path) for name in ("file", "linked", "folder")]
    freed = [catalog.remove(place, tmp_path) for place in places]
    assert freed[0] > 5_000_000 > freed[2] > 300_000 > 200 > freed[1]
    assert (tmp_path / "elsewhere" / "config.json").exists()
    assert not file.exists()
    assert [*models.glob("[!.]*")] == [other]


def test_a_converted_gguf_file_outside_the_models_folder_is_listed_but_cannot_be_removed(
    tmp_path: Path,
) -> None:
    source = TinyLlama().write(tmp_path / "away.gguf")
    made = gguf_model.convert(source, tmp_path / "models", dtype="float16")
    entry = catalog.named("away", tmp_path)
    assert (entry.origin, entry.path, entry.dtype) == ("converted", made, "float16")
    assert catalog.named(str(source), tmp_path).conversions == (made,)
    with pytest.raises(ModelError, match="is not a name of `turnkeep model list`"):
        catalog.remove(catalog.located(str(source), tmp_path), tmp_path)
    assert source.exists()
    assert catalog.count_parameters(entry) == catalog.count_parameters(catalog.named(str(source), tmp_path))


def test_the_model_catalog_reads_tools_reasoning_and_cache_policies_of_a_model_from_its_files(
    tmp_path: Path,
) -> None:
    words = [*(f"w{i}" for i in range(315)), "<think>", "</think>", "<s>", "</s>", "<|eot_id|>"]
    fields = {
        "gemma3.attention.sliding_window": 16,
        "tokenizer.ggml.tokens": words,
        "tokenizer.chat_template": "{% if tools %}{{ tools | tojson }}{% endif %}",
    }
    weights = {"token_embd.weight": np.zeros((320, 256), np.float32)}
    TinyLlama(weights, architecture="gemma3", fields=fields).write(tmp_path / "a-Q4_0.gguf")
    entry = catalog.named(str(tmp_path / "a-Q4_0.gguf"), tmp_path)
    assert (entry.tools, entry.reasoning, entry.window_tokens) == (True, True, 16)
    assert (entry.architecture, entry.dtype, entry.context_tokens) == ("gemma3_text", "Q4_0", 512)
    assert entry.policies == ("full", "sink_window", "paged")
    assert entry.instead is None
    TinyLlama(architecture="phi9").write(tmp_path / "phi-9-Q8_0.gguf")
    assert catalog.named(str(tmp_path / "phi-9-Q8_0.gguf"), tmp_path).instead == "mlx-community/phi-9-8bit"


def test_cache_policies_and_windows_of_architectures_match_the_table_in_the_documentation() -> None:
    rows = [*csv.DictReader(TABLE.read_text().splitlines())]
    assert len(rows) > 60
    for row in rows:
        name, caches = row["architecture"], row["caches"]
        expected = ("full", *(policy for policy in ("sink_window", "paged") if row[policy] == "yes"))
        assert architectures.policies(name) == expected, name
        config = {"model_type": name, "sliding_window": 16}
        assert (architectures.window(config) == 16) == ("RotatingKVCache" in caches), name
    assert architectures.policies("unheard-of") is None


GB = 1e9


def test_each_recommended_model_fits_in_the_memory_size_for_which_it_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known, "computes_on_linux_cpu", lambda: False)
    found = known.known()
    assert {one.memory_gb for one in found} == {8, 16, 32, 64}
    for one in found:
        assert hub.is_id(one.id)
        assert len(one.sources) >= 2
        monkeypatch.setattr(known, "memory_bytes", lambda size=one.memory_gb * 2**30: size)
        assert known.fits(known.needed_bytes(one.weights_gb * GB, one.parameters_b * GB)), one.id
        assert one.weights_gb == pytest.approx(one.parameters_b * 4.5 / 8, rel=0.03)


def test_a_downloaded_model_is_listed_with_its_memory_need_and_the_command_that_serves_the_model(
    cache: Path, tmp_path: Path
) -> None:
    models = ServableModels(Settings(data_dir=tmp_path))
    assert models.pull("org/tiny") == "downloading org/tiny"
    while models.listed()["pulls"]:
        assert "error" not in models.listed()["pulls"].get("org/tiny", {})
        time.sleep(0.02)
    (entry,) = [one for one in models.listed()["here"] if one["name"] == "org/tiny"]
    assert entry["serve"].endswith(f"serve --data-dir {tmp_path} --model org/tiny")
    assert entry["fits"]
    assert entry["needed_bytes"] > entry["size_bytes"]


def test_a_failed_model_download_reports_its_error_and_can_be_started_again(
    cache: Path, tmp_path: Path
) -> None:
    models = ServableModels(Settings(data_dir=tmp_path))
    with pytest.raises(ModelError, match="is no id of the hub"):
        models.pull("tiny")
    for _ in range(2):
        assert models.pull("org/none") == "downloading org/none"
        while not (why := models.listed()["pulls"]["org/none"].get("error")):
            time.sleep(0.02)
        assert "org/none" in why
