"""Makes KV in which each value is a fingerprint of the tokens up to its position, to check restores."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from cache.names import blocks
from cache.names.blocks import Span
from cache.names.identity import Identity
from cache.names.snapshot import ModelLayout, Tensor
from cache.names.tokens import Chain, as_tokens, pack
from cache.store import PrefixMatch, Store
from tests.at_rest import unbalanced

BLOCK = 4
HEADS, DIM = 2, 3


def identity(**changes: Any) -> Identity:
    fields = {"weights": "w", "config": "c", "tokenizer": "t", "kv_dtype": "float32", "block_tokens": BLOCK}
    return Identity(**{**fields, **changes})


def kv(tokens: Sequence[int], num_layers: int = 2) -> dict[str, np.ndarray]:
    """Make KV in which the value at a position is a fingerprint of all tokens up to it."""
    prints, seen = [], 7
    for token in tokens:
        seen = (seen * 31 + token + 1) % 1_000_003
        prints.append(seen)
    base = np.array(prints, dtype=np.float32)[None, None, :, None] * np.ones((1, HEADS, 1, DIM), np.float32)
    ramp = np.arange(HEADS * DIM, dtype=np.float32).reshape(1, HEADS, 1, DIM)
    return {
        f"{layer}.{part}": base + ramp + 10 * layer + (5 if part == "keys" else 0)
        for layer in range(num_layers)
        for part in ("keys", "values")
    }


LAYOUT = ModelLayout(tuple((name, "F32", (HEADS, DIM)) for name in kv([0])))


def cut(tokens: Sequence[int], span: Span) -> tuple[Tensor, ...]:
    """Return a span of the KV of `kv` as tensors, as the device thread would copy it."""
    tensors = []
    for name, whole in kv(tokens).items():
        part = np.ascontiguousarray(whole[:, :, span.start : span.end])
        tensors.append(Tensor(name, "F32", part.shape, memoryview(part).cast("B")))
    return tuple(tensors)


def save_all(store: Store, tenant: str, tokens: Sequence[int]) -> list[bool]:
    """Save all spans of these tokens that `store.kv.wanted` names; return which of them were accepted."""
    spans = store.kv.wanted(store.kv.chain(tenant), tokens)
    return [store.kv.save(store.kv.chain(tenant), tokens, span, cut(tokens, span)) for span in spans]


async def put(store: Store, tokens: Sequence[int], tenant: str = "a") -> None:
    """Save the KV of these tokens, and wait until it is written."""
    save_all(store, tenant, tokens)
    assert await store.queue.drained(10)


async def stored(open_store: Callable[..., Awaitable[Store]], *runs: Sequence[int], **settings: Any) -> Store:
    """Open a store, save the KV of each run of tokens for the tenant `a`, and wait until it is written."""
    store = await open_store(**settings)
    for tokens in runs:
        await put(store, tokens)
    return store


def assert_is_kv_of(tensors: dict[str, mx.array], tokens: Sequence[int]) -> None:
    """Assert that the tensors begin with the KV of these tokens; they may be longer."""
    expected = kv(tokens)
    assert tensors.keys() == expected.keys()
    for name, whole in expected.items():
        assert np.array_equal(np.array(tensors[name])[:, :, : len(tokens)], whole), name


async def num_restored(store: Store, tokens: Sequence[int], tenant: str = "a") -> int:
    """Restore the longest stored prefix of these tokens and check its KV; return its number of tokens."""
    restored = await store.kv.load(await extended(store, tokens, tenant))
    if restored is None:
        return 0
    assert_is_kv_of(restored.tensors, tokens[: restored.num_tokens])
    return restored.num_tokens


async def extended(
    store: Store, tokens: Sequence[int], tenant: str = "a", chain: Chain | None = None
) -> PrefixMatch:
    """Match these tokens, exact to the token."""
    chain = chain or store.kv.chain(tenant)
    return await store.kv.extend(store.kv.match(chain, tokens), chain, tokens)


class Clock:
    """A clock that stands still until a test sets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def flip(path: Path, at: int = -1) -> None:
    """Change a bit of a file, by default in its last byte."""
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)


def traces(directory: Path, tokens: list[int]) -> list[str]:
    """Return the entries of the directory that contain two consecutive tokens, or the digest of a block."""
    chain = Chain(blocks.root(identity().digest(), "a"), BLOCK)
    told = list(chain.names(as_tokens(tokens))[1:])
    told += [pack(tokens[i : i + 2]) for i in range(len(tokens) - 1)]
    found = set()
    for path in directory.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        content += str(path.relative_to(directory)).encode()
        if any(one in content or one.hex().encode() in content for one in told):
            found.add(path.relative_to(directory).parts[0])
    return sorted(found)


async def uploaded(store: Store) -> None:
    """Wait until the snapshots that are queued for the remote tier are there."""
    assert store.remote is not None
    await asyncio.to_thread(store.remote._uploading.submit(lambda: None).result, 5)


def assert_sum_rule(store: Store) -> None:
    assert not unbalanced(store)
