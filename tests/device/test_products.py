"""Products of few tokens, divided among the cores of a CPU, are those that MLX computes at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from worker.batch import products as products_of
from worker.batch.batch_kinds import batch_for
from worker.batch.parts import OwnPart
from worker.batch.products import Products, products_for

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="this is the way on a CPU alone")


class Threads:
    """Stands for OpenBLAS's threads; notes how many were to be used."""

    num = 3

    def __init__(self) -> None:
        self.used: list[int] = []

    def use(self, num: int) -> None:
        self.used.append(num)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products_of, "openblas", Threads)
    monkeypatch.setattr(products_of, "_LEAST_ELEMENTS", 16)


@pytest.mark.parametrize("num_rows", [5, 96, 97])
@pytest.mark.parametrize("num", [*range(1, 18), 128])
def test_a_divided_product_equals_the_whole_one(num: int, num_rows: int) -> None:
    x = mx.random.normal((num, 1, 64), key=mx.random.key(num))
    weight = mx.random.normal((num_rows, 64), key=mx.random.key(1))
    divided = Products(Threads())
    for some in (x, x.swapaxes(0, 1)):
        found = divided(some, weight)
        assert found.shape == (*some.shape[:-1], num_rows)
        assert mx.allclose(found, some @ weight.T, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "exaone4"])
def test_a_model_has_the_same_logits_with_divided_products(
    monkeypatch: pytest.MonkeyPatch, family: str, build_model: Callable[..., Any]
) -> None:
    """One of the two has its embedding as output head."""
    model = build_model(family)
    with monkeypatch.context() as patch:
        patch.setattr(Threads, "num", 1)
        plain = batch_for(model)._run
    expected = [logits(plain, num) for num in (1, 3, 8, 20)]
    assert plain.products is None
    forward = batch_for(model)._run
    for num, one in zip((1, 3, 8, 20), expected, strict=True):
        assert mx.allclose(logits(forward, num), one, atol=1e-4)
    assert forward.products._threads.used == [3, 1, 1, 3], "OpenBLAS divides the others"
    assert batch_for(model)._run.products is forward.products, "its layers have them already"


def logits(forward: Any, num: int) -> mx.array:
    caches = make_prompt_cache(forward._model)
    found: mx.array = forward([OwnPart(caches, 0, num)], [5] * num)
    mx.eval(found)
    return found


def test_products_are_not_divided_on_one_core(
    monkeypatch: pytest.MonkeyPatch, build_model: Callable[..., Any]
) -> None:
    monkeypatch.setattr(Threads, "num", 1)
    assert products_for(build_model("llama")) is None


def test_products_are_not_divided_in_models_with_quantised_weights_or_experts(
    build_model: Callable[..., Any],
) -> None:
    """OpenBLAS's threads are of use there."""
    quantised = build_model("llama")
    nn.quantize(quantised, group_size=32)
    for model in (quantised, Experts()):
        assert products_for(model) is None


class Experts(nn.Module):
    """A model of which few weights belong to linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = mx.ones((4, 32, 32))
        self.head = nn.Linear(32, 8)
