"""Reads the last exchanges of a session from its log: questions, answers, and their start positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ops.log.record import pair_up
from turnkeep_client.messages import Appended, Closed, Failed, Generate, Generated, Opened, Rewound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.log import Entry


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer: the session's tokens from `start` to `end`.

    `start` is None if unknown: either the part of the log that was read starts with this exchange, or tokens
    before it were replaced, then or in a later turn. If its own tokens were replaced, they end behind `end`.
    """

    question: str
    answer: str
    start: int | None
    end: int


async def last_exchanges(client: Client, session: str, at_least: int = 1) -> list[Exchange]:
    """Return the last exchanges of a session, at least `at_least` if it has that many; the newest is last.

    Reads the log from its end, so a long session costs no more than a short one.
    """
    return (await last_exchanges_and_position(client, session, at_least))[0]


async def last_exchanges_and_position(
    client: Client, session: str, at_least: int
) -> tuple[list[Exchange], int]:
    """Return what `last_exchanges` does, and the session's position after the last result in the log."""
    entries: list[Entry] = []
    async for piece in client.log_backwards(session):
        entries = piece + entries
        found, position = _exchanges(entries)
        # Read one more, as the start of the first is unknown.
        if position is not None and len(found) > at_least:
            return found, position
    found, position = _exchanges(entries, 0)
    return found, position or 0


def _exchanges(entries: Sequence[Entry], position: int | None = None) -> tuple[list[Exchange], int | None]:
    """Return the exchanges in a part of a session's log, in order, and the session's position after it.

    A rewind or a close removes exchanges. `position` is the session's position before this part, or None if
    unknown.
    """
    found: list[Exchange] = []
    # A request that waits may be cancelled before an earlier one is answered: its result comes first.
    for one in sorted(pair_up(entries), key=lambda pair: pair.answered.seq):
        request, result = one.request, one.result
        if isinstance(result, Failed) or result.repeat_of is not None:
            continue  # the request changed nothing
        match result:
            case Appended(rewritten_from=int(kept)) | Generated(rewritten_from=int(kept)):
                found = [_moved(one, kept) for one in found]
        match result:
            case Generated() if isinstance(request, Generate) and result.tokens:
                start = position if result.rewritten_from is None else None
                found.append(Exchange(_question(request), result.text, start, result.position))
            case Opened() | Closed():
                found.clear()
            case Rewound():
                found = [one for one in found if one.end <= result.position]
        position = 0 if isinstance(result, Closed) else result.position
    return found, position


def _moved(exchange: Exchange, kept: int) -> Exchange:
    """Return an exchange after the tokens from `kept` on were replaced: it ends somewhere behind `kept`."""
    start = exchange.start if (exchange.start or 0) <= kept else None
    return replace(exchange, start=start, end=min(exchange.end, kept + 1))


def _question(request: Generate) -> str:
    if request.messages is None:
        return request.text or ""
    return "\n\n".join(str(message.content or "") for message in request.messages if message.role == "user")
