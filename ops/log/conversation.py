"""Reads a session's log as a conversation: its requests in order, each with its result."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003  # msgspec reads the annotations
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

from turnkeep_client.messages import Appended, Generated, Request, Result
from turnkeep_client.session_log import tails
from turnkeep_client.subjects import session_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from turnkeep_client.client import Client
    from turnkeep_client.session_log import LoggedResult, SessionLog

#: Most bytes of an invalid request that are shown.
_SENT: Final = 1024


class LoggedTurn(Struct, frozen=True, kw_only=True):
    """A request and its result."""

    #: The request's number in the part of the log that was read, from 1.
    number: int
    #: The sequences of request and result in the log.
    seq: int
    answered_seq: int | None = None
    #: When the log stored the request.
    stored: datetime
    #: None if it is invalid; `sent` is its beginning then.
    request: Request | None
    sent: str = ""
    #: None if there is none, or none that is valid.
    result: Result | None
    #: Who has made the result: see `turnkeep_client.log.Entry`.
    model: str | None
    build: dict[str, str]


def conversation(log: SessionLog) -> Iterator[LoggedTurn]:
    """Yield a session's requests in order, each with its result."""
    answered: dict[int, LoggedResult] = {}
    for one in log.answers:
        if one.result is not None and one.result.seq is not None:
            answered.setdefault(one.result.seq, one)
    for number, (entry, request) in enumerate(log.asked, 1):
        found = answered.get(entry.seq)
        yield LoggedTurn(
            number=number,
            seq=entry.seq,
            answered_seq=found.entry.seq if found else None,
            stored=entry.stored,
            request=request,
            sent="" if request else entry.body[:_SENT].decode(errors="replace"),
            result=found.result if found else None,
            model=found.entry.model if found else None,
            build=dict(found.entry.build) if found else {},
        )


def taken_over(result: Appended | Generated) -> str:
    """Say which model made a turn and which the turn before it, if the two differ; else return "".

    An answer that another model had begun counts as that model's, which is taken to be the previous turn's.
    """
    model, before = result.model, result.previous_model
    if model is not None and isinstance(result, Generated) and result.finish_reason == "model_changed":
        return f"by {before.name if before else 'another model'}, ended by {model.name}"
    if model is None or before is None:
        return ""
    differs = "another tokenizer" if model.tokenizer != before.tokenizer else "other weights"
    return f"by {model.name}, after {before.name}" + (f" with {differs}" if model.name == before.name else "")


class ConversationEnd(NamedTuple):
    """Where a part of a conversation ends: before the request at `before` and the result at `end`."""

    before: int
    end: int


async def part(
    client: Client, session: str, num: int, mark: ConversationEnd | None = None
) -> tuple[list[LoggedTurn], ConversationEnd | None]:
    """Return the last `num` turns before a mark, and the mark for the turns before these.

    A `mark` of None is the end of the conversation. The returned mark is None if there are no earlier turns.
    Reads the log backwards, so the last turns of a long session cost no more than those of a short one.
    Raises `TurnkeepError`.
    """
    turns: list[LoggedTurn] = []
    async for log in tails(client.stored, session_key(client.tenant, session), mark and mark.end):
        turns = [
            turn
            for turn in conversation(log)
            if turn.seq >= log.start and (mark is None or turn.seq < mark.before)
        ]
        if len(turns) > num:
            break
    shown = turns[-num:]
    if len(turns) == len(shown):
        return shown, None
    begin = shown[0].seq
    return shown, ConversationEnd(begin, 1 + max([begin, *(turn.answered_seq or 0 for turn in shown)]))
