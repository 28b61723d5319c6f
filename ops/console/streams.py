"""Streams answers as server-sent events: the chunks, and the Markdown blocks so far; and exported sessions.

Event loop only.
"""

from __future__ import annotations

import asyncio
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from turnkeep_client.errors import TurnkeepError

from .markdown import Growing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from turnkeep_client.messages import Chunk, Generate
    from turnkeep_client.session import Session

#: Seconds between `quiet` events, while no token arrives.
_QUIET_S: Final = 3
#: Least pause between two parses of the text: in seconds, and as a multiple of the last parse's duration.
_DRAW_S: Final = 0.05
_DRAW_SHARE: Final = 4
#: A file is read and sent in pieces of this size.
_PIECE_BYTES: Final = 2**18


async def pieces(file: IO[bytes]) -> AsyncGenerator[bytes]:
    """Yield the content of a file, then close the file."""
    with file:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece


async def events(
    session: Session, asked: Generate, seq: int, is_stopping: Callable[[], bool]
) -> AsyncGenerator[bytes]:
    """Yield the events of an answer from its first token on: chunks, and the Markdown blocks that change.

    `seq` is the sequence of the request `asked`. The stream ends early once `is_stopping()`.
    """
    chunks = aiter(session.follow(asked, seq))
    yield _event("begin", {})
    text, following, quiet_s = Growing(), asyncio.create_task(_next(chunks)), 0
    now = asyncio.get_running_loop().time
    due, earliest = None, now()
    try:
        while not is_stopping():
            done, _ = await asyncio.wait({following}, timeout=1 if due is None else max(0, due - now()))
            if done:
                chunk, quiet_s = following.result(), 0
                if chunk is not None:
                    following = asyncio.create_task(_next(chunks))
                    parts = {"text": chunk.text, "reasoning": chunk.reasoning, "calls": chunk.tool_calls}
                    yield _event("chunk", parts)
                    text.add(chunk.text)
                    due = due or (earliest if chunk.text else None)
            elif due is None and (quiet_s := quiet_s + 1) % _QUIET_S == 0:
                yield _event("quiet", {"seconds": quiet_s})
            is_last = bool(done) and chunk is None
            if due is not None and (is_last or now() >= due):
                began = now()
                first, blocks = await asyncio.to_thread(text.take)
                due, earliest = None, now() + max(_DRAW_S, _DRAW_SHARE * (now() - began))
                yield _event("blocks", {"first": first, "blocks": blocks})
            if is_last:
                yield _event("end", {})
                return
    except TurnkeepError as error:
        yield _event("end", {"error": str(error)})
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _next(chunks: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(chunks, None)


def _event(kind: str, content: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(content))
