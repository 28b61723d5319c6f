"""Converts a session's turns to what the page shows: no token ids, and answers parsed as Markdown. Pure."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003  # msgspec reads the annotations
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from msgspec import Struct

from ops.log.conversation import taken_over
from turnkeep_client.images import images_in, text_in
from turnkeep_client.messages import (
    Append,
    Appended,
    Failed,
    Generate,
    Generated,
    Open,
    Opened,
    Rewind,
    Rewound,
    UnknownResult,
    Usage,
)

from .markdown import rendered

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ops.log.conversation import LoggedTurn
    from turnkeep_client.history import Turn as Past
    from turnkeep_client.messages import Called, Message, Request, Result, ToolCall

    from .markdown import Node


#: The note to show for each finish reason of an answer.
_ENDS: Final = {
    "stop": "",
    "length": "cut: no more tokens were allowed",
    "cancelled": "stopped",
    "expired": "ended at its deadline",
    "tool_calls": "",
    "model_changed": "cut: the model was changed",
    "given_up": "given up by the worker",
}


class ShownCall(NamedTuple):
    """A tool call of the model."""

    name: str
    arguments: str


class ShownMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of a turn. An answer has `text` and the same text as Markdown `blocks`.

    `images` has the digests of its images.
    """

    role: str
    text: str = ""
    images: tuple[str, ...] = ()
    blocks: tuple[Node, ...] = ()
    reasoning: str = ""
    calls: tuple[ShownCall, ...] = ()


