"""A session's tokens and conversation, and how requests and results change them. Pure: no I/O, no device.

A session is the fold of its log: its answered requests are applied in the order of their sequences, each with
its result. Live requests and the replay of a log use the same functions, so both lead to the same tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cache.names.policy import FULL
from cache.names.tokens import as_tokens
from turnkeep_client.blocks import Warned, sentences, text_of
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
    Rewind,
    Rewound,
)
from worker.text.harmony import FINAL
from worker.text.templates import Addition, Conversation, TemplateError

from .policies import in_words, recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime
    from typing import TypeAlias

    from cache.names.policy import Policy
    from cache.names.tokens import Tokens
    from turnkeep_client.errors import ErrorCode
    from turnkeep_client.messages import Message, Request, Result
    from worker.text.templates import Tokenizer

    Edit: TypeAlias = Callable[["History"], tuple[Conversation, Addition]]

#: Last tokens that a session under a window keeps for guesses at its answers, which match earlier text.
KEPT: Final = 16_384


def unread(messages: Sequence[Message]) -> list[Warned]:
    """List the parts of messages that are no text."""
    found: list[Warned] = []
    for number, message in enumerate(messages):
        if message.sent is not None and isinstance(content := message.sent.get("content"), list):
            text_of(content, f"messages[{number}].content", found)
    return found


def _counted(number: int) -> str:
    return "1 message is" if number == 1 else f"{number} messages are"


class RefusedError(Exception):
    """A request cannot be carried out; its result is `failed`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code


class DivergedError(Exception):
    """The log gives other tokens than its results state: another model or template has written it."""


@dataclass(frozen=True, slots=True)
class History:
    """A session's tokens and the state of its conversation.

    `policy` says which of the tokens the model sees; while the session does not exist, it is the default. A
    fork has a `parent`; `tags` are those of the session's `open`.
    """

    conversation: Conversation
    tokens: Tokens
    exists: bool = False
    closed: bool = False
    policy: Policy = FULL
    parent: Parent | None = None
    tags: tuple[str, ...] = ()

    @property
    def position(self) -> int:
        """Number of tokens in the session."""
        return len(self.tokens)

    def digest(self) -> str:
        """Return the 16-byte digest of the tokens, as hex."""
        return self.tokens.digest()

    def has_digest(self, digest: str) -> bool:
        """Whether `digest` is the digest of the tokens, in this or an earlier format.

        Raises `CutOffError`.
        """
        return digest == self.tokens.digest() or digest == self.tokens.plain_digest()

    def shortened(self) -> History:
        """Return the history without the parts that only a rewind or a prefill after lost KV needs.

        This saves memory, and the time to read them; those operations then raise `CutOffError`. Under a
        policy for endless sessions, tokens that the model no longer sees are left out too, except the last
        `KEPT`.
        """
        conversation = self.conversation.shortened()
        tokens, policy = self.tokens, self.policy
        if policy.is_endless and not conversation.looks_back:
            seen_from = min(policy.visible_from(len(tokens)), len(tokens) - KEPT)
            tokens = tokens.shortened(min(seen_from, conversation.begins))
        return replace(self, conversation=conversation, tokens=tokens)

    def filled(self, whole: History) -> History:
        """Return the history with the parts that were left out, from an earlier `whole` history.

        Raises `CutOffError` if that history lacks them too.
        """
        conversation = self.conversation.filled(whole.conversation)
        return replace(self, conversation=conversation, tokens=self.tokens.filled(whole.tokens))

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return not (self.conversation.begins or self.tokens.held_from)


def seen(history: History) -> dict[str, Any]:
    """Build a result's fields about the cache policy; `history` is the session after it. Empty for `full`."""
    cache = in_words(history.policy) if history.exists else None
    if cache is None:
        return {}
    return {"cache": cache, "visible_from": history.policy.visible_from(history.position)}


@dataclass(frozen=True, slots=True)
class Input:
    """A history with a request's input added; its first `kept` tokens are unchanged.

    Its last `num_given` tokens are the beginning of the answer, which the request gives. `warnings` say what
    the model is told in another form than the request has.
    """

    history: History
    kept: int
    rewritten_from: int | None
    num_given: int = 0
    warnings: tuple[str, ...] = ()


