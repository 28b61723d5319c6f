"""A model's code is named by its source: whatever computes KV, and nothing else."""

from __future__ import annotations

import importlib
import sys

import pytest
from mlx_lm.models import gemma3_text, llama

from worker.models.code import code_digest

LLAMA = """
from .base import attention

class Model:
    def __call__(self, x):
        return attention(x)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a package like mlx-lm; returns a model of its `llama`, as a new process would load it."""
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
def test_whatever_the_model_s_module_builds_on_is_part_of_its_code(package, name) -> None:
    models, load = package
    before = code_digest(load())
    assert code_digest(load()) == before
    path = models / name
    path.write_text(path.read_text() + "\nCHANGED = 1000\n")
    assert code_digest(load()) != before


def test_another_model_of_the_same_release_is_no_part_of_it(package) -> None:
    models, load = package
    before = code_digest(load())
    (models / "mamba.py").write_text("class Model:\n    changed = True\n")
    (models / "new_model.py").write_text("class Model: ...\n")
    assert code_digest(load()) == before


def test_models_of_mlx_lm_have_code_of_their_own() -> None:
    digests = {code_digest(module.Model.__new__(module.Model)) for module in (llama, gemma3_text)}
    assert len(digests) == 2
