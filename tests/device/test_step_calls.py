"""A decode step waits for the device once, and copies few numbers to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import GREEDY, batched, begin, prompt

from worker.batch.row_sampler import RowSampling

HOT = RowSampling(0.8, seed=1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of MLX that evaluate, wait, or copy numbers to the device (`array`) or from it."""
    counted: Counter[str] = Counter()

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **options: Any) -> Any:
            counted[name] += 1
            return call(*args, **options)

        return count

    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, counting(name, getattr(mx, name)))
    array = mx.array
    for name in ("item", "tolist", "__array__", "__bool__", "__int__", "__float__"):
        if hasattr(array, name):
            monkeypatch.setattr(array, name, counting(name, getattr(array, name)))

    class Kind(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, array)

        def __call__(cls, *args: Any) -> Any:
            counted["array"] += 1
            return array(*args)

    class Array(metaclass=Kind):
        pass

    monkeypatch.setattr(mx, "array", Array)
    return counted


@pytest.mark.parametrize(
    ("samplings", "num_left", "num_copied"),
    [
        pytest.param([GREEDY], 0, 1, id="one row: its position"),
        pytest.param([GREEDY] * 4, 0, 3, id="four rows in a pool: positions, for layers and pool, and slots"),
        pytest.param([GREEDY] * 4, 1, 5, id="a free slot between them: which slots are rows, and whose"),
        pytest.param([HOT], 0, 3, id="one sampled row: its temperature and key"),
        pytest.param([HOT] * 4, 0, 5, id="four sampled rows"),
    ],
)
def test_a_decode_step_evaluates_and_waits_once_and_copies_few_numbers_to_the_device(
    make_model, calls, samplings: list[RowSampling], num_left: int, num_copied: int
) -> None:
    """The next step is launched before the tokens of this one, and whether they are sound, are read."""
    model = make_model("llama")
    pieces = [begin(model, prompt(9 + i, salt=i), one) for i, one in enumerate(samplings)]
    batch = batched(model)
    batch.step(pieces)
    batch.step([])
    for piece in pieces[1 : 1 + num_left]:
        batch.remove(piece.row)
    batch.step([], run_ahead=True)
    for _ in range(3):
        calls.clear()
        batch.step([], run_ahead=True)
        assert batch.is_ahead
        assert calls == {"async_eval": 1, "eval": 1, "tolist": 2, "array": num_copied}
