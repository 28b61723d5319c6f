"""Fixtures of the bench tests: benches as processes, a model."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from parts import make_tiny_model

from tests.forked import CAN_FORK, Piped


@pytest.fixture
def turnkeep() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `turnkeep bench` in a new process session; kill it and its workers if it outlives the test."""
    started: list[Any] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "commands", "bench", *map(str, arguments)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TURNKEEP_")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        if CAN_FORK:
            started.append(Piped(command[1:], environment, new_session=True))
        else:
            started.append(subprocess.Popen(command, env=environment, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        with process:
            if process.poll() is None:
                for member in (process, *psutil.Process(process.pid).children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose head size is 32, the least that allows quantised KV."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "wide", num_attention_heads=2)
