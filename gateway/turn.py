"""The form of a request (`ClientTurn`) to which every dialect converts its own, and its errors (`Fault`).

Results have no internal form: dialects convert the protocol's `Chunk` and `Generated`.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import Struct

from turnkeep_client.content_blocks import ContentError, sentences
from turnkeep_client.errors import (
    ClientClosedError,
    FullServerError,
    InvalidMessageError,
    MessageTooLargeError,
    NoServerError,
    NoWorkerError,
    RequestFailedError,
    TurnkeepError,
)
from turnkeep_client.explain import field_of
from turnkeep_client.messages import TOOL_NAME_RULE, Generate, ToolFunction
from turnkeep_client.session import build
from turnkeep_client.writes import unstored

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from turnkeep_client.content_blocks import ContentWarning
    from turnkeep_client.errors import TokenLimit
    from turnkeep_client.messages import Message

    from .images import Link

#: More than any context: a worker lowers `max_tokens` to the tokens that still fit in the session's context.
ALL_THAT_FITS: Final = 2**31 - 1
#: The most answers to one prompt.
MOST_ANSWERS: Final = 16

#: The most characters of a model's name, which each event of a stream repeats: as many as a path has.
_MOST_NAME: Final = 4_096

#: The response header that lists the parts of a request that were ignored or replaced.
WARNINGS: Final = "x-turnkeep-warnings"
#: The request header that keeps a conversation's KV off the disk.
SNAPSHOTS: Final = "x-turnkeep-snapshots"
_MOST_SHOWN: Final = 4_000
_UNSHOWN: Final = re.compile(r"[^ -~]+")

_NUMBER: Final = re.compile(r"\d{1,15}", re.ASCII)

#: When a client should try again: after an overloaded worker, and if there is no worker.
_PAUSE_S: Final = 1.0
_START_S: Final = 5.0
#: An escape in JSON; only an unpaired surrogate is in the group.
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(u[dD][89a-fA-F][\da-fA-F]{2})|.)",
    re.DOTALL,
)
_REPLACEMENT: Final = rb"\ufffd"

_T = TypeVar("_T")


class WholeNumber(int):
    """An integer field of a request. `as_whole` decodes it, also from 2.0, which some clients write for 2."""


class ClientTurn(Struct, frozen=True, kw_only=True):
    """One request: a whole conversation, or a prompt as `text` or `tokens`, and how to answer it."""

    messages: tuple[Message, ...] | None = None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    #: Fields of the protocol's generate request.
    options: Mapping[str, Any]
    #: The number of answers, to all prompts together.
    n: int = 1
    #: The client's name for the model.
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    #: Other fields of the request, which the answer repeats.
    asked: Mapping[str, Any] = {}
    #: Whether clients can read the answer later by its id.
    is_kept: bool = False
    #: Whether a session begun for this turn can have KV on disk.
    has_snapshots: bool = True
    #: The id of an earlier answer: the conversation up to that answer comes before the messages.
    previous: str = ""
    #: These go into a header of the response.
    warnings: tuple[ContentWarning, ...] = ()
    #: Files of images by their digests, or where to fetch them; empty once the messages have the files.
    images: Mapping[str, bytes | Link] = {}
    #: Reads an image of the earlier answer's conversation by its digest.
    earlier_image: Callable[[str], Awaitable[bytes]] | None = None
    #: If there are several prompts: all of them, in the order of their answers.
    prompts: tuple[str | tuple[int, ...], ...] = ()

    def alone(self, number: int) -> tuple[ClientTurn, int]:
        """Return a turn with only the prompt of answer `number`, and the answer's number for this prompt."""
        if not self.prompts:
            return self, number
        which, own = divmod(number, self.n // len(self.prompts))
        prompt = self.prompts[which]
        text, tokens = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        return msgspec.structs.replace(self, text=text, tokens=tokens, prompts=()), own


#: The code of a `Fault` that says that no worker, or no NATS server, can be reached.
NO_WORKER: Final = "no_worker"


class NotStoredError(NoWorkerError):
    """The NATS server stores nothing, so requests and answers wait."""

    def __init__(self, refusal: str = "") -> None:
        """`refusal` is why JetStream stores nothing, if it has said so."""
        super().__init__(unstored(refusal))
        self.refusal = refusal


class Fault(Exception):  # noqa: N818  # an outcome that each dialect writes in its own shape
    """The error of a request, with its HTTP status and OpenAI's type, code and parameter."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        limit: TokenLimit | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`limit`: the tokens of a prompt that is too long and the context length, if these are known.

        `retry_after_s`: when the client should send the same request again.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.limit = limit
        self.retry_after_s = retry_after_s

    @property
    def sentence(self) -> str:
        """The message, with the name of the wrong field, for APIs whose errors have no place for it."""
        is_named = self.param is None or self.param in self.message
        return self.message if is_named else f"{self.param}: {self.message}"

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the error: `retry-after`, if the client should send the request again."""
        return {} if self.retry_after_s is None else {"retry-after": str(math.ceil(self.retry_after_s))}


def refused(message: str, param: str | None = None, code: str | None = None) -> Fault:
    """Build the `Fault`, with status 400, of a request that is invalid or not supported."""
    return Fault(400, message, param=param, code=code)


@contextlib.contextmanager
def parts_checked() -> Iterator[None]:
    """Convert a `ContentError` that the block raises, for a part of a message's content, to a `Fault`."""
    try:
        yield
    except ContentError as error:
        raise refused(str(error), error.where) from None


def warning_header(warnings: Sequence[ContentWarning]) -> dict[str, str]:
    """Return the response header with a request's warnings; empty if there are none."""
    shown = _UNSHOWN.sub("?", "; ".join(sentences(warnings)))
    return {WARNINGS: shown[:_MOST_SHOWN]} if shown else {}


def decoded(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Decode a request's body; unpaired surrogates become replacement characters. Raises `Fault`."""
    try:
        return decoder.decode(body)
    except RecursionError:
        raise refused("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise refused(str(error), field_of(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        mended = _ESCAPE.sub(lambda found: _REPLACEMENT if found[1] else found[0], body)
        if mended != body:
            return decoded(decoder, mended)
        raise refused(f"the body is not JSON: {error}") from None


def as_whole(kind: type, given: Any) -> Any:
    """Convert a number to `WholeNumber`: a `dec_hook` for msgspec's decoders. Raises `ValueError`."""
    if (
        kind is WholeNumber
        and isinstance(given, int | float)
        and not isinstance(given, bool)
        and given == given // 1
    ):
        return WholeNumber(given)
    found = {str: "str", bool: "bool", float: "float", list: "array", dict: "object"}.get(type(given))
    raise ValueError(f"Expected `int | null`, got `{found}`")


def number_in(query: Mapping[str, str], name: str) -> int | None:
    """Return a whole number from the query of a request's URL; None if it is missing. Raises `Fault`."""
    if (given := query.get(name)) is None:
        return None
    if _NUMBER.fullmatch(given) is None:
        raise refused(f"{name} must be a whole number", name)
    return int(given)


def prefilled(messages: list[Message], options: dict[str, Any]) -> tuple[tuple[Message, ...], dict[str, Any]]:
    """Return the messages without a final one of the assistant, and options that make it the answer's prefix.

    Such an answer has no reasoning. If the last message is another role's, return both as they are. Raises
    `Fault` if the final message cannot be a prefix.
    """
    *before, last = messages
    if last.role != "assistant":
        return tuple(messages), options
    why = None
    if not before:
        why = "there is no message before the assistant's"
    elif isinstance(last.content, tuple):
        why = "an answer cannot begin with an image: the last message is the assistant's"
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


def check(turn: ClientTurn, names: Mapping[str, str]) -> ClientTurn:
    """Return `turn` if its fields are valid, else raise `Fault`; `names` has the dialect's field names."""
    if len(turn.model) > _MOST_NAME:
        raise refused(f"model has {len(turn.model)} characters; the most are {_MOST_NAME}", "model")
    each = turn.n // (len(turn.prompts) or 1)
    try:
        for number in range(0, turn.n, max(1, each)):
            one, _ = turn.alone(number)
            build(Generate, messages=one.messages, text=one.text, tokens=one.tokens, **one.options)
    except InvalidMessageError as error:
        raise renamed(refused(str(error), error.field), names) from None
    if not 1 <= each <= MOST_ANSWERS:
        raise refused(f"n must be 1 to {MOST_ANSWERS}, not {each}", "n")
    return turn


def check_results(turn: ClientTurn, names: Mapping[str, str]) -> ClientTurn:
    """Return `turn` if each tool's result follows its call, else raise `Fault`; `names` as in `check`.

    A result without an id is given to its call by the chat template.
    """
    called = set[str]()
    for message in turn.messages or ():
        called.update(call.id for call in message.tool_calls or ())
        wanted = message.tool_call_id if message.role == "tool" else None
        if wanted and wanted not in called:
            why = f"the result of a tool names the call {wanted!r}, which no message before it has"
            raise refused(why, names.get("messages", "messages"))
    return turn


def as_tool(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a function, at the path `where` of the request, as a tool. Raises `Fault` for its name."""
    try:
        msgspec.convert(function, ToolFunction)
    except msgspec.ValidationError:  # dialects have checked the other fields
        raise refused(f"{where}.name must be {TOOL_NAME_RULE}", f"{where}.name") from None
    return {"type": "function", "function": function}


def renamed(fault: Fault, names: Mapping[str, str]) -> Fault:
    """Give a fault's field, in `param` and in the sentence, the dialect's name; return the fault.

    `names` may have paths of fields; of those that a field's path begins with, the longest counts. Without a
    field it is about the messages; if `names` has these, the client's have other numbers, and none is named.
    Changes only faults of an invalid request (400).
    """
    if fault.status == 400 and fault.kind == "invalid_request_error":
        path = fault.param or "messages"
        begins = [path[: one.start()] for one in re.finditer(r"[.\[]|$", path)]
        ours = next((one for one in reversed(begins) if one in names), begins[0])
        theirs = names.get(ours, ours)
        fault.param = theirs if ours in names and ours == "messages" else theirs + path[len(ours) :]
        if fault.code is None:  # else the sentence has words that agents look for
            fault.message = re.sub(rf"\b{re.escape(ours)}\b", lambda _: theirs, fault.message, count=1)
    return fault


def fault_of(error: TurnkeepError) -> Fault:
    """Convert an error of the protocol to a `Fault`, with an HTTP status and OpenAI's type and code."""
    match error:
        case RequestFailedError(code="context_exceeded" | "memory_exceeded"):
            return _too_long(error.message, error.limit)
        case RequestFailedError(code="invalid_request"):
            return refused(error.message, error.field)
        case RequestFailedError(code="overloaded"):
            return Fault(
                429,
                error.message,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=_PAUSE_S,
            )
        case RequestFailedError(code="key_reused"):
            return Fault(422, error.message, code="idempotency_key_reused")
        case RequestFailedError(code="cancelled"):
            return Fault(409, error.message, code="cancelled")
        case ClientClosedError():  # the answer goes on
            message = "the gateway has stopped, or its connection to the NATS server was closed"
            message += "; send the request again"
            return Fault(503, message, kind="server_error", code=NO_WORKER, retry_after_s=_PAUSE_S)
        case NotStoredError():
            remedy = " Free space there (see the runbook), or start more servers of its cluster,"
            message = f"{error}{'; see the runbook,' if error.refusal else remedy} then send this again"
            return Fault(503, message, kind="server_error", code=NO_WORKER, retry_after_s=_START_S)
        case FullServerError():
            message = "the NATS server has no connection left; close some, or raise its max_connections"
            return Fault(503, message, kind="server_error", code=NO_WORKER, retry_after_s=_START_S)
        case NoWorkerError():
            missing = "NATS server can be reached" if isinstance(error, NoServerError) else "worker answers"
            message = f"no {missing}; `turnkeep serve` starts one"
            return Fault(503, message, kind="server_error", code=NO_WORKER, retry_after_s=_START_S)
        case MessageTooLargeError():
            return Fault(413, str(error).partition(": send it")[0], code="request_too_large")
    # A request was valid, so an invalid message is the worker's.
    whose = "the worker sent an invalid message: " if isinstance(error, InvalidMessageError) else ""
    return Fault(500, f"{whose}{error}", kind="server_error")


def _too_long(message: str, limit: TokenLimit | None) -> Fault:
    """Build the `Fault` of a too long prompt, in OpenAI's wording: agents compact when they see it."""
    words = f"is exceeded: {message}."
    if limit is not None:
        words = f"is {limit.allowed} tokens. However, your messages resulted in {limit.asked} tokens."
    return Fault(
        400,
        f"This model's maximum context length {words} Please reduce the length of the messages.",
        param="messages",
        code="context_length_exceeded",
        limit=limit,
    )
