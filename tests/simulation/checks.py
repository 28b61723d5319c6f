"""The invariants that must hold after each simulated history.

Reads everything that the simulated server ever stored, directly and not by a worker or a client. Computes
each session's state a second time, in the simplest way: from its requests, its results and the device's hash.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from cache.names.policy import FULL
from turnkeep_client.checkpoints import CheckpointMessage, Link
from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.history import History as ShownHistory
from turnkeep_client.images import digest_of
from turnkeep_client.log import BUILD_HEADER, CLOSE_HEADER, HISTORY_HEADER, PARTS_HEADER, derived_seed, words
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
    Parent,
    Request,
    Result,
    Rewound,
    UnknownResult,
    decode_asked,
    decode_chunk,
    decode_request,
    decode_result,
)
from turnkeep_client.subjects import SessionKey
from worker.sessions.fold import Fold
from worker.sessions.history import TokenHistory as State
from worker.sessions.history import answer_message

from .actors import PICTURES, SUBJECTS, History, Read, Told
from .device import END, IMAGE, POISON, VISION, next_token, pictures, tokenizer
from .jetstream import Message, Stream

_MAY_FAIL: Final = {
    "invalid_request",
    "id_conflict",
    "position_conflict",
    "unknown_session",
    "expired",
    "context_exceeded",
}
FOLD: Final = Fold(tokenizer(), model=VISION)
#: The width of each picture, by its digest.
GRIDS: Final = {digest_of(data): (width,) for width, data in PICTURES}
_EMPTY: Final = FOLD.begin(datetime.fromtimestamp(0, UTC))
# Cached: until a history settles, its whole log is read again and again.
_parse: Final = lru_cache(65_536)(SUBJECTS.parse)
_request: Final = lru_cache(65_536)(decode_request)
_result: Final = lru_cache(65_536)(decode_result)


@dataclass
class Logged:
    """One session's log, and the state that the checks compute from it."""

    key: SessionKey
    requests: dict[int, Request] = field(default_factory=dict)
    asked: dict[int, Message] = field(default_factory=dict)
    results: dict[int, list[tuple[Message, Result]]] = field(default_factory=dict)
    state: State = _EMPTY
    #: The state after each message on `out`, with the message's sequence.
    states: list[tuple[int, State]] = field(default_factory=list)
    #: The state that must be erased from all disks: the one before a last close with `forget`.
    forgotten: State = _EMPTY
    #: The history digest in the last result that changed the session.
    vouched: str = ""
    closed: Message | None = None  # the result of its last close
    #: Its last result, if an import has stored it. Only an import that fails removes it from an open session.
    copied: Message | None = None
    #: Whether a newer version has continued the session with a result that this version does not know.
    is_beyond: bool = False
    #: The results that the server has lost.
    lost: list[Result] = field(default_factory=list)
    #: The sequence of the last request that changed the session.
    last_seq: int = 0
    #: For each id its first request: sequence, request and result; then the result's message.
    firsts: dict[str, tuple[int, Request, Result]] = field(default_factory=dict)
    records: dict[str, Message] = field(default_factory=dict)


def logs(stream: Stream) -> dict[SessionKey, Logged]:
    """Return each session's log, with every message that the stream ever stored."""
    found: dict[SessionKey, Logged] = {}
    for message in stream.all:
        try:
            key, kind, _ = _parse(message.subject)
        except InvalidMessageError:
            continue
        log = found.setdefault(key, Logged(key))
        if kind == "in":
            log.requests[message.seq] = _request(message.data)
            log.asked[message.seq] = message
        elif kind == "out":
            result = _result(message.data)
            log.results.setdefault(result.seq or 0, []).append((message, result))
    for key, kind, message in _lost(stream):
        log = found.setdefault(key, Logged(key))
        if kind == "out":
            log.lost.append(_result(message.data))
    return found


def _lost(stream: Stream) -> Iterator[tuple[SessionKey, str, Message]]:
    for message in stream.lost:
        with suppress(InvalidMessageError):
            key, kind, _ = _parse(message.subject)
            yield key, kind, message


def _lost_names(streams: dict[str, Stream]) -> set[tuple[SessionKey, str]]:
    """Return (session, request id) where the server has lost the request, its result or a chunk."""
    names = {(key, _parse(one.subject)[2] or "") for key, _, one in _lost(streams[SUBJECTS.token_stream])}
    for key, kind, message in _lost(streams[SUBJECTS.log_stream]):
        if kind in ("in", "out"):
            names.add((key, json.loads(message.data).get("id") or ""))
    return names


