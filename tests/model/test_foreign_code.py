"""A model is data: code in its folder is never run."""

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
    """A model folder with a Python module that writes a file when it is run."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return folder


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_folder_with_its_own_architecture_code_is_refused_and_the_code_not_run(folder: Path) -> None:
    change(folder / "config.json", model_file="foreign.py")
    with pytest.raises(
        ModelError, match=r"needs its own code, foreign\.py, which is not run; take another m"
    ):
        load(folder, dtype="float32")
    assert not (folder.parent / "ran").exists()


def test_tokenizer_code_in_a_model_folder_is_not_run(folder: Path) -> None:
    code = {"AutoTokenizer": ["foreign.Tokenizer", "foreign.Tokenizer"]}
    change(folder / "tokenizer_config.json", auto_map=code, tokenizer_class="Tokenizer")
    with contextlib.suppress(ModelError):
        load(folder, dtype="float32")
    assert not (folder.parent / "ran").exists()


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.getpid() }}",
        "{{ namespace().__class__.__init__.__globals__ }}",
        "{% for one in messages %}{{ loop.__class__.__init__.__globals__ }}{% endfor %}",
        "{% for one in messages %}{{ loop._iterator.gi_frame }}{% endfor %}",
    ],
)
def test_a_chat_template_that_reaches_into_the_python_process_is_refused_as_unsafe(
    folder: Path, source: str
) -> None:
    for file in folder.glob("chat_template*"):
        file.write_text(source)
    with pytest.raises(TemplateError, match="unsafe"):
        Tokenizer.from_folder(folder).render(
            [{"role": "user", "content": "hi"}],
            add_generation_prompt=True,
            started=datetime(2026, 1, 1, tzinfo=UTC),
        )
