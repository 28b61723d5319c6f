"""The packaged model's tokenizer, and copies of it with other chat templates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

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