def unanswered(stream: Stream) -> int:
    """Count the stored requests without a result."""
    return sum(seq not in log.results for log in logs(stream).values() for seq in log.requests)


def check(history: History) -> list[str]:
    """Check all invariants after a history; return one line for each violation."""
    streams = history.server.jetstream.streams
    found = logs(streams[SUBJECTS.log_stream])
    wrong = [*history.faults, *history.loop.faults]
    wrong += _check_sessions(found, history)
    for key, read in history.read.items():
        wrong += [f"{key}: {one}" for one in _check_read(found[key], read)]
    for log in found.values():
        wrong += [f"{log.key}: {one}" for one in _check_deadlines(log, history)]
    wrong += unforgotten(history)
    wrong += _copies(found, history)
    expired = _expired(streams[SUBJECTS.token_stream], found, history.plan.settings["token_ttl_s"])
    wrong += _check_told_results(history, found)
    wrong += _check_looks(history, found)
    expired |= _lost_names(streams)
    wrong += _check_clients(history, found, expired)
    restarted = {key.session for key, _ in expired}
    wrong += [fault for session, fault in history.differing if session not in restarted]
    wrong += _check_gateways(history, found)
    wrong += _check_chunks(streams[SUBJECTS.token_stream], found, expired)
    return wrong


def unforgotten(history: History) -> list[str]:
    """Return one line for each message of a forgotten session that a stream still has."""
    streams = history.server.jetstream.streams
    found = logs(streams[SUBJECTS.log_stream]).values()
    return [f"{log.key}: {one}" for log in found for one in _check_forgotten(log, streams)]


def copies(history: History) -> list[str]:
    """Return one line for each forgotten session with tokens on a disk that no other session ever had."""
    found = logs(history.server.jetstream.streams[SUBJECTS.log_stream])
    for _ in _check_sessions(found, history):
        pass  # only computes the states; `check` reports violations
    return [*_copies(found, history)]


def _copies(found: dict[SessionKey, Logged], history: History) -> Iterator[str]:
    for one in history.supervisors:
        for key, tokens in one.disk.items():
            num = tokens.num_common(found[key].forgotten.tokens)
            others = [log for log in found.values() if log.key.tenant == key.tenant and log.key != key]
            is_of_it = num == len(tokens) > 0  # otherwise a rewind or a cancel had removed these tokens
            if is_of_it and not any(
                state.tokens.num_common(tokens) >= num for log in others for _, state in log.states
            ):
                yield f"{key}: still on a disk"


def _check_sessions(found: dict[SessionKey, Logged], history: History) -> Iterator[str]:
    """Apply and check all results in the order of the log, since a fork needs its parent's earlier states."""
    stored = []
    for log in found.values():
        for seq in log.requests:
            answers = log.results.get(seq, [])
            stored += [(message, result, log) for message, result in answers[:1]]
            if len(answers) != 1:
                yield f"{log.key}: the request at {seq} has {len(answers)} results"
    for message, result, log in sorted(stored, key=lambda one: one[0].seq):
        _undo_import(log, message.seq, message.stored_s)
        yield from (f"{log.key}: {one}" for one in _check_result(log, message, result, found, history))
        log.states.append((message.seq, log.state))
        log.copied = message if is_imported(log.asked[result.seq or 0]) else None
    for log in found.values():
        _undo_import(log, history.server.jetstream.streams[SUBJECTS.log_stream].last_seq, history.loop.time())


def _undo_import(log: Logged, seq: int, at_s: float) -> None:
    """Empty a session whose import failed, and removed its entries, before `at_s` and the sequence `seq`."""
    if log.copied is not None and log.closed is None and (log.copied.removed_s or at_s) < at_s:
        log.state, log.copied = _EMPTY, None
        log.states.append((seq, _EMPTY))


