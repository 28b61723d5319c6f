"""Whether to read, fetch or prefill follows from measured speeds, and a slow disk is tried again."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import pytest
from engine_process import open_process
from tiny_models import BLOCK, prompt

from cache.disk import format as snapshot_format
from worker.engine import kv_lookup as measured
from worker.engine.kv_lookup import RestoreTimes

MIB = 2**20


def test_a_fetch_is_tried_again_after_refusals_whether_the_disk_or_the_tier_was_slow() -> None:
    for tier_s, disk_s in ((60.0, 1.0), (1.0, 60.0), (1.0, None)):
        rates = RestoreTimes()
        rates.prefilled(1000, seconds=1.0)
        rates.fetched(64 * MIB, tier_s)
        if disk_s is not None:
            rates.restored(64 * MIB, disk_s)
        refused = next(n for n in count() if rates.should_fetch(64 * MIB, 1000))
        assert refused <= 100
        assert (refused > 50) == (disk_s is not None)


def test_a_restore_is_tried_again_after_refusals() -> None:
    rates = RestoreTimes()
    rates.prefilled(1000, seconds=1.0)
    rates.restored(64 * MIB, seconds=60.0)
    assert [rates.should_restore(64 * MIB, 1000) for _ in range(100)].index(True) > 50


@pytest.mark.parametrize(
    ("file_s", "token_s", "is_restored"),
    [(0.0, 1000.0, True), (0.01, 1e-6, False)],
    ids=["a fast disk", "a slow disk"],
)
async def test_a_session_is_prefilled_again_where_the_disk_was_seen_to_be_slower(
    make_model, trials, tmp_path, monkeypatch, file_s: float, token_s: float, is_restored: bool
) -> None:
    """The first session is restored from a disk of unknown speed, which that measures."""
    monkeypatch.setattr(measured, "_LEAST_BYTES", 1)
    texts = [prompt(8 * BLOCK, salt=salt) for salt in (3, 4)]
    async with open_process(make_model("llama"), tmp_path, trials=trials) as before:
        for i, tokens in enumerate(texts):
            await before.append(tokens, name=f"s{i}")
    read = snapshot_format.read

    def slow(*args: Any, **options: Any) -> int:
        time.sleep(file_s)
        return read(*args, **options)

    monkeypatch.setattr(snapshot_format, "read", slow)
    async with open_process(make_model("llama"), tmp_path, trials=trials) as after:
        after.engine._finder.rates.prefilled(1000, seconds=1000 * token_s)
        first, second = [await after.append(tokens, name=f"s{i}") for i, tokens in enumerate(texts)]
    assert (first.num_cached, first.num_prefilled) == (8 * BLOCK - 1, 0)
    assert (second.num_prefilled == 0) == is_restored
