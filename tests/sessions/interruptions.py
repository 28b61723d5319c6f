"""An answer whose worker is killed while it is heard."""

from __future__ import annotations

from typing import Any

from turnkeep_client.messages import Chunk, Generated


async def heard_over_a_kill(
    process: Any, asked: dict[str, Any], *, behind: int
) -> tuple[list[Chunk], Generated]:
    """Start a worker, ask it in the session `s`, and kill it once, behind so many tokens of the answer."""
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
