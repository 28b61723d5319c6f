"""Checks whether the log has lost or changed entries of sessions. Needs neither a worker nor a model.

A result states how its request changed the session's tokens, the digest of all these tokens, and the sequence
of the previous result. Requests have no digest, so only their form is checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import Struct

from cache.names.images import ImageSpan
from cache.names.tokens import Tokens, as_tokens, from_compact, unpack
from turnkeep_client import __version__
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.images import images_of
from turnkeep_client.log import BUILD_HEADER, EXPECT_HEADER, HISTORY_HEADER, PARTS_HEADER, words
from turnkeep_client.messages import (
    Append,
    Appended,
    Close,
    Closed,
    Failed,
    Generate,
    Generated,
    Open,
    Opened,
    Rewind,
    Rewound,
    UnknownResult,
)
from turnkeep_client.session_log import changes_session, is_failure, read, read_part
from turnkeep_client.subjects import REFUSED

from .sessions import is_named

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Request, Result
    from turnkeep_client.session_log import LoggedRequest, SessionLog
    from turnkeep_client.subjects import SessionKey

_FITTING: Final[Mapping[type[Request], type[Result]]] = {
    Open: Opened,
    Append: Appended,
    Generate: Generated,
    Rewind: Rewound,
    Close: Closed,
}
#: The codes of failures that depend on the session's state, and thus come after all earlier requests.
_REFUSALS: Final = {"history_diverged", "invalid_request", "position_conflict", "unknown_session"}
#: The indices of the tokens and of their images in a fork's base (`worker/sessions/attachments`).
_TOKENS: Final = 7
_SPANS: Final = 13


class LogFault(Struct, frozen=True):
    """A fault of the entry at sequence `seq`, which can be missing; `what` describes the fault."""

    seq: int
    what: str


class DamagedSession(Struct, frozen=True, kw_only=True):
    """A session with faults, in the order of their entries."""

    tenant: str
    session: str
    faults: tuple[LogFault, ...]


class VerifyReport(Struct, frozen=True, kw_only=True):
    """The numbers of sessions and entries that were read, and the damaged sessions."""

    sessions: int
    entries: int
    damaged: tuple[DamagedSession, ...]


class _Answer(NamedTuple):
    """The first result of a request; `seq` is the result's own sequence in the log."""

    seq: int
    headers: Mapping[str, str]
    result: Result

    @property
    def changes(self) -> bool:
        """Whether the request changed the session, according to this result."""
        return changes_session(self.result)

    @property
    def is_in_turn(self) -> bool:
        """Whether the request ended in its turn, after all earlier ones, and not while it waited for them."""
        result = self.result
        refused = isinstance(result, Failed) and result.code in _REFUSALS
        return result.repeat_of is None and (self.changes or refused)


class _FaultError(Exception):
    """A result's tokens or position contradict the entries before it."""


