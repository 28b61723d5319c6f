"""Carries out one request of a session: adds its input, runs its turn on the device, builds the result.

Takes a history, and returns a result and the history after it. The session commits both, so a failure in this
module changes nothing but the KV on the device.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
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
    Closed,
    Generate,
    Open,
    Parent,
    Rewind,
    Rewound,
    encode,
    joined,
)
from worker.batch.row_sampler import RowSampling
from worker.device.request import TurnRequest
from worker.process.concurrency import in_thread, task_group
from worker.text.answer import Answer
from worker.text.text_stream import TextStream
from worker.wire.fence import FencedError

from .history import RefusedError, answer_message, digests_of, policy_fields
from .images import SessionImages
from .results import (
    Outcome,
    appended_result,
    foreign_result,
    generated_result,
    opened_result,
    withdrawn_result,
)
from .streaming import AnswerStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from cache.names.tokens import Tokens
    from cache.store import ErasureResult
    from turnkeep_client.messages import CallPart, Chunk, Close, FinishReason, ForkPoint, TokenLogprob
    from turnkeep_client.subjects import SessionKey
    from worker.batch.row_sampler import Constraint
    from worker.engine.port import EnginePort, TurnResult
    from worker.wire.chunks import PublishedChunks

    from .history import ExtendedHistory, TokenHistory
    from .pending import PendingRequest
    from .services import Services

log = structlog.get_logger()

#: Reason for giving up an answer whose session no longer has the tokens that the answer was begun with.
_LOST_BASE: Final = (
    "the NATS server has lost entries on which this answer was begun: it ends as it was streamed"
)


class Execution:
    """Carries out one request, which `check_allowed` allows after `history`. Event loop only."""

    def __init__(
        self, services: Services, key: SessionKey, pending: PendingRequest, history: TokenHistory
    ) -> None:
        self._services = services
        self._fold = services.fold
        self._engine = services.engine
        self._limits = services.limits
        self._key = key
        self._pending = pending
        self._history = history
        self._images = SessionImages(key, services)

    async def carry_out(self, given_up: str = "") -> Outcome:
        """Carry out a request that is no fork and no close; return its outcome, not committed yet.

        With `given_up`, a reason, a generate runs no more: its result is what was published of its answer.
        Raises `RefusedError`, `FencedError`, and what `EnginePort.run` raises.
        """
        pending, history = self._pending, self._history
        match pending.request:
            case Append() as request:
                return await self._append(request)
            case Generate() as request:
                return await self._generate(request, given_up)
            case Open(cache=cache) as request:
                after = self._fold.open(history, self._limits.chosen_policy(cache), request.tags)
                self._limits.check_policy(after.policy)
                self._limits.note(after.policy, self._key.tenant)
                return Outcome(opened_result(request, pending, after), after)
            case Rewind(position=position) as request:
                self._fold.check_cut(history, position)
                after = self._fold.rewind(history, position)
                rewound = Rewound(id=request.id, seq=pending.seq, position=position, **policy_fields(after))
                return Outcome(rewound, after)
        raise AssertionError(pending.type)

    def fork(self, request: Open, of: ForkPoint) -> Outcome:
        """Return the outcome of a fork; `history` is the whole parent's. Raises `RefusedError`."""
        parent = self._history
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
        self._fold.check_cut(parent, position)
        after = self._fold.fork(parent, Parent(session=of.session, position=position), request.tags)
        self._limits.check_policy(after.policy)
        return Outcome(opened_result(request, self._pending, after), after)

    async def close(
        self, request: Close, had: Sequence[Tokens], shared: Callable[[Tokens], Awaitable[int]]
    ) -> Outcome:
        """Close a session, after a note in the log that it is closing; return the outcome.

        With `forget`, first erase the KV of all tokens that it `had`, here and at the other workers, except
        what is `shared` (see `erase_all`), and store notes for workers that do not run.
        """
        services, key, after = self._services, self._key, self._fold.close(self._history)
        removed = await services.retention.note_close(key, self._pending.seq, forget=request.forget)
        closed = Closed(
            id=request.id, seq=self._pending.seq, position=after.position, removed_entries=removed
        )
        if not request.forget:
            self._engine.forget(key)
            return Outcome(closed, after)
        # Erase before the result is stored: after a crash in between, the next attempt erases the rest.
        num_snapshots, settled, shares = await erase_all(self._engine, key, had, shared)
        have = {**await services.erase_elsewhere(key), **dict.fromkeys(services.erases, settled)}
        for tokens, num_shared in zip(had, shares, strict=True):
            await services.erasures.note(key, tokens, num_shared, [name for name in have if have[name]])
        closed = structs.replace(closed, forgotten=num_snapshots, settled=all(have.values()))
        return Outcome(closed, after)

    async def _append(self, request: Append) -> Outcome:
        pending, history = self._pending, self._history
        self._limits.check_policy(history.policy)
        extended = await self._extend(request)
        tokens = extended.history.tokens
        self._limits.check_size(len(tokens), history.policy, room=0)
        turn, live_bytes = None, self._engine.live_bytes(self._key, history.tokens, history.policy)
        if tokens != history.tokens:
            pending.change = extended.change
            turn = await self._prefill(extended.history)
            if turn is None or not turn.complete:
                return Outcome(withdrawn_result(pending, history, history.position), history)
        return Outcome(appended_result(pending, turn, history, extended, live_bytes), extended.history)

    async def _generate(self, request: Generate, given_up: str) -> Outcome:
        pending, history = self._pending, self._history
        self._limits.check_policy(history.policy)
        self._limits.check_answer(request)
        published, extended = await self._begun(request)
        if published.num_tokens and published.base not in ("", history.digest()):
            given_up = _LOST_BASE
        is_sealed = published.is_sealed and not pending.expired  # another worker ends it, or died doing so
        own = self._fold.model
        is_begun_by_other = published.num_tokens > 0 and published.model not in ("", digests_of(own))
        if is_begun_by_other and published.model.split()[-1:] != [own.tokenizer]:
            return await self._end_foreign(request, published)
        prompt = extended.history.tokens
        _check_not_empty(prompt)
        self._limits.check_size(len(prompt), history.policy, room=min(request.max_tokens, 1))
        answer, grammar, warnings = await self._answer(request, extended, published, given_up)
        num_resumed, pending.change = len(answer.tokens), extended.change
        stream = AnswerStream(self._services, self._key, pending, published, history.digest(), warnings)
        turn = None
        if not (is_begun_by_other or is_sealed or given_up):
            turn = await self._run(request, extended.history, answer, grammar, stream)
        await _check_complete(answer, grammar)
        held = None
        if answer.finish_reason is None:
            is_late = pending.expired and not (pending.cancelled or is_sealed)
            why: FinishReason = "given_up" if given_up else "expired" if is_late else "cancelled"
            held = answer.cancel("model_changed" if is_begun_by_other else why)
            await stream.seal()
        if not answer.tokens and answer.finish_reason != "length":
            return Outcome(withdrawn_result(pending, history, history.position, turn), history, held)
        message = answer_message(answer.text, answer.reasoning, answer.calls)
        after = self._fold.add_answer(extended.history, request, answer.tokens, message)
        result = generated_result(pending, answer, turn, history, extended, after)
        result = structs.replace(result, warnings=warnings, resumed_tokens=num_resumed)
        if turn is None:
            live_bytes = self._engine.live_bytes(self._key, after.tokens, after.policy)
            result = structs.replace(result, kv_live_bytes=live_bytes)
        return Outcome(result, after, held)

    async def _begun(self, request: Generate) -> tuple[PublishedChunks, ExtendedHistory]:
        """Read the chunks of the answer that an earlier worker has published, and add the request's input.

        Raises `FencedError` if the answer has a result.
        """
        journal, pending = self._services.journal, self._pending
        async with task_group() as tasks:
            reading = tasks.start_soon(
                journal.chunks.read, self._key, request.id, pending.seq, pending.stored
            )
            extended = await self._extend(request)
            published = await reading
        if published.has_ended and await journal.last_seq(self._key, "out") > pending.after:
            raise FencedError("the answer has a result already")  # a lagging replica did not show it
        return published, extended

    async def _answer(
        self, request: Generate, extended: ExtendedHistory, published: PublishedChunks, given_up: str
    ) -> tuple[Answer, Constraint | None, tuple[str, ...]]:
        """Create an answer that begins with its published chunks; return it, its grammar and its warnings."""
        prompt, tenant, formats = extended.history, self._key.tenant, self._services.formats
        # Context and memory limit an answer; the tokens that a dead worker has published stay in any case.
        wanted = prompt.position + request.max_tokens
        most = wanted if prompt.policy.is_endless else self._limits.context_tokens
        most = self._engine.most_tokens(most, prompt.policy) - prompt.position
        splitter = await formats.splitter(tenant, f"{self._key}:{self._pending.seq}", request, prompt)
        grammar, warnings = await formats.grammar(tenant, request, prompt, splits=splitter is not None)
        warnings = extended.warnings + warnings
        room = self._limits.answer_bytes - min(len(extended.change.input), self._limits.most_input)
        room -= len(encode({"images": extended.change.images}))
        room -= min(self._pending.size_bytes, self._limits.most_request)
        tokenizer = formats.tokenizer
        answer = Answer(
            TextStream(tokenizer, request.stop, splitter.is_marker if splitter else None),
            splitter=splitter,
            max_tokens=min(request.max_tokens, max(most, published.num_tokens)),
            max_bytes=room - len(encode({"warnings": warnings})),
            end_tokens=frozenset() if request.ignore_eos else tokenizer.eos_ids,
        )
        self._resume(published.chunks, answer)
        return answer, grammar, (*warnings, given_up) if given_up else warnings

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

    async def _end_foreign(self, request: Generate, published: PublishedChunks) -> Outcome:
        """End an answer that a model with another tokenizer has begun; the published part is the result.

        That part is added to the session as a message, tokenised for this model.
        """
        pending = self._pending
        await self._services.journal.chunks.seal(
            self._key, request.id, pending.seq, published.last_seq, server=pending.server
        )
        chunk = joined(published.chunks)
        calls = _whole_calls(chunk.tool_calls)
        message = answer_message(chunk.text, chunk.reasoning, calls)
        grids = await self._images.grids(self._history, request)
        extended = await self._fold.extend_on_thread(self._key.tenant, self._history, request, grids, message)
        return Outcome(foreign_result(pending, chunk, calls, self._history, extended), extended.history)

    async def _extend(self, request: Append | Generate) -> ExtendedHistory:
        """Add a request's input to the history. Raises `RefusedError`."""
        grids = await self._images.grids(self._history, request)
        return await self._fold.extend_on_thread(self._key.tenant, self._history, request, grids)

    async def _prefill(self, prompt: TokenHistory) -> TurnResult | None:
        """Prefill a prompt without an answer; return the cost, None if cancelled before the turn began."""
        pending = self._pending
        read = partial(self._images.read_for, prompt.tokens)
        asked = TurnRequest(self._key, prompt.tokens, prompt.policy, pending.priority, read_image=read)
        turn = await self._engine.run(asked, lambda: pending.stopped, phases=pending.phases)
        if turn is not None:
            self._services.telemetry.queue_time.observe(pending.waited_s(turn.started_s))
        return turn

    async def _run(
        self,
        request: Generate,
        prompt: TokenHistory,
        answer: Answer,
        grammar: Constraint | None,
        stream: AnswerStream,
    ) -> TurnResult | None:
        """Sample the rest of an answer, and publish it; with `max_tokens` 0 only prefill the prompt.

        Returns None if the answer is complete already, or was cancelled before its turn began.
        """
        pending, telemetry = self._pending, self._services.telemetry
        if not request.max_tokens:
            turn = await self._prefill(prompt)
            if turn is not None and turn.complete:
                answer.finish_reason = "length"
            return turn
        if answer.finish_reason is not None:
            return None
        num_known = len(answer.tokens)
        sampling = _sampling(self._key, request, pending.seq, self._services.own_sampling, grammar)
        asked = TurnRequest(
            *(self._key, prompt.tokens + answer.tokens, prompt.policy, pending.priority, answer, sampling),
            read_image=partial(self._images.read_for, prompt.tokens),
        )
        async with stream.keep_available():
            turn = await self._engine.run(asked, lambda: pending.stopped, stream.publish, pending.phases)
        if turn is not None and not num_known:
            telemetry.queue_time.observe(pending.waited_s(turn.started_s))
        if turn is not None and len(answer.tokens) > num_known:
            telemetry.time_to_first_token.observe(turn.first_token_s - pending.received_s)
        return turn