class Fold:
    """Applies requests to histories with one model's tokenizer. Thread-safe: it has no state.

    Tokenising a long text takes long, so call `extend` on a thread, not on the event loop.
    """

    def __init__(self, tokenizer: Tokenizer, policy: Policy = FULL) -> None:
        """Sessions that choose no cache policy begin with `policy`."""
        self.policy = policy
        self._tokenizer = tokenizer

    def begin(self, started: datetime) -> History:
        """Return the history of a session without entries; chat templates may print the date `started`."""
        return History(Conversation(self._tokenizer, started), as_tokens(), policy=self.policy)

    def check(self, history: History, request: Request) -> None:
        """Raise `RefusedError` if the session's state does not allow the request."""
        gone = history.closed or not history.exists
        if isinstance(request, Open):
            if not gone:
                instead = "go on without an open" if request.from_ is None else "fork under another name"
                raise RefusedError(
                    "invalid_request",
                    f"the session is open already, at position {history.position}; {instead}",
                )
        elif history.closed:
            raise RefusedError(
                "unknown_session", "the session was closed; an open starts a new one under this name"
            )
        elif gone and isinstance(request, Rewind | Close):
            raise RefusedError(
                "unknown_session", "there is no such session; an append or a generate starts one"
            )
        expected = request.expect_position
        position = 0 if gone else history.position
        if expected is not None and expected != position:
            raise RefusedError(
                "position_conflict", f"the session is at position {position}, not at the expected {expected}"
            )
        if isinstance(request, Rewind) and request.position > history.position:
            raise RefusedError(
                "invalid_request",
                f"cannot rewind to {request.position}: the session is at position {history.position}",
            )

    def extend(self, history: History, request: Append | Generate) -> Input:
        """Add a request's input, and for a generate the template's answer header.

        Raises `RefusedError` for tokens outside the vocabulary and for messages that the chat template
        refuses, and `CutOffError`.
        """
        kept, num_added, warnings = history.position, 0, list[str]()
        state = replace(history, exists=True)
        try:
            for edit in self._edits(history, request, warnings):
                conversation, addition = edit(state)
                kept, num_added = min(kept, addition.keep), len(addition.tokens)
                tokens = state.tokens[: addition.keep] + addition.tokens
                state = replace(state, conversation=conversation, tokens=tokens)
        except TemplateError as error:
            raise RefusedError("invalid_request", str(error)) from None
        except RecursionError:
            raise RefusedError("invalid_request", "a tool or the arguments of a call nest too deep") from None
        return Input(
            history=state,
            kept=kept,
            rewritten_from=kept if kept < history.position else None,
            num_given=num_added if isinstance(request, Generate) and request.prefix else 0,
            warnings=tuple(warnings),
        )

    def answered(self, extended: History, request: Generate, tokens: Sequence[int]) -> History:
        """Add an answer's tokens."""
        keeps = request.reasoning.keep
        conversation = extended.conversation.add_answer(extended.tokens, tokens, keeps_reasoning=keeps)
        return replace(extended, conversation=conversation, tokens=extended.tokens + tokens, exists=True)

    def opened(self, history: History, policy: Policy, tags: tuple[str, ...] = ()) -> History:
        """Start a session; it may replace a closed session of the same name."""
        return replace(self.begin(history.conversation.started), exists=True, policy=policy, tags=tags)

    def forked(self, whole: History, parent: Parent, tags: tuple[str, ...] = ()) -> History:
        """Start a session with the first tokens of its parent, given the parent's `whole` history.

        At a position inside an answer or a prompt this is what a rewind to that position leaves. Raises
        `CutOffError`.
        """
        begun = self.rewound(whole, parent.position)
        return replace(begun, tokens=begun.tokens.apart(), parent=parent, tags=tags)

    def closed(self, history: History) -> History:
        """End a session. Its tokens are kept only for its position."""
        return replace(history, closed=True)

    def rewound(self, history: History, position: int) -> History:
        """Drop the tokens from `position` on. Raises `CutOffError`."""
        conversation = history.conversation.rewind(history.tokens, position)
        return replace(history, conversation=conversation, tokens=history.tokens[:position])

    def replay(
        self, history: History, request: Request, result: Result, base: History | None = None
    ) -> History:
        """Return the history after a request, given its result and the `history` before the request.

        `base` is what the request, if it opened a fork, took from the parent.

        Raises `DivergedError` if the new position is not the one in the result, and `CutOffError`.
        """
        match request, result:
            case _, Failed():
                return history
            case _, Generated(tokens=(), finish_reason="cancelled"):
                return history  # cancelled before its first token: not even its input was added
            case Open(from_=None), Opened():
                after = self.opened(history, _recorded(result), result.tags)
            case Open(), Opened(parent=Parent() as parent) if base is not None:
                after = self.forked(base, parent, result.tags)
            case Open(), Opened():
                raise DivergedError("the tokens that this fork took from its parent are gone from the log")
            case Append(), Appended():
                after = self._replay_extend(_begun(history, result), request)
            case Generate(), Generated(tokens=tokens):
                begun = _begun(history, result)
                extended = self._replay_extend(begun, request)
                after = self.answered(extended, request, tokens)
            case Rewind(position=position), Rewound():
                after = self.rewound(history, position)
            case Close(), Closed() if not history.exists:
                return self.closed(history)  # a forgotten session: its earlier entries have left the log
            case Close(), Closed():
                after = self.closed(history)
            case _:
                raise DivergedError(
                    f"a {type(request).__name__} with a {type(result).__name__} as its result"
                )
        if after.position != result.position:
            raise DivergedError(
                f"the log says position {result.position}, this model makes it {after.position}"
            )
        return after

    def _replay_extend(self, history: History, request: Append | Generate) -> History:
        """Add the input of a request that was answered."""
        try:
            return self.extend(history, request).history
        except RefusedError as error:
            raise DivergedError(f"a request that was answered is refused now: {error}") from None

    def _edits(self, history: History, request: Append | Generate, warnings: list[str]) -> Iterator[Edit]:
        """List the edits of a request: tools, its input, then for a generate the answer header."""
        if request.tools is not None or request.chat_template_kwargs is not None:
            tools, variables = history.conversation.tools, history.conversation.variables
            if request.tools is not None:
                given = msgspec.to_builtins(request.tools)
                tools = self._tokenizer.as_tools(given)
                if given and not self._tokenizer.dialect.renders_tools:
                    warnings.append("the chat template knows no tools: the first message describes them")
            if request.chat_template_kwargs is not None:
                variables = self._tokenizer.as_tools(request.chat_template_kwargs)
            yield lambda state: state.conversation.set_rendering(state.tokens, tools, variables)
        if request.messages:
            warnings += sentences(unread(request.messages))
            given, noted = [message.as_sent() for message in request.messages], Counter[str]()
            messages = self._tokenizer.adapted(given, history.conversation.last_message, noted)
            warnings += [
                f"{_counted(number)} told to the model in another form: {what}"
                for what, number in noted.items()
            ]
            if not request.special_tokens:
                messages = [self._tokenizer.as_content(message) for message in messages]
            yield lambda state: state.conversation.add_messages(state.tokens, messages)
        if request.text:
            text = (
                request.text if request.special_tokens is not False else self._tokenizer.as_text(request.text)
            )
            yield lambda state: self._raw(state, self._tokenizer.encode(text, at_start=not state.tokens))
        if request.tokens:
            tokens = list(request.tokens)
            self._check_vocabulary(tokens)
            yield lambda state: self._raw(state, tokens)
        if isinstance(request, Generate):
            yield lambda state: state.conversation.start_answer(state.tokens, raw=request.raw)
            if request.prefix:
                yield lambda state: self._begin_answer(state, request)

    def _begin_answer(self, state: History, request: Generate) -> tuple[Conversation, Addition]:
        """Add the beginning of the answer, which the request gives.

        Where there may be no reasoning, one that the assistant header has opened ends before.
        """
        text = request.prefix if request.special_tokens else self._tokenizer.as_text(request.prefix)
        tokens = self._tokenizer.encode(text, at_start=not state.tokens)
        dialect, lead = self._tokenizer.dialect, ""
        if request.reasoning.budget == 0 and state.conversation.has_messages and not request.raw:
            if dialect.is_harmony:
                lead = FINAL
            elif dialect.reasoning and state.conversation.in_reasoning():
                lead = f"{dialect.reasoning[1]}\n\n"
        if lead:
            tokens = self._tokenizer.encode(lead, at_start=False) + tokens
        keeps = request.reasoning.keep
        begun = state.conversation.add_answer(state.tokens, tokens, keeps_reasoning=keeps)
        return begun, Addition(state.position, tokens)

    def _raw(self, state: History, tokens: list[int]) -> tuple[Conversation, Addition]:
        return state.conversation.add_raw(state.tokens, tokens)

    def _check_vocabulary(self, tokens: list[int]) -> None:
        vocabulary = self._tokenizer.vocab_size
        for token in tokens:
            if token >= vocabulary:
                raise RefusedError(
                    "invalid_request",
                    f"token id {token} is outside of the vocabulary: ids go from 0 to {vocabulary - 1}",
                )


def _begun(history: History, result: Appended | Generated) -> History:
    """Return the history before a result, with the policy that the session keeps from this result on."""
    return history if history.exists else replace(history, policy=_recorded(result))


def _recorded(result: Opened | Appended | Generated) -> Policy:
    try:
        return recorded(result.cache)
    except ValueError as error:
        raise DivergedError(str(error)) from None
