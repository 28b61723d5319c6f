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
    """A request and its result. `request` is None if it is invalid; `result` is None if none is valid.

    `sent` is the beginning of an invalid request. `seq` and `answered_seq` are their sequences in the log.
    """

    number: int
    seq: int
    answered_seq: int | None = None
    stored: datetime
    request: Request | None
    sent: str = ""
    result: Result | None
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


class ConversationEnd(NamedTuple):
    """Limits a part of a conversation to requests before sequence `before` and results before `end`."""

    before: int
    end: int


async def part(
    client: Client, session: str, num: int, mark: ConversationEnd | None = None
) -> tuple[list[LoggedTurn], ConversationEnd | None]:
    """Return the last `num` turns before a mark, and the mark for the turns before these.

    The argument None means the end of the conversation. The returned mark is None if there are no earlier
    turns.

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
