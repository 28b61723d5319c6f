"""A model's code digest covers the source that computes KV, and no other."""

from __future__ import annotations

import importlib
import subprocess
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
def test_changing_any_module_that_a_model_builds_on_changes_its_code_digest(package, name) -> None:
    models, load = package
    before = code_digest(load())
    assert code_digest(load()) == before
    path = models / name
    path.write_text(path.read_text() + "\nCHANGED = 1000\n")
    assert code_digest(load()) != before


def test_changing_another_models_module_leaves_the_code_digest_unchanged(package) -> None:
    models, load = package
    before = code_digest(load())
    (models / "mamba.py").write_text("class Model:\n    changed = True\n")
    (models / "new_model.py").write_text("class Model: ...\n")
    assert code_digest(load()) == before


def test_different_mlx_lm_models_have_different_code_digests() -> None:
    digests = {code_digest(module.Model.__new__(module.Model)) for module in (llama, gemma3_text)}
    assert len(digests) == 2


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


def test_a_models_code_digest_stays_the_same_after_its_functions_are_patched() -> None:
    done = subprocess.run([sys.executable, "-c", PATCHED], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after
