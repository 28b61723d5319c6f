"""Reads the last exchanges of a session from its log: questions, answers, and their start positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from turnkeep_client.images import images_in, text_in
from turnkeep_client.messages import Appended, Closed, Generate, Generated, Opened, Rewound
from turnkeep_client.session_log import tails
from turnkeep_client.subjects import session_key

if TYPE_CHECKING:
    from turnkeep_client.client import Client
    from turnkeep_client.session_log import SessionLog


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
    client: Client, session: str, at_least: int
) -> tuple[list[ShownExchange], int]:
    """Return what `last_exchanges` does, and the session's position after the last result in the log."""
    found, position = list[ShownExchange](), 0
    async for log in tails(client.stored, session_key(client.tenant, session)):
        found, position = _exchanges(log)
        if len(found) > at_least:  # read one more, as the start of the first is unknown
            break
    return found, position


def _exchanges(log: SessionLog) -> tuple[list[ShownExchange], int]:
    """Return the exchanges in a part of a session's log, in order, and the session's position after it.

    A rewind or a close removes exchanges.
    """
    found: list[ShownExchange] = []
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
                found.clear()
            case Rewound():
                found = [one for one in found if one.end <= result.position]
        position = 0 if isinstance(result, Closed) else result.position
    return found, position or 0


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
