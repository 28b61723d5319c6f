"""Finds answers in the log by their ids, with the conversations before them; follows and cancels them.

An id names a session and one of its requests, so the log alone is enough, also after a restart. A request
whose answer clients may read later has a `LoggedHeader` in a header of its own, which workers ignore.
"""

from __future__ import annotations

import asyncio
import math
import re
import zlib
from base64 import b64decode, b64encode
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from turnkeep_client.chunks import Assembly
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.history import answer_message, read_history
from turnkeep_client.messages import Close, Failed, Generate, Generated, Message, encode
from turnkeep_client.session_log import read
from turnkeep_client.subjects import session_key

from .index import PREFIX
from .turn import ClientTurn, refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Chunk
    from turnkeep_client.session_log import Exchange, SessionLog

#: Failure codes which mean that a session differs from its entry in the gateway's index.
MISTAKEN: Final = {"position_conflict", "unknown_session", "history_diverged", "id_conflict"}
#: The first and the longest pause between two attempts to cancel an answer.
FIRST_PAUSE_S: Final = 0.05
LAST_PAUSE_S: Final = 5.0
#: The API in which a request may name an earlier answer in place of the conversation up to it.
RESPONSES: Final = "response"
HEADER: Final = "Turnkeep-Answer"
#: JetStream stores headers of up to 64 KiB.
MOST_BYTES: Final = 60_000
_MOST_INFLATED: Final = 64 * 2**20
_ID: Final = re.compile(r"[0-9a-f]{48}")
#: Fields of a generate request that are not options of a turn.
_OWN: Final = ("type", "id", "messages", "text", "tokens", "expect_position")


class LoggedHeader(Struct, frozen=True, omit_defaults=True, dict=True):
    """The content of a request's header in the log, from which any gateway can write the answer again."""

    #: The end of the answer's id, which begins with the session's name.
    id: str
    #: When the request came, in seconds since 1970.
    created: int
    model: str
    #: Fields of the request that the answer repeats.
    asked: dict[str, Any]
    #: A fork's messages before the fork; None if they are so long that only the parent's log has them.
    before: tuple[Message, ...] | None = None
    #: The dialect.
    api: str = RESPONSES
    #: A digest of the request's API and body.
    body: str = ""
    #: Whether clients can read the answer by its id; else only by sending the same request again.
    is_kept: bool = True

    @property
    def has_messages(self) -> bool:
        """Whether a later request may continue the conversation by naming the answer's id."""
        return self.api == RESPONSES and self.is_kept

    @cached_property
    def packed(self) -> str:
        """The value of the header."""
        return b64encode(zlib.compress(encode(self))).decode()


class LoggedAnswer(NamedTuple):
    """A generate request from the log, and its result."""

    session: str
    #: The request's stream sequence.
    seq: int
    request: Generate
    note: LoggedHeader
    #: The request as a turn. Its `messages` are the conversation without the answer; they are None if `find`
    #: was called without `conversation`, or if the log no longer has all of them.
    turn: ClientTurn
    #: None without a result of a known type.
    result: Generated | Failed | None

    @property
    def id(self) -> str:
        """The answer's id; see `answer_id`."""
        return answer_id(self.session, self.note)


def digest(api: str, body: bytes) -> str:
    """Return a digest of a request's API and body."""
    return blake2b(api.encode() + body, digest_size=16).hexdigest()


def new_note(
    own_id: str, created: int, turn: ClientTurn, api: str = RESPONSES, body: str = ""
) -> LoggedHeader:
    """Build the note for a turn; `body` is what `digest` returns for its request.

    The note's id is the end of `own_id`. Raises `Fault` if the note is too long for a header.
    """
    asked = {**turn.asked, **({"include_usage": True} if turn.include_usage else {})}
    is_kept = turn.n == 1 and (turn.is_kept or api != RESPONSES)
    note = LoggedHeader(own_id[-16:], created, turn.model, asked, None, api, body, is_kept)
    if len(note.packed) > MOST_BYTES:
        raise refused("the names of model and tools are too long to keep", "model")
    return note


def num_bytes(note: LoggedHeader) -> int:
    """Return the largest size in bytes that a note's header can have."""
    return MOST_BYTES if note.has_messages else len(note.packed)


def answer_id(session: str, note: LoggedHeader) -> str:
    """Build an answer's id from its session's name and its note's id."""
    return session.removeprefix(PREFIX) + note.id


def headers(note: LoggedHeader, before: tuple[Message, ...] | None) -> dict[str, str]:
    """Encode a note as a NATS header, with the messages `before` a fork if they are not too long for it."""
    before = before if note.has_messages else None
    whole = note if before == note.before else msgspec.structs.replace(note, before=before)
    return {HEADER: whole.packed if len(whole.packed) <= MOST_BYTES else note.packed}


