"""Decides how to send a turn: to a new, continued or forked session, and with which messages. No I/O.

New messages that do not fit in one request are divided among several.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple
from uuid import uuid4

from turnkeep_client.errors import MessageTooLargeError
from turnkeep_client.messages import encode

from . import boundaries
from .idempotency import key_reused
from .index import PREFIX, IndexedRequest, IndexedSession, RequestName

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from turnkeep_client.messages import Message

    from .idempotency import KeyState
    from .index import SessionIndex
    from .turn import ClientTurn

How = Literal["continued", "forked", "begun", "repeated"]


class SendPlan(NamedTuple):
    """How to send a turn: to session `asked.session`, which may have the turn's first messages already."""

    asked: IndexedRequest
    how: How
    #: How many of the turn's messages the session has, and its position after them.
    num_known: int
    position: int
    #: Digests of the conversation: before its first message, then up to each message.
    known: list[bytes]
    #: The fields of the generate request.
    options: dict[str, Any]
    #: The session to fork; None also if the log has the fork already.
    parent: IndexedSession | None = None
    #: The parent's position at the time of planning; None if unknown.
    parent_position: int | None = None
    #: Whether other gateways can send the same request to this session.
    is_apart: bool = False
    #: The sequence at which the session was closed last; 0 if never.
    closed_seq: int = 0
    #: Whether the repeated request is from before this gateway's start.
    is_claimed: bool = False


def plan(index: SessionIndex, turn: ClientTurn, number: int, *, is_last: bool) -> SendPlan:
    """Decide how to send a turn; record a new request in the index, so that no other turn uses the session.

    `number` is the number of the answer among the turn's `n`. The `is_last` attempt goes to a new session.
    """
    now_s = time.monotonic()
    options, known, key = _named(turn, number)
    before = index.asked.get(key)
    if before is not None and not is_last and _may_repeat(before, now_s):
        base = next((at for at, boundary in enumerate(known) if boundary in before.bases), None)
        if not before.expected:  # that request sent the whole conversation
            base = 0
        if base is not None:
            index.use(before.session, now_s)
            is_claimed = before.claim(now_s)
            return SendPlan(before, "repeated", base, before.expected, known, options, is_claimed=is_claimed)
    place = None if is_last or turn.messages is None else _place(index, known)
    num_known, parent, position = place or (0, None, 0)
    how: How = "begun"
    session = IndexedSession(new_name(), None, now_s)
    if parent is not None:
        index.use(parent, now_s)
        how = "forked"
        # Without new messages the session stands at an answer's beginning, and must keep that position.
        if parent.position == position and not parent.num_running and num_known < len(known) - 1:
            session, how = parent, "continued"
    name = RequestName(*key, 0 if before is None else before.name.nonce + 1)
    is_certain = options.get("temperature") == 0 or options.get("seed") is not None
    prefix, bases = options.get("prefix", ""), {known[num_known]}
    asked = IndexedRequest(session, name, bases, position, prefix, is_certain=is_certain)
    index.begin(asked)
    return SendPlan(
        asked, how, num_known, position, known, options, parent, parent.position if parent else None
    )


def plan_apart(index: SessionIndex, turn: ClientTurn, state: KeyState) -> SendPlan:
    """Decide how to send a turn with an idempotency key, to a session that only this key uses.

    Records the request in the index. All gateways give it the same id. Raises `RequestFailedError` if the
    session was opened for another request with this key.
    """
    options, known, key = _named(turn, 0)
    place: tuple[int, IndexedSession | None, int] | None
    if state.opened is not None:
        boundary, position = state.opened
        if boundary not in known:
            raise key_reused()
        place = known.index(boundary), None, position
    else:
        if (before := index.sessions.get(state.session)) is not None:  # deleted, or refused
            index.drop(before)
        place = None if turn.messages is None else _place(index, known)
    num_known, parent, position = place or (0, None, 0)
    session = index.sessions.get(state.session) or IndexedSession(state.session, None, time.monotonic())
    name = RequestName(*key, state.nonce)
    asked = IndexedRequest(session, name, {known[num_known]}, position, options.get("prefix", ""))
    index.begin(asked)
    how: How = "begun" if place is None else "forked"
    made = SendPlan(
        asked, how, num_known, position, known, options, parent, parent.position if parent else None
    )
    return made._replace(is_apart=True, closed_seq=state.closed_seq)


def _named(turn: ClientTurn, number: int) -> tuple[dict[str, Any], list[bytes], tuple[bytes, bytes]]:
    """Return a turn's options, the digests up to each message, and two digests that equal requests share."""
    options = dict(turn.options)
    if options.get("seed") is not None:
        options["seed"] += number
    apart = options if turn.has_snapshots else {**options, "snapshots": "none"}
    if turn.messages is None:
        known = [boundaries.prompt_of(turn.text or turn.tokens or (), apart)]
    else:
        known = boundaries.chain(turn.messages, apart)
    return options, known, (known[-1], boundaries.options_digest(options, number))


def _place(index: SessionIndex, known: list[bytes]) -> tuple[int, IndexedSession, int] | None:
    """Find the session with most of a conversation; None if no session has any.

    Returns how many messages the session has, the session, and the position after them.
    """
    for num_known in range(len(known) - 1, 0, -1):
        if (found := index.find(known[num_known])) is None:
            continue
        session, mark = found
        # A prompt's boundary lies after the assistant's header: no further message fits there.
        if mark.is_answer != (num_known < len(known) - 1):
            continue
        if session.num_running and index.rewrites:
            continue  # the running request may move the position
        return num_known, session, mark.position
    return None


def _may_repeat(asked: IndexedRequest, now_s: float) -> bool:
    """Whether a new request equal to `asked` gets the answer of `asked`.

    A sampled answer is given again only if it is from before this gateway's start: its client may lack it.
    """
    if asked.state == "failed":
        return False
    if asked.claim_until_s > now_s:
        return True
    return asked.is_certain and (asked.state == "answered" or asked.num_users > 0)


def new_name() -> str:
    """Return the name of a new session."""
    return PREFIX + uuid4().hex


#: Room for a request's other fields beside messages and options: type, id and position.
_HEAD_BYTES: Final = 512


def groups_ahead(
    messages: Sequence[Message], options: Mapping[str, Any], max_bytes: int, header_bytes: int = 0
) -> list[Sequence[Message]]:
    """Divide messages that do not fit into one generate: return the groups to append before it, else [].

    The last message always stays for the generate. A request has at most `max_bytes`, and the generate needs
    `header_bytes` of that for its header. The first append has the tools too. Raises `MessageTooLargeError`
    if a single message is too large.
    """
    sizes = [len(encode(message)) + 1 for message in messages]
    num_rest = _HEAD_BYTES + header_bytes + len(encode(dict(options)))
    if sum(sizes) + num_rest <= max_bytes:
        return []
    num_tools = _HEAD_BYTES + len(encode({"tools": options.get("tools")}))
    for number, (message, size) in enumerate(zip(messages, sizes, strict=True)):
        beside = num_rest if number == len(messages) - 1 else num_tools
        if size + beside > max_bytes:
            raise MessageTooLargeError(
                f"a message ({message.role}) has {size} bytes, {size + beside} with the options; the worker"
                f" takes at most {max_bytes} (max_message_bytes)"
            )
    return [messages[start:end] for start, end in _groups(sizes[:-1], max_bytes - num_tools)]


def _groups(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of consecutive groups whose total is at most `most`; a larger item is one group."""
    start = total = 0
    for at, size in enumerate(sizes):
        if at > start and total + size > most:
            yield start, at
            start, total = at, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)
