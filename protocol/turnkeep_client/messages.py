"""Every message of protocol version 1 as a frozen msgspec Struct, with encoding and decoding.

Requests refuse unknown fields by name. Replies ignore them, so that a client survives a newer worker.
Shapes only: what a message means to a session is the worker's business.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from .errors import RETRYABLE, ErrorCode, InvalidMessageError
from .explain import explain
from .subjects import ID_PATTERN, ID_RULE

VERSION: Final = 1

Id = Annotated[str, Meta(pattern=ID_PATTERN, description=ID_RULE)]
Position = Annotated[int, Meta(ge=0, le=2**53, description="tokens from the session's start")]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Text = Annotated[str, Meta(description="raw text, tokenised as it is")]
SpecialTokens = Annotated[
    bool,
    Meta(
        description="whether special tokens that are written out are read as such; unless given, in text and"
        " not in messages"
    ),
]
Deadline = Annotated[
    float, Meta(gt=0, le=31_536_000, description="seconds from when the log stored the request")
]
Priority = Annotated[int, Meta(ge=-10, le=10, description="higher first, among requests that wait")]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    """The function that a tool call names, in OpenAI's shape."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """One tool call of an assistant message, in OpenAI's shape."""

    id: str
    function: Function
    type: Literal["function"] = "function"


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message's content, in OpenAI's shape. Images and sound are not taken."""

    text: str


