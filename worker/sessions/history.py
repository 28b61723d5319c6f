"""A session's history: its tokens and conversation, before and after an input. Pure; see `fold`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from cache.names.images import ImageSpan
from cache.names.policy import FULL, Policy
from cache.names.tokens import from_compact, to_compact
from turnkeep_client.messages import DEFAULT_SINK, Change, PlacedImage, SessionCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.names.tokens import Tokens
    from turnkeep_client.errors import ErrorCode, TokenLimit
    from turnkeep_client.messages import Called, Model, Parent
    from worker.text.templates import Conversation, Message


class RefusedError(Exception):
    """A request cannot be carried out; its result is `failed`, with the same `field` and `limit`."""

    def __init__(
        self, code: ErrorCode, message: str, *, field: str | None = None, limit: TokenLimit | None = None
    ) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.field = field
        self.limit = limit


class DivergedError(Exception):
    """The log contradicts itself: a result does not follow from the entries before it."""


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """A session's tokens and the state of its conversation."""

    conversation: Conversation
    tokens: Tokens
    exists: bool = False
    closed: bool = False
    #: Which of the tokens the model sees; the default policy until the session exists.
    policy: Policy = FULL
    #: None if the session is no fork.
    parent: Parent | None = None
    #: From the session's `open`.
    tags: tuple[str, ...] = ()
    #: The model of the last turn; None before the first one.
    model: Model | None = None

    @property
    def position(self) -> int:
        """Number of tokens in the session."""
        return len(self.tokens)

    @property
    def is_open(self) -> bool:
        """Whether the session exists and is not closed."""
        return self.exists and not self.closed

    def digest(self) -> str:
        """Return the 16-byte digest of the tokens, as hex."""
        return self.tokens.digest()


def apply_change(tokens: Tokens, change: Change, packed: str | None = None) -> Tokens:
    """Return `tokens` after a request's `change`; `packed` has its encoded input if the change does not.

    Raises `ValueError` if the input cannot be decoded.
    """
    kept, added = tokens[: change.kept], from_compact(change.input if packed is None else packed)
    return kept.extended(added.ids(), map(_span, change.images))


def _span(image: PlacedImage) -> ImageSpan:
    names = bytes.fromhex(image.fingerprint), bytes.fromhex(image.digest)
    return ImageSpan(image.start, image.end, *names, image.columns)


def prefilled_by(parts: TokenHistory | str | None) -> Change | None:
    """Decode what a request prefilled that changed nothing, from its result's parts; None if they lack it."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(parts, type=Change) if isinstance(parts, str) else None
    return None


def policy_fields(history: TokenHistory) -> dict[str, Any]:
    """Return the fields of a result that describe the session's cache policy; none for the policy `full`."""
    cache = cache_field(history.policy) if history.exists else None
    if cache is None:
        return {}
    return {"cache": cache, "visible_from": history.policy.visible_from(history.position)}


def digests_of(model: Model) -> str:
    """Return the digests of a model's weights and tokenizer, which identify it whatever its name."""
    return f"{model.weights} {model.tokenizer}".strip()


def answer_message(text: str, reasoning: str, calls: Sequence[Called]) -> Message:
    """Return an answer as an assistant message for the chat template."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = msgspec.to_builtins(calls)
    return message


@dataclass(frozen=True)
class ExtendedHistory:
    """A history with a request's input added."""

    history: TokenHistory
    #: How many of its first tokens are unchanged.
    kept: int
    #: How many of its last tokens are the request's `prefix`, with which the answer begins.
    num_given: int = 0
    #: After a session was tokenised anew: where its last raw part (text outside of chat messages) ends.
    num_raw: int = 0
    #: They name the content that the model gets in another form.
    warnings: tuple[str, ...] = ()

    @cached_property
    def change(self) -> Change:
        """The result's field `change`: how many of the session's tokens were kept, and which were added."""
        tokens = self.history.tokens
        # All messages are looked through for their images, so not in a session without any.
        grids = dict(self.history.conversation.images) if tokens.spans else {}
        images = tuple(
            PlacedImage(
                digest=(digest := span.digest.hex()),
                start=span.start,
                end=span.end,
                fingerprint=span.fingerprint.hex(),
                grid=tuple(grids[digest]),
                columns=span.columns,
            )
            for span in tokens.spans
            if span.start >= self.kept
        )
        return Change(kept=self.kept, input=to_compact(tokens[self.kept :]), raw=self.num_raw, images=images)


def cache_field(policy: Policy) -> SessionCache | None:
    """Build the field `cache` of results; None for `full` with snapshots."""
    snapshots = None if policy.has_snapshots else "none"
    if policy.window is None:
        return SessionCache(policy=policy.name, snapshots=snapshots) if snapshots else None
    if policy.recall:
        return SessionCache(policy=policy.name, resident=policy.most_tokens, pin=policy.pins)
    return SessionCache(policy=policy.name, sink=policy.sink, window=policy.window, snapshots=snapshots)


def policy_of(cache: SessionCache | None) -> Policy:
    """Return the policy that a result names. Raises `ValueError` if this worker does not know it."""
    if cache is not None and cache.snapshots == "none":
        return replace(policy_of(structs.replace(cache, snapshots=None)), has_snapshots=False)
    match cache:
        case None | SessionCache(policy="full", snapshots=None):
            return FULL
        case SessionCache(policy="sink_window", sink=int(sink), window=int(window), snapshots=None) if (
            sink > 0 < window
        ):
            return Policy(sink, window)
        case SessionCache(policy="paged", resident=int(resident), pin=pins, snapshots=None):
            return Policy.paged(resident, pins, sink=DEFAULT_SINK)
        case _:
            raise ValueError(f"the log says a cache policy that this worker does not know: {cache}")
