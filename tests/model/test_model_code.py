"""A model's code digest covers the source that computes KV; code in a model folder is never run."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from worker.models.code import code_digest
from worker.models.model import load
from worker.models.model_files import ModelError
from worker.models.tokenizer import TemplateError, Tokenizer

LLAMA = """
from .base import attention

class Model:
    def __call__(self, x):
        return attention(x)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a package like mlx-lm; return its folder, and a function that imports its `llama` model anew."""
    models = tmp_path / "made_lm" / "models"
    models.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = {
        "__init__.py": "",
        "llama.py": LLAMA,
        "base.py": "from .rope_utils import rope\ndef attention(x):\n    return rope(x)\n",
        "rope_utils.py": "def rope(x):\n    return x\n",
        "cache.py": "class KVCache: ...\n",
        "mamba.py": "class Model: ...\n",
    }
    for name, text in sources.items():
        (models / name).write_text(text)

    def load():
        for name in [name for name in sys.modules if name.startswith("made_lm")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        importlib.import_module("made_lm.models.cache")
        return importlib.import_module("made_lm.models.llama").Model()

    yield models, load
    for name in [name for name in sys.modules if name.startswith("made_lm")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["llama.py", "base.py", "rope_utils.py", "cache.py"])
def test_changing_any_python_module_that_a_model_class_imports_changes_its_code_digest(package, name) -> None:
    models, load = package
    before = code_digest(load())
    assert code_digest(load()) == before
    path = models / name
    path.write_text(path.read_text() + "\nCHANGED = 1000\n")
    assert code_digest(load()) != before


PATCHED = """
from mlx_lm.models import llama
from worker.batch.forward import Forward
from worker.models.code import code_digest

sizes = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 1}
model = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=9, **sizes))
print(code_digest(model))
Forward(model)
print(code_digest(model))
"""


def test_the_code_digest_of_a_model_stays_the_same_after_functions_of_its_module_are_patched() -> None:
    done = subprocess.run([sys.executable, "-c", PATCHED], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model folder with a Python module that writes a file when it is run."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "foreign.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    return folder


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_folder_with_its_own_architecture_code_is_refused_and_the_code_is_not_run(
    folder: Path,
) -> None:
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