class ShownCost(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cost of a turn: tokens (`found` in KV, prefilled, generated), seconds, and decoded tokens/s.

    `images` counts the tokens of the turn's images.
    """

    found: int
    prefilled: int
    images: int = 0
    generated: int | None = None
    first_token_s: float | None = None
    tokens_per_s: float | None = None
    total_s: float


class ShownTurn(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn as the page shows it. `note` says what a turn without text did, or why and how a turn ended.

    `model` names the model that has answered. A turn that a fork has from its parent has no `stored`. `start`
    is the session's position before the turn; None if the chat template has changed earlier text since, or
    if it is unknown. `kept` is how many of the tokens before the turn stayed.
    """

    seq: int
    id: str | None
    kind: str
    stored: datetime | None = None
    state: Literal["waiting", "done", "failed"]
    said: tuple[ShownMessage, ...] = ()
    model: str | None = None
    note: str = ""
    parent: str | None = None
    position: int | None = None
    start: int | None = None
    kept: int | None = None
    spent: ShownCost | None = None


def shown(turn: LoggedTurn) -> ShownTurn:
    """Return a turn as the page shows it: waiting, done or failed, with texts, notes and cost."""
    request, result = turn.request, turn.result
    has_failed = isinstance(result, Failed) or request is None
    start, kept = _places(result)
    change = taken_over(result) if isinstance(result, Appended | Generated) else ""
    return ShownTurn(
        seq=turn.seq,
        id=request.id if request else None,
        kind=str(request.__struct_config__.tag) if request else "invalid",
        stored=turn.stored,
        state="failed" if has_failed else "done" if result else "waiting",
        said=tuple(_said(request, result)),
        model=turn.model,
        note=", ".join(filter(None, (_note(request, result), change))),
        parent=result.parent.session if isinstance(result, Opened) and result.parent else None,
        position=result.position if result else None,
        start=start,
        kept=kept,
        spent=_spent(result),
    )


def inherited(turn: Past) -> ShownTurn:
    """Return a turn that a fork has from its parent as the page shows it, without id and time."""
    start, kept = _places(turn.answer)
    model = turn.answer.model if turn.answer else None
    return ShownTurn(
        seq=turn.seq,
        id=None,
        kind=str(turn.request.__struct_config__.tag),
        state="done",
        said=tuple(_said(turn.request, turn.answer)),
        model=model.name if model else None,
        note=_note(turn.request, turn.answer),
        position=turn.position,
        start=start,
        kept=kept,
        spent=_spent(turn.answer),
    )


def _places(result: Result | None) -> tuple[int | None, int | None]:
    """Return `start` and `kept` of a turn with this result; see `ShownTurn`."""
    if result is None or result.repeat_of is not None:
        return None, None
    match result:
        case Failed(position=position):
            return position, None
        case Appended(change=change) | Generated(change=change) if change is not None:
            return change.kept if result.rewritten_from is None else None, change.kept
        case Generated(position=position, tokens=()):
            return position, None
        case Rewound(position=position):
            return None, position
    return None, None


def _said(request: Request | None, result: Result | None) -> Iterator[ShownMessage]:
    if isinstance(request, Append | Generate):
        yield from map(_message, request.messages or ())
        if request.text:
            yield ShownMessage(role="text", text=request.text)
        if request.tokens:
            yield ShownMessage(role="tokens", text=f"{len(request.tokens)} tokens by their ids")
    if isinstance(result, Generated) and result.repeat_of is None:
        text = (request.prefix if isinstance(request, Generate) else "") + result.text
        yield ShownMessage(
            role="assistant",
            text=text,
            blocks=rendered(text),
            reasoning=result.reasoning,
            calls=_calls(result.tool_calls),
        )


def _message(message: Message) -> ShownMessage:
    text = text_in(message.content)
    blocks = rendered(text) if message.role == "assistant" else ()
    calls = _calls(message.tool_calls or ())
    images = tuple(images_in(message.content))
    return ShownMessage(role=message.role, text=text, images=images, blocks=blocks, calls=calls)


def _calls(calls: Iterable[ToolCall | Called]) -> tuple[ShownCall, ...]:
    return tuple(ShownCall(one.function.name, one.function.arguments) for one in calls)


def _note(request: Request | None, result: Result | None) -> str:
    match request, result:
        case None, None:
            return "not a valid request"
        case _, Failed(code="context_exceeded", message=message):
            return (
                message.partition("; ")[0].rpartition(": ")[0] or message
            )  # the page has buttons for what to do
        case _, Failed(code=code, message=message):
            return f"{code}: {message}"
        case _, UnknownResult(type=kind):
            return f"{kind}, of a newer version"
        case _, Generated(repeat_of=None, finish_reason=reason):
            return _ENDS.get(reason, f"ended: {reason}")
        case _, None:
            return ""
        case _, result if result.repeat_of is not None:
            return "sent again; answered from the record"
        case Rewind(position=position), _:
            return f"went back to position {position}"
        case Open(from_=None), _:
            return "opened"
        case Open(), Opened(position=0):
            return "begins anew, beside another session"
        case Open(), Opened(position=position):
            return f"begins with {position} tokens of another session"
        case _, Appended():
            return ""
        case _, result:
            return str(result.__struct_config__.tag)


def _spent(result: Any) -> ShownCost | None:
    match result:
        case Generated(usage=Usage(prefilled_tokens=0, completion_tokens=0)):
            return None  # cancelled while it waited
        case Generated(repeat_of=None, usage=used, seconds=took):
            decoding_s, num = took.total - took.first_token, used.completion_tokens - 1
            return ShownCost(
                found=used.cached_tokens,
                prefilled=used.prefilled_tokens,
                images=_of_images(result),
                generated=used.completion_tokens,
                first_token_s=took.first_token if used.completion_tokens else None,
                tokens_per_s=num / decoding_s if num > 0 and decoding_s > 0 else None,
                total_s=took.total,
            )
        case Appended(repeat_of=None):
            return ShownCost(
                found=result.cached_tokens,
                prefilled=result.prefilled_tokens,
                images=_of_images(result),
                total_s=result.seconds,
            )
    return None


def _of_images(result: Appended | Generated) -> int:
    return sum(one.end - one.start for one in result.change.images) if result.change else 0