def _check_result(
    log: Logged, message: Message, result: Result, found: dict[SessionKey, Logged], history: History
) -> Iterator[str]:
    seq = result.seq or 0
    request = log.requests[seq]
    if isinstance(result, UnknownResult):
        log.is_beyond = True
    if log.is_beyond and isinstance(result, Closed) and result.repeat_of is None:
        log.state, log.closed, log.forgotten = FOLD.close(log.state), message, _EMPTY
        log.is_beyond = False  # a session that cannot be continued was removed; it may begin anew
        _free_ids(log, result)
        return
    if log.is_beyond:  # then only the number of results can be checked
        return
    if result.id != request.id:
        yield f"the result of {request.id} at {seq} names {result.id}"
    if _changes(result):
        if seq < log.last_seq:
            yield f"the result of {seq} comes behind that of a later request"
        log.last_seq = seq
    for name, record in [*log.records.items()]:
        if _is_gone(record, message):  # it was removed with its session
            del log.firsts[name], log.records[name]
    first, is_copy = log.requests.get(result.repeat_of or 0), is_imported(log.asked[seq])
    lacks_first = first is None or first.id != request.id
    if result.repeat_of is not None and lacks_first and not is_copy:
        yield f"the repeat at {seq} names {result.repeat_of}, which is another request"
    was_asked = any(one.id == request.id for at, one in log.requests.items() if at < seq)
    if not is_copy and (
        not was_asked or request.id in log.firsts
    ):  # otherwise the first result was removed, perhaps meanwhile
        yield from _check_repeat(seq, request, result, log.firsts)
    _free_ids(log, result)
    if not _is_known(result):
        log.firsts.setdefault(request.id, (seq, request, result))
        log.records.setdefault(request.id, message)
    stays = result.repeat_of is None and not _changes(result) and log.closed is None and not is_copy
    if stays and result.position not in (None, log.state.position):
        yield f"{request.id} at {seq} is at {result.position}, but changes nothing at {log.state.position}"
    if isinstance(result, Failed):
        if not is_copy:
            yield from _check_failure(log, message, request, result, history)
            if isinstance(request, Open) and request.from_ is not None and result.repeat_of is None:
                yield from _check_no_fork(log, request, result, found)
        return
    is_close = isinstance(result, Closed) and result.repeat_of is None
    if is_copy and is_close and not log.state.exists:  # the copy of a forgotten session begins with its close
        log.state, log.closed = FOLD.close(log.state), message
        return
    if result.repeat_of is None:
        yield from _apply(log, seq, request, message, result, found, history)
    digest = message.headers.get(HISTORY_HEADER)
    # An imported session has its results in the order of its requests, even of requests cancelled early.
    is_about_it = _changes(result) or (log.closed is None and not is_copy)
    if not log.is_beyond and is_about_it and digest not in (log.state.digest(), log.vouched):
        yield f"{request.id} at {seq} has a digest of other tokens"
    if _changes(result):
        log.vouched = digest or ""


def _free_ids(log: Logged, result: Result) -> None:
    """Forget the ids of a session that `result` forgets: they are free before all its entries are removed."""
    if _frees_ids(result):
        log.firsts.clear()
        log.records.clear()


def _frees_ids(result: Result) -> bool:
    return isinstance(result, Closed) and result.forgotten is not None and result.repeat_of is None


def is_imported(asked: Message) -> bool:
    """Whether a request was stored, together with its result, by an import of a session's log."""
    return "Nats-Batch-Id" in asked.headers


def _is_gone(record: Message, at: Message) -> bool:
    """Whether the message `record` was removed from the stream before the message `at` was stored."""
    return record.removed_s is not None and record.removed_s <= at.stored_s


def _last_before(log: Logged, closed: Message) -> list[Message]:
    """Return the result before that of a close, if there is one."""
    messages = [message for answers in log.results.values() for message, _ in answers]
    return sorted((one for one in messages if one.seq < closed.seq), key=lambda one: one.seq)[-1:]


def _changes(result: Result) -> bool:
    if isinstance(result, Generated):
        return bool(result.tokens) and result.repeat_of is None
    return not isinstance(result, Failed) and result.repeat_of is None


def _is_known(result: Result) -> bool:
    """Whether the result says that an earlier request had the same id."""
    return result.repeat_of is not None or (isinstance(result, Failed) and result.code == "id_conflict")


