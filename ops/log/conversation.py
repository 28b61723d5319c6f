"""Reads a session's log as a conversation: its requests in order, each with its result."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003  # msgspec reads the annotations
from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from turnkeep_client.messages import Appended, Generated, Request, Result, decode_request
from turnkeep_client.subjects import session_key

from .record import decoded, pair_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.log import Entry


class Turn(Struct, frozen=True, kw_only=True):
    """A request and its result. `request` is None if it is invalid; `result` is None if none is valid."""

    number: int
    seq: int
    stored: datetime
    request: Request | None
    result: Result | None
    model: str | None
    build: dict[str, str]


def conversation(entries: Sequence[Entry]) -> Iterator[Turn]:
    """Yield a session's requests in order, each with its result."""
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


def taken_over(result: Appended | Generated) -> str:
    """Name a turn's model and the one before, if the session has changed from one to the other; else "".

    An answer that another model had begun is of that model, which is taken to be that of the turn before.
    """
    model, before = result.model, result.previous_model
    if model is not None and isinstance(result, Generated) and result.finish_reason == "model_changed":
        return f"by {before.name if before else 'another model'}, ended by {model.name}"
    if model is None or before is None:
        return ""
    differs = "another tokenizer" if model.tokenizer != before.tokenizer else "other weights"
    return f"by {model.name}, after {before.name}" + (f" with {differs}" if model.name == before.name else "")


class Mark(NamedTuple):
    """Limits a part of a conversation to requests before sequence `before` and results before `end`."""

    before: int
    end: int


async def part(
    client: Client, session: str, num: int, mark: Mark | None = None
) -> tuple[list[Turn], Mark | None]:
    """Return the last `num` turns before a mark, and the mark for the turns before these.

    The argument None means the end of the conversation. The returned mark is None if there are no earlier
    turns.

    Reads the log backwards, so the last turns of a long session cost no more than those of a short one.
    Raises `TurnkeepError`.
    """
    if mark is None:
        last = 1 + await _last_seq(client, session)
        mark = Mark(last, last)
    entries: list[Entry] = []
    async for piece in client.log_backwards(session, mark.end):
        entries = piece + entries
        if sum(entry.kind == "in" and entry.seq < mark.before for entry in entries) > num:
            break
    turns = [turn for turn in conversation(entries) if turn.seq < mark.before]
    shown = turns[-num:]
    if len(turns) == len(shown):
        return shown, None
    begin = shown[0].seq
    ends = [one.answered.seq for one in pair_up(entries) if begin <= one.asked.seq < mark.before]
    return shown, Mark(begin, 1 + max([begin, *ends]))


async def _last_seq(client: Client, session: str) -> int:
    """Return the sequence of a session's last request or result, 0 if there is none."""
    key = session_key(client.tenant, session)
    asked = [one.seq async for _, one in client.stored.last([key], "in")]
    return max(asked + [one.seq async for _, one in client.stored.last([key], "out")], default=0)
