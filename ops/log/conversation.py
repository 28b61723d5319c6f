"""A session's log as a conversation: its requests in order, each with its result. Pure."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003  # msgspec reads the annotations
from typing import TYPE_CHECKING

from msgspec import Struct

from turnkeep_client.messages import Request, Result, decode_request

from .record import decoded, pair_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from turnkeep_client.log import Entry


class Turn(Struct, frozen=True, kw_only=True):
    """A request and its result. An invalid body is None, and so is the result of a waiting request."""

    number: int
    seq: int
    stored: datetime
    request: Request | None
    result: Result | None
    model: str | None
    build: dict[str, str]


def conversation(entries: Sequence[Entry]) -> Iterator[Turn]:
    """Yield a session's requests in order."""
    answered = {exchange.asked.seq: exchange for exchange in pair_up(entries)}
    for number, entry in enumerate((entry for entry in entries if entry.kind == "in"), 1):
        exchange = answered.get(entry.seq)
        yield Turn(
            number=number,
            seq=entry.seq,
            stored=entry.stored,
            request=exchange.request if exchange else decoded(decode_request, entry.body),
            result=exchange.result if exchange else None,
            model=exchange.answered.model if exchange else None,
            build=dict(exchange.answered.build) if exchange else {},
        )
