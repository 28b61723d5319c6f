"""Finds answers in the log by their ids, with the conversations before them; follows and cancels them.

An id names a session and one of its requests, so the log alone is enough, also after a restart. A request
whose answer clients may read later has a `LoggedHeader` in a header of its own, which workers ignore.
"""

from __future__ import annotations

import asyncio
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
from turnkeep_client.history import answer_message
from turnkeep_client.messages import (
    Append,
    Appended,
    Close,
    Failed,
    Generate,
    Generated,
    Message,
    Open,
    encode,
)
from turnkeep_client.session_log import read
from turnkeep_client.subjects import session_key

from .index import PREFIX
from .turn import ClientTurn, refused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from typing import TypeAlias

    from turnkeep_client.client import Client
    from turnkeep_client.log import Entry
    from turnkeep_client.messages import Chunk, ForkPoint, Request, Result
    from turnkeep_client.subjects import SessionKey

    _Conversation: TypeAlias = tuple[Message, ...] | None

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
    """The content of a request's header in the log: fields that the answer repeats, and a fork's history.

    `before` has the messages before the fork; if they are too long, only the parent's log has them. `api`
    names the dialect; `body` is a digest of the request's body. An answer that is not `is_kept`, such as one
    of several, is found only by a client that sends the same request again.
    """

    id: str
    created: int
    model: str
    asked: dict[str, Any]
    before: tuple[Message, ...] | None = None
    api: str = RESPONSES
    body: str = ""
    is_kept: bool = True

    @property
    def has_messages(self) -> bool:
        """Whether a later request may continue the conversation by naming the answer's id."""
        return self.api == RESPONSES and self.is_kept

    @cached_property
    def packed(self) -> str:
        """The value of the header."""
        return b64encode(zlib.compress(encode(self))).decode()


class _Exchange(NamedTuple):
    """A session's request and its result; `prompt` is the conversation before an answer or after an append.

    A `Close` with `forget` voids all earlier exchanges unless it was refused, even if the worker has not
    removed them yet.
    """

    seq: int
    request: Generate | Append | Close
    note: LoggedHeader | None
    result: Result | None
    prompt: _Conversation


class LoggedAnswer(NamedTuple):
    """A generate request from the log, at the stream sequence `seq`, and its result (None if there is none).

    `turn.messages` is the whole conversation, or None if the log no longer has all of it.
    """

    session: str
    seq: int
    request: Generate
    note: LoggedHeader
    turn: ClientTurn
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
    """Build the note for a `ClientTurn`; `body` is the digest of the request's body. Raises `Fault`."""
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
    """Encode a note as a NATS header; `before` are the messages that a fork takes from its parent."""
    before = before if note.has_messages else None
    whole = note if before == note.before else msgspec.structs.replace(note, before=before)
    return {HEADER: whole.packed if len(whole.packed) <= MOST_BYTES else note.packed}


def continued(turn: ClientTurn, before: LoggedAnswer | None) -> ClientTurn:
    """Put the conversation up to an earlier answer before a turn's messages. Raises `Fault`.

    Instructions apply to one request only, so the earlier request's are left out.
    """
    result = before.result if before is not None and before.note.has_messages else None
    if before is None or before.turn.messages is None or not isinstance(result, Generated):
        raise refused(
            f"Previous response with id '{turn.previous}' not found.",
            "previous_response_id",
            "previous_response_not_found",
        )
    earlier = _after(before.turn.messages, result)[bool(before.turn.asked.get("instructions")) :]
    at, own = int(bool(turn.asked.get("instructions"))), turn.messages or ()
    return msgspec.structs.replace(turn, messages=(*own[:at], *earlier, *own[at:]))


async def find(client: Client, wanted: set[str], *, conversation: bool = True) -> dict[str, LoggedAnswer]:
    """Find the answers with the ids `wanted` in the log; return those found, by id.

    With `conversation`, each `turn` has the messages before the answer. If a request failed and was sent
    again, return the last attempt. Raises `NoWorkerError`.
    """
    found: dict[str, LoggedAnswer] = {}
    for session in {one[:32] for one in wanted if _ID.fullmatch(one)}:
        key = session_key(client.tenant, PREFIX + session)
        of_session: dict[str, LoggedAnswer] = {}
        async for seq, request, note, result, prompt in _exchanges(client, key, conversation=conversation):
            if isinstance(request, Close):
                of_session.clear()
            if note is not None and isinstance(request, Generate) and session + note.id in wanted:
                turn = _turn(request, note, prompt)
                known = result if isinstance(result, Generated | Failed) else None
                one = LoggedAnswer(key.session, seq, request, note, turn, known)
                if request.id != of_session.setdefault(one.id, one).request.id:
                    of_session[one.id] = one
        found |= of_session
    return found


