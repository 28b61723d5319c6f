"""The command `turnkeep bench`, a group that the package `bench` makes."""

from __future__ import annotations

from bench.cli import bench
from worker.models.blas import preload

__all__ = ["bench"]

bench.callback = preload  # the programs compared with the worker inherit its choice of OpenBLAS kernels
