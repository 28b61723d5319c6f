"""What every test of a bench needs."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_runs import end_all
from parts import make_tiny_model

from worker.batch.shared_pass import SharedPass


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """A bench that a failed test left running is ended."""
    yield
    end_all()


@pytest.fixture(scope="session")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads are wide enough for KV in fewer bits."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "wide", num_attention_heads=2)


@pytest.fixture
def let_tokens_cost(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let reading a token take so many seconds: a tiny model is so fast that a busy machine hides it."""

    def let(seconds: float) -> None:
        step = SharedPass.step

        def slow(self: SharedPass, pieces: Any, **more: Any) -> None:
            time.sleep(seconds * sum(len(piece.tokens) for piece in pieces))
            step(self, pieces, **more)

        monkeypatch.setattr(SharedPass, "step", slow)

    return let
