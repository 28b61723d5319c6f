"""Names the folders that GGUF files are converted to, so that a start need not read a file again.

A folder's name has the file's path, size, mtime and ctime: a file that has changed is converted anew. Knows
nothing of GGUF.
"""

from __future__ import annotations

import glob
import hashlib
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

#: The converter's version. Increment it when its output changes: old folders are then not used.
_CONVERTER: Final = 1
_CONVERTED: Final = re.compile(r"(.+)-(?:keep|float32|float16|bfloat16)-[0-9a-f]{16}")


def folder_of(source: Path, models_dir: Path, dtype: str) -> Path:
    """Return the folder in `models_dir` for a GGUF file's conversion to `dtype`. Raises `OSError`."""
    stat = source.stat()
    state = f"{_CONVERTER} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
    return models_dir / f"{source.stem}-{dtype}-{_digest_of_path(source)}{_digest(state)}"


def source_name(folder: Path) -> str | None:
    """Return the name of the GGUF file from which a folder was made; None if the folder is no conversion."""
    made = _CONVERTED.fullmatch(folder.name)
    return made[1] if made else None


def conversions(source: Path, models_dir: Path) -> tuple[Path, ...]:
    """Return the folders that were made from a GGUF file, also from its earlier versions."""
    pattern = f"{glob.escape(source.stem)}-*-{_digest_of_path(source)}{'?' * 8}"
    return tuple(one for one in sorted(models_dir.glob(pattern)) if source_name(one) == source.stem)


def _digest_of_path(source: Path) -> str:
    return _digest(str(source.resolve()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]
