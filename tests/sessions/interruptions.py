"""Generates an answer whose worker is killed in the middle."""

from __future__ import annotations

from typing import Any

from turnkeep_client.messages import Chunk, Generated


async def heard_over_a_kill(
    process: Any, asked: dict[str, Any], *, behind: int
) -> tuple[list[Chunk], Generated]:
    """Start a worker, send a generate to the session `s`, and restart the worker by SIGKILL in the answer.

    The kill comes after more than `behind` tokens. Return all chunks and the result.
    """
    process.start()
    async with await process.client() as client:
        generation, is_killed = client.session("s").generate(**asked), False
        chunks: list[Chunk] = []
        async for chunk in generation:
            chunks.append(chunk)
            if not is_killed and sum(len(one.tokens) for one in chunks) > behind:
                process.kill()
                process.start()
                is_killed = True
    assert is_killed, "the answer lasted for it"
    return chunks, generation.result
