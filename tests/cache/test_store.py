"""The store on a real directory: what is saved is found again, and only that."""

from __future__ import annotations

from made_kv import assert_is_kv_of, save_all


async def test_smoke(open_store) -> None:
    store = await open_store()
    tokens = list(range(10))
    assert save_all(store, "a", tokens) == [True, True, True]
    assert await store.barrier(5)
    match = store.match("a", tokens)
    assert match.num_tokens == 10
    restored = await store.load(match)
    assert restored is not None
    assert_is_kv_of(restored.tensors, tokens)
    print(store.stats())