def _check_repeat(
    seq: int, request: Request, result: Result, firsts: dict[str, tuple[int, Request, Result]]
) -> Iterator[str]:
    first_seq, first_request, first = firsts.get(request.id, (seq, request, result))
    is_first = first_seq == seq
    is_conflict = isinstance(result, Failed) and result.code == "id_conflict"
    if is_first:
        if result.repeat_of is not None or is_conflict:
            yield f"{request.id} at {seq} was never asked before: {result}"
    elif request != first_request:
        is_expired = isinstance(result, Failed) and result.code == "expired"
        is_withdrawn = is_expired or (isinstance(result, Generated) and not result.tokens)
        if not is_conflict and not is_withdrawn:
            yield f"{request.id} at {seq} is another request than at {first_seq}: {result}"
    elif result.repeat_of is not None:
        same = (type(result), getattr(result, "tokens", None), result.position)
        if same != (type(first), getattr(first, "tokens", None), first.position):
            yield f"the repeat at {seq} of {first_seq} says {result} instead of {first}"
    elif _changes(result):
        yield f"{request.id} was carried out twice, at {first_seq} and {seq}"


def _check_failure(
    log: Logged, message: Message, request: Request, result: Failed, history: History
) -> Iterator[str]:
    if result.repeat_of is not None:
        return
    seq = result.seq or 0
    is_innocent = not request.id.startswith("poison")
    is_innocent = is_innocent and POISON not in (getattr(request, "tokens", None) or ())
    asked_s = log.asked[seq].stored_s
    if "has ended every worker" in result.message:
        # Other causes may have ended that many workers while it ran, and no worker can tell the difference. A
        # server that ends forgets who had the request, and another worker may be the first to take it again.
        # While a worker runs no code for a second or more, others take it for one that has ended.
        num_ended = sum(
            began_s < message.stored_s and asked_s < ended_s and ended_s - began_s > 1.0
            for began_s, ended_s in history.stalls_s
        )
        num_ended += sum(asked_s <= died_s < message.stored_s for died_s in history.deaths_s)
        num_ended += history.server.counts["crashes of the server"]
        most = 2 if "operator" in history.plan.kinds else history.plan.settings["max_attempts"]
        is_innocent = is_innocent and num_ended < most
        is_innocent = (
            is_innocent and history.plan.leases
        )  # without leases a worker that is only cut off counts as dead
    asks_again = "is not stored yet: ask again" in result.message
    asks_again = asks_again or "cannot be forked: " in result.message
    if is_innocent and result.code not in _MAY_FAIL and not asks_again:
        yield f"the innocent {request.id} at {seq} got {result.code}: {result.message}"
    if is_innocent and "gone from the log" in result.message and "fork" not in result.message:
        yield f"the record of {request.id} at {seq} is gone: {result.message}"


def _apply(
    log: Logged,
    seq: int,
    request: Request,
    message: Message,
    result: Any,
    found: dict[SessionKey, Logged],
    history: History,
) -> Iterator[str]:
    """Check a result against the session's state, then apply the request and the result to the state."""
    if log.closed and _is_gone(log.closed, message):
        log.state, log.closed = _EMPTY, None  # no entry of the close is left
    before, log.forgotten = log.state, _EMPTY
    match request, result:
        case _, Generated(tokens=()):
            return
        case Open(from_=None), Opened():
            log.state, log.closed = FOLD.open(log.state, FULL, result.tags), None
        case Open(), Opened():
            yield from _check_fork(log, request, message, result, found)
            log.closed = None
        case Append(), Appended():
            log.state = _extended(log.state, request)
        case Generate(), Generated():
            state = _extended(log.state, request)
            prompt, shown = state.tokens.ids(), pictures(state.tokens)
            key, first_seq = log.key, seq
            while (key, first_seq) in history.imported:
                asked = found[key].asked.get(first_seq)
                if asked is not None and not is_imported(asked):
                    break
                key, first_seq = history.imported[key, first_seq]
            seed = request.seed if request.seed is not None else derived_seed(key, first_seq)
            seed = seed if request.temperature else 0
            is_orphan = log.lost and any("lost entries" in one for one in result.warnings)
            for i, token in enumerate(() if is_orphan else result.tokens):
                ways = [next_token(prompt, shown, result.tokens[:i], seed, way) for way in (0, 1)]
                if token not in ways:
                    yield f"token {i} of {request.id} at {seq} does not follow from its session"
                    break
            yield from _check_text(request, result)
            said = answer_message(result.text, result.reasoning, result.tool_calls)
            log.state = FOLD.add_answer(state, request, result.tokens, said)
        case _, Rewound():
            log.state = FOLD.rewind(log.state, result.position)
        case Close(), Closed():
            # What the log no longer has of a closed session, no forget can find.
            is_known = log.closed is None or not any(
                _is_gone(one, message) for one in _last_before(log, log.closed)
            )
            log.forgotten = before if request.forget and is_known else _EMPTY
            log.state, log.closed = FOLD.close(log.state), message
        case _:
            yield f"{request} at {seq} got {result}"
    if not log.is_beyond and result.position != log.state.position:
        yield f"{request.id} at {seq} is at {result.position}, its log makes it {log.state.position}"