class Message(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One chat message in OpenAI's shape; rendered by the model's chat template.

    Parts of a content are joined as they are, so `content` is a string once the message is made, or null
    where an assistant only calls tools.
    """

    role: Role
    content: str | tuple[TextPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = ()
    tool_call_id: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.content, tuple):
            force_setattr(self, "content", "".join(part.text for part in self.content))
        if self.tool_calls is None:
            force_setattr(self, "tool_calls", ())
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("needs content; only an assistant message with tool_calls goes without")


class CachePolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """Which positions keep their KV, and how precisely. Version 1 knows the policy `full`: all of them.

    With `kv_bits` the session insists on KV of so many bits: a worker that keeps another kind refuses it.
    """

    policy: Literal["full"] = "full"
    kv_bits: Literal[4, 8] | None = None


class _Request(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", omit_defaults=True
):
    id: Id
    expect_position: Position | None = None


class Open(_Request, frozen=True, tag="open"):
    """Start a session explicitly. Optional: the first append or generate does it too."""

    cache: CachePolicy = CachePolicy()


class _Input(_Request, frozen=True):
    messages: tuple[Message, ...] | None = None
    text: Text | None = None
    tokens: tuple[TokenId, ...] | None = None
    special_tokens: SpecialTokens | None = None
    deadline_s: Deadline | None = None
    priority: Priority = 0

    @property
    def num_inputs(self) -> int:
        """Count how many of `messages`, `text` and `tokens` are given."""
        return sum(part is not None for part in (self.messages, self.text, self.tokens))


class Append(_Input, frozen=True, tag="append"):
    """Add exactly one of `messages`, `text`, `tokens` to the session and prefill it at once."""

    def __post_init__(self) -> None:
        if self.num_inputs != 1:
            raise ValueError(f"append takes exactly one of messages, text, tokens; it has {self.num_inputs}")


class Generate(_Input, frozen=True, tag="generate"):
    """Sample tokens, after appending at most one of `messages`, `text`, `tokens`.

    Filters apply in the order repetition_penalty, temperature, top_k, top_p, min_p. A temperature of 0
    takes the most likely token. Without a seed one is derived from the request, so that an interrupted
    answer goes on as it would have. `top_k` 0 and `top_p` 1 are off. `raw` leaves out the assistant header
    that the chat template would add after messages.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 256
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[tuple[Stop, ...], Meta(max_length=16)] | Stop = ()
    raw: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            force_setattr(self, "stop", (self.stop,))
        if self.num_inputs > 1:
            raise ValueError(
                f"generate takes at most one of messages, text, tokens; it has {self.num_inputs}"
            )


class Rewind(_Request, frozen=True, tag="rewind"):
    """Forget every token from `position` on."""

    position: Position


class Close(_Request, frozen=True, tag="close"):
    """End the session. Only an `open` can use its name again; after some days it leaves the log.

    `forget` removes at once what was said in it: from the worker's disk, up to where other sessions or a pin
    share it, and from the log, where the close and its result remain. What the session no longer held, after
    a rewind or a request that was withdrawn, is not looked for on the disk; it ages out.
    """

    forget: bool = False


Request = Open | Append | Generate | Rewind | Close


class _Result(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    id: str
    seq: int
    position: int
    repeat_of: int | None = None


class Opened(_Result, frozen=True, tag="opened"):
    """Answer to `open`."""


class Rewound(_Result, frozen=True, tag="rewound"):
    """Answer to `rewind`."""


class Closed(_Result, frozen=True, tag="closed"):
    """Answer to `close`; `position` is what the session held.

    Where it was to forget, `forgotten` counts the snapshots that went. `settled` is false where some of the
    session's tokens may be left on the disk: it did not answer in time, a file could not be removed, another
    session's turn holds it, or there are snapshots that this worker does not read. `removed_entries` counts
    what leaves the log with it.
    """

    forgotten: int | None = None
    removed_entries: int | None = None
    settled: bool = True


class Appended(_Result, frozen=True, tag="appended"):
    """Answer to `append`; `tokens = cached_tokens + prefilled_tokens`, all of the session's but the last.

    That one is run by the generate that follows, whose answer is drawn from it. An empty append has zeros.
    `rewritten_from` is set where the chat template changed what was already in the session: the tokens
    from that position on were replaced and prefilled again.
    """

    tokens: int
    cached_tokens: int
    prefilled_tokens: int
    kv_live_bytes: int
    seconds: float
    rewritten_from: int | None = None


FinishReason = Literal["stop", "length", "cancelled", "expired", "tool_calls"]


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of one generate: `prompt_tokens = cached_tokens + prefilled_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    completion_tokens: int


class Seconds(Struct, frozen=True, kw_only=True):
    """Where the time of one generate went: waiting, prefill, to the first token, in all."""

    queued: float
    prefill: float
    first_token: float
    total: float


class Generated(_Result, frozen=True, tag="generated"):
    """Answer to `generate`. `text` leaves out the stop string; `tokens` holds all ids that were added."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    seconds: Seconds
    kv_live_bytes: int
    rewritten_from: int | None = None


class Failed(Struct, frozen=True, kw_only=True, tag_field="type", tag="failed", omit_defaults=True):
    """Answer to a request that changed nothing. `id` is null where the body names no valid one."""

    id: str | None
    code: ErrorCode
    message: str
    retryable: bool
    seq: int | None = None
    position: int | None = None
    repeat_of: int | None = None


def failure(
    request_id: str | None,
    code: ErrorCode,
    message: str,
    *,
    seq: int | None = None,
    position: int | None = None,
) -> Failed:
    """Build a `failed`; whether a retry can help follows from the code."""
    retryable = code in RETRYABLE
    return Failed(id=request_id, code=code, message=message, retryable=retryable, seq=seq, position=position)


class DeadLetter(Struct, frozen=True, kw_only=True, tag_field="type", tag="dead"):
    """Why a request was given up, on the session's `dead`; the request itself is in the log at `seq`."""

    seq: int
    id: str | None
    request: str
    position: int
    attempts: int
    reason: str
    worker: str
    model: str


Result = Opened | Appended | Generated | Rewound | Closed | Failed


class Chunk(Struct, frozen=True, omit_defaults=True):
    """Some tokens of a running generate. `i` is the index of the first one; `text` is whole characters.

    `seq` is the generate's stream sequence: what does not name it is not of this request.
    """

    i: int
    tokens: tuple[int, ...]
    text: str
    seq: int | None = None


class InfoRequest(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="info", omit_defaults=True
):
    """Ask for a session's state (on `ctl`), with some of the requests that wait: `limit` behind `skip`."""

    skip: Annotated[int, Meta(ge=0, le=2**53)] = 0
    limit: Annotated[int, Meta(ge=0, le=1000)] = 100


class CancelRequest(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="cancel"):
    """Stop a waiting or running request of the session (on `ctl`)."""

    id: Id


class PinRequest(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="pin", omit_defaults=True
):
    """Keep the session's first `position` tokens on disk, until they are unpinned (on `ctl`).

    Without a position: all that it has now. The pin belongs to the tenant's prefix, not to the session: it
    outlives both session and worker, and serves every session that begins alike.
    """

    position: Annotated[int, Meta(ge=1, le=2**53, description="tokens from the session's start")] | None = (
        None
    )


class UnpinRequest(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="unpin", omit_defaults=True
):
    """Let go of the pinned prefixes of the session, or of the one with `position` tokens (on `ctl`)."""

    position: Annotated[int, Meta(ge=1, le=2**53, description="tokens from the session's start")] | None = (
        None
    )


ControlRequest = InfoRequest | CancelRequest | PinRequest | UnpinRequest


class Cancelled(Struct, frozen=True, kw_only=True, tag_field="type", tag="cancelled"):
    """Answer to `cancel`: what the request was doing when it was told to stop."""

    id: str
    was: Literal["waiting", "running"]


class Pinned(Struct, frozen=True, kw_only=True, tag_field="type", tag="pinned"):
    """Answer to `pin`: of `tokens`, `stored_tokens` are on disk or on their way, in `size_bytes`.

    `pinned_bytes` are those of all pins in the worker's cache. `noted` says that the pin itself is on disk.
    """

    tokens: int
    stored_tokens: int
    size_bytes: int
    pinned_bytes: int
    noted: bool


class Unpinned(Struct, frozen=True, kw_only=True, tag_field="type", tag="unpinned"):
    """Answer to `unpin`: the lengths in tokens of the prefixes that were let go."""

    prefixes: tuple[int, ...]
    pinned_bytes: int


class Histogram(Struct, frozen=True):
    """Counts by upper bound; `counts` has one entry more than `bounds`, for what lies above the last."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    count: int


class SnapshotCounters(Struct, frozen=True, kw_only=True):
    """Two sums hold at every instant.

    `accepted = durable + sum(dropped) + failed + cancelled + in_flight` counts snapshots.
    `free + pinned + evictable = capacity` counts bytes: what snapshots may take, of which `pinned` must not
    be evicted now: pinned prefixes (`kept`) and what is being written or loaded. `rejected` counts the files
    that were doubtful, `timed_out` the loads that the disk did not answer in time.
    """

    accepted: int = 0
    durable: int = 0
    dropped: dict[str, int] = {}
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    in_flight_bytes: int = 0
    written_bytes: int = 0
    restored_bytes: int = 0
    stored: int = 0
    stored_bytes: int = 0
    evicted: int = 0
    rejected: int = 0
    timed_out: int = 0
    capacity_bytes: int = 0
    free_bytes: int = 0
    pinned_bytes: int = 0
    evictable_bytes: int = 0
    kept_bytes: int = 0


class Metrics(Struct, frozen=True, kw_only=True, tag_field="type", tag="metrics"):
    """A worker's state, published every few seconds. Times are in seconds, sizes in bytes.

    `waiting` are the sessions that the worker has taken up and that are not on the device, of which
    `waiting_for_memory` only want room there; `returned` are the requests that it gave back, since their
    tenant has as many sessions at work as it may. `ignored` counts what fitted nowhere, by its kind: somebody
    else than a worker has published it. `kv_layers` names the layers
    of each way of keeping KV.
    """

    worker: str
    version: str
    model: str
    device: str
    uptime_s: float
    requests: dict[str, dict[str, int]]
    waiting: int
    waiting_for_memory: int
    returned: int = 0
    log_bytes: int = 0
    log_max_bytes: int = 0
    ignored: dict[str, int] = {}
    running: int
    sessions: int
    resident_sessions: int
    prefilled_tokens: int
    cached_tokens: int
    generated_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    time_to_first_token: Histogram
    time_per_output_token: Histogram
    batch_size: Histogram
    event_loop_lag: Histogram
    resident_kv_bytes: int
    kv_layers: dict[str, str] = {}
    max_memory_bytes: int
    device_memory_bytes: int = 0
    mlx_active_bytes: int
    mlx_peak_bytes: int
    estimated_scratch_bytes: int = 0
    measured_scratch_bytes: int = 0
    process_bytes: int
    snapshots: SnapshotCounters


class Progress(Struct, frozen=True, kw_only=True):
    """How far the running request has come: its context's tokens that have KV, and new tokens."""

    cached_tokens: int
    context_tokens: int
    generated_tokens: int


class SessionInfo(Struct, frozen=True, kw_only=True, tag_field="type", tag="session"):
    """Answer to `info`. `waiting` are some of the `num_waiting` requests that wait, as it was asked for."""

    tenant: str
    session: str
    position: int
    state: Literal["idle", "waiting", "running"]
    active: str | None
    waiting: tuple[str, ...]
    num_waiting: int = 0
    requests: int
    progress: Progress | None
    resident: bool
    kv_live_bytes: int
    policy: str
    model: str
    worker: Metrics


ControlReply = SessionInfo | Cancelled | Pinned | Unpinned | Failed

_T = TypeVar("_T")


class _Named(Struct):
    id: Id | None = None


_REQUEST: Final[msgspec.json.Decoder[Request]] = msgspec.json.Decoder(Request)
_RESULT: Final[msgspec.json.Decoder[Result]] = msgspec.json.Decoder(Result)
_CHUNK: Final = msgspec.json.Decoder(Chunk)
_CONTROL: Final[msgspec.json.Decoder[ControlRequest]] = msgspec.json.Decoder(ControlRequest)
_CONTROL_REPLY: Final[msgspec.json.Decoder[ControlReply]] = msgspec.json.Decoder(ControlReply)
_METRICS: Final = msgspec.json.Decoder(Metrics)
#: The values stay raw: they are read once, by the request decoder, whatever their nesting.
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAMED: Final = msgspec.json.Decoder(_Named)
_ENCODER: Final = msgspec.json.Encoder()


def encode(message: Struct | dict[str, Any]) -> bytes:
    """Write a message as JSON; raises `InvalidMessageError` for what JSON cannot hold."""
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        raise InvalidMessageError(
            "text must be whole Unicode characters, not half a surrogate pair"
        ) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidMessageError(f"the message cannot be written as JSON: {error}") from None


def decode_request(body: bytes) -> Request:
    """Read what came on `in`; raises `InvalidMessageError` with a sentence for the sender."""
    return _decode(_REQUEST, body, "a request")


def decode_control(body: bytes) -> ControlRequest:
    """Read what came on `ctl`; raises `InvalidMessageError`."""
    return _decode(_CONTROL, body, "a control request")


def decode_ask(body: bytes, request_id: str) -> Generate:
    """Read what came on `ask`: a generate whose `type` and `id` may be left out.

    `request_id` is taken where the sender gave no id. Raises `InvalidMessageError`.
    """
    fields = _decode(_FIELDS, body, "a generate")
    fields.setdefault("type", msgspec.Raw(b'"generate"'))
    fields.setdefault("id", msgspec.Raw(_ENCODER.encode(request_id)))
    try:
        request = decode_request(_ENCODER.encode(fields))
    except InvalidMessageError as error:
        raise InvalidMessageError(str(error), request_id=_named(body)) from None  # not an id of our making
    if not isinstance(request, Generate):
        kind = type(request).__struct_config__.tag
        raise InvalidMessageError(
            f"ask takes a generate, not {kind}: publish that on the session's in", request_id=request.id
        )
    return request


def decode_result(body: bytes) -> Result:
    """Read what came on `out`; raises `InvalidMessageError`."""
    return _decode(_RESULT, body, "a result")


def decode_chunk(body: bytes) -> Chunk:
    """Read one token chunk; raises `InvalidMessageError`."""
    return _decode(_CHUNK, body, "a chunk")


def decode_control_reply(body: bytes) -> ControlReply:
    """Read the answer to a control request; raises `InvalidMessageError`."""
    return _decode(_CONTROL_REPLY, body, "a control reply")


def decode_metrics(body: bytes) -> Metrics:
    """Read a metrics message; raises `InvalidMessageError`."""
    return _decode(_METRICS, body, "a metrics message")


def _decode(decoder: msgspec.json.Decoder[_T], body: bytes, what: str) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = explain(error, body, decoder.type, what)
        raise InvalidMessageError(text, request_id=_named(body)) from None


def _named(body: bytes) -> str | None:
    """Find the id that a body names, whatever else is wrong with it."""
    try:
        return _NAMED.decode(body).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
