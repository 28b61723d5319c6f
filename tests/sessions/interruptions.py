"""An answer whose worker is killed while it is heard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnkeep_client.messages import Chunk, Generated


async def heard_over_kills(
    process: Any, asked: dict[str, Any], *, every: int, num_kills: int = 2
) -> tuple[list[Chunk], Generated]:
    """Start a worker, ask it in the session `s`, and kill it after each `every` tokens of the answer."""
    process.start()
    client = await process.client()
    try:
        generation = client.session("s").generate(**asked)
        chunks: list[Chunk] = []
        kills = 0
        async for chunk in generation:
            chunks.append(chunk)
            if kills < num_kills and sum(len(one.tokens) for one in chunks) > every * (kills + 1):
                process.kill()
                process.start()
                kills += 1
        result = generation.result
    finally:
        await client.close()
    assert kills == num_kills, "the answer lasted for all of them"
    return chunks, result