def _extended(state: State, request: Append | Generate) -> State:
    """Return the state with a request's input added; compute the tokens of input without messages twice."""
    extended = FOLD.extend(state, request, GRIDS).history
    if not request.messages and not state.conversation.has_messages:
        given = request.tokens
        if given is None:
            given = tokenizer().encode(request.text or "", at_start=not state.position)
        assert [*extended.tokens.ids()] == [*state.tokens.ids(), *given]
    return extended


def _check_read(log: Logged, read: Read) -> Iterator[str]:
    """Check that a fresh worker has read the session's state, and the first request of each answered id."""
    entries = [message for answers in log.results.values() for message, _ in answers]
    removed_s = [one.removed_s for one in entries if one.removed_s is not None]
    if any(read.begun_s <= one <= read.ended_s for one in removed_s):
        return  # entries were removed while the worker read them

    def is_there(message: Message) -> bool:
        return message.removed_s is None or message.removed_s > read.ended_s

    if log.is_beyond:
        if read.diverged is None and log.closed is None:
            yield "a fresh worker takes what it cannot know for read"
        return
    is_open = log.state.exists and log.closed is None
    if is_open != (read.history.exists and not read.history.closed):
        yield f"a fresh worker reads an open session as closed, or a closed one as open: {is_open}"
    if log.closed and is_there(log.closed) and not read.history.closed:
        yield "a fresh worker does not know that the session was closed"
    if read.diverged is not None:
        yield f"a fresh worker cannot go on: {read.diverged}"
    if is_open and read.history.digest() != log.state.digest():
        yield f"a fresh worker reads {read.history.position} other tokens than the {log.state.position}"
    if is_open and not log.lost:
        yield from _check_shown(log.state, read.shown)
    if is_open and (read.history.parent, read.history.tags) != (log.state.parent, log.state.tags):
        yield f"a fresh worker reads that it comes from {read.history.parent}"
    there: dict[str, int] = {}
    for seq, request in sorted(log.requests.items()):
        answers = [result for message, result in log.results.get(seq, ()) if is_there(message)]
        if answers and not _is_known(answers[0]):
            there.setdefault(request.id, seq)
    # The copy of a forgotten session has results from before its close, of which nothing else is left.
    results = [one for answers in log.results.values() for one in answers]
    forgotten_seq = max((message.seq for message, result in results if _frees_ids(result)), default=0)
    copied = {
        log.requests[seq].id for seq, asked in log.asked.items() if is_imported(asked) and seq < forgotten_seq
    }
    for name in (there.keys() | read.answered.keys()) - copied:
        if there.get(name) != read.answered.get(name):
            yield f"a fresh worker has {name} as that of {read.answered.get(name)}, not {there.get(name)}"


def _check_shown(state: State, shown: ShownHistory) -> Iterator[str]:
    """Check that a client's reader of the log shows the session's answers where its tokens have them."""
    if shown.turns and shown.position != state.position:
        yield f"a client reads {shown.position} tokens from the log, not {state.position}"
    for turn in shown.turns:
        answer = () if turn.answer is None or turn.is_cut else turn.answer.tokens
        if [*state.tokens.ids(turn.position - len(answer), turn.position)] != [*answer]:
            yield f"a client reads the answer {turn.answer} of {turn.seq}, which the session does not have"


def _check_text(request: Generate, result: Generated) -> Iterator[str]:
    """Check that an answer's text and its reason to end follow from its tokens and its request."""
    has_ended = result.tokens[-1:] == (END,)
    shown = [one for one in result.tokens[: len(result.tokens) - has_ended] if one != IMAGE]
    text = tokenizer().decode(shown)
    ends = [text.index(one) for one in request.stop or () if one in text]
    if result.text != (text[: min(ends)] if ends else text):
        yield f"{request.id} has the text {result.text!r} for the tokens of {text!r}"
    is_stopped, is_long = has_ended or bool(ends), len(result.tokens) == request.max_tokens
    reasons = {"stop"} if is_stopped else {"length"} if is_long else {"cancelled", "expired"}
    if result.finish_reason not in reasons:
        yield f"{request.id} has ended by {result.finish_reason}, not by {reasons}"


