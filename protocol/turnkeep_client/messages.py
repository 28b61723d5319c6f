"""Every message of protocol version 1 as a frozen msgspec Struct, with encoding and decoding.

Requests are decoded strictly: unknown fields are refused by name. Results, chunks and replies are decoded
openly: unknown types, finish reasons, codes and fields are kept, so an old client or worker never overlooks
the result of a newer worker. The modules `requests`, `sampling`, `controls`, `results` and
`metrics` define the types; users import all types from here. The worker decides how a message changes a
session.
"""

from __future__ import annotations

import contextlib
import re
from itertools import accumulate
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr, replace

from .controls import *  # noqa: F403  # users import all messages from here
from .controls import (
    Cancelled,
    ControlRequest,
    Counted,
    CountRequest,
    Embedded,
    Reranked,
    ServeRequest,
    Serving,
    SessionInfo,
)
from .errors import InvalidMessageError
from .explain import explain, field_of
from .metrics import *  # noqa: F403  # users import all messages from here
from .metrics import GatewayMetrics, Metrics
from .requests import *  # noqa: F403  # users import all messages from here
from .requests import POLICIES, Append, Close, Id, Open, Rewind
from .results import *  # noqa: F403  # users import all messages from here
from .results import (
    Asked,
    Chunk,
    Failed,
    KnownResult,
    Result,
    UnknownResult,
)
from .sampling import *  # noqa: F403  # users import all messages from here
from .sampling import Generate

_T = TypeVar("_T")

Request = Open | Append | Generate | Rewind | Close
VERSION: Final = 1
#: What clients may ask of a worker of this version; `$SRV.INFO` and the worker's log line `ready` name them.
FEATURES: Final = (
    "fork",
    "tools",
    "reasoning",
    "logprobs",
    "penalties",
    "count",
    "embed",
    "rerank",
    "priority",
    "deadline",
    "forget",
    *(name for name in POLICIES if name != "full"),
    "response_format",
    "chat_template_kwargs",
    "other_model",
    "close_cancel",
    "images",
)
ControlReply = SessionInfo | Metrics | Cancelled | Counted | Embedded | Reranked | Failed


class _Named(Struct):
    id: Id | None = None


class _Answering(Struct):
    asked: Asked | None = None


