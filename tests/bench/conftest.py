"""What every test of a bench needs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_runs import end_all
from parts import make_tiny_model


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """A bench that a failed test left running is ended."""
    yield
    end_all()


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads are wide enough for KV in fewer bits."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "wide", num_attention_heads=2)
