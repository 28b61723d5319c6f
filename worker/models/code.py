"""Computes digests of the code that computes a model's KV, for snapshot identities. Must not import MLX."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def code_digest(model: Any) -> str:
    """Digest the source code that computes a model's KV.

    Covers the module that defines the model, the modules of its caches, and all modules that these import. So
    snapshots stay valid if an update of mlx-lm does not change the model, but not after a patch of its
    code. MLX itself, and so its rounding, is not covered. Reads some files.
    """
    module = type(model).__module__
    caches = module.rpartition(".")[0] + ".cache"  # models without `make_cache` use mlx-lm's caches
    whole = hashlib.sha256()
    for name, used in sorted(_modules(module, caches).items()):
        source = Path(used.__file__).read_bytes() if used.__file__ else b""
        whole.update(f"{name}\0{hashlib.sha256(source).hexdigest()}\n".encode())
    return whole.hexdigest()


def package_digest(name: str) -> str:
    """Digest the sources of one of Turnkeep's imported packages. Reads some files."""
    whole = hashlib.sha256()
    for place in sys.modules[name].__path__:
        for path in sorted(Path(place).glob("[!.]*.py")):
            whole.update(f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def _modules(*first: str) -> dict[str, ModuleType]:
    """Return the modules named in `first` and all modules of their package that they import, at any depth."""
    package = first[0].partition(".")[0] + "."
    found: dict[str, ModuleType] = {}
    todo = list(first)
    while todo:
        name = todo.pop()
        if name in found or name not in sys.modules:
            continue
        found[name] = sys.modules[name]
        for value in list(vars(found[name]).values()):
            used = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(used, str) and used.startswith(package):
                todo.append(used)
    return found
