"""Imports the model architectures of mlx-lm and mlx-vlm without the rest of these packages.

Importing any part of mlx-lm runs its package's `__init__`, which imports its commands, transformers and the
hub's client, and takes a second. A worker needs none of these. mlx-vlm's `__init__` imports OpenCV, audio
and data sets too.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Final

_PACKAGE: Final = "mlx_lm"
_VISION: Final = "mlx_vlm"
#: Names that `mlx_lm.utils` imports for functions which are not used here; stand-ins replace them.
_UNUSED: Final = {
    "huggingface_hub": ("snapshot_download",),
    "mlx_lm.tokenizer_utils": ("TokenizerWrapper", "load"),
}


def import_mlx_lm() -> None:
    """Import `mlx_lm.utils`, which loads models; afterwards, other modules can be imported one by one.

    Call it before anything else imports mlx-lm; otherwise it has no effect. Afterwards this process cannot
    use names of the package `mlx_lm` itself, nor its functions that load tokenizers or download.
    """
    spec = find_spec(_PACKAGE)
    if spec is None or _PACKAGE in sys.modules:
        return
    stand_ins = {name: _stand_in(name, *names) for name, names in _UNUSED.items() if name not in sys.modules}
    sys.modules |= {_PACKAGE: module_from_spec(spec), **stand_ins}
    try:
        import_module(f"{_PACKAGE}.utils")
    except ImportError:  # a version of mlx-lm that needs more of these
        for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
            del sys.modules[name]
    finally:
        for name, module in stand_ins.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def import_mlx_vlm() -> None:
    """Let `mlx_vlm.models` be imported module by module; this process cannot use the package itself."""
    spec = find_spec(_VISION)
    if spec is not None and _VISION not in sys.modules:
        sys.modules[_VISION] = module_from_spec(spec)
        # Its modules import transformers, which else says at each start that there is no PyTorch.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def _stand_in(name: str, *names: str) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(dict.fromkeys(names))
    return module
