"""A model is data: code that its folder brings along is not run."""

from __future__ import annotations

import contextlib
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from worker.models.model import load
from worker.models.model_files import ModelError
from worker.models.tokenizer import TemplateError, Tokenizer


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model with a module that leaves a trace when it is run."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return folder


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_architecture_of_a_model_s_own_is_refused(folder: Path) -> None:
    change(folder / "config.json", model_file="foreign.py")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder, dtype="float32")
    assert not (folder.parent / "ran").exists()


def test_a_tokenizer_s_own_code_is_not_run(folder: Path) -> None:
    code = {"AutoTokenizer": ["foreign.Tokenizer", "foreign.Tokenizer"]}
    change(folder / "tokenizer_config.json", auto_map=code, tokenizer_class="Tokenizer")
    with contextlib.suppress(ModelError):
        load(folder, dtype="float32")
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize(
    "expression", ["''.__class__.__mro__[1].__subclasses__()", "cycler.__init__.__globals__.os.getpid()"]
)
def test_a_chat_template_reaches_nothing_of_the_process(folder: Path, expression: str) -> None:
    for file in folder.glob("chat_template*"):
        file.write_text("{{ " + expression + " }}")
    with pytest.raises(TemplateError, match="unsafe"):
        Tokenizer.from_folder(folder).render(
            [{"role": "user", "content": "hi"}],
            add_generation_prompt=True,
            started=datetime(2026, 1, 1, tzinfo=UTC),
        )
