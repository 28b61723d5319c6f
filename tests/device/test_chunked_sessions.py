"""Sessions with chunked attention are stored, rewound and forked, and get the tokens of plain masks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_process
import mlx.core as mx
import pytest
from tiny_models import BLOCK, append, generate, key, prompt

KIND = "llama4_chunks"
CHUNK = 4 * BLOCK


def answer(model: Any, tokens: Sequence[int], num: int) -> list[int]:
    """Answer greedily without caches: for each token, run the whole session under a mask of its chunks."""
    known = list(tokens)
    for _ in range(num):
        known.append(int(model(mx.array([known]))[0, -1].argmax().item()))
    return known[len(tokens) :]


async def test_chunked_layers_are_stored_once_and_a_restore_reads_only_their_last_chunk(
    make_model, trials, tmp_path
) -> None:
    """A block is half a chunk. The model has four layers, of which the fourth keeps all tokens."""
    model, tokens, block = make_model(KIND), prompt(699), 2 * BLOCK

    def open_process() -> Any:
        return engine_process.open_process(model, tmp_path, num_blocks=2, trials=trials)

    async with open_process() as process:
        _, answered, _ = await process.generate(tokens, 3 * block)
        await process.store.queue.drained(10)
        num_tokens, per_token = 699 + 3 * block - 1, 4 * 2 * 2 * 32 * 4
        assert _disk_bytes(tmp_path) <= 1.1 * num_tokens * per_token
    session = [*tokens, *answered]
    async with open_process() as process:
        outcome, got, _ = await process.generate([*session, 7], 5)
        assert (outcome.num_cached, outcome.num_prefilled) == (len(session) - 1, 2)
        assert got == answer(model, [*session, 7], 5)
        read = num_tokens + 3 * (CHUNK + 2 * block)
        assert process.store.stats().restored_bytes <= 1.1 * read * per_token // 4
        process.engine.forget(key())
        for end in (CHUNK, 5 * CHUNK - 1, 10 * CHUNK + 13):
            outcome, got, _ = await process.generate(session[:end], 3, name=f"s{end}")
            assert outcome.num_prefilled == 1, "it begins anywhere in what is stored"
            assert got == answer(model, session[:end], 3)


def _disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("end", [3 * CHUNK + 1, 3 * CHUNK + 5, 4 * CHUNK - 1, 4 * CHUNK])
def test_a_rewind_within_the_last_chunk_prefills_one_token_and_a_longer_one_prefills_all(
    make_model, make_rig, end
) -> None:
    model = make_model(KIND)
    rig, context = make_rig(model), prompt(4 * CHUNK + 1)
    first = append(context)
    rig.run(first)
    assert (first.num_cached, rig.end(first).earliest) == (4 * CHUNK, 3 * CHUNK)
    turn = generate(context[:end], 4, num_kept=end - 1)
    rig.run(turn)
    assert turn.num_prefilled == 1
    assert rig.tokens(turn) == answer(model, context[:end], 4)
    beyond = generate(context[:CHUNK], 4, num_kept=CHUNK - 1)
    rig.run(beyond)
    assert beyond.num_prefilled == CHUNK
    assert rig.tokens(beyond) == answer(model, context[:CHUNK], 4)
