"""The internal form of a request, which every dialect reads into, and what may be wrong with a request.

A result needs no form of its own: dialects write the protocol's `Chunk` and `Generated`.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from turnkeep_client.errors import (
    InvalidMessageError,
    NoWorkerError,
    RequestFailedError,
    TurnkeepError,
)
from turnkeep_client.messages import Generate
from turnkeep_client.session import build

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from turnkeep_client.messages import Message

#: More than any context has: a worker cuts `max_tokens` to what is left of the session's.
ALL_THAT_FITS: Final = 2**31 - 1
#: Answers to one prompt.
MOST_ANSWERS: Final = 16

#: The header of an answer that says what of its request was not taken as it is.
WARNINGS: Final = "x-turnkeep-warnings"
_MOST_WARNINGS: Final = 20

#: How long who is one too many should wait.
_PAUSE_S: Final = 1.0
#: Of a worker's `context_exceeded`: the prompt's tokens and the context.
_OVERFLOW = re.compile(r"would hold (\d+) tokens .* the context is (\d+)")
_PATH = re.compile(r"(?P<fault>.*) - at `\$\.?(?P<path>[^`]*)`", re.DOTALL)

_T = TypeVar("_T")


class Warned(NamedTuple):
    """What of a request is not as its client may think; if it `is_lost`, the model is not told it."""

    where: str
    what: str
    is_lost: bool = False


class Turn(Struct, frozen=True, kw_only=True):
    """One request: a whole conversation, or a prompt as `text` or `tokens`, and how to answer it `n` times.

    `options` are fields of the protocol's generate. `model` is what the client calls the model. `asked` has
    other fields of the request that its answer repeats. If the answer `is_kept`, its id will find it.
    `previous` is the id of an earlier answer: the conversation up to it comes before the messages.
    `warnings` are told in a header of the answer.
    """

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    options: Mapping[str, Any]
    n: int = 1
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    asked: Mapping[str, Any] = {}
    is_kept: bool = False
    previous: str = ""
    warnings: tuple[Warned, ...] = ()


class Fault(Exception):  # noqa: N818  # an outcome that each dialect writes in its own shape
    """Why a request gets no answer, with the HTTP status and OpenAI's words for the kind of error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        overflow: tuple[int, int] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`overflow`: the tokens of a prompt that is too long, and the context, if these are known.

        `retry_after_s`: when the same request may be answered.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.overflow = overflow
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {} if self.retry_after_s is None else {"retry-after": str(math.ceil(self.retry_after_s))}


def refused(message: str, param: str | None = None, code: str | None = None) -> Fault:
    """Build the fault of a request that asks for something that is not there."""
    return Fault(400, message, param=param, code=code)


def told(warnings: Sequence[Warned]) -> dict[str, str]:
    """Return the header of an answer that has the warnings of its request."""
    shown = [f"{one.where}: {one.what}" for one in warnings[:_MOST_WARNINGS]]
    if more := len(warnings) - len(shown):
        shown.append(f"and {more} more")
    return {WARNINGS: "; ".join(shown)} if shown else {}


def all_read(turn: Turn) -> Turn:
    """Return `turn` if nothing of it is lost, else raise `Fault`."""
    for one in turn.warnings:
        if one.is_lost:
            kind = one.what.partition(" ")[0]
            raise refused(
                f"the model cannot read {kind}, and placeholders are off here: send text", one.where
            )
    return turn


def decoded(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Decode a request's body. Raises `Fault`."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise refused("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        found = _PATH.fullmatch(str(error))
        raise refused(str(error), found["path"] if found else None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise refused(f"the body is not JSON: {error}") from None


def prefilled(messages: list[Message], options: dict[str, Any]) -> tuple[tuple[Message, ...], dict[str, Any]]:
    """Make the assistant's last message, if it is the last of all, the beginning of the answer.

    Such an answer has no reasoning. Raises `Fault`.
    """
    *before, last = messages
    if last.role != "assistant":
        return tuple(messages), options
    why = None
    if not before:
        why = "there is no message before the assistant's"
    elif last.tool_calls:
        why = "the last message has tool calls, and their results must follow it"
    elif options.get("tool_choice", "auto") not in ("auto", "none"):
        why = "an answer that must call a tool cannot be prefilled: the last message is the assistant's"
    elif "response_format" in options:
        why = "an answer with a format cannot be prefilled: the last message is the assistant's"
    if why:
        raise refused(why, "messages")
    given = {"prefix": last.content, "reasoning": {"budget": 0}} if last.content else {}
    return tuple(before), options | given


def check(turn: Turn) -> Turn:
    """Return `turn` if a worker would take its fields, else raise `Fault`."""
    try:
        build(Generate, messages=turn.messages, text=turn.text, tokens=turn.tokens, **turn.options)
    except InvalidMessageError as error:
        raise refused(str(error)) from None
    if not 1 <= turn.n <= MOST_ANSWERS:
        raise refused(f"n must be 1 to {MOST_ANSWERS}, not {turn.n}", "n")
    return turn


def fault_of(error: TurnkeepError) -> Fault:
    """Say an error of the protocol in HTTP's and OpenAI's words."""
    match error:
        case RequestFailedError(code="context_exceeded" | "memory_exceeded" as code):
            return _too_long(code, error.message)
        case RequestFailedError(code="invalid_request"):
            return refused(error.message)
        case RequestFailedError(code="overloaded"):
            return Fault(
                429,
                error.message,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=_PAUSE_S,
            )
        case NoWorkerError():
            message = f"{error}; `turnkeep serve` starts one"
            return Fault(503, message, kind="server_error", code="no_worker")
        case InvalidMessageError():  # the messages were valid: what is left is their size
            return Fault(413, str(error).partition(": send it")[0], code="request_too_large")
    return Fault(500, str(error), kind="server_error")


def _too_long(code: str, message: str) -> Fault:
    """Use OpenAI's wording, which agents look for before they compact a conversation."""
    words, overflow = f"is exceeded: {message}.", None
    if code == "context_exceeded" and (found := _OVERFLOW.search(message)):
        words = f"is {found[2]} tokens. However, your messages resulted in {found[1]} tokens."
        overflow = int(found[1]), int(found[2])
    return Fault(
        400,
        f"This model's maximum context length {words} Please reduce the length of the messages.",
        param="messages",
        code="context_length_exceeded",
        overflow=overflow,
    )
