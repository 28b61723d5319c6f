"""How a restore allocates memory, and which CPUs its threads use."""

from __future__ import annotations

import os
import sys
import threading

import mlx.core as mx
import numpy as np
import pytest
from made_kv import assert_is_kv_of, save_all

from cache.disk import chain_reader
from cache.kv import arrays
from cache.kv.arrays import BlankTensors
from cache.names.snapshot import ModelLayout

TOKENS = list(range(200))

linux = pytest.mark.skipif(sys.platform != "linux", reason="only there threads choose their CPUs")


@pytest.mark.parametrize("dtype", sorted(arrays.TYPES))
def test_bytes_written_into_a_restore_buffer_appear_in_the_mlx_array(dtype) -> None:
    mlx_type, numpy_type = arrays.TYPES[dtype]
    blank = BlankTensors(
        ModelLayout((("0.keys", dtype, (2, 3)), ("0.values", dtype, (2, 0)))), 5, (("state.1", dtype, (7,)),)
    )
    keys, values = blank.places
    item = np.dtype(numpy_type).itemsize
    assert ([row.nbytes for row in keys.rows], keys.token_bytes) == ([256 * 3 * item] * 2, 3 * item)
    assert ([row.nbytes for row in values.rows], values.token_bytes) == ([0, 0], 0)
    written = np.random.default_rng(0).integers(0, 2, (2, 256 * 3)).astype(numpy_type)
    for row, numbers in zip(keys.rows, written, strict=True):
        row[:] = numbers.tobytes()
    blank.state[0][:] = written[0, :7].tobytes()
    del keys, values, row
    found = blank.arrays()
    assert {name: array.dtype for name, array in found.items()} == dict.fromkeys(found, mlx_type)
    assert found["0.keys"].shape == (1, 2, 256, 3)
    assert found["0.values"].shape == (1, 2, 256, 0)
    for name, expected in (("0.keys", written), ("state.1", written[0, :7])):
        assert bytes(memoryview(found[name])) == expected.tobytes()


async def test_restored_arrays_have_the_saved_kv_and_can_grow(open_store) -> None:
    store = await open_store()
    save_all(store, "a", TOKENS)
    assert await store.queue.drained(10)
    restored = await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS))
    assert_is_kv_of(restored.tensors, TOKENS)
    grown = mx.concatenate([restored.tensors["0.keys"], mx.ones((1, 2, 1, 3))], axis=2)
    assert mx.array_equal(grown[..., -1:, :], mx.ones((1, 2, 1, 3))), "they are arrays like any other"


@linux
async def test_two_restore_threads_use_separate_cpus_and_get_their_affinity_back(
    open_store, monkeypatch
) -> None:
    monkeypatch.setattr(chain_reader, "LEAST_HELPED_BYTES", 0)
    seen: dict[int, set[int]] = {}
    both = threading.Barrier(2)
    read = chain_reader.snapshot_format.read

    def watched(*args, **fields):
        if threading.get_native_id() not in seen:
            seen[threading.get_native_id()] = os.sched_getaffinity(0)
            both.wait(timeout=10)
        return read(*args, **fields)

    monkeypatch.setattr(chain_reader.snapshot_format, "read", watched)
    store = await open_store()
    save_all(store, "a", TOKENS)
    assert await store.queue.drained(10)
    assert_is_kv_of((await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS))).tensors, TOKENS)
    one, other = seen.values()
    allowed = os.sched_getaffinity(0)
    assert one | other == allowed
    assert not one & other or len(allowed) == 1
    for thread in seen:
        assert os.sched_getaffinity(thread) == allowed


@linux
async def test_a_restore_still_works_if_cpu_affinity_cannot_be_set(open_store, monkeypatch) -> None:
    def forbidden(thread: int, mask: object) -> None:
        raise PermissionError

    monkeypatch.setattr(chain_reader, "LEAST_HELPED_BYTES", 0)
    monkeypatch.setattr(chain_reader.os, "sched_setaffinity", forbidden)
    store = await open_store()
    save_all(store, "a", TOKENS)
    assert await store.queue.drained(10)
    assert_is_kv_of((await store.kv.load(store.kv.match(store.kv.chain("a"), TOKENS))).tensors, TOKENS)
