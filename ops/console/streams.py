"""Streams answers as server-sent events: the chunks, and the Markdown blocks so far; and exported sessions.

Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from turnkeep_client.errors import TurnkeepError

from .markdown import GrowingText

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from turnkeep_client.messages import Chunk, Generate
    from turnkeep_client.session import Session

#: How long a worker may take to say what an answer without tokens waits for.
_ASK_S: Final = 0.8
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
    """Yield an answer as server-sent events, from its first token on: chunks, and changed Markdown blocks.

    A second after each token, and then every second or two, an event says what it waits for (`_waits`).
    `seq` is the sequence of `asked`. The last event is `end`, or an error; none comes once `is_stopping()`.
    """
    chunks = aiter(session.follow(asked, seq))
    yield _event("begin", {})
    text, following = GrowingText(), asyncio.create_task(_next(chunks))
    now = asyncio.get_running_loop().time
    due, earliest = None, now()
    try:
        while not is_stopping():
            done, _ = await asyncio.wait({following}, timeout=1 if due is None else max(0, due - now()))
            if done:
                chunk = following.result()
                if chunk is not None:
                    following = asyncio.create_task(_next(chunks))
                    parts = {"text": chunk.text, "reasoning": chunk.reasoning, "calls": chunk.tool_calls}
                    yield _event("chunk", parts)
                    text.add(chunk.text)
                    due = due or (earliest if chunk.text else None)
            elif due is None:
                yield _event("waits", await _waits(session, asked))
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


async def _waits(session: Session, asked: Generate) -> dict[str, int | bool]:
    """Return what an answer waits for, as its worker says: the progress of its prompt, or other requests.

    `is_heard` is false if no worker answers. `others` counts the requests that wait or run at the worker,
    without this one; `written` the tokens that were generated and not sent, as those of a call are.
    """
    info = None
    with contextlib.suppress(TimeoutError, TurnkeepError):
        async with asyncio.timeout(_ASK_S):
            info = await session.info(limit=0)
    if info is None:
        return {"is_heard": False}
    done, worker = info.progress, info.worker
    if done is not None and info.active == asked.id:
        read = {"read": done.cached_tokens, "of": done.context_tokens, "written": done.generated_tokens}
        return {"is_heard": True, **read}
    return {"is_heard": True, "others": max(worker.running + worker.waiting - 1, 0)}


async def _next(chunks: AsyncIterator[Chunk]) -> Chunk | None:
    return await anext(chunks, None)


def _event(kind: str, content: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(content))
