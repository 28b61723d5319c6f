"""Multiplies few tokens with a model's weights on all cores, on a Linux CPU. Device thread only.

OpenBLAS divides products of one token, and of many tokens, well among its threads, but not those of 2 to 15
tokens: these took as long on two cores as on one. Here each core multiplies with some rows of the weights, by
a stream of MLX and a single thread of OpenBLAS. So several answers, and drafts of several tokens, take little
more time than one token.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_flatten

from .cpu import on_cpu

if TYPE_CHECKING:
    from collections.abc import Callable

#: The numbers of tokens whose products are divided. All but 2 are filled up to a multiple of `_TILE`.
_FEW: Final = range(2, 16)
_TILE: Final = 4
#: Weights with fewer elements are not divided: it takes longer than it saves.
_LEAST_ELEMENTS: Final = 1 << 18
#: The most cores among which a product is divided.
_MOST_CORES: Final = 8
#: Other layers than linear ones need OpenBLAS's threads; they may have this share of the weights at most.
_OTHERS: Final = 0.1


class Products:
    """Divides the products of a model's passes over few tokens among the cores."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._streams = [mx.default_stream(mx.cpu)]
        self._streams += [mx.new_stream(mx.cpu) for _ in range(min(threads.num, _MOST_CORES) - 1)]

    def begin(self, num_tokens: int) -> None:
        """Choose OpenBLAS's threads for the pass over `num_tokens` tokens that is built next."""
        self._threads.use(1 if num_tokens in _FEW else self._threads.num)

    def __call__(self, x: mx.array, weight: mx.array) -> mx.array:
        """Return the product of `x`, (..., K), and `weight`, (N, K): an array (..., N)."""
        num = x.size // x.shape[-1]
        if num not in _FEW or weight.size < _LEAST_ELEMENTS:
            return x @ weight.T
        tokens = x.reshape(num, -1)
        if missing := -num % _TILE if num > _FEW[0] else 0:
            tokens = mx.pad(tokens, [(0, missing), (0, 0)])
        each = -(-len(weight) // len(self._streams))
        parts = [
            mx.matmul(
                tokens, mx.swapaxes(weight[i * each : (i + 1) * each], 0, 1, stream=stream), stream=stream
            )
            for i, stream in enumerate(self._streams)
        ]
        return mx.concatenate(parts, axis=-1)[:num].reshape(*x.shape[:-1], -1)


class Threads:
    """Sets the number of OpenBLAS's threads, for the products that begin from then on."""

    def __init__(self) -> None:
        """Raises `AttributeError` if MLX does not use OpenBLAS."""
        library = ctypes.CDLL(None)
        self._set: Callable[[int], Any] = library.openblas_set_num_threads
        #: The number that OpenBLAS uses by itself.
        self.num = int(library.openblas_get_num_threads())

    def use(self, num: int) -> None:
        """Have OpenBLAS use `num` threads. What runs already keeps its threads."""
        self._set(num)


@cache
def openblas() -> Threads:
    """Return OpenBLAS's threads, which all models of the process share. Raises `AttributeError`."""
    return Threads()


class _Linear:
    def __call__(self: Any, x: mx.array) -> mx.array:
        product: mx.array = self.products(x, self["weight"])
        return product + self["bias"] if "bias" in self else product


class _Embedding:
    def as_linear(self: Any, x: mx.array) -> mx.array:
        product: mx.array = self.products(x, self["weight"])
        return product


#: By class of layer: the methods that replace its own.
_FASTER: Final[dict[type, type]] = {Linear: _Linear, Embedding: _Embedding}


def install(model: Any, products: Products) -> None:
    """Make the model's linear layers, and its output head, use `products`; later calls change nothing."""
    kinds = {
        kind: type(kind.__name__, (faster, kind), {"__module__": kind.__module__, "products": products})
        for kind, faster in _FASTER.items()
    }
    for module in model.modules():
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]


def products_for(model: Any) -> Products | None:
    """Make a model divide its products, and return them.

    None without any effect unless the model is in float32, on a Linux CPU with OpenBLAS and several cores.
    """
    for module in model.modules():
        if isinstance(earlier := getattr(type(module), "products", None), Products):
            return earlier  # another batch runs this model, too
    if not on_cpu() or not _is_linear(model):
        return None
    try:
        threads = openblas()
    except AttributeError:
        return None
    if threads.num == 1:
        return None
    products = Products(threads)
    install(model, products)
    return products


def _is_linear(model: Any) -> bool:
    """Whether nearly all weights belong to linear layers and embeddings in float32, some large enough."""
    arrays: Any = tree_flatten(model.parameters())
    ours = [one["weight"] for one in model.modules() if type(one) in _FASTER]
    size = sum(one.size for one in ours if one.dtype == mx.float32)
    is_most: bool = size >= (1 - _OTHERS) * sum(array.size for _, array in arrays)
    return is_most and any(one.size >= _LEAST_ELEMENTS for one in ours)
