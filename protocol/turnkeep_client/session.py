"""One session of a client: each method is one request, or one question to the worker that holds it.

Builds requests and names their results; `calls` and `generation` carry them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack
from uuid import uuid4

from .calls import Outboxes, Pending, Wire, expect
from .generation import Generation
from .messages import (
    Append,
    Appended,
    CachePolicy,
    Cancelled,
    CancelRequest,
    Close,
    Closed,
    ControlReply,
    ControlRequest,
    Generate,
    InfoRequest,
    Message,
    Open,
    Opened,
    Pinned,
    PinRequest,
    Request,
    Rewind,
    Rewound,
    SessionInfo,
    Unpinned,
    UnpinRequest,
    decode_control_reply,
    decode_request,
    encode,
)
from .subjects import check_id

if TYPE_CHECKING:
    from .subjects import SessionKey

#: Chat messages as our own type or as dicts in OpenAI's shape.
Messages = Sequence[Message | Mapping[str, Any]]


class Sampling(TypedDict, total=False):
    """The options of a generate; what is left out has the default of `messages.Generate`."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop: Sequence[str] | str
    raw: bool
    special_tokens: bool | None
    deadline_s: float | None
    priority: int


class Session:
    """A session by its name. Holds nothing: two objects for one session are as good as one.

    Every method that takes a `request_id` makes one up where it is left out. Repeating a request under its
    id is safe: it is answered from the record. `timeout_s` counts from the call to the result; without it a
    call waits for as long as it takes, over restarts of worker and server. All raise `InvalidMessageError`,
    `RequestFailedError` (the worker refused; its `code` says why), `NoWorkerError`, `NotPermittedError` and
    `ResultTimeoutError`.
    """

    def __init__(self, wire: Wire, outboxes: Outboxes, key: SessionKey, control_timeout_s: float) -> None:
        self.key = key
        self._wire = wire
        self._outboxes = outboxes
        self._control_timeout_s = control_timeout_s

    async def open(
        self,
        cache: CachePolicy | None = None,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Opened:
        """Start the session explicitly; only as its first request, or after `close`."""
        return expect(Opened, await self._call(build(Open, request_id, cache=cache), timeout_s))

    async def append(
        self,
        *,
        messages: Messages | None = None,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        special_tokens: bool | None = None,
        request_id: str | None = None,
        expect_position: int | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Appended:
        """Add exactly one of `messages`, `text`, `tokens` and wait until it is prefilled.

        With `special_tokens` what is written like a special token in messages is one: for trusted ones only.
        After `deadline_s` the worker gives it up, where `timeout_s` only ends the wait.
        """
        request = build(
            Append,
            request_id,
            messages=messages,
            text=text,
            tokens=tokens,
            special_tokens=special_tokens,
            expect_position=expect_position,
            deadline_s=deadline_s,
            priority=priority,
        )
        return expect(Appended, await self._call(request, timeout_s))

    def generate(
        self,
        *,
        messages: Messages | None = None,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        request_id: str | None = None,
        expect_position: int | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Prepare a generate, after appending at most one of `messages`, `text`, `tokens`.

        Iterating over it or awaiting it sends it. Raises `InvalidMessageError` at once.
        """
        request = build(
            Generate,
            request_id,
            messages=messages,
            text=text,
            tokens=tokens,
            expect_position=expect_position,
            **sampling,
        )
        return Generation(self._pending(request, timeout_s), self._wire, self.cancel)

    async def rewind(
        self,
        position: int,
        *,
        request_id: str | None = None,
        expect_position: int | None = None,
        timeout_s: float | None = None,
    ) -> Rewound:
        """Forget every token from `position` on."""
        request = build(Rewind, request_id, position=position, expect_position=expect_position)
        return expect(Rewound, await self._call(request, timeout_s))

    async def close(
        self, *, forget: bool = False, request_id: str | None = None, timeout_s: float | None = None
    ) -> Closed:
        """End the session; `forget` removes its snapshots too. Only `open` can use its name again."""
        request = build(Close, request_id, forget=forget or None)
        return expect(Closed, await self._call(request, timeout_s))

    async def info(self, *, skip: int = 0, limit: int = 100) -> SessionInfo:
        """Return the session's state, from the worker that holds it.

        It names at most `limit` of the requests that wait, behind the first `skip`, and counts all.
        """
        return expect(SessionInfo, await self._control(InfoRequest(skip=skip, limit=limit)))

    async def cancel(self, request_id: str) -> Cancelled:
        """Stop a waiting or running request of the session."""
        return expect(Cancelled, await self._control(CancelRequest(id=check_id("request id", request_id))))

    async def pin(self, position: int | None = None) -> Pinned:
        """Keep the session's first `position` tokens on the worker's disk (None: all) until `unpin`."""
        return expect(Pinned, await self._control(PinRequest(position=position)))

    async def unpin(self, position: int | None = None) -> Unpinned:
        """Let go of the pinned prefixes of the session, or of the one with `position` tokens."""
        return expect(Unpinned, await self._control(UnpinRequest(position=position)))

    async def _call(self, request: Request, timeout_s: float | None) -> Any:
        return await self._pending(request, timeout_s)

    def _pending(self, request: Request, timeout_s: float | None) -> Pending:
        return Pending(self._wire, self._outboxes, self.key, request, timeout_s=timeout_s)

    async def _control(self, request: ControlRequest) -> ControlReply:
        subject = self._wire.subjects.of(self.key, "ctl")
        return decode_control_reply(await self._wire.ask(subject, encode(request), self._control_timeout_s))


_Q = TypeVar("_Q", Open, Append, Generate, Rewind, Close)


def build(kind: type[_Q], request_id: str | None = None, **fields: Any) -> _Q:
    """Make a request, None meaning left out; raises `InvalidMessageError` as the worker would answer."""
    given = {name: value for name, value in fields.items() if value is not None}
    tag = kind.__struct_config__.tag
    request = decode_request(encode({"type": tag, "id": request_id or uuid4().hex, **given}))
    if not isinstance(request, kind):  # the tag says that it is
        raise TypeError(request)
    return request
