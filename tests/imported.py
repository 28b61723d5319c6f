"""Imports the modules of a worker with a tiny model, in the process that `forked` forks."""

import gc
from importlib import import_module

from worker.models.blas import preload

preload()  # as a worker does, before anything imports MLX
for name in (
    "mlx_lm.models.llama",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "worker.app",
    "worker.main",
    "commands.cli",
    "worker.device.runner",
    "worker.models.tokenizer",
):
    import_module(name)
gc.freeze()  # otherwise garbage collection in each forked process would copy these pages
