"""Carries out one request of a session: adds its input, runs its turn on the device, builds the result.

Keeps no state between requests: takes a history, and returns a result and the history after it. The session
commits both, so a failure in this module changes nothing but the KV on the device.
"""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import UNSET, structs

from turnkeep_client.log import derived_seed
from turnkeep_client.messages import (
    RECOMMENDED,
    Append,
    Called,
    CalledFunction,
    Chunk,
    Close,
    Closed,
    Generate,
    Open,
    Parent,
    Rewind,
    Rewound,
    encode,
    joined,
)
from worker.batch.row_sampler import Sampling
from worker.device.request import TurnRequest
from worker.process.concurrency import in_thread, task_group
from worker.text.answer import Answer
from worker.text.text_stream import TextStream
from worker.wire.fence import FencedError

from .formats import Formats
from .history import RefusedError, digests_of, seen, spoken
from .results import appended, begun_elsewhere, generated, opened, withdrawn
from .streaming import AnswerStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from cache.names.tokens import Tokens
    from cache.store import ErasureResult
    from turnkeep_client.messages import (
        CallPart,
        FinishReason,
        ForkPoint,
        Result,
        TokenLogprob,
    )
    from turnkeep_client.subjects import SessionKey
    from worker.batch.row_sampler import Grammar
    from worker.cluster.erasures import Erasures
    from worker.engine.port import EnginePort, TurnResult
    from worker.models.tokenizer import Tokenizer
    from worker.observe.counters import Telemetry
    from worker.wire.chunks import Published
    from worker.wire.journal import Journal
    from worker.wire.retention import Retention

    from .fold import Fold
    from .history import History, Input
    from .limits import Limits
    from .record import Pending

log = structlog.get_logger()

#: Up to this many characters or token ids, tokenising takes less time than starting a thread.
_LITTLE: Final = 256

#: Bytes of a result and its headers besides the tokens of input and answer and their text. This includes
#: text held back for a stop string: 256 characters of up to 6 bytes each as JSON.
_RESULT_BYTES: Final = 4096

_MOST_INPUT: Final = 8192

#: Reason for giving up an answer whose session no longer has the tokens that the answer was begun with.
_LOST_BASE: Final = (
    "the NATS server has lost entries on which this answer was begun: it ends as it was streamed"
)