def continued(turn: ClientTurn, before: LoggedAnswer | None) -> ClientTurn:
    """Return a turn with the conversation up to an earlier answer, and this answer, before its messages.

    Instructions apply to one request only, so the earlier request's are left out. Raises `Fault` if the log
    does not have the whole conversation, or no result of the answer.
    """
    if before is None or not before.note.has_messages or before.turn.messages is None:
        raise refused(
            f"Previous response with id '{turn.previous}' not found.",
            "previous_response_id",
            "previous_response_not_found",
        )
    result = before.result
    if not isinstance(result, Generated):
        state = "is in progress" if result is None else "has failed"
        raise refused(f"Previous response with id '{turn.previous}' {state}.", "previous_response_id")
    answer = (answer_message(result),) if result.tokens else ()  # it may be cancelled before its first token
    earlier = (*before.turn.messages, *answer)[bool(before.turn.asked.get("instructions")) :]
    at, own = int(bool(turn.asked.get("instructions"))), turn.messages or ()
    return msgspec.structs.replace(turn, messages=(*own[:at], *earlier, *own[at:]))


async def find(client: Client, wanted: set[str], *, conversation: bool = True) -> dict[str, LoggedAnswer]:
    """Find the answers with the ids `wanted` in the log; return those found, by id.

    With `conversation`, each `turn` has the messages before the answer. If a request failed and was sent
    again, return the last attempt. Raises `NoWorkerError`.
    """
    found: dict[str, LoggedAnswer] = {}
    for session in {one[:32] for one in wanted if _ID.fullmatch(one)}:
        log = await read(client.stored, session_key(client.tenant, PREFIX + session))
        firsts, of_session = _firsts(log), dict[str, LoggedAnswer]()
        for entry, request in log.asked:
            first = firsts.get(request.id) if request else None
            result = first.result if first else None
            if isinstance(request, Close) and request.forget and not isinstance(result, Failed):
                of_session.clear()  # even if the worker has not removed them yet
            note = _note(entry.headers)
            if note is None or not isinstance(request, Generate) or session + note.id not in wanted:
                continue
            last = of_session.get(session + note.id)
            if last is None or last.request.id != request.id:
                prompt = await _prompt(client, log, request, note, first) if conversation else None
                known = result if isinstance(result, Generated | Failed) else None
                turn = _turn(request, note, prompt)
                one = LoggedAnswer(log.key.session, entry.seq, request, note, turn, known)
                of_session[one.id] = one
        found |= of_session
    return found


async def note_of(client: Client, session: str, request_id: str) -> LoggedHeader | None:
    """Find the note with which the log first stored a request; None without one. Raises `NoWorkerError`."""
    for entry, request in (await read(client.stored, session_key(client.tenant, session))).asked:
        if request and request.id == request_id and (note := _note(entry.headers)) is not None:
            return note
    return None


def _firsts(log: SessionLog) -> dict[str, Exchange]:
    """Return the first request of each id with its result."""
    found: dict[str, Exchange] = {}
    for one in log.exchanges:
        if one.result.repeat_of is None:
            found.setdefault(one.request.id, one)
    return found


async def _prompt(
    client: Client, log: SessionLog, request: Generate, note: LoggedHeader, first: Exchange | None
) -> tuple[Message, ...] | None:
    """Return the conversation before an answer; None if the log does not have all of it."""
    before = note.before
    if before is None:
        end = first.answered.seq if first else math.inf
        history = await read_history(client.stored, log.key, end, log)
        is_known = history.is_whole and not any(turn.is_cut for turn in history.turns)
        before = tuple(history.messages) if is_known else None
    return None if before is None else (*before, *(request.messages or ()))


def _turn(request: Generate, note: LoggedHeader, prompt: tuple[Message, ...] | None) -> ClientTurn:
    fields = msgspec.to_builtins(request)
    options = {name: value for name, value in fields.items() if name not in _OWN}
    options["max_tokens"] = request.max_tokens  # the log leaves out the default, a turn does not
    return ClientTurn(
        messages=prompt,
        text=request.text,
        tokens=request.tokens,
        options=options,
        model=note.model,
        include_usage=bool(note.asked.get("include_usage")),
        asked=note.asked,
        is_kept=note.is_kept,
    )


def _note(headers: Mapping[str, str]) -> LoggedHeader | None:
    with suppress(KeyError, ValueError, zlib.error, msgspec.MsgspecError):
        packed = b64decode(headers[HEADER], validate=True)
        return msgspec.json.decode(zlib.decompressobj().decompress(packed, _MOST_INFLATED), type=LoggedHeader)
    return None


async def follow(client: Client, found: LoggedAnswer, tell: Callable[[Chunk], None]) -> Generated:
    """Pass an answer's chunks to `tell`, from the first on; return its result. Raises `TurnkeepError`."""
    match found.result:
        case Failed() as failed:
            raise failed.as_error()
        case Generated() as result:
            if (whole := Assembly().finish(result)) is not None:
                tell(whole)
            return result
    generation = client.session(found.session).follow(found.request, found.seq)
    async for chunk in generation:
        tell(chunk)
    return generation.result


async def cancel(client: Client, answer_id: str) -> LoggedAnswer | None:
    """Cancel an answer; return it from the log once it has a result. None if the log has no such answer.

    Tries for about six seconds; then returns the answer with a `result` of None. An answer that already has a
    result is returned as it is. Raises `TurnkeepError`.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        found = (await find(client, {answer_id})).get(answer_id)
        if found is None or found.result is not None or pause_s > LAST_PAUSE_S:
            return found
        with suppress(RequestFailedError):  # the worker has not read it yet, or has ended it
            await client.session(found.session).cancel(found.request.id)
        await asyncio.sleep(pause_s)
        pause_s *= 2
