"""The packaged model's tokenizer, and copies of it with other chat templates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import ID, FakeHub
from transformers import AutoTokenizer

from worker.models import model
from worker.models.tokenizer import Tokenizer

MakeTokenizer = Callable[[str], Tokenizer]


@pytest.fixture(scope="session")
def tokenizer(packaged_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(packaged_folder)


@pytest.fixture(scope="session")
def with_template(packaged_folder: Path, tokenizer: Tokenizer) -> MakeTokenizer:
    """Make the packaged tokenizer with another chat template."""
    loaded = AutoTokenizer.from_pretrained(str(packaged_folder))

    def make(template: str) -> Tokenizer:
        changed = copy.copy(loaded)
        changed.chat_template = template
        return Tokenizer(changed, tokenizer.eos_ids)

    return make


@pytest.fixture
def server(tiny_model: Path) -> Iterator[FakeHub]:
    with FakeHub() as started:
        started.add(ID, tiny_model)
        started.add(model.DEFAULT_ID, tiny_model)
        yield started


@pytest.fixture
def cache(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process download from the server into an empty cache; return the cache's folder."""
    from huggingface_hub import constants

    files = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"
