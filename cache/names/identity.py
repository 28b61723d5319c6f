"""The identity of a model: everything that must be equal for a model to use a snapshot.

The identity has hashes of contents, not names: two models with the same name, or two versions of a file,
never share KV.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


#: Increase when the meaning of a snapshot's tensors or header changes: older files then never match.
FORMAT_VERSION: Final = 4

#: Fields of config.json that say where a model came from, not what it computes.
_PROVENANCE: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})

_TOKENIZER_FILES: Final = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
)
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything that KV depends on besides its tokens."""

    #: Hex digests.
    weights: str
    config: str
    tokenizer: str
    kv_dtype: str
    block_tokens: int
    #: A hex digest of the model's source code.
    code: str = ""
    #: The cache classes, by `layers.describe`.
    caches: str = ""
    #: By `ModelLayout.name`.
    policy: str = "full"
    format_version: int = FORMAT_VERSION

    def digest(self) -> bytes:
        """Return the identity's digest, 32 bytes."""
        return _digest(self.to_json().encode())

    def to_json(self) -> str:
        """Return the identity as one line of JSON, fields in a fixed order."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=32, person=b"turnkeep.model").digest()


def folder_identity(
    folder: Path,
    *,
    kv_dtype: str,
    block_tokens: int,
    code: str = "",
    caches: str = "",
    policy: str = "full",
    memo: Path | None = None,
) -> Identity:
    """Compute the identity of a model folder in the MLX layout.

    Reads every weight file whose digest is not in `memo` (see `files_digest`): do not call on the event loop.
    Raises `FileNotFoundError` if weights or config.json are missing.
    """
    weights = _weight_files(folder)
    if not weights:
        raise FileNotFoundError(f"no *.safetensors in {folder}")
    return Identity(
        weights=files_digest(weights, memo=memo),
        config=config_digest(json.loads((folder / "config.json").read_bytes())),
        tokenizer=_tokenizer_digest(folder, memo),
        kv_dtype=kv_dtype,
        block_tokens=block_tokens,
        code=code,
        caches=caches,
        policy=policy,
    )


def _weight_files(folder: Path) -> list[Path]:
    """List the weight files, without those (`._NAME`) that macOS adds on disks of other systems."""
    return sorted(folder.glob("[!.]*.safetensors"))


def hash_weights(folder: Path, memo: Path) -> None:
    """Hash a folder's weights in advance, and store the digests in `memo`. Ignores `OSError`."""
    with suppress(OSError):
        files_digest(_weight_files(folder), memo=memo)


def model_digest(folder: Path, memo: Path) -> str:
    """Return a digest of the weights and the configuration of a folder's model: 16 bytes as hex.

    Reads the weights whose digest is not in `memo`. Raises `OSError`.
    """
    weights = files_digest(_weight_files(folder), memo=memo)
    config = config_digest(json.loads((folder / "config.json").read_bytes()))
    return hashlib.sha256(f"{weights} {config}".encode()).hexdigest()[:32]


def config_digest(config: dict[str, Any]) -> str:
    """Hash a model's configuration without the fields that only name the model's origin."""
    relevant = {name: value for name, value in config.items() if name not in _PROVENANCE}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def _tokenizer_digest(folder: Path, memo: Path | None) -> str:
    """Hash the tokenizer's files. The chat template is left out: it does not change a text's tokens."""
    files = files_digest([path for name in _TOKENIZER_FILES if (path := folder / name).is_file()], memo=memo)
    path = folder / _TOKENIZER_CONFIG
    said = path.read_bytes() if path.is_file() else b""
    with suppress(ValueError, TypeError):  # a file that is not JSON is hashed unchanged
        config = json.loads(said)
        said = json.dumps({**config, "chat_template": None}, sort_keys=True).encode()
    return hashlib.sha256(files.encode() + said).hexdigest()


def files_digest(paths: Sequence[Path], *, memo: Path | None = None) -> str:
    """Hash the names and contents of files, in the given order; return the digest as hex. Raises `OSError`.

    `memo` is a small JSON file of earlier digests, so that a start need not read the weights again. A file
    counts as unchanged if its path, size, mtime and ctime are the same (a copy can preserve the mtime, but
    not the ctime). If `memo` cannot be read or written, only time is lost.
    """
    known = _read_memo(memo)
    whole = hashlib.sha256()
    fresh = False
    for path in paths:
        key = str(path.resolve())
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        entry = known.get(key)
        if not isinstance(entry, list) or len(entry) != 4 or entry[:3] != stamp:
            entry = [*stamp, _file_digest(path)]
            known[key] = entry
            fresh = True
        whole.update(f"{path.name}\0{entry[3]}\n".encode())
    if memo is not None and fresh:
        _write_memo(memo, known)
    return whole.hexdigest()


def _file_digest(path: Path) -> str:
    """Hash a file's content."""
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()


def _read_memo(memo: Path | None) -> dict[str, Any]:
    try:
        known = json.loads(memo.read_bytes()) if memo is not None else {}
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_memo(memo: Path, known: dict[str, Any]) -> None:
    temporary = memo.with_name(f"{memo.name}.{os.getpid()}")
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(known, indent=1))
        temporary.replace(memo)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
