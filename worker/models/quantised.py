"""Quantises KV: replaces a model's plain caches by quantised ones. Device thread only.

Keys and values are quantised when they enter the cache, from a session's first token on, and never change: a
session's KV has one precision on the device and on disk, and the same bits after a restore. Layers with other
caches (windows, chunks, recurrent states) keep full precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from cache.kv.states import leaves, parts

from .model_files import ModelError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: The values of the setting `kv_bits`, besides full precision.
BITS: Final = (4, 8)
#: Group sizes (how many numbers share a scale and a bias); the first one that divides the head size is used.
_GROUPS: Final = (64, 32)
#: Token counts of the trial's two passes: a prompt, which needs an attention mask, then one token.
_TRIAL: Final = (5, 1)


def quantise_kv(model: Any, bits: int) -> None:
    """Make all caches that `model` creates from now on keep keys and values in `bits` bits.

    Replaces the model's `make_cache`, which mlx-lm calls for every cache. Tries it with a few tokens. Raises
    `ModelError` if no layer can be quantised, or if the model's attention cannot read quantised KV.
    """
    if bits not in BITS:
        raise ModelError(f"kv_bits is {bits}; it must be 4, 8, or full")
    groups = _groups(model)
    make = getattr(model, "make_cache", None) or (lambda: [KVCache() for _ in model.layers])  # type: ignore[no-untyped-call]  # mlx-lm has no annotations
    try:
        caches = _quantised(make(), groups, bits)
        for length in _TRIAL:
            logits = model(mx.array([list(range(length))]), cache=caches)
            if not np.isfinite(np.array(logits.astype(mx.float32))).all():
                raise ValueError("logits are not finite")  # noqa: TRY301  # reported like the others
    except Exception as error:  # noqa: BLE001  # a model may raise anything for an unexpected cache
        raise ModelError(
            "this model's attention cannot read quantised KV"
            f" ({type(error).__name__}: {one_line(error)}); leave kv_bits at full"
        ) from None
    model.make_cache = lambda: _quantised(make(), groups, bits)


def unpacked_bytes(caches: Sequence[Any]) -> int:
    """Return the bytes of one token's dequantised keys and values in the largest layer.

    The caches must hold tokens. Returns 0 if none of them is quantised.
    """
    return max((_unpacked_bytes(cache) for _, cache in leaves(caches)), default=0)


def _unpacked_bytes(cache: Any) -> int:
    if type(cache) is not QuantizedKVCache:
        return 0
    held = parts(cache)
    return sum(
        held[f"{name}.codes"].shape[1]
        * held[f"{name}.codes"].shape[3]
        * (32 // cache.bits)
        * held[f"{name}.scales"].dtype.size
        for name in ("keys", "values")
    )


def _groups(model: Any) -> dict[str, int]:
    """Return the quantisation group size of each layer with plain keys and values. Raises `ModelError`."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[0]]), cache=caches))
    groups = {}
    for path, cache in leaves(caches):
        if type(cache) is not KVCache or cache.keys is None or cache.values is None:
            continue
        sizes = {cache.keys.shape[3], cache.values.shape[3]}
        group = next((group for group in _GROUPS if all(size and size % group == 0 for size in sizes)), None)
        if group is None:
            raise ModelError(
                f"heads of layer {path} have a size of {' and '.join(map(str, sorted(sizes)))}, and kv_bits"
                " needs a multiple of 32; leave kv_bits at full"
            )
        groups[path] = group
    if not groups:
        raise ModelError("this model has no layer of plain keys and values; leave kv_bits at full")
    return groups


def _quantised(caches: Sequence[Any], groups: Mapping[str, int], bits: int, path: str = "") -> list[Any]:
    """Return new caches in which quantised ones replace the layers named in `groups`."""
    made: list[Any] = []
    for i, cache in enumerate(caches):
        here = f"{path}{i}"
        if type(cache) is CacheList:
            made.append(CacheList(*_quantised(cache.caches, groups, bits, f"{here}.")))  # type: ignore[no-untyped-call]
        elif here in groups:
            made.append(QuantizedKVCache(group_size=groups[here], bits=bits))
        else:
            made.append(cache)
    return made