class _Sent(Struct):
    """The fields of a request that a chat template gets exactly as they were sent."""

    tools: tuple[dict[str, Any], ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None


_REQUEST: Final[msgspec.json.Decoder[Request]] = msgspec.json.Decoder(Request)
_RESULT: Final[msgspec.json.Decoder[KnownResult]] = msgspec.json.Decoder(KnownResult)
_UNKNOWN_RESULT: Final = msgspec.json.Decoder(UnknownResult)
_ANSWERING: Final = msgspec.json.Decoder(_Answering)
_LINKED: Final = msgspec.json.Decoder(Asked)
_CHUNK: Final = msgspec.json.Decoder(Chunk)
_CONTROL: Final[msgspec.json.Decoder[ControlRequest]] = msgspec.json.Decoder(ControlRequest)
_SERVE: Final[msgspec.json.Decoder[ServeRequest]] = msgspec.json.Decoder(ServeRequest)
_SERVING: Final[msgspec.json.Decoder[Serving | Failed]] = msgspec.json.Decoder(Serving | Failed)
_CONTROL_REPLY: Final[msgspec.json.Decoder[ControlReply]] = msgspec.json.Decoder(ControlReply)
_METRICS: Final = msgspec.json.Decoder(Metrics)
_GATEWAY_METRICS: Final = msgspec.json.Decoder(GatewayMetrics)
#: The values stay raw JSON: only the request decoder parses them, however deep they nest.
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAMED: Final = msgspec.json.Decoder(_Named)
_SENT: Final = msgspec.json.Decoder(_Sent)
_ENCODER: Final = msgspec.json.Encoder()
#: How deep a request may nest. Its result has it two levels deeper; Python's limit is 1,000 with all calls.
_MOST_DEPTH: Final = 900
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')


def encode(message: Struct | dict[str, Any]) -> bytes:
    """Encode as JSON; raises `InvalidMessageError` for values that JSON cannot hold."""
    if isinstance(message, UnknownResult):
        return message.body
    if isinstance(message, Append | Generate | CountRequest) and message.messages:
        message = replace(message, messages=[one.sent or one for one in message.messages])
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:
        raise InvalidMessageError(
            "text must be whole Unicode characters, not half a surrogate pair"
        ) from None
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidMessageError(f"the message cannot be written as JSON: {error}") from None


def decode_request(body: bytes) -> Request:
    """Decode a body from `in`; raises `InvalidMessageError` with a sentence for the sender.

    The request's `tools` are checked, but stay dicts with the keys in the sender's order; each message has
    such a dict in `sent`.
    """
    request = _decode(_REQUEST, body, "a request")
    if _depth(body) > _MOST_DEPTH:
        raise InvalidMessageError(
            f"the body is nested too deeply to be a request: {_MOST_DEPTH} levels are allowed",
            request_id=request.id,
        )
    return _as_sent(request, body)


def decode_control(body: bytes) -> ControlRequest:
    """Decode a body from `ctl`; raises `InvalidMessageError`."""
    return _as_sent(_decode(_CONTROL, body, "a control request"), body)


def decode_ask(body: bytes, request_id: str) -> Generate | Close:
    """Decode a body from `ask`: a generate, whose `type` may be left out, or a close; both without an `id`.

    A missing id becomes `request_id`. Raises `InvalidMessageError`.
    """
    fields = _decode(_FIELDS, body, "a generate")
    fields.setdefault("type", msgspec.Raw(b'"generate"'))
    fields.setdefault("id", msgspec.Raw(_ENCODER.encode(request_id)))
    try:
        request = decode_request(_ENCODER.encode(fields))
    except InvalidMessageError as error:
        named = _named(body)  # not the id added here
        raise InvalidMessageError(str(error), request_id=named, field=error.field) from None
    if not isinstance(request, Generate | Close):
        kind = type(request).__struct_config__.tag
        raise InvalidMessageError(
            f"ask takes a generate or a close, not {kind}: publish that on the session's in",
            request_id=request.id,
        )
    return request


def decode_result(body: bytes) -> Result:
    """Decode a body from `out`; raises `InvalidMessageError` if it has no `type` or no `seq`.

    If this version does not know the type or shape of a newer worker's result, returns an `UnknownResult`.
    """
    try:
        return _decode(_RESULT, body, "a result")
    except InvalidMessageError:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return replace(_UNKNOWN_RESULT.decode(body), body=body)
        raise


def encode_answer(result: Result, asked: Asked) -> bytes:
    """Encode a result with the request that it answers in the field `asked`."""
    return encode(result)[:-1] + b',"asked":' + _ENCODER.encode(asked) + b"}"


def decode_asked(body: bytes) -> Asked | None:
    """Decode the field `asked` of a result's body; None if it is missing or invalid."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _ANSWERING.decode(body).asked
    return None


def decode_linked(value: bytes | None) -> Asked | None:
    """Decode the `Asked` that the `link` of a shortened one leads to; None if it is gone or invalid."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _LINKED.decode(value or b"")
    return None


def encode_repeat(body: bytes, asked: Asked, *, seq: int, repeat_of: int) -> bytes:
    """Encode a recorded result as the answer to a repeat of its request.

    `body` is the recorded result, `asked` the repeat at the sequence `seq`, `repeat_of` the sequence of the
    first request. All other fields stay, also those unknown to this version.
    """
    fields = {name: value for name, value in _decode(_FIELDS, body, "a result").items() if name != "asked"}
    return _ENCODER.encode(fields | {"seq": seq, "repeat_of": repeat_of, "asked": asked})


def decode_chunk(body: bytes) -> Chunk:
    """Decode one token chunk; raises `InvalidMessageError`."""
    return _decode(_CHUNK, body, "a chunk")


def decode_control_reply(body: bytes) -> ControlReply:
    """Decode the answer to a control request, a `Failed` included; raises `InvalidMessageError`."""
    return _decode(_CONTROL_REPLY, body, "a control reply")


def decode_serve(body: bytes) -> ServeRequest:
    """Decode a body from `_serve`; raises `InvalidMessageError`."""
    return _decode(_SERVE, body, "a request to load or unload")


def decode_serving(body: bytes) -> Serving | Failed:
    """Decode the answer to a request on `_serve`; raises `InvalidMessageError`."""
    return _decode(_SERVING, body, "the answer")


def decode_metrics(body: bytes) -> Metrics:
    """Decode a metrics message; raises `InvalidMessageError`."""
    return _decode(_METRICS, body, "a metrics message")


def decode_gateway_metrics(body: bytes) -> GatewayMetrics:
    """Decode a gateway's metrics message; raises `InvalidMessageError`."""
    return _decode(_GATEWAY_METRICS, body, "a gateway's metrics message")


def _as_sent(request: _T, body: bytes) -> _T:
    """Replace a decoded request's tools by the dicts that were sent: a `Tool` would reorder their keys.

    Also set the field `sent` of each of the request's messages to the dict that was sent.
    """
    if isinstance(request, Append | Generate | CountRequest) and (request.tools or request.messages):
        sent = _SENT.decode(body)
        if request.tools:
            force_setattr(request, "tools", sent.tools)
        for message, one in zip(request.messages or (), sent.messages or (), strict=True):
            sent_one = {**one, "content": message.blocks} if message.blocks else one
            force_setattr(message, "sent", sent_one)
    return request


def _depth(body: bytes) -> int:
    """Return how deep a body nests, which is JSON; for one with few brackets their number."""
    num_opening = body.count(b"[") + body.count(b"{")
    if num_opening <= _MOST_DEPTH:
        return num_opening
    steps = (1 if one in b"[{" else -1 for one in _STRING.sub(b"", body) if one in b"[]{}")
    return max(accumulate(steps))


def _decode(decoder: msgspec.json.Decoder[_T], body: bytes, what: str) -> _T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = explain(error, body, decoder.type, what)
        field = field_of(error) if isinstance(error, msgspec.ValidationError) else None
        raise InvalidMessageError(text, request_id=_named(body), field=field) from None


def _named(body: bytes) -> str | None:
    """Return the id of a body that is otherwise invalid; None without a valid id."""
    try:
        return _NAMED.decode(body).id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
