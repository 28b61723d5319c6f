"""Reads the last exchanges of a session from its log: questions, answers, and their start positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from turnkeep_client.images import images_in, text_in
from turnkeep_client.messages import Appended, Closed, Generate, Generated, Opened, Rewound
from turnkeep_client.session_log import tails
from turnkeep_client.subjects import session_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from turnkeep_client.client import Client
    from turnkeep_client.session_log import Exchange, SessionLog


@dataclass(frozen=True, slots=True)
class ShownExchange:
    """One question and its answer."""

    question: str
    answer: str
    #: The position before the exchange. None if unknown: the part of the log that was read starts with this
    #: exchange, or tokens before it were replaced, then or in a later turn.
    start: int | None
    #: The position after it; a lower one if a later turn has replaced its own tokens.
    end: int
    #: The digests of the question's images.
    images: tuple[str, ...] = ()


async def last_exchanges(client: Client, session: str, at_least: int = 1) -> list[ShownExchange]:
    """Return the last exchanges of a session, at least `at_least` if it has that many; the newest is last.

    Reads the log from its end, so a long session costs no more than a short one.
    """
    return (await last_exchanges_and_position(client, session, at_least))[0]


async def last_exchanges_and_position(
    client: Client, session: str, at_least: float, end: int | None = None
) -> tuple[list[ShownExchange], int]:
    """Return what `last_exchanges` does, and the session's position after the last result in the log.

    With `end`, as they were before that sequence of the log. A fork that has too few begins with all that it
    took from its parent, unless it was imported: another session may have the parent's name then.
    """
    found, position, opened = list[ShownExchange](), 0, None
    async for log in tails(client.stored, session_key(client.tenant, session), end):
        found, position, opened = _exchanges(log)
        if opened or len(found) > at_least:  # read one more, as the start of the first is unknown
            break
    parent = opened.result.parent if opened and isinstance(opened.result, Opened) else None
    if opened and parent and len(found) < at_least and not log.is_copy:
        whole, _ = await last_exchanges_and_position(client, parent.session, inf, opened.answered.seq)
        found, position, _ = _exchanges(log, _until(whole, parent.position))
    return found, position


def _exchanges(
    log: SessionLog, taken: Iterable[ShownExchange] = ()
) -> tuple[list[ShownExchange], int, Exchange | None]:
    """Return the exchanges in a part of a session's log, the position after it, and the open that begins it.

    A rewind or a close removes exchanges. A fork begins with those `taken` from its parent.
    """
    found, opened = list[ShownExchange](), None
    position = 0 if log.start == 1 else None
    for one in log.exchanges:
        request, result = one.request, one.result
        if not one.changes_session:
            continue
        match result:
            case Appended(rewritten_from=int(kept)) | Generated(rewritten_from=int(kept)):
                found = [_moved(one, kept) for one in found]
        match result:
            case Generated() if isinstance(request, Generate) and result.tokens:
                start = position if result.rewritten_from is None else None
                text, images = _question(request)
                found.append(ShownExchange(text, result.text, start, result.position, images))
            case Opened() | Closed():
                found, opened = [*taken], one if isinstance(result, Opened) else None
            case Rewound():
                found = _until(found, result.position)
        position = 0 if isinstance(result, Closed) else result.position
    return found, position or 0, opened


def _until(exchanges: Iterable[ShownExchange], position: int) -> list[ShownExchange]:
    """Return the exchanges that end at `position` or before."""
    return [one for one in exchanges if one.end <= position]


def _moved(exchange: ShownExchange, kept: int) -> ShownExchange:
    """Return an exchange after the tokens from `kept` on were replaced: it ends somewhere behind `kept`."""
    start = exchange.start if (exchange.start or 0) <= kept else None
    return replace(exchange, start=start, end=min(exchange.end, kept + 1))


def _question(request: Generate) -> tuple[str, tuple[str, ...]]:
    """Return a question's text and the digests of its images."""
    if request.messages is None:
        return request.text or "", ()
    said = [message.content for message in request.messages if message.role == "user"]
    return "\n\n".join(map(text_in, said)), tuple(one for content in said for one in images_in(content))