def _check_deadlines(log: Logged, history: History) -> Iterator[str]:
    """Check that no worker that started after a request's deadline has executed the request."""
    for seq, answers in log.results.items():
        request = log.requests.get(seq)
        for message, result in answers:
            if not isinstance(request, Append) or request.deadline_s is None or not _changes(result):
                continue
            worker = words(message.headers.get(BUILD_HEADER, "")).get("worker")
            due_s = log.asked[seq].stored_s + request.deadline_s + max(map(abs, history.plan.skews))
            if dict(history.lives).get(worker or "", 0.0) > due_s:
                yield f"{request.id} at {seq} was carried out though its deadline had passed"


def _check_fork(
    log: Logged, request: Open, message: Message, result: Opened, found: dict[SessionKey, Logged]
) -> Iterator[str]:
    """Find the parent's state that a fork has copied, and make it the fork's state."""
    assert request.from_ is not None
    is_copy = is_imported(log.asked[result.seq or 0])  # the original log had the expected position
    since = 0 if is_copy else result.seq or 0
    parent, states = _parent(log, request.from_.session, since, found)
    digest = message.headers.get(HISTORY_HEADER)
    of = Parent(session=request.from_.session, position=result.position)
    expected = None if is_copy else request.from_.expect_position
    for state in states:
        if _is_open(state) and state.position >= result.position and expected in (None, state.position):
            log.state = FOLD.fork(state, of, result.tags)
            if log.state.digest() == digest:
                return
    if parent is not None and parent.is_beyond:
        log.is_beyond = True
        return
    yield f"the fork at {result.seq} has tokens that its parent did not have since it was asked for"


def _parent(
    log: Logged, session: str, since: int, found: dict[SessionKey, Logged]
) -> tuple[Logged | None, list[State]]:
    """Return the log of a fork's parent, and the parent's states from sequence `since` on."""
    parent = found.get(type(log.key)(log.key.tenant, session))
    states = parent.states if parent else []
    before = [state for seq, state in states if seq < since]
    return parent, [before[-1] if before else _EMPTY, *(state for seq, state in states if seq > since)]


def _is_open(state: State) -> bool:
    return state.exists and not state.closed


def _check_no_fork(
    log: Logged, request: Open, result: Failed, found: dict[SessionKey, Logged]
) -> Iterator[str]:
    """Check that a refused fork's parent has been in the state that the refusal names, since the request."""
    assert request.from_ is not None
    parent, states = _parent(log, request.from_.session, result.seq or 0, found)
    if parent is not None and parent.is_beyond:
        return
    if "only an open session can be forked" in result.message and all(map(_is_open, states)):
        yield f"the fork at {result.seq} is refused, though its parent was open: {result.message}"
    of = request.from_
    conflicts = result.message.startswith(f"{of.session} is at position ")
    if conflicts and all(one.position == of.expect_position for one in states):
        yield f"the fork at {result.seq} is refused, though its parent was as expected: {result.message}"
    position = of.position or 0
    if "cannot fork " in result.message and all(one.position >= position for one in states):
        yield f"the fork at {result.seq} is refused, though its parent was there: {result.message}"


def _linked(log: Logged, stream: Stream, close_seq: int) -> set[int]:
    """Return the sequences of what results of requests behind a close link to: long requests and inputs."""
    texts, found = list[str](), set[int]()
    for message in stream.matching(SUBJECTS.of(log.key, "out")):
        if (_result(message.data).seq or 0) > close_seq:
            asked = decode_asked(message.data)
            texts += [message.headers.get(PARTS_HEADER, ""), asked.link if asked else ""]
    parts = {one.seq: one.data for one in stream.matching(SUBJECTS.of(log.key, "checkpoint"))}
    while texts:
        link = Link.parse(texts.pop())
        part = CheckpointMessage.unpack(parts[link.seq], link) if link and link.seq in parts else None
        if link and part:
            found.add(link.seq)
            texts.append(part.before)
    return found