async def verify(
    client: Client,
    tenant: str = "*",
    names: Sequence[str] = (),
    told: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check the sessions with these names, which can be patterns; without names all sessions.

    `told` is called with the numbers of checked and of all sessions. Raises `TurnkeepError` if the log has no
    session of these names, or cannot be read.
    """
    counts = await client.stored.subjects(tenant)
    keys = [
        key
        for key in sorted(counts, key=str)
        if key.session != REFUSED and counts[key].keys() & {"in", "out"}
    ]
    keys = [key for key in keys if is_named(key.session, names)]
    if names and not keys:
        raise TurnkeepError(f"the log has no session {' '.join(names)}; see turnkeep sessions")
    damaged, num_entries = [], 0
    for number, key in enumerate(keys):
        num, found = await _read(client, key)
        if found:  # perhaps removed while it was read
            num, found = await _read(client, key)
        num_entries += num
        if found:
            damaged.append(DamagedSession(tenant=key.tenant, session=key.session, faults=tuple(found)))
        if told:
            told(number + 1, len(keys))
    return VerifyReport(sessions=len(keys), entries=num_entries, damaged=tuple(damaged))


async def _read(client: Client, key: SessionKey) -> tuple[int, list[LogFault]]:
    """Count a session's entries, and find its faults."""
    log = await read(client.stored, key)
    parts = {
        one.seq: await read_part(client.stored, one) for one, _ in log.answers if PARTS_HEADER in one.headers
    }
    named = {digest for one in log.asked for digest in images_of(one.request)}
    lost = [digest for digest in named if await client.stored.image(key, digest) is None]
    return len(log.answers) + len(log.asked), faults(log, parts, lost)


def faults(log: SessionLog, parts: Mapping[int, bytes | None], lost: Container[str] = ()) -> list[LogFault]:
    """Find the faults of one session's log.

    `parts` maps results' sequences to the data that did not fit into the result; None if this is gone. `lost`
    has the digests of images that are not in the log as a whole.
    """
    answers: dict[int, _Answer] = {}
    found = list(_pair(log, answers))
    asked = {one.entry.seq: one for one in log.asked}
    removed = _removed(log, answers.values())
    left = {seq: one for seq, one in answers.items() if one.seq > removed or isinstance(one.result, Closed)}
    found += _lost_results(log, removed, {one.seq for one in answers.values() if one.changes})
    found += _lost({seq: one for seq, one in asked.items() if seq in left or seq > removed}, left)
    found += _fitting(asked, left)
    for seq in asked.keys() & {seq for seq, one in left.items() if one.changes}:
        gone = [digest for digest in images_of(asked[seq].request) if digest in lost]
        found += [LogFault(seq, f"names the image {digest}, which is gone or changed") for digest in gone]
    found += (wrong := list(_fold(left, parts)))
    found += _unchanged(left, {one.seq for one in wrong})
    return sorted(found, key=lambda one: one.seq)


def _pair(log: SessionLog, answers: dict[int, _Answer]) -> Iterator[LogFault]:
    """Add each request's first result to `answers`; yield a fault for every other result."""
    for one, result in log.answers:
        seq = result.seq if result else None
        is_valid = result is not None and (is_failure(result) or HISTORY_HEADER in one.headers)
        if result is None or not is_valid or seq is None or not 0 < seq < one.seq:
            yield LogFault(one.seq, "no worker has written it so")
        elif seq in answers:
            yield LogFault(one.seq, f"is a second result of the request at {seq}, after {answers[seq].seq}")
        else:
            answers[seq] = _Answer(one.seq, one.headers, result)


def _removed(log: SessionLog, answers: Iterable[_Answer]) -> int:
    """Return the sequence of the close up to which results are being removed; 0 if none are.

    A closed session is removed from its first result on, which therefore no longer is the first of its log.
    """
    fence = log.answers[0].entry.headers.get(EXPECT_HEADER, "0") if log.answers else "0"
    if fence == "0":
        return 0
    return max((one.seq for one in answers if isinstance(one.result, Closed) and one.changes), default=0)


def _lost_results(log: SessionLog, removed: int, changing: set[int]) -> Iterator[LogFault]:
    """Yield results that are missing or out of order: each result states the sequence of the previous one.

    Before the first result that changed the session, missing results may belong to a removed session.
    """
    before, is_begun = 0, False
    for one, _ in log.answers:
        fence = one.headers.get(EXPECT_HEADER, "")
        behind = int(fence) if fence.isdecimal() else before
        if before and behind > before and is_begun and one.seq > removed:
            yield LogFault(behind, f"is gone: the result at {one.seq} was stored behind it")
        elif behind < before:
            yield LogFault(
                one.seq, f"was stored behind {behind}, but the log has a result at {before} before it"
            )
        before, is_begun = one.seq, is_begun or one.seq in changing


def _lost(asked: Mapping[int, LoggedRequest], left: Mapping[int, _Answer]) -> Iterator[LogFault]:
    """Yield requests that their results do not have, and requests whose result is missing."""
    for seq, answer in left.items():
        if seq not in asked and answer.changes and not isinstance(answer.result, Closed):
            yield LogFault(seq, f"is gone: the result at {answer.seq} answers it")
    last = max((seq for seq, one in left.items() if one.is_in_turn), default=0)
    for seq in asked:
        if seq < last and seq not in left:
            yield LogFault(seq, f"has no result, but the later request at {last} has one")


def _fitting(asked: Mapping[int, LoggedRequest], answers: Mapping[int, _Answer]) -> Iterator[LogFault]:
    """Yield results whose type does not fit the request."""
    for seq, answer in answers.items():
        if seq not in asked or not answer.changes or isinstance(answer.result, UnknownResult):
            continue
        request, result = asked[seq].request, answer.result
        if request is None:  # of a newer version
            continue
        if not isinstance(result, _FITTING[type(request)]) or (
            isinstance(request, Rewind) and request.position != result.position
        ):
            yield LogFault(answer.seq, f"does not fit the request at {seq}")


def _unchanged(answers: Mapping[int, _Answer], wrong: set[int]) -> Iterator[LogFault]:
    """Yield results that changed nothing, but do not state position and tokens of the result before them.

    `wrong` has the sequences of results that are known to be wrong.
    """
    before: _Answer | None = None  # the last result that changed the session; None if that proves nothing
    for answer in sorted(answers.values(), key=lambda one: one.seq):
        if answer.changes:
            is_vague = isinstance(answer.result, Closed | UnknownResult) or answer.seq in wrong
            before = None if is_vague else answer
        elif before is not None and EXPECT_HEADER in answer.headers:  # an import stores in another order
            result, stated = answer.result, answer.headers.get(HISTORY_HEADER)
            position = before.result.position
            if result.repeat_of is None and result.position not in (None, position):
                yield LogFault(
                    answer.seq,
                    f"says position {result.position}, but the result at {before.seq} leaves {position}",
                )
            elif stated not in (None, before.headers.get(HISTORY_HEADER)):
                yield LogFault(answer.seq, f"states other tokens than the result at {before.seq} before it")


def _fold(answers: Mapping[int, _Answer], parts: Mapping[int, bytes | None]) -> Iterator[LogFault]:
    """Yield, for each session that had the name, the first result that contradicts the earlier ones."""
    tokens, exists, is_sure = as_tokens(), False, True
    for seq in sorted(answers):
        answer = answers[seq]
        if not answer.changes:
            continue
        is_sure = is_sure or isinstance(answer.result, Opened)
        if isinstance(answer.result, Closed) and not exists:
            continue  # of a removed session
        exists = True
        if isinstance(answer.result, UnknownResult):
            is_sure = False  # only a newer version can decode it
            if words(answer.headers.get(BUILD_HEADER, "")).get("version") == __version__:
                yield LogFault(answer.seq, "no worker of the version that it names has written it so")
        if not is_sure:
            continue
        try:
            tokens = _after(tokens, answer, parts.get(answer.seq))
        except (_FaultError, ValueError, OverflowError) as error:
            yield LogFault(answer.seq, str(error))
            is_sure = False


def _after(tokens: Tokens, answer: _Answer, part: bytes | None) -> Tokens:
    """Return the session's tokens after a result. Raises `_FaultError`, `ValueError`, `OverflowError`."""
    result, headers = answer.result, answer.headers
    if PARTS_HEADER in headers and part is None:
        link = headers[PARTS_HEADER].partition(" ")[0]
        raise _FaultError(f"names tokens in the messages up to {link}, which are gone or changed")
    match result:
        case Opened(parent=None):
            after = as_tokens()
        case Opened():
            after = _base(part or b"")
        case Appended(change=change) | Generated(change=change) if change is not None:
            if change.kept > len(tokens):
                raise _FaultError(
                    f"keeps {change.kept} tokens, but the entries before it come to {len(tokens)}"
                )
            added = from_compact(change.input if part is None else part.decode())
            spans = (
                ImageSpan(one.start, one.end, bytes.fromhex(one.fingerprint), columns=one.columns)
                for one in change.images
            )
            after = tokens[: change.kept].extended(added.ids(), spans)
            if isinstance(result, Generated) and not change.holds_answer:
                after += result.tokens
        case Rewound(position=position):
            after = tokens[:position]
        case Closed():
            after = tokens
        case _:
            raise _FaultError("does not say what its request did to the tokens")
    if len(after) != result.position:
        raise _FaultError(f"says position {result.position}, but the entries up to it come to {len(after)}")
    if after.digest() != headers.get(HISTORY_HEADER):
        raise _FaultError("the entries up to it come to other tokens than it states")
    return after


def _base(packed: bytes) -> Tokens:
    """Unpack the tokens that a fork copied from its parent. Raises `_FaultError`."""
    try:
        fields = msgspec.msgpack.decode(packed)
        tokens: bytes = fields[_TOKENS]
        return as_tokens(unpack(tokens).ids(), (ImageSpan(*span) for span in fields[_SPANS]))
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError) as error:
        raise _FaultError(f"what the fork took from its parent cannot be read: {error}") from None