async def note_of(client: Client, session: str, request_id: str) -> LoggedHeader | None:
    """Find the note with which the log first stored a request. Raises `NoWorkerError`."""
    async for one in _exchanges(client, session_key(client.tenant, session), conversation=False):
        if one.request.id == request_id and one.note is not None:
            return one.note
    return None


async def _exchanges(
    client: Client, key: SessionKey, *, conversation: bool = True
) -> AsyncIterator[_Exchange]:
    """Yield a session's appends, generates and unrefused closes with `forget`, in log order; repeats too."""
    log, replay = await read(client.stored, key), _Replay()
    results: dict[str, Result] = {}
    for one in log.exchanges:
        if one.result.repeat_of is None:
            results.setdefault(one.request.id, one.result)
    for entry, request in log.asked:
        result = results.get(request.id) if request else None
        if isinstance(request, Open) and request.from_ is not None and not isinstance(result, Failed):
            replay.said = await _said_at(client, request.from_) if conversation else None
        elif request and (found := replay.exchange(entry, request, result)) is not None:
            yield found


class _Replay:
    """The conversation (`said`) of a session up to the last answer, while its requests are read in order."""

    def __init__(self) -> None:
        self.said: _Conversation = ()
        self._prompts: dict[str, _Conversation] = {}  # by the request's id

    def exchange(self, stored: Entry, request: Request, result: Result | None) -> _Exchange | None:
        """Return a request with its conversation; None if it has no conversation, or was refused."""
        match request:
            case Close(forget=True) if not isinstance(result, Failed):
                return _Exchange(stored.seq, request, None, None, None)
            case Append() if isinstance(result, Appended) and request.id not in self._prompts:
                self.said = None if self.said is None else (*self.said, *(request.messages or ()))
                self._prompts[request.id] = self.said
                return _Exchange(stored.seq, request, None, result, self.said)
            case Generate():
                note = _note(stored.headers)
                prompt = self._prompt(request, note.before if note else None, result)
                return _Exchange(stored.seq, request, note, result, prompt)
        return None

    def _prompt(self, request: Generate, own: _Conversation, result: Result | None) -> _Conversation:
        """Return the conversation before an answer; its note may have its `own` beginning."""
        before = self.said if own is None else own
        prompt = None if before is None else (*before, *(request.messages or ()))
        if request.id in self._prompts:  # a repeat changes nothing
            return self._prompts[request.id] if own is None else prompt
        self._prompts[request.id] = prompt
        if prompt is not None and isinstance(result, Generated) and result.tokens:
            self.said = _after(prompt, result, request.prefix)
        return prompt


async def _said_at(client: Client, point: ForkPoint) -> _Conversation:
    """Return the conversation up to a fork point; None if the log does not have it."""
    async for _, request, _, result, prompt in _exchanges(client, session_key(client.tenant, point.session)):
        if isinstance(result, Appended) and point.position == result.position:
            return prompt
        if isinstance(request, Generate) and isinstance(result, Generated) and prompt is not None:
            if point.position == result.position - len(result.tokens) - result.prefix_tokens:
                return prompt
            if point.position == result.position:
                return _after(prompt, result, request.prefix)
    return None


def _after(prompt: tuple[Message, ...], result: Generated, prefix: str = "") -> tuple[Message, ...]:
    if not result.tokens:  # the answer was cancelled before its first token
        return prompt
    return (*prompt, answer_message(result, prefix))


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
    """Cancel a running answer; return its entry in the log, None if it has none. Raises `TurnkeepError`."""
    pause_s = FIRST_PAUSE_S
    while True:
        found = (await find(client, {answer_id})).get(answer_id)
        if found is None or found.result is not None or pause_s > LAST_PAUSE_S:
            return found
        with suppress(RequestFailedError):  # the worker has not read it yet, or has ended it
            await client.session(found.session).cancel(found.request.id)
        await asyncio.sleep(pause_s)
        pause_s *= 2