async def erase_all(
    engine: EnginePort, key: SessionKey, had: Sequence[Tokens], shared: Callable[[Tokens], Awaitable[int]]
) -> tuple[int, bool, list[int]]:
    """Erase the KV of all tokens that a session `had`, except what others share.

    Of each of these sequences the first `shared(tokens)` stay, and those that the next one begins with: they
    go with that. After a failure, only the last sequence is still tried. Returns the number of snapshots
    removed, whether certainly no copy is left, and for each sequence how many of its first tokens keep KV.
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


async def _check_complete(answer: Answer, grammar: Constraint | None) -> None:
    """Let an answer end with `length` if it ended because the grammar had reached one of its limits."""
    if answer.finish_reason == "stop" and grammar and answer.tokens[-1] in answer.end_tokens:
        followed = await in_thread(grammar.follow, answer.tokens[:-1])
        if not followed.is_complete:
            answer.finish_reason = "length"


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
    seq: int,
    own_sampling: Mapping[str, float],
    grammar: Constraint | None,
) -> RowSampling:
    given = {name: getattr(request, name) for name in RECOMMENDED}
    options = {name: value for name, value in given.items() if value is not UNSET}
    # A seed derived from the request's place in the log: a worker that resumes the answer draws the same.
    seed = derived_seed(key, seq) if request.seed is None else request.seed
    return RowSampling(
        **{**(own_sampling if request.own_sampling else {}), **options},
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple(sorted(request.logit_bias.items())),
        min_tokens=request.min_tokens,
        top_logprobs=request.top_logprobs if request.logprobs else None,
        grammar=grammar,
        seed=seed,
    )
