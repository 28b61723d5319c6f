"""A second load of a model imports and reads less, and gives the same results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import TinyLlama
from transformers.utils.chat_template_utils import _compile_jinja_template

from worker.models import catalog, model, tokenizer_files
from worker.models.chat_template import ChatTemplate
from worker.models.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "é 🫠 <|im_end|>"}, {"role": "assistant", "content": " a  b\n"}]
LOAD = """
import pathlib, sys
from worker.models.partial_import import import_mlx_lm
import_mlx_lm()
from worker.models import model
folder, store = map(pathlib.Path, sys.argv[1:])
loaded = model.load(folder, dtype="float32", store=store)
print(loaded.tokenizer.encode("the cat", at_start=True), loaded.tokenizer.fingerprint.hex())
print(sorted({"transformers", "huggingface_hub", "mlx_lm.generate", "gguf"} & set(sys.modules)))
"""


def load(folder: Path, store: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), str(store)], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_loading_a_known_model_again_does_not_import_transformers_and_gives_the_same_tokens(
    tiny_model: Path, tmp_path: Path
) -> None:
    first, second = load(tiny_model, tmp_path), load(tiny_model, tmp_path)
    assert first[0] == second[0]
    assert "transformers" in first[1]
    assert second[1] == "[]"


@pytest.mark.model
def test_a_stored_tokenizer_equals_the_one_loaded_from_the_model_folder(
    packaged_folder: Path, tmp_path: Path
) -> None:
    loaded = Tokenizer.from_folder(packaged_folder)
    for _ in range(2):
        stored = Tokenizer.from_folder(packaged_folder, tmp_path)
        assert stored.fingerprint == loaded.fingerprint
        assert (stored.eos_ids, stored.controls.ids) == (loaded.eos_ids, loaded.controls.ids)
        said = [
            one.render(CHAT, add_generation_prompt=True, started=datetime.now(UTC))
            for one in (stored, loaded)
        ]
        assert stored.encode(said[0], at_start=True) == loaded.encode(said[1], at_start=True)


def test_a_stored_tokenizer_is_rebuilt_after_damage_or_a_change_of_the_model_folder(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder, store = tmp_path / "model", tmp_path / "store"
    store.mkdir()
    folder.mkdir()
    for path in tiny_model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    assert tokenizer_files.load(folder, store).eos_token_id == 2
    (kept,) = store.iterdir()
    kept.write_bytes(kept.read_bytes()[:-100])
    assert tokenizer_files.load(folder, store).eos_token_id == 2
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "<|endoftext|>"}))
    assert tokenizer_files.load(folder, store).eos_token_id == 0
    (kept,) = store.iterdir()


GGUF = TinyLlama().but(tokenizer__chat_template="{{ bos_token }}{{ messages }}")
FILES = {
    "no beginning": GGUF,
    "no end": GGUF.but(tokenizer__ggml__eos_token_id=None),
    "beginning added": GGUF.but(tokenizer__ggml__pre="llama-bpe", tokenizer__ggml__padding_token_id=318),
    "words of a user": GGUF.but(tokenizer__ggml__token_type=[1] * 310 + [4] * 7 + [3] * 3),
    "a usual token at the end": GGUF.but(tokenizer__ggml__eos_token_id=5),
}


def test_a_converted_gguf_file_is_not_read_again_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = TinyLlama().write(tmp_path / "tiny.gguf")

    def resolve() -> Path:
        return model.resolve(str(path), tmp_path, dtype="float32")

    folder = resolve()
    with monkeypatch.context() as patched:
        patched.setattr("worker.models.gguf_file.read", None)
        assert resolve() == folder
        os.utime(path)
        with pytest.raises(TypeError):
            resolve()
    assert resolve() != folder
    assert catalog.named(str(path), tmp_path).conversions == tuple(sorted((folder, resolve())))


@pytest.mark.parametrize("name", FILES)
def test_the_stored_tokenizer_of_a_converted_gguf_file_equals_the_one_that_transformers_loads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FILES[name].write(tmp_path / "tiny.gguf")
    folder = model.resolve(str(path), tmp_path, dtype="float32")
    read = Tokenizer.from_folder(folder)
    if name != "a usual token at the end":  # transformers makes it a special one
        monkeypatch.setattr(tokenizer_files, "_load", None)
    stored = Tokenizer.from_folder(folder, tmp_path / "models")
    assert stored.fingerprint == read.fingerprint
    assert stored.eos_ids == read.eos_ids
    assert vars(stored)["_hf"].special_tokens_map == vars(read)["_hf"].special_tokens_map


TEMPLATES = (
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}\n{% endfor %}",
    (
        "{% for m in messages %}\n {%- generation %}\n {% set x = 1 %}"
        "{{ m.role }}{% endgeneration %}{{ x }}{% endfor %}"
    ),
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ dict(a=1) | tojson(indent=2) }}{{ dict.fromkeys('ab', 1) }}{{ messages | tojson(True) }}",
    "  {% if true %}\n  x\n  {% endif %}\n{{ undefined }}{{ '<' | tojson }}",
    (
        "{% set ns = namespace(n=0) %}{% macro tag(name, x='-') %}<{{ name }}{{ x }}>{% endmacro %}"
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}"
        "{% set ns.n = ns.n + 1 %}{{ tag(m.content) }}{% else %}none{% endfor %}{{ ns.n }}"
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}"
        "{% for row in [[1, [2, 3]], [4]] recursive %}{{ row if row is number else loop(row) }}{% endfor %}"
        "{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}in{% endcall %}"
    ),
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ dict.mro() }}",
    "{{ raise_exception('no') }}",
    "{{ messages.append(1) }}",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_template_gives_the_same_text_or_error_as_in_transformers(template: str) -> None:
    def said(render: Any) -> tuple[str, str]:
        try:
            return "", render()
        except Exception as error:  # both must raise the same error
            return type(error).__name__, ""

    now = datetime.now(UTC)
    own = said(lambda: ChatTemplate(template, {}).render(CHAT, add_generation_prompt=False, started=now))
    assert own == said(lambda: _compile_jinja_template(template).render(messages=CHAT))