def _check_forgotten(log: Logged, streams: dict[str, Stream]) -> Iterator[str]:
    """Check that the streams have no message of the session from before its last close with `forget`."""
    closes = [
        seq
        for seq, request in log.requests.items()
        if isinstance(request, Close)
        and request.forget
        and seq in log.results
        and isinstance(log.results[seq][0][1], Closed)
        and log.results[seq][0][1].repeat_of is None
        and not is_imported(log.asked[seq])
    ]
    if not closes:
        return
    last = max(closes)
    closed = log.results[last][0][0].seq
    later = _linked(log, streams[SUBJECTS.log_stream], last)
    for message in streams[SUBJECTS.log_stream].matching(SUBJECTS.log(log.key)):
        kind = message.subject.rpartition(".")[2]
        ends = {"in": last, "out": last, "checkpoint": closed, "dead": closed}  # waiting requests lie between
        if message.seq < ends.get(kind, 0) and message.seq not in later:
            yield f"the {kind} at {message.seq} is still there after the forget at {last}"
    noted = [
        one.seq
        for one in streams[SUBJECTS.log_stream].all
        if one.subject == SUBJECTS.of(log.key, "closed") and one.headers.get(CLOSE_HEADER) == str(last)
    ]
    note = min(noted, default=0)  # the images behind the first one are of the next session
    for message in streams[SUBJECTS.log_stream].matching(SUBJECTS.image(log.key, "*")):
        if message.seq < note:
            yield f"the image at {message.seq} is still there after the forget at {last}"
    for message in streams[SUBJECTS.log_stream].matching(SUBJECTS.of(log.key, "out")):
        if message.seq < closed and (_result(message.data).seq or 0) < last:
            yield f"the result at {message.seq} is still there after the forget at {last}"
    before = {log.requests[seq].id for seq in log.requests if seq < last}
    after = {log.requests[seq].id for seq in log.requests if seq > last}
    for name in before:
        for one in streams[SUBJECTS.token_stream].matching(SUBJECTS.tokens(log.key, name)):
            if one.data and (name not in after or (decode_chunk(one.data).seq or 0) < last):
                yield f"the chunk at {one.seq} of {name} is still there after the forget at {last}"


def _expired(stream: Stream, found: dict[SessionKey, Logged], ttl_s: float) -> set[tuple[SessionKey, str]]:
    """Return (session, request id) of answers with chunks that expired before the result was stored.

    If a worker dies during such an answer, the next worker continues without the expired chunks.
    """
    expired: set[tuple[SessionKey, str]] = set()
    for message in stream.all:
        key, _, name = _parse(message.subject)
        if message.data and message.removed_s is not None and message.removed_s - message.stored_s >= ttl_s:
            results = found[key].results.get(decode_chunk(message.data).seq or 0, [])
            if not results or results[0][0].stored_s > message.removed_s:
                expired.add((key, name or ""))
    return expired


def _check_clients(
    history: History, found: dict[SessionKey, Logged], expired: set[tuple[SessionKey, str]]
) -> Iterator[str]:
    """Check that each result that a client received is in the log, and that its chunks begin the answer."""
    for told in history.told:
        name = f"{told.key} {told.request.id}"
        log = found.get(told.key)
        if (told.key, told.request.id) in expired:
            continue
        if told.broken and not (log is not None and _began_anew(told.request, log)):
            yield f"{name}: the client was told {told.broken}"
        answers = log.results.get(told.seq or 0, []) if log else []
        if told.seq is not None and log is not None and told.seq not in log.requests:
            yield f"{name}: its request at {told.seq} was acknowledged and is not in the log"
        if told.result is not None and told.result not in [result for _, result in answers]:
            yield f"{name}: the client got {told.result}, the log has {answers}"
        if told.chunks and log is not None:
            yield from (f"{name}: {one}" for one in _check_told(told, log))


def _check_told_results(history: History, found: dict[SessionKey, Logged]) -> Iterator[str]:
    """Check that no client has received another request's result, or one that the log never had."""
    for told in history.told:
        log, result = found.get(told.key, Logged(told.key)), told.result
        if result is not None and result.id != told.request.id:
            yield f"{told.key} {told.request.id}: the client got {result}"
        elif result is not None and result not in log.lost and log.lost:
            answers = log.results.get(told.seq or 0, [])
            if result not in [one for _, one in answers]:
                yield f"{told.key} {told.request.id}: the client got {result}, which the log never had"


