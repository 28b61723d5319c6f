"""Computes how requests and results change a session's history. No I/O, no device; pure but for threads.

A session is the fold of its log: its answered requests are applied in the order of their sequences, each with
its result. Results contain the tokens, so replaying them renders and tokenises no text. New requests are
tokenised with the model's tokenizer (`extend`), which leads to the same history.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from cache.names.policy import FULL
from cache.names.tokens import as_tokens
from turnkeep_client.content_blocks import ContentWarning, content_of, sentences, text_of
from turnkeep_client.messages import (
    Append,
    Appended,
    Close,
    Closed,
    Failed,
    Generate,
    Generated,
    Model,
    Open,
    Opened,
    Parent,
    Rewind,
    Rewound,
)
from worker.models.image_parts import with_marks, with_parts
from worker.process.concurrency import Rotation
from worker.text.harmony import FINAL
from worker.text.templates import Addition, Conversation, MessageRecord, TemplateError

from .history import (
    DivergedError,
    ExtendedHistory,
    RefusedError,
    TokenHistory,
    answer_message,
    apply_change,
    digests_of,
    policy_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime
    from typing import TypeAlias

    from cache.names.policy import Policy
    from cache.names.tokens import Tokens
    from turnkeep_client.messages import Change, Request, Result
    from turnkeep_client.messages import Message as ChatMessage
    from worker.text.templates import Message, Tokenizer

    #: By an image's digest, its grid: the numbers of its patches, on which its tokens depend.
    Grids: TypeAlias = Mapping[str, Sequence[int]]
    Edit: TypeAlias = Callable[["TokenHistory"], tuple[Conversation, Addition]]


class Fold:
    """Applies requests to histories with one model's tokenizer. Thread-safe but for `tokenising`.

    Tokenising a long text takes long, so the event loop awaits `extend_on_thread`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        policy: Policy = FULL,
        model: Model | None = None,
        *,
        takes_over: bool = True,
    ) -> None:
        """Sessions that choose no cache policy begin with `policy`. The tokenizer is that of `model`.

        Unless `takes_over`, `extend` refuses sessions that another model has answered.
        """
        self.policy = policy
        self.model = model or Model(name="model")
        #: So that one tenant's many long texts do not take all CPUs while another tenant waits.
        self.tokenising = Rotation(max((os.cpu_count() or 1) // 2, 1))
        self._tokenizer = tokenizer
        self._takes_over = takes_over

    def begin(self, started: datetime) -> TokenHistory:
        """Return the history of a session without entries; chat templates may print the date `started`."""
        return TokenHistory(Conversation(self._tokenizer, started), as_tokens(), policy=self.policy)

    def check_cut(self, history: TokenHistory, position: int) -> None:
        """Raise `RefusedError` if `position` is inside an image whose tokens attend to each other."""
        processor = self._tokenizer.image_processor
        for span in history.tokens.spans if processor is not None and processor.is_joint else ():
            if span.start < position < span.end:
                raise RefusedError(
                    "invalid_request",
                    f"position {position} is inside an image, which this model sees as a whole; take"
                    f" {span.start} or {span.end}",
                )

    async def extend_on_thread(
        self,
        tenant: str,
        history: TokenHistory,
        request: Append | Generate,
        grids: Grids,
        answer: Message | None = None,
    ) -> ExtendedHistory:
        """Call `extend` on a thread, and return its result. Tenants take turns. Event loop only."""
        return await self.tokenising.in_thread(tenant, self.extend, history, request, grids, answer)

    def extend(
        self,
        history: TokenHistory,
        request: Append | Generate,
        grids: Grids = MappingProxyType({}),
        answer: Message | None = None,
    ) -> ExtendedHistory:
        """Tokenise a request's input and add it to a history; for a generate, also add the answer header.

        `grids` has the numbers of patches of the request's images, by digest, for a model with vision. If
        `answer` is given, it is added as a message instead of the header. If the session's tokens were made
        for another tokenizer (`is_foreign`), the whole conversation is rendered and tokenised anew, and
        `grids` has those of all its images. Raises `RefusedError`: `invalid_request` for tokens outside the
        vocabulary, too deep nesting, and messages that the chat template refuses; `history_diverged` if this
        worker may not continue another model's session, or cannot, as only tokens of a part are known.
        """
        self._check_model(history)
        kept, num_added, num_raw, warnings = history.position, 0, 0, list[str]()
        state = replace(history, exists=True)
        try:
            if self.is_foreign(history):
                state, num_raw = self._tokenised_anew(state, grids)
                kept = 0
            for edit in self._edits(state, request, grids, answer, warnings):
                conversation, addition = edit(state)
                kept, num_added = min(kept, addition.keep), len(addition.tokens)
                tokens = self._changed(state.tokens, addition, conversation)
                state = replace(state, conversation=conversation, tokens=tokens)
        except TemplateError as error:
            raise RefusedError("invalid_request", str(error)) from None
        except RecursionError:
            raise RefusedError("invalid_request", "a tool or the arguments of a call nest too deep") from None
        has_prefix = answer is None and isinstance(request, Generate) and bool(request.prefix)
        num_given = num_added if has_prefix else 0
        added = ExtendedHistory(
            history=replace(state, model=self.model),
            kept=kept,
            num_given=num_given,
            num_raw=num_raw,
            warnings=tuple(warnings),
        )
        return replace(added, history=self._after_input(history, request, added, grids, answer))

    def is_foreign(self, history: TokenHistory) -> bool:
        """Whether a session's tokens are not those that this model needs, so that they are made anew."""
        return _is_foreign(history, self.model)

    def _changed(self, tokens: Tokens, addition: Addition, conversation: Conversation) -> Tokens:
        """Return a session's tokens after an addition, with which it has this conversation.

        Raises `TemplateError` if the images of its messages are not where they belong.
        """
        kept, image_processor = tokens[: addition.keep], self._tokenizer.image_processor
        if image_processor is None:
            return kept + addition.tokens
        images = conversation.images[sum(span.start >= conversation.base for span in kept.spans) :]
        return kept + (image_processor.found(addition.tokens, images) if images else addition.tokens)

    def add_answer(
        self, extended: TokenHistory, request: Generate, tokens: Sequence[int], message: Message
    ) -> TokenHistory:
        """Return the history with an answer: its tokens, and its `message` in the conversation."""
        keeps = request.reasoning.keep
        conversation = extended.conversation.answered(extended.tokens, tokens, message, keeps_reasoning=keeps)
        return replace(extended, conversation=conversation, tokens=extended.tokens + tokens, exists=True)

    def open(self, history: TokenHistory, policy: Policy, tags: tuple[str, ...] = ()) -> TokenHistory:
        """Return the history of a new session; `history` is empty, or of a closed session with this name."""
        return replace(self.begin(history.conversation.started), exists=True, policy=policy, tags=tags)

    def fork(self, whole: TokenHistory, parent: Parent, tags: tuple[str, ...] = ()) -> TokenHistory:
        """Return the history of a fork, given its parent's `whole` history.

        The fork starts as the parent after a rewind to `parent.position`, which may be inside an answer or
        a prompt.
        """
        begun = self.rewind(whole, parent.position)
        return replace(begun, tokens=begun.tokens.apart(), parent=parent, tags=tags)

    def close(self, history: TokenHistory) -> TokenHistory:
        """Return the history of a closed session. It keeps the tokens, whose number is the position.

        A session that was closed before is closed again only to be forgotten: then no tokens are left.
        """
        left = self.begin(history.conversation.started) if history.closed else history
        return replace(left, closed=True)

    def rewind(self, history: TokenHistory, position: int) -> TokenHistory:
        """Return the history without the tokens from `position` on, and without their messages."""
        conversation = history.conversation.rewind(history.tokens, position)
        return replace(history, conversation=conversation, tokens=history.tokens[:position])

    def replay(
        self,
        history: TokenHistory,
        request: Request,
        result: Result,
        base: TokenHistory | None = None,
        packed: str | None = None,
    ) -> TokenHistory:
        """Return the history after a request, given its result and the `history` before the request.

        `base` is the history that a fork starts with, if the request opens one. `packed` are the encoded
        tokens of the request's input, if the result does not contain them. Tokenises nothing.

        Raises `DivergedError` if the result does not follow from the history.
        """
        match request, result:
            case _, Failed():
                return history
            case _, Generated(tokens=(), finish_reason="cancelled"):
                return history  # cancelled before its first token: not even its input was added
            case Close(), Closed() if not history.exists:
                return self.close(history)  # a forgotten session: its earlier entries have left the log
        after = self._replayed(history, request, result, base, packed)
        if after.position != result.position:
            raise DivergedError(
                f"a result says position {result.position}, the entries before it come to {after.position}"
            )
        return after

    def _replayed(
        self,
        history: TokenHistory,
        request: Request,
        result: Result,
        base: TokenHistory | None,
        packed: str | None,
    ) -> TokenHistory:
        """Apply a result that changes the session; see `replay`."""
        match request, result:
            case Open(from_=None), Opened():
                return self.open(history, _policy_of(result), result.tags)
            case Open(), Opened(parent=Parent() as parent) if base is not None:
                return replace(base, parent=parent, tags=result.tags, exists=True, model=result.model)
            case Open(), Opened():
                raise DivergedError("the tokens that this fork took from its parent are gone from the log")
            case Append(), Appended(change=change) if change is not None:
                return self._replay_input(_begun(history, result), request, result, change, packed)
            case Generate(), Generated(tokens=tokens, change=change) if change is not None:
                extended = self._replay_input(_begun(history, result), request, result, change, packed)
                message = answer_message(result.text, result.reasoning, result.tool_calls)
                held = change.holds_answer
                return extended if held else self.add_answer(extended, request, tokens, message)
            case Rewind(position=position), Rewound() if position <= history.position:
                return self.rewind(history, position)
            case Close(), Closed():
                return self.close(history)
            case _:
                raise DivergedError(
                    f"the result of an {type(request).__name__} is no such result: {type(result).__name__}"
                )

    def _replay_input(
        self,
        history: TokenHistory,
        request: Append | Generate,
        result: Appended | Generated,
        change: Change,
        packed: str | None,
    ) -> TokenHistory:
        """Add the input tokens of an answered request, taken from its result or `packed`."""
        try:
            tokens = apply_change(history.tokens, change, packed)
        except ValueError as error:
            raise DivergedError(f"the input of a result cannot be read: {error}") from None
        num_given = result.prefix_tokens if isinstance(result, Generated) else 0
        if change.kept > history.position or num_given > len(tokens) - change.kept:
            raise DivergedError("a result keeps more tokens than there are")
        grids = {image.digest: image.grid for image in change.images}
        answer = None
        if change.holds_answer and isinstance(result, Generated):
            answer = answer_message(result.text, result.reasoning, result.tool_calls)
        after = replace(history, tokens=tokens, model=result.model)
        return self._after_input(
            history, request, ExtendedHistory(after, change.kept, num_given, change.raw), grids, answer
        )

    def _after_input(
        self,
        before: TokenHistory,
        request: Append | Generate,
        added: ExtendedHistory,
        grids: Grids,
        answer: Message | None,
    ) -> TokenHistory:
        """Return the history after a request's input, tokenising nothing.

        The history in `added` has the tokens and the model after the input, not yet its conversation.
        """
        after, kept = added.history, added.kept
        end, is_rewritten = after.position - added.num_given, kept < before.position
        tools = None if request.tools is None else msgspec.to_builtins(request.tools)
        conversation = before.conversation.with_extras(tools, request.chat_template_kwargs)
        if _is_foreign(before, after.model):
            conversation = conversation.tokenised_anew(added.num_raw, grids)
        said = self._said(request, conversation, grids, [])
        if request.text or request.tokens or (answer and not (said or conversation.has_messages)):
            text = (request.text or "") + (answer["content"] if answer else "")
            conversation = conversation.with_raw(kept, end, None if request.tokens else text)
        else:
            may_open = isinstance(request, Generate) and not request.raw and answer is None
            opens = may_open and (bool(said) or conversation.opens_answer() or is_rewritten)
            said += self._answer_said(answer) if answer else []
            if said or opens or end != before.position:
                conversation = conversation.given(said, kept, end, opens_answer=opens)
        if isinstance(request, Generate) and added.num_given:
            begun = {"role": "assistant", "content": request.prefix}
            conversation = conversation.answered(
                after.tokens[:end], after.tokens[end:], begun, keeps_reasoning=request.reasoning.keep
            )
        return replace(before, conversation=conversation, tokens=after.tokens, exists=True, model=after.model)

    def _said(
        self, request: Append | Generate, conversation: Conversation, grids: Grids, warnings: list[str]
    ) -> list[MessageRecord]:
        """Convert a request's messages to forms that the template renders; say in `warnings` what changed."""
        noted = Counter[str]()
        sent = [with_marks(one.as_sent(), grids) for one in request.messages or ()]
        messages = conversation.with_call_indices(sent)
        adapted = self._tokenizer.adapted(messages, conversation.last_message, noted)
        warnings += [
            f"{_counted(number)} told to the model in another form: {what}" for what, number in noted.items()
        ]
        trusted = request.special_tokens is True
        return [
            MessageRecord(with_parts(one), trusted, call_index=one.pop("call_index", None)) for one in adapted
        ]

    def _answer_said(self, answer: Message) -> list[MessageRecord]:
        return [MessageRecord(one) for one in self._tokenizer.adapted([answer], {"role": "user"}, Counter())]

    def _check_model(self, history: TokenHistory) -> None:
        """Raise `RefusedError` if another model answered the session, and this one may not take it over."""
        last, own = history.model, self.model
        if self._takes_over or not history.position or last is None or digests_of(last) == digests_of(own):
            return
        raise RefusedError(
            "history_diverged",
            f"{last.name} has answered this session, with other weights or another tokenizer than {own.name},"
            " and this worker has --other-model refuse: serve that model, or go on in a new session",
        )

    def _tokenised_anew(self, history: TokenHistory, grids: Grids) -> tuple[TokenHistory, int]:
        """Tokenise the whole conversation for this tokenizer; also count the tokens up to its last raw part.

        Raw parts are text outside of chat messages. Raises `RefusedError` if only the tokens of a part are
        known, `TemplateError`.
        """
        conversation, tokens, num_raw = history.conversation.emptied(), as_tokens(), 0
        for part in history.conversation.parts():
            if part is None:
                raise RefusedError(
                    "history_diverged",
                    f"the session was begun with {history.model.name if history.model else 'another model'},"
                    " whose tokenizer is another one, and some of it is known as tokens only (given so, or"
                    " the session was rewound into an answer): serve that model, or go on in a new session",
                )
            if isinstance(part, str):
                ids = self._tokenizer.encode(part, at_start=not tokens)
                conversation, addition = conversation.add_raw(tokens, ids, part)
                num_raw = len(tokens) + len(ids)
            else:
                told = [with_marks(one.message, grids) for one in part]
                messages = [with_parts(one) for one in self._tokenizer.adapted(told, None, Counter())]
                trusted = all(one.trusted for one in part)
                conversation, addition = conversation.add_messages(tokens, messages, trusted=trusted)
            tokens = self._changed(tokens, addition, conversation)
        return replace(history, conversation=conversation, tokens=tokens), num_raw

    def _edits(
        self,
        history: TokenHistory,
        request: Append | Generate,
        grids: Grids,
        answer: Message | None,
        warnings: list[str],
    ) -> Iterator[Edit]:
        """Yield functions that each add one part of a request: tools, input, answer header or answer."""
        if request.tools is not None or request.chat_template_kwargs is not None:
            tools = None if request.tools is None else msgspec.to_builtins(request.tools)
            if tools and not self._tokenizer.markup.renders_tools:
                warnings.append("the chat template knows no tools: the first message describes them")
            variables = request.chat_template_kwargs
            yield lambda state: state.conversation.set_extras(state.tokens, tools, variables)
        warnings += sentences(
            _unread(request.messages or (), sees=self._tokenizer.image_processor is not None)
        )
        if said := self._said(request, history.conversation, grids, warnings):
            opens = isinstance(request, Generate) and answer is None and not request.raw
            opens = opens and not (request.text or request.tokens)
            yield lambda state: state.conversation.add_said(state.tokens, said, opens_answer=opens)
        if request.text:
            text = (
                request.text if request.special_tokens is not False else self._tokenizer.as_text(request.text)
            )
            yield lambda state: self._raw(state, self._tokenizer.encode(text, at_start=not state.tokens))
        if request.tokens:
            tokens = list(request.tokens)
            self._check_vocabulary(tokens)
            yield lambda state: self._raw(state, tokens)
        if answer is not None:
            yield lambda state: self._as_message(state, answer)
        elif isinstance(request, Generate):
            yield lambda state: state.conversation.start_answer(state.tokens, raw=request.raw)
            if request.prefix:
                yield lambda state: self._begin_answer(state, request)

    def _begin_answer(self, state: TokenHistory, request: Generate) -> tuple[Conversation, Addition]:
        """Add the request's `prefix`, with which its answer begins.

        If the request allows no reasoning, first close the reasoning that the answer header has opened.
        """
        text = request.prefix if request.special_tokens else self._tokenizer.as_text(request.prefix)
        tokens = self._tokenizer.encode(text, at_start=not state.tokens)
        markup, lead = self._tokenizer.markup, ""
        if request.reasoning.budget == 0 and state.conversation.has_messages and not request.raw:
            if markup.is_harmony:
                lead = FINAL
            elif markup.reasoning and state.conversation.in_reasoning(state.tokens):
                lead = f"{markup.reasoning[1]}\n\n"
        if lead:
            tokens = self._tokenizer.encode(lead, at_start=False) + tokens
        keeps = request.reasoning.keep
        begun = state.conversation.add_answer(state.tokens, tokens, keeps_reasoning=keeps)
        return begun, Addition(state.position, tokens)

    def _as_message(self, state: TokenHistory, answer: Message) -> tuple[Conversation, Addition]:
        """Add an answer that was begun with another tokenizer, tokenised for this model."""
        if state.conversation.has_messages:
            return state.conversation.add_said(state.tokens, self._answer_said(answer))
        return self._raw(state, self._tokenizer.encode(answer["content"], at_start=not state.tokens))

    def _raw(self, state: TokenHistory, tokens: list[int]) -> tuple[Conversation, Addition]:
        return state.conversation.add_raw(state.tokens, tokens)

    def _check_vocabulary(self, tokens: list[int]) -> None:
        vocabulary = self._tokenizer.vocab_size
        for token in tokens:
            if token >= vocabulary:
                raise RefusedError(
                    "invalid_request",
                    f"token id {token} is outside of the vocabulary: ids go from 0 to {vocabulary - 1}",
                    field="tokens",
                )


def _unread(messages: Sequence[ChatMessage], *, sees: bool) -> list[ContentWarning]:
    """List the message parts that the model gets in another form, such as images unless it `sees`."""
    found: list[ContentWarning] = []
    for number, message in enumerate(messages):
        if message.sent is not None and isinstance(content := message.sent.get("content"), list):
            (content_of if sees else text_of)(content, f"messages[{number}].content", found)
    return found


def _counted(number: int) -> str:
    return "1 message is" if number == 1 else f"{number} messages are"


def _is_foreign(history: TokenHistory, model: Model | None) -> bool:
    """Whether a session's tokens were made with another tokenizer than that of `model`."""
    last = history.model
    if last is None or model is None or not history.position:
        return False
    if last.tokenizer != model.tokenizer:
        return True
    # The digests last, since all messages are looked through for them.
    return last.vision != model.vision and bool(history.tokens.spans or history.conversation.digests)


def _begun(history: TokenHistory, result: Appended | Generated) -> TokenHistory:
    """Return the history before a result; a session that does not exist yet gets the result's policy."""
    return history if history.exists else replace(history, policy=_policy_of(result))


def _policy_of(result: Opened | Appended | Generated) -> Policy:
    try:
        return policy_of(result.cache)
    except ValueError as error:
        raise DivergedError(str(error)) from None
