"""Remembers which folder each GGUF file was converted to, so that a worker need not read the file again.

A file counts as unchanged if its path, size, mtime and ctime are the same. Knows nothing of GGUF.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

#: The converter's version. Increment it when its output changes: old folders are then not used.
CONVERTER: Final = 1
#: The types of weights that a file can be converted to; `keep` is the file's own.
_DTYPES: Final = ("keep", "float32", "float16", "bfloat16")
_CONVERTED: Final = re.compile(r"(.+)-(?:float32|float16|bfloat16)-[0-9a-f]{12}")


def state(source: Path) -> list[int]:
    """Return what tells whether a file has changed; empty if there is no such file."""
    with suppress(OSError):
        stat = source.stat()
        return [CONVERTER, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    return []


def known(source: Path, models_dir: Path, dtype: str) -> Path | None:
    """Return the folder in `models_dir` to which a file was converted; None without a valid note of it."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        note = json.loads(_note(source, models_dir, dtype).read_bytes())
        folder = models_dir / str(note["folder"])
        if note["state"] == state(source) and folder.is_dir():
            return folder
    return None


def source_name(folder: Path) -> str | None:
    """Return the name of the GGUF file from which a folder was made; None if the folder is no conversion."""
    made = _CONVERTED.fullmatch(folder.name)
    return made[1] if made else None


def conversions(source: Path, models_dir: Path) -> tuple[Path, ...]:
    """Return the folders that were made from a GGUF file.

    Files of several repositories may have the same name: a folder that has notes belongs to their files.
    """
    own = {_note(source, models_dir, dtype) for dtype in _DTYPES}
    notes: dict[str, set[Path]] = {}
    for note in models_dir.glob("converted-*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            notes.setdefault(str(json.loads(note.read_bytes())["folder"]), set()).add(note)
    named = [folder for folder in sorted(models_dir.glob("[!.]*")) if source_name(folder) == source.stem]
    return tuple(folder for folder in named if folder.name not in notes or notes[folder.name] & own)


def remember(source: Path, models_dir: Path, dtype: str, folder: Path, read: list[int]) -> None:
    """Store a note of the folder to which a file was converted; `read` is its `state` from before.

    Ignores errors: they cost only time later.
    """
    note = _note(source, models_dir, dtype)
    unfinished = note.with_name(f"{note.name}.{os.getpid()}")
    with suppress(OSError):
        unfinished.write_text(json.dumps({"state": read, "folder": folder.name}))
        unfinished.replace(note)


def tidy(models_dir: Path) -> None:
    """Remove notes whose folders no longer exist."""
    for note in models_dir.glob("converted-*.json"):
        with suppress(OSError, ValueError, TypeError, KeyError):
            if not (models_dir / str(json.loads(note.read_bytes())["folder"])).is_dir():
                note.unlink()


def _note(source: Path, models_dir: Path, dtype: str) -> Path:
    named = hashlib.sha256(f"{source.resolve()}\0{dtype}".encode(errors="surrogateescape"))
    return models_dir / f"converted-{named.hexdigest()[:16]}.json"