class Execution:
    """Carries out requests for one model. Event loop only."""

    def __init__(
        self,
        *,
        journal: Journal,
        engine: EnginePort,
        fold: Fold,
        tokenizer: Tokenizer,
        telemetry: Telemetry,
        retention: Retention,
        limits: Limits,
        max_result_bytes: int,
        own_sampling: Mapping[str, float],
        token_ttl_s: float,
        directory: str,
        erasures: Erasures,
        erase_elsewhere: Callable[[SessionKey], Awaitable[Mapping[str, bool]]],
    ) -> None:
        """`own_sampling` are the sampling options that the model's authors recommend.

        The token stream keeps chunks for `token_ttl_s`. `erase_elsewhere` has other workers drop the KV of a
        session, and returns for each data directory whether none is left; `directory` identifies this
        worker's data directory. An answer ends before its result takes more than `max_result_bytes` of the
        log.
        """
        self._journal = journal
        self._engine = engine
        self._fold = fold
        self._tokenizer = tokenizer
        self._telemetry = telemetry
        self._retention = retention
        self._limits = limits
        self._max_answer_bytes = max(max_result_bytes - _RESULT_BYTES, max_result_bytes // 4)
        #: Most characters of an input's encoded tokens in a result; longer inputs are stored before it.
        self.most_input = min(_MOST_INPUT, max_result_bytes // 16)
        self._own_sampling = own_sampling
        self._token_ttl_s = token_ttl_s
        self._directory = directory
        self._erasures = erasures
        self._erase_elsewhere = erase_elsewhere
        self._formats = Formats(tokenizer)

    async def carry_out(
        self, key: SessionKey, request: Append | Generate | Open | Rewind, pending: Pending, history: History
    ) -> tuple[Result, History]:
        """Carry out a request that has passed `Fold.check`; return its result and the history after it.

        Raises `RefusedError`, `FencedError`, and what `EnginePort.run` raises.
        """
        match request:
            case Append():
                return await self._append(key, request, pending, history)
            case Generate():
                return await self._generate(key, request, pending, history)
            case Open(cache=cache):
                after = self._fold.opened(history, self._limits.chosen(cache), request.tags)
                self._limits.check_policy(after.policy)
                self._limits.note(after.policy, key.tenant)
                return opened(request, pending, after), after
            case Rewind(position=position):
                after = self._fold.rewound(history, position)
                return Rewound(id=request.id, seq=pending.seq, position=position, **seen(after)), after

    def fork(self, request: Open, of: ForkPoint, pending: Pending, parent: History) -> tuple[Result, History]:
        """Open a fork of `parent`, a whole history, at the position in `of`. Raises `RefusedError`."""
        if of.expect_position not in (None, parent.position):
            raise RefusedError(
                "position_conflict",
                f"{of.session} is at position {parent.position}, not at the expected {of.expect_position}",
            )
        position = parent.position if of.position is None else of.position
        if position > parent.position:
            raise RefusedError(
                "invalid_request",
                f"cannot fork {of.session} at {position}: it is at position {parent.position}",
            )
        after = self._fold.forked(parent, Parent(session=of.session, position=position), request.tags)
        self._limits.check_policy(after.policy)
        return opened(request, pending, after), after

    async def close(
        self,
        key: SessionKey,
        request: Close,
        pending: Pending,
        history: History,
        had: Sequence[Tokens],
        shared: Callable[[Tokens], Awaitable[int]],
    ) -> tuple[Result, History]:
        """Close a session; with `forget` also erase the KV of all tokens that it `had`; see `erase_all`."""
        removed = await self._retention.note_close(key, forget=request.forget)
        closed = Closed(id=request.id, seq=pending.seq, position=history.position, removed_entries=removed)
        if not request.forget:
            self._engine.forget(key)
            return closed, self._fold.closed(history)
        # Erase before the result is stored: after a crash in between, the next attempt erases the rest.
        num_snapshots, settled, shares = await erase_all(self._engine, key, had, shared)
        have = {**await self._erase_elsewhere(key), self._directory: settled}
        for tokens, num_shared in zip(had, shares, strict=True):
            await self._erasures.note(key, tokens, num_shared, [name for name in have if have[name]])
        closed = structs.replace(closed, forgotten=num_snapshots, settled=all(have.values()))
        return closed, self._fold.closed(history)

    async def _append(
        self, key: SessionKey, request: Append, pending: Pending, history: History
    ) -> tuple[Result, History]:
        policy = history.policy
        self._limits.check_policy(policy)
        extended = await self._extend(key, history, request)
        tokens = extended.history.tokens
        self._limits.check_size(len(tokens), policy, room=0)
        turn, live_bytes = None, self._engine.live_bytes(key, history.tokens, policy)
        if tokens != history.tokens:
            pending.change = extended.change
            turn = await self._prefill(key, pending, extended.history)
            if turn is None or not turn.complete:
                return withdrawn(pending, history, history.position), history
        result = appended(pending, turn, history, extended, live_bytes)
        return result, extended.history

    async def _generate(
        self, key: SessionKey, request: Generate, pending: Pending, history: History
    ) -> tuple[Result, History]:
        policy = history.policy
        self._limits.check_policy(policy)
        self._limits.check_answer(request)
        published, extended = await self._begun(key, request, pending, history)
        own = digests_of(self._fold.model)
        is_begun_by_other = published.num_tokens > 0 and published.model not in ("", own)
        is_over = is_begun_by_other or bool(pending.given_up)
        if is_begun_by_other and published.model.split()[-1:] != [self._fold.model.tokenizer]:
            return await self._end_foreign(key, request, pending, history, published)
        prompt = extended.history.tokens
        _check_not_empty(prompt)
        self._limits.check_size(len(prompt), policy, room=min(request.max_tokens, 1))
        answer, grammar, warnings = await self._answer(key, request, pending, extended, published)
        chunks = AnswerStream(self._journal.chunks, key, pending, published, ttl_s=self._token_ttl_s)
        turn = None
        if not is_over and request.max_tokens:
            turn = await self._sample(
                key, request, pending, extended.history, answer, grammar, chunks, warnings
            )
        elif not is_over:
            turn = await self._prefill(key, pending, extended.history)
            if turn is not None and turn.complete:
                answer.finish_reason = "length"
        await _settle(pending, answer, grammar, chunks, is_begun_by_other=is_begun_by_other)
        if not answer.tokens and answer.finish_reason != "length":
            return withdrawn(pending, history, history.position, turn), history
        message = spoken(answer.text, answer.reasoning, answer.calls)
        after = self._fold.answered(extended.history, request, answer.tokens, message)
        live_bytes = turn.live_bytes if turn else self._engine.live_bytes(key, after.tokens, after.policy)
        result = generated(pending, answer, turn, history, extended, after, live_bytes)
        return structs.replace(result, warnings=warnings), after

    async def _answer(
        self,
        key: SessionKey,
        request: Generate,
        pending: Pending,
        extended: Input,
        published: Published,
    ) -> tuple[Answer, Grammar | None, tuple[str, ...]]:
        """Create an answer that begins with its published chunks; return it, its grammar and its warnings."""
        prompt, policy = extended.history.tokens, extended.history.policy
        # Context and memory limit an answer; the tokens that a dead worker has published stay in any case.
        most = len(prompt) + request.max_tokens if policy.is_endless else self._limits.context_tokens
        most = max(self._engine.most_tokens(most, policy) - len(prompt), published.num_tokens)
        splitter = await self._formats.splitter(key.tenant, f"{key}:{pending.seq}", request, extended.history)
        grammar, warnings = await self._formats.grammar(
            key.tenant, request, extended.history, splits=splitter is not None
        )
        warnings = extended.warnings + warnings
        room = self._max_answer_bytes - min(len(extended.change.input), self.most_input)
        room -= len(encode({"warnings": warnings}))
        warnings += (pending.given_up,) if pending.given_up else ()
        answer = Answer(
            TextStream(self._tokenizer, request.stop, splitter.is_marker if splitter else None),
            splitter=splitter,
            max_tokens=min(request.max_tokens, most),
            max_bytes=room,
            end_tokens=frozenset() if request.ignore_eos else self._tokenizer.eos_ids,
        )
        self._resume(published.chunks, answer)
        pending.num_resumed, pending.change = len(answer.tokens), extended.change
        return answer, grammar, warnings

    async def _begun(
        self, key: SessionKey, request: Generate, pending: Pending, history: History
    ) -> tuple[Published, Input]:
        """Read the chunks of the answer that an earlier worker has published, and add the request's input.

        Sets `cancelled` or `given_up` of `pending` if the answer cannot continue. Raises `FencedError`.
        """
        async with task_group() as tasks:
            reading = tasks.start_soon(
                self._journal.chunks.read, key, request.id, pending.seq, pending.stored
            )
            extended = await self._extend(key, history, request)
            published = await reading
        if published.has_ended and await self._journal.last_seq(key, "out") > pending.after:
            raise FencedError("the answer has a result already")  # a lagging replica did not show it
        if published.is_sealed and not pending.expired:  # another worker is ending it, or died doing so
            pending.cancelled = True
        pending.base = history.digest()
        if published.num_tokens and published.base not in ("", pending.base):
            pending.given_up = _LOST_BASE
        return published, extended

    async def _end_foreign(
        self, key: SessionKey, request: Generate, pending: Pending, history: History, published: Published
    ) -> tuple[Result, History]:
        """End an answer that a model with another tokenizer has begun; the published part is the result.

        That part is added to the session as a message, tokenised for this model.
        """
        await self._journal.chunks.seal(
            key, request.id, pending.seq, published.last_seq, server=pending.server
        )
        chunk = joined(published.chunks)
        calls = _whole_calls(chunk.tool_calls)
        message = spoken(chunk.text, chunk.reasoning, calls)
        extended = await self._fold.extended(key.tenant, history, request, message)
        return begun_elsewhere(pending, chunk, calls, history, extended), extended.history

    async def _prefill(self, key: SessionKey, pending: Pending, prompt: History) -> TurnResult | None:
        """Prefill a prompt without an answer; return the cost, None if cancelled before the turn began."""
        asked = TurnRequest(key, prompt.tokens, prompt.policy, pending.priority)
        turn = await self._engine.run(asked, lambda: pending.stopped, phases=pending.phases)
        if turn is not None:
            self._telemetry.queue_time.observe(pending.waited_s(turn.started_s))
        return turn

    async def _extend(self, key: SessionKey, history: History, request: Append | Generate) -> Input:
        """Add a request's input to a history, on a thread if it may be long. Raises `RefusedError`."""
        num_given = len(request.text or request.tokens or ()) + len(getattr(request, "prefix", ""))
        if request.messages or num_given > _LITTLE or history.conversation.has_messages:
            return await self._fold.extended(key.tenant, history, request)
        return self._fold.extend(history, request)

    def _resume(self, published: list[Chunk], answer: Answer) -> None:
        """Begin an answer with its published chunks, since clients may have seen them.

        Another worker may have published them, even if this worker had the session in memory all the time.
        """
        for chunk in published:
            if not all(0 <= token < self._limits.vocab_size for token in chunk.tokens):
                log.warning("ignoring tokens that this model does not have", first=chunk.i)
                break
            for token, said in zip_longest(chunk.tokens, chunk.logprobs[: len(chunk.tokens)]):
                if answer.finish_reason is None:
                    answer.push(token, *_known(said))
        if answer.tokens:
            log.info("resuming an interrupted answer", tokens=len(answer.tokens))

    async def _sample(
        self,
        key: SessionKey,
        request: Generate,
        pending: Pending,
        prompt: History,
        answer: Answer,
        grammar: Grammar | None,
        chunks: AnswerStream,
        warnings: tuple[str, ...],
    ) -> TurnResult | None:
        """Sample the rest of an answer and publish it as chunks; the first chunk has the `warnings`.

        Returns None if the answer is complete already, or was cancelled before its turn began.
        """
        if answer.finish_reason is not None:
            return None
        num_known = len(answer.tokens)
        asked = TurnRequest(
            key,
            prompt.tokens + answer.tokens,
            prompt.policy,
            pending.priority,
            answer,
            _sampling(key, request, pending, self._own_sampling, grammar),
        )
        async with chunks.kept():
            turn = await self._engine.run(
                asked, lambda: pending.stopped, lambda chunk: chunks.publish(chunk, warnings), pending.phases
            )
        if turn is not None and not num_known:
            self._telemetry.queue_time.observe(pending.waited_s(turn.started_s))
        if turn is not None and len(answer.tokens) > num_known:
            self._telemetry.time_to_first_token.observe(turn.first_token_s - pending.received_s)
        return turn


async def erase_all(
    engine: EnginePort, key: SessionKey, had: Sequence[Tokens], shared: Callable[[Tokens], Awaitable[int]]
) -> tuple[int, bool, list[int]]:
    """Erase the KV of all tokens that a session `had`, except what others share.

    Of each of these sequences the first `shared(tokens)` stay, and those that the next one begins with: they
    go with that. If one cannot be settled, only the last one is still tried. Returns how many snapshots were
    removed, whether all is settled, and of how many tokens of each sequence the KV stays.
    """
    shares: list[int] = []
    done: list[ErasureResult] = []
    for tokens, after in zip_longest(had, had[1:]):
        # No await between count and removal: a session that shares the tokens may be forgotten any time.
        shares.append(max(await shared(tokens), after.num_common(tokens) if after is not None else 0))
        if after is None or all(one.settled for one in done):
            done.append(await engine.erase(key, tokens, shares[-1]))
    return sum(one.num_snapshots for one in done), all(one.settled for one in done), shares


def _check_not_empty(prompt: Sequence[int]) -> None:
    if not prompt:
        raise RefusedError(
            "invalid_request",
            "the session is empty: append something first, or send messages, text or tokens",
        )


async def _settle(
    pending: Pending,
    answer: Answer,
    grammar: Grammar | None,
    chunks: AnswerStream,
    *,
    is_begun_by_other: bool,
) -> None:
    """Set an answer's finish reason after its turn. If the answer ended early, prevent further chunks."""
    if answer.finish_reason == "stop" and grammar and answer.tokens[-1] in answer.end_tokens:
        followed = await in_thread(grammar.follow, answer.tokens[:-1])
        if not followed.is_complete:  # the grammar reached one of its limits
            answer.finish_reason = "length"
    if answer.finish_reason is None:
        late = pending.expired and not pending.cancelled
        why: FinishReason = "given_up" if pending.given_up else "expired" if late else "cancelled"
        pending.held = answer.cancel("model_changed" if is_begun_by_other else why)
        await chunks.seal()


def _whole_calls(parts: Sequence[CallPart]) -> tuple[Called, ...]:
    """Return the tool calls of which all parts were published."""
    found = []
    for _, run in groupby(parts, lambda part: part.index):
        first, *rest = run
        arguments = "".join(part.arguments for part in (first, *rest))
        with suppress(ValueError):
            if first.id is not None and first.name is not None and isinstance(json.loads(arguments), dict):
                found.append(Called(first.id, CalledFunction(first.name, arguments)))
    return tuple(found)


def _known(said: TokenLogprob | None) -> tuple[float | None, list[tuple[int, float]]]:
    """Return a published token's logprob and likeliest tokens in the form that `Answer.push` takes."""
    return (said.logprob, [(one.id, one.logprob) for one in said.top]) if said is not None else (None, [])


def _sampling(
    key: SessionKey,
    request: Generate,
    pending: Pending,
    own_sampling: Mapping[str, float],
    grammar: Grammar | None,
) -> Sampling:
    given = {name: getattr(request, name) for name in RECOMMENDED}
    options = {name: value for name, value in given.items() if value is not UNSET}
    # A seed derived from the request's place in the log: a worker that resumes the answer draws the same.
    seed = derived_seed(key, pending.seq) if request.seed is None else request.seed
    return Sampling(
        **{**(own_sampling if request.own_sampling else {}), **options},
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple(sorted(request.logit_bias.items())),
        min_tokens=request.min_tokens,
        top_logprobs=request.top_logprobs if request.logprobs else None,
        grammar=grammar,
        seed=seed,
    )
