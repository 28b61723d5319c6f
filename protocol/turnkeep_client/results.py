"""Results and chunks; decoding accepts unknown fields. Import them from `messages`."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003  # msgspec reads it
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from .errors import (
    ERROR_CODES,
    RETRYABLE,
    AnswerNotParsedError,
    ErrorCode,
    RequestFailedError,
    TokenLimit,
)
from .requests import POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .requests import CachePolicy


_T = TypeVar("_T")


class _Result(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    id: str
    seq: int
    position: int
    repeat_of: int | None = None


class Asked(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The request that a result answers, and the time at which the log stored the request.

    Each result has this in its field `asked`, which `decode_asked` reads. So the results of a session, in
    their order, say all that happened in it.

    `request` is the request as it was sent, and `headers` are its headers whose names begin with `Turnkeep-`.
    If these are too long, they are left out: `link` names the last of the messages of the log that together
    have the complete `Asked`. An invalid request is a string here: its first 1,024 bytes, as UTF-8.
    """

    stored: datetime
    request: msgspec.Raw | UnsetType = UNSET
    link: str = ""
    headers: dict[str, str] = {}


class SessionCache(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cache policy of a session.

    Under `sink_window` it keeps the first `sink` tokens and the last `window`. Under `paged`, `resident`
    tokens are on the device, always including the spans `pin`. With `snapshots` `none`, its KV is never
    written to disk.
    """

    policy: str
    sink: int | None = None
    window: int | None = None
    resident: int | None = None
    pin: tuple[tuple[int, int], ...] = ()
    snapshots: str | None = None

    @classmethod
    def of(cls, asked: CachePolicy) -> SessionCache | None:
        """Return the policy that a request asks for, with its defaults; None if the request names none."""
        if asked.policy is None:
            return None
        given = {name: getattr(asked, name) or default for name, default in POLICIES[asked.policy].items()}
        return cls(policy=asked.policy, **given, snapshots=asked.snapshots)

    def __str__(self) -> str:
        """Name the policy with its numbers."""
        return self._spans() + (", no snapshots" if self.snapshots == "none" else "")

    def _spans(self) -> str:
        if self.resident is not None:
            pins = "".join(f", always {start}-{end}" for start, end in self.pin)
            return f"{self.policy} ({self.resident} tokens on the device{pins})"
        if self.sink is None or self.window is None:
            return self.policy
        return f"{self.policy} (the first {self.sink} tokens and the last {self.window})"


class Model(Struct, frozen=True, kw_only=True):
    """A model by its name, and by digests of its weights and of its tokenizer, as hex.

    `vision` is a digest of how the worker processes images for it; empty if the model does not see them.
    """

    name: str
    weights: str = ""
    tokenizer: str = ""
    vision: str = ""


class PlacedImage(Struct, frozen=True):
    """An image among a session's tokens: the model gets rows computed from it in place of `[start, end)`."""

    digest: Annotated[str, Meta(description="the SHA-256 of the image's file")]
    start: int
    end: int
    fingerprint: Annotated[str, Meta(description="names the pixels and settings that give the rows")]
    grid: Annotated[
        tuple[int, ...], Meta(description="the image's size for the model, from which its tokens follow")
    ]
    columns: Annotated[int, Meta(description="tokens in a line, if positions are in a plane; else 0")] = 0


class Change(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a request changed the session's tokens, so that workers can read a log without a model.

    The first `kept` tokens stay; after them come those of the `input`, then the answer's. `input` is base64
    of the token ids as LEB128 numbers; if that is long, it is stored in other messages of the log, which the
    result's header `Turnkeep-Parts` names. If the session was tokenised again for another tokenizer, the
    first `raw` tokens are raw content. With `holds_answer`, the input ends with the answer, since the
    result's `tokens` are ids of another tokenizer. `images` are the images among the input's tokens.
    """

    kept: int
    input: str = ""
    raw: int = 0
    holds_answer: bool = False
    images: tuple[PlacedImage, ...] = ()


class _Bounded(_Result, frozen=True, kw_only=True):
    """A result with the fields `cache` and `visible_from`, set if the session's policy is not `full`.

    The model sees all tokens from the position `visible_from` on. Of the earlier tokens it sees only the
    sinks, or under `paged` only those on the device.
    """

    cache: SessionCache | None = None
    visible_from: int | None = None


class Parent(Struct, frozen=True, kw_only=True):
    """The session that a fork was made from, and the number of tokens that the fork took from it."""

    session: str
    position: int


class Opened(_Bounded, frozen=True, tag="opened"):
    """Answer to `open`. `cache` is the session's policy; it is left out if the policy is `full`.

    A fork has a `parent`; `position` is then the number of tokens that the fork took from the parent, and
    `model` the parent's model.
    """

    model: Model | None = None
    parent: Parent | None = None
    tags: tuple[str, ...] = ()


class Rewound(_Bounded, frozen=True, tag="rewound"):
    """Answer to `rewind`; `position` is the number of tokens that are left."""


class Closed(_Result, frozen=True, tag="closed"):
    """Answer to `close`; `position` is the session's last one.

    After `forget`, `forgotten` counts the removed snapshots and `removed_entries` the entries removed from
    the log. `settled` is false if some of the session's own tokens may be left on the disk: the disk did not
    answer in time, a file could not be removed, another session's turn uses a snapshot, there are
    snapshots that a worker cannot read, or another worker did not answer. `settled` says nothing
    about workers that are not running. Tokens shared with another open session are not the session's own.
    """

    forgotten: int | None = None
    removed_entries: int | None = None
    settled: bool = True


class _Turned(_Bounded, frozen=True, kw_only=True):
    """A turn's result: how the turn changed the session's tokens, and with which `model`.

    `previous_model` is the model of the session's previous turn, if it was another one.
    """

    change: Change | None = None
    model: Model | None = None
    previous_model: Model | None = None
    rewritten_from: int | None = None


class Appended(_Turned, frozen=True, tag="appended"):
    """Answer to `append`; `tokens = cached_tokens + prefilled_tokens`: all session tokens but the last.

    The following generate runs the last token, whose logits give the answer's first token. After an empty
    append the counts are zero. `kv_live_bytes` is the size of the KV that the next token sees; under `paged`
    it includes the sketches (2-bit copies of the keys) of all tokens. `rewritten_from` is set if the chat
    template changed earlier text, or the model's tokenizer differs from the previous model's: the tokens from
    that position on were replaced and prefilled again.
    `warnings` are as in a `Generated`.
    """

    tokens: int
    cached_tokens: int
    prefilled_tokens: int
    kv_live_bytes: int
    seconds: float
    warnings: tuple[str, ...] = ()


OPEN: Final = "later versions have other values too"
FinishReason = Literal[
    "stop",
    "length",
    "cancelled",
    "expired",
    "tool_calls",
    "tool_calls_malformed",
    "model_changed",
    "given_up",
]
#: The finish reasons of answers that were ended from outside: by their client, a deadline, or their worker.
STOPPED: Final = frozenset({"cancelled", "expired", "model_changed", "given_up"})
_OpenReason = Annotated[str, Meta(description=OPEN, examples=list(get_args(FinishReason)))]
_OpenCode = Annotated[str, Meta(description=OPEN, examples=list(ERROR_CODES))]


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens of one generate: `prompt_tokens = cached_tokens + prefilled_tokens`.

    `reasoning_tokens` of the `completion_tokens` are reasoning.
    """

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


class Seconds(Struct, frozen=True, kw_only=True):
    """Times of one generate since the worker got it: in the queue, in prefill, to the first token, total."""

    queued: float
    prefill: float
    first_token: float
    total: float


class LikelyToken(Struct, frozen=True, omit_defaults=True):
    """A token and the logarithm of its probability.

    `token` is its text. `bytes` are its bytes if these are not whole characters.
    """

    id: int
    token: str
    logprob: float
    bytes: tuple[int, ...] | None = None


class TokenLogprob(LikelyToken, frozen=True, omit_defaults=True):
    """One token of an answer. `top` has the tokens that were likeliest in its place, the likeliest first."""

    top: tuple[LikelyToken, ...] = ()


class CalledFunction(Struct, frozen=True):
    """The function of a tool call; `arguments` is JSON as text."""

    name: str
    arguments: str


class Called(Struct, frozen=True):
    """One tool call of an answer, in OpenAI's shape."""

    id: str
    function: CalledFunction
    type: str = "function"


class Generated(_Turned, frozen=True, tag="generated"):
    """Answer to `generate`. `tokens` are all ids that were added. `text` leaves out the stop string (`stop`).

    With `logprobs`, the field of that name has an item for each token. `reasoning` and `tool_calls` are not
    in the text. A call stays in the text if its tool was not offered, it does not fit the tool's schema, or
    it cannot be parsed; an answer with no other call then has the `finish_reason` `tool_calls_malformed`.
    `warnings` name parts of the request that had no effect, or that the model got in another form:
    placeholders, and messages that the chat template changed. `prefix_tokens` counts the last tokens of the
    prompt that are the request's `prefix`; `resumed_tokens` counts the answer's tokens that an earlier worker
    had published. An answer that another model had begun ends as it was streamed, with the `finish_reason`
    `model_changed`; one that the worker failed to complete, with `given_up`, and then `warnings` say why.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: _OpenReason
    usage: Usage
    seconds: Seconds
    kv_live_bytes: int
    stop: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[Called, ...] = ()
    warnings: tuple[str, ...] = ()
    prefix_tokens: int = 0
    resumed_tokens: int = 0

    def parsed(self, kind: type[_T]) -> _T:
        """Parse the text as JSON of a type: one that msgspec knows, such as `dict`, or a pydantic model.

        Raises `AnswerNotParsedError`.
        """
        if self.finish_reason != "stop":
            raise AnswerNotParsedError(
                f"the answer is not whole: its finish_reason is {self.finish_reason!r} after"
                f" {self.usage.completion_tokens} tokens"
            )
        read = getattr(kind, "model_validate_json", None)
        try:
            found: _T = read(self.text) if read else msgspec.json.decode(self.text, type=kind)
        except ValueError as error:  # raised by msgspec and by pydantic
            raise AnswerNotParsedError(
                f"the answer is no {getattr(kind, '__name__', kind)}: {error}; it begins {self.text[:80]!r}"
            ) from error
        return found


class Failed(Struct, frozen=True, kw_only=True, tag_field="type", tag="failed", omit_defaults=True):
    """Answer to a request that failed and changed nothing. `id` is null if the body has no valid id.

    `field` is the path of the field that is wrong, if it is one, such as `messages[0].role`. `limit` is there
    if the context is exceeded.
    """

    id: str | None
    code: _OpenCode
    message: str
    retryable: bool
    field: str | None = None
    limit: TokenLimit | None = None
    seq: int | None = None
    position: int | None = None
    repeat_of: int | None = None

    def as_error(self) -> RequestFailedError:
        """Return the failure as an exception for the caller to raise."""
        return RequestFailedError(
            self.code, self.message, retryable=self.retryable, field=self.field, limit=self.limit
        )


def failure(
    request_id: str | None,
    code: ErrorCode,
    message: str,
    **fields: Any,
) -> Failed:
    """Build a `Failed` result with these `fields`; its `retryable` follows from the code."""
    return Failed(id=request_id, code=code, message=message, retryable=code in RETRYABLE, **fields)


class DeadLetter(Struct, frozen=True, kw_only=True, tag_field="type", tag="dead"):
    """Why workers gave up the request at sequence `seq`. Stored on the session's subject `dead`."""

    seq: int
    id: str | None
    request: Annotated[str, Meta(description="the request's type")]
    position: int
    attempts: int
    reason: str
    worker: str
    model: str


class UnknownResult(Struct, frozen=True, kw_only=True):
    """A result whose type or shape this version does not know; `body` is its JSON."""

    type: str
    seq: int
    id: str | None = None
    position: int | None = None
    repeat_of: int | None = None
    body: bytes = b""


KnownResult = Opened | Appended | Generated | Rewound | Closed | Failed
Result = KnownResult | UnknownResult


class CallPart(Struct, frozen=True, omit_defaults=True):
    """A part of the tool call number `index`, from 0: `id` and `name` once, then text of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Chunk(Struct, frozen=True, omit_defaults=True):
    """A part of an answer: some of its tokens, and their text; `i` is the index of the first token.

    `text` has only whole characters. `logprobs` has an item for each token, if the request asks for them.
    `reasoning` and `tool_calls` are not in the text; a call is sent when it is complete. The first chunk has
    the `warnings` of the result.

    `seq` is the generate's stream sequence, or that of the one it repeats: ignore chunks with another `seq`.
    """

    i: int
    tokens: tuple[int, ...]
    text: str
    seq: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[CallPart, ...] = ()
    warnings: tuple[str, ...] = ()


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Join one or more consecutive chunks of an answer into one chunk."""
    return replace(
        chunks[0],
        tokens=tuple(token for chunk in chunks for token in chunk.tokens),
        text="".join(chunk.text for chunk in chunks),
        logprobs=tuple(one for chunk in chunks for one in chunk.logprobs),
        reasoning="".join(chunk.reasoning for chunk in chunks),
        tool_calls=tuple(one for chunk in chunks for one in chunk.tool_calls),
    )
