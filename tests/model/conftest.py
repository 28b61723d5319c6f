"""The packaged model's tokenizer, and tokenizers with templates of the tests' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from worker.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

MakeTokenizer = Callable[[str], Tokenizer]


@pytest.fixture(scope="session")
def tokenizer(packaged_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(packaged_folder)


@pytest.fixture(scope="session")
def with_template(packaged_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeTokenizer:
    """Make the packaged tokenizer with another chat template."""

    def make(template: str) -> Tokenizer:
        folder = tmp_path_factory.mktemp("tokenizer")
        for name in ("config.json", "tokenizer.json"):
            shutil.copy(packaged_folder / name, folder)
        config = json.loads((packaged_folder / "tokenizer_config.json").read_text())
        config["chat_template"] = template
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.from_folder(folder)

    return make