def _check_looks(history: History, found: dict[SessionKey, Logged]) -> Iterator[str]:
    """Check that `info` never showed a state older than a result that a client had received before."""
    for key, told, position in history.looks:
        log = found.get(key)
        if log is None or log.is_beyond or history.plan.sync_s:
            continue
        results = [
            message
            for one in told
            for message, result in log.results.get(one.seq or 0, ())
            if result == one.result
        ]
        since = max((message.seq for message in results), default=0)
        before = [state for seq, state in log.states if seq <= since]
        states = [before[-1] if before else _EMPTY, *(state for seq, state in log.states if seq > since)]
        seen = {state.position for state in states} | {
            None if position is None else 0 for state in states if not _is_open(state)
        }
        if position not in seen:
            yield f"{key}: info says position {position}, after {since} in the log it was at {sorted(seen)}"


def _check_gateways(history: History, found: dict[SessionKey, Logged]) -> Iterator[str]:
    """Check that gateways show the answers that the log has."""
    for key, (shown, text) in history.shown.items():
        records = [
            (one.text, len(one.tokens), "completed" if one.finish_reason == "stop" else "incomplete")
            for results in found[key].results.values()
            for _, one in results
            if isinstance(one, Generated)
        ]
        told = text, (shown.get("usage") or {}).get("output_tokens"), shown.get("status")
        if told not in records and shown.get("status") != "failed":
            yield f"{key}: a gateway shows {told}, the log has {records}"


def _began_anew(request: Request, log: Logged) -> bool:
    """Whether a request was published and executed again, because its session had been removed."""
    same = [seq for seq, one in log.requests.items() if one.id == request.id]
    return len(same) > 1 and log.asked[min(same)].removed_s is not None


def _check_told(told: Told, log: Logged) -> Iterator[str]:
    tokens = [token for chunk in told.chunks for token in chunk.tokens]
    text = "".join(chunk.text for chunk in told.chunks)
    results = [
        result
        for seq, one in log.requests.items()
        if one.id == told.request.id
        for _, result in log.results.get(seq, [])
    ]
    records = [result for result in results if isinstance(result, Generated)]
    if any(map(_is_given_up, results)):
        return
    if told.is_whole and told.result in records:
        assert isinstance(told.result, Generated)
        records = [told.result]
        parts = told.result.text, told.result.reasoning, list(told.result.tokens)
        if parts != (text, "".join(chunk.reasoning for chunk in told.chunks), tokens):
            yield f"the client read {tokens} {text!r} to the end, the record is {told.result}"
    if not any(list(one.tokens[: len(tokens)]) == tokens and one.text.startswith(text) for one in records):
        yield f"the client saw {tokens} {text!r}, which begins no record of {records}"


def _is_given_up(result: Result) -> bool:
    """Whether a request failed because too many workers crashed on it. Its published chunks then stay."""
    what = ("has ended every worker", "reading its log has ended")
    return isinstance(result, Failed) and any(one in result.message for one in what)


def _check_chunks(
    stream: Stream, found: dict[SessionKey, Logged], expired: set[tuple[SessionKey, str]]
) -> Iterator[str]:
    """Check that each chunk that was ever stored is a part of its recorded answer."""
    for message in stream.all:
        if not message.data:
            continue
        key, _, request_id = _parse(message.subject)
        if (key, request_id) in expired:
            continue
        chunk = decode_chunk(message.data)
        answers = found[key].results.get(chunk.seq or 0, [])
        asked = found[key].asked.get(chunk.seq or 0)
        if asked and is_imported(asked):
            continue  # a worker on a lagging replica may answer a copied request, which has no seal
        if asked and asked.removed_s is not None and asked.removed_s < message.stored_s and message.removed_s:
            continue  # a stalled worker published it after the forget of its request, and removed it
        for _, result in answers:
            tokens = result.tokens if isinstance(result, Generated) else ()
            if isinstance(result, Generated) and not (
                result.text.startswith(chunk.text) if not chunk.i else chunk.text in result.text
            ):
                yield f"{key} {request_id}: the text of {chunk} is no part of the record {result}"
            if not _is_given_up(result) and tuple(tokens[chunk.i : chunk.i + len(chunk.tokens)]) != tuple(
                chunk.tokens
            ):
                yield f"{key} {request_id}: the chunk {chunk} is no part of the record {result}"
