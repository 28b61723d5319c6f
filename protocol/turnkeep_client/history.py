"""Reads a session's conversation from its log, without rewound and failed parts.

A fork's conversation begins with its parent's. Needs no worker; a worker rebuilds the session's tokens from
the same entries of the log.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from .messages import (
    Append,
    Appended,
    Function,
    Generate,
    Generated,
    Message,
    Opened,
    Parent,
    Rewound,
    ToolCall,
)
from .session_log import read
from .subjects import SessionKey

_CHANGING: Final = (Opened, Appended, Generated, Rewound)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .session_log import Exchange, SessionLog
    from .stream import LogStream


class Turn(Struct, frozen=True, kw_only=True):
    """An append, or a generate with its answer.

    Positions are those at the time of the result: the chat template may have changed earlier text since then
    (`rewritten_from`).
    """

    #: Sequence of the request in the log.
    seq: int
    request: Append | Generate
    #: None for an append, and if a rewind has removed all tokens of the answer.
    answer: Generated | None
    #: The session's number of tokens before the turn.
    start: int
    #: Where the answer begins; without an answer, `position`.
    answer_start: int
    #: The session's number of tokens after the turn.
    position: int
    #: Whether a rewind has removed a part of the messages or of the answer; here both are still whole.
    is_cut: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """The request's messages (raw text as a user message), then the answer as an assistant message.

        A request with raw tokens has no text, so it has no message here.
        """
        asked, answer = self.request, self.answer
        said = (Message("user", asked.text),) if asked.text else asked.messages or ()
        if answer is None or not answer.tokens:
            return said
        return (*said, answer_message(answer, asked.prefix if isinstance(asked, Generate) else ""))


def answer_message(answer: Generated, prefix: str = "") -> Message:
    """Return an answer as an assistant message, behind the `prefix` that its request gave."""
    calls = tuple(
        ToolCall(id=call.id, function=Function(call.function.name, call.function.arguments))
        for call in answer.tool_calls
    )
    return Message("assistant", prefix + answer.text, tool_calls=calls)


class History(Struct, frozen=True, kw_only=True):
    """A session's turns, oldest first. If `is_whole` is false, the log no longer has the beginning."""

    turns: tuple[Turn, ...]
    is_whole: bool = True

    @property
    def messages(self) -> list[Message]:
        """The conversation as chat messages in OpenAI's shape."""
        return [message for turn in self.turns for message in turn.messages]

    @property
    def position(self) -> int:
        """The number of tokens that the session has."""
        return self.turns[-1].position if self.turns else 0


class _Placed(NamedTuple):
    """A turn, and which of the session's present tokens it has: those of [start, end).

    After a later turn has replaced its tokens, they end somewhere behind `end`, where is unknown.
    """

    turn: Turn
    start: int
    end: int


async def read_history(
    stream: LogStream, key: SessionKey, end: float = inf, log: SessionLog | None = None
) -> History:
    """Read a session's history from the log's entries before the sequence `end`.

    `log` is the session's whole log, if it was read already. Raises `NoWorkerError`.
    """
    turns: list[_Placed] = []
    digests: list[tuple[int, str]] = []  # of the tokens up to ascending positions
    is_whole, position = True, 0
    for part in reversed(await _parts(stream, key, end, log)):
        for one in part.exchanges:
            result, kept = one.result, None
            match one.request, result:
                case _, Opened(parent=Parent() as parent):
                    if part.is_copy and dict(digests).get(parent.position) != one.answered.history:
                        turns = []  # those of another session
                    is_whole = is_whole and (turns[-1].end if turns else 0) >= parent.position
                    turns = _until(turns, parent.position)
                case _, Rewound():
                    turns = _until(turns, result.position)
                case (Append() | Generate()) as asked, Appended() | Generated():
                    turn, kept = _turn(asked, result, position), result.rewritten_from
                    if kept is not None:
                        turns = [_Placed(one, min(a, kept), min(b, kept + 1)) for one, a, b in turns]
                    turns.append(_Placed(turn, position if kept is None else kept, turn.position))
            position = result.position or 0
            while digests and digests[-1][0] > (position if kept is None else kept):
                digests.pop()
            digests.append((position, one.answered.history or ""))
    return History(turns=tuple(one.turn for one in turns), is_whole=is_whole)


class _Part(NamedTuple):
    """A session's exchanges since its last open that changed it.

    In a log that was imported (`is_copy`), another session may have the name of a fork's parent.
    """

    exchanges: Sequence[Exchange]
    is_copy: bool

    @property
    def parent(self) -> Parent | None:
        """The session that the part was forked from, None if it does not begin with a fork."""
        first = self.exchanges[0].result if self.exchanges else None
        return first.parent if isinstance(first, Opened) else None


async def _parts(stream: LogStream, key: SessionKey, end: float, log: SessionLog | None) -> list[_Part]:
    """Return a session's part since its last open, then its parent's before that open, and so on."""
    found: dict[SessionKey, SessionLog] = {} if log is None else {key: log}
    parts: list[_Part] = []
    opens, is_copy, least = set[int](), False, 0
    while True:
        if key not in found:  # the end of a later read of the same session is an earlier one
            found[key] = await read(stream, key, end=end)
        part = _since_open(found[key], end, least)
        if is_copy and not part.exchanges:  # the parent may have been imported after its fork
            found = {key: await read(stream, key)}
            part = _since_open(found[key], inf, least)
        parent = part.parent
        seq = part.exchanges[0].answered.seq if part.exchanges else 0
        if parent is None:
            return [*parts, part]
        if seq in opens:  # copies may name each other as parents
            return parts
        parts.append(part)
        opens.add(seq)
        key, end, least = SessionKey(key.tenant, parent.session), seq, parent.position
        is_copy = part.is_copy


def _since_open(log: SessionLog, end: float, least: int) -> _Part:
    """Return the part before `end`, up to where the session last had `least` tokens: so many a fork took.

    A rewind of the parent may be stored while the fork is made from what the parent had before.
    """
    changes = [
        one
        for one in log.exchanges
        if one.answered.seq < end and one.changes_session and one.answered.history is not None
        if isinstance(one.result, _CHANGING)
    ]
    while changes and (changes[-1].result.position or 0) < least:
        changes.pop()
    opened = (number for number, one in enumerate(changes) if isinstance(one.result, Opened))
    return _Part(changes[max(opened, default=0) :], log.is_copy)


def _until(turns: Iterable[_Placed], position: int) -> list[_Placed]:
    """Return the turns that begin before `position`; the last one is shortened to end there."""
    return [
        one if one.end <= position else _Placed(_cut(one.turn, position), one.start, position)
        for one in turns
        if one.start < position
    ]


def _turn(request: Append | Generate, result: Appended | Generated, start: int) -> Turn:
    answer = result if isinstance(result, Generated) else None
    begins = result.position - (len(answer.tokens) + answer.prefix_tokens if answer else 0)
    return Turn(
        seq=result.seq,
        request=request,
        answer=answer,
        start=start,
        answer_start=begins,
        position=result.position,
    )


def _cut(turn: Turn, position: int) -> Turn:
    begins = min(turn.answer_start, position)
    left = turn.answer if position > begins else None
    is_cut = position != turn.answer_start
    return replace(turn, answer=left, answer_start=begins, position=position, is_cut=is_cut)
