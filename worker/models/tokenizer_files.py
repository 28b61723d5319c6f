"""Loads the tokenizer of a model folder with transformers, and stores it in a form that later starts use.

When a worker starts with a known model, importing transformers would take most of the time. A stored
tokenizer needs only the `tokenizers` library, and gives the same tokens. Must not import MLX.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from .model_files import ModelError, one_line, read_json, silent

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from .model_files import Progress

#: The version of the stored form; increment it when the form changes.
_FORM: Final = 2
#: All files from which transformers may read something about a tokenizer.
_PATTERNS: Final = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.jsonl", "*/*.jinja")
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class LoadedTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that `Tokenizer` uses; the backend is a `tokenizers.Tokenizer`."""

    chat_template: Any  # a text, a mapping or list of named ones, or None
    eos_token_id: Any
    backend_tokenizer: Any
    special_tokens_map: Any


class _Stored(msgspec.Struct):
    """A `LoadedTokenizer` as it is stored, with the `key` of what it was loaded from."""

    key: str
    backend_tokenizer: Tokenizer = msgspec.field(name="tokenizer")
    chat_template: Any
    eos_token_id: Any
    special_tokens_map: dict[str, Any]


def load(folder: Path, store: Path | None = None, progress: Progress = silent) -> LoadedTokenizer:
    """Load the tokenizer of a model folder. Raises `ModelError`.

    `store` is a folder for loaded tokenizers; None stores none. A stored one is used while the model folder's
    files and the libraries are unchanged. Errors of the store are ignored, and cost only time. `progress` is
    called only for a tokenizer that is not stored yet.
    """
    if store is None:
        return _load(folder)
    path, key = _place(folder, store), _key(folder)
    with suppress(Exception):  # a missing or broken file is written anew
        found = msgspec.json.decode(path.read_bytes(), type=_Stored, dec_hook=_as_tokenizer)
        if found.key == key:
            return found
    progress(0, 1, "reading the tokenizer")
    loaded = _load(folder)
    named = dict(loaded.special_tokens_map)
    _keep(_Stored(key, loaded.backend_tokenizer, loaded.chat_template, loaded.eos_token_id, named), path)
    progress(1, 1, "reading the tokenizer")
    return loaded


def keep(rust: Tokenizer, config: Mapping[str, Any], folder: Path, store: Path) -> None:
    """Store a folder's tokenizer as if transformers had loaded it, as a `PreTrainedTokenizerFast`.

    `rust` is the tokenizer of tokenizer.json, and is modified; `config` is tokenizer_config.json. If
    transformers would add tokens, nothing is stored.
    """
    named = {name: config[name] for name in _NAMED if name in config}
    special = {token.content for token in rust.get_added_tokens_decoder().values() if token.special}
    if not special.issuperset(named.values()):
        return
    if rust.post_processor is None:
        rust.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    eos_id = rust.token_to_id(named["eos_token"]) if "eos_token" in named else None
    stored = _Stored(_key(folder), rust, config.get("chat_template"), eos_id, named)
    _keep(stored, _place(folder, store))


def drop(folder: Path, store: Path) -> None:
    """Remove the stored tokenizer of a model folder, if there is one."""
    _place(folder, store).unlink(missing_ok=True)


def _place(folder: Path, store: Path) -> Path:
    return store / f"tokenizer-{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}.json"


def _as_tokenizer(_kind: type, text: str) -> Tokenizer:
    return Tokenizer.from_str(text)


def _keep(stored: _Stored, path: Path) -> None:
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        stored.backend_tokenizer.no_truncation()
        stored.backend_tokenizer.no_padding()
        unfinished.write_bytes(msgspec.json.encode(stored, enc_hook=Tokenizer.to_str))
        unfinished.replace(path)
    except Exception:  # noqa: BLE001  # a tokenizer with Python code in it cannot be stored; or the disk is full
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _key(folder: Path) -> str:
    """Digest the sizes and times of the folder's small files, and the versions of the libraries."""
    files = sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)})
    stamps = [(str(path.relative_to(folder)), *_stamp(path)) for path in files]
    whole = repr((_FORM, version("transformers"), version("tokenizers"), stamps))
    return hashlib.sha256(whole.encode()).hexdigest()


def _stamp(path: Path) -> tuple[int, int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _load(folder: Path) -> LoadedTokenizer:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that PyTorch is missing
    from transformers import AutoTokenizer

    try:
        hf: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  # the library passes on any error of its parsers
        raise ModelError(f"{folder} has no tokenizer that can be read: {one_line(error)}") from None
    if not hf.chat_template:  # transformers reads this file for multimodal models only
        written = folder / "chat_template.json"
        hf.chat_template = read_json(written).get("chat_template") if written.exists() else None
    if not hasattr(hf, "backend_tokenizer"):
        raise ModelError(f"{folder} has a tokenizer without tokenizer.json; convert it to a fast tokenizer")
    loaded: LoadedTokenizer = hf
    return loaded
