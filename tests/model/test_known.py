"""The list of known good models, and the console's list of models and downloads on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub

from commands.servable_models import ServableModels
from worker.models import hub, known
from worker.models.model_files import ModelError
from worker.process.settings import Settings

GB = 1e9


def test_each_known_model_fits_in_the_memory_size_it_is_listed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "computes_on_linux_cpu", lambda: False)
    found = known.known()
    assert {one.memory_gb for one in found} == {8, 16, 32, 64}
    for one in found:
        assert hub.is_id(one.id)
        assert len(one.sources) >= 2
        monkeypatch.setattr(known, "memory_bytes", lambda size=one.memory_gb * 2**30: size)
        assert known.fits(known.needed_bytes(one.weights_gb * GB, one.parameters_b * GB)), one.id
        assert one.weights_gb == pytest.approx(one.parameters_b * 4.5 / 8, rel=0.03)


def test_the_memory_of_a_model_on_a_cpu_is_estimated_from_four_bytes_per_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known, "computes_on_linux_cpu", lambda: True)
    assert known.needed_bytes(2.3 * GB, 4 * GB) == int(1.2 * 16 * GB)
    monkeypatch.setattr(known, "memory_bytes", lambda: int(16 * GB))
    assert not known.fits(known.needed_bytes(2.3 * GB, 4 * GB))


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from huggingface_hub import constants

    with FakeHub() as started:
        started.add("org/tiny", tiny_model)
        files = started.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", started.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield started


def test_a_downloaded_model_is_listed_with_the_command_that_serves_it_and_the_memory_it_needs(
    server: FakeHub, tmp_path: Path
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


def test_a_failed_download_reports_its_error_and_can_be_started_again(
    server: FakeHub, tmp_path: Path
) -> None:
    models = ServableModels(Settings(data_dir=tmp_path))
    with pytest.raises(ModelError, match="is no id of the hub"):
        models.pull("tiny")
    for _ in range(2):
        assert models.pull("org/none") == "downloading org/none"
        while not (why := models.listed()["pulls"]["org/none"].get("error")):
            time.sleep(0.02)
        assert "org/none" in why
