"""One session of a client: each method sends a request, or a control request to the session's worker.

Builds the requests and gives their results types; `calls` and `generation` send the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack
from uuid import uuid4

from msgspec import UNSET
from msgspec.structs import force_setattr

from .calls import Call, ResultFeeds, expect
from .errors import InvalidMessageError, NoWorkerError, RequestFailedError, TurnkeepError
from .formats import response_format as as_format
from .generation import STOP_S, Generation
from .history import History, read_history
from .images import files_of
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
    Counted,
    CountRequest,
    ForkPoint,
    Generate,
    Generated,
    InfoRequest,
    Message,
    Open,
    Opened,
    Request,
    Rewind,
    Rewound,
    SessionCache,
    SessionInfo,
    Tool,
    decode_control_reply,
    decode_request,
    encode,
)
from .options import check_options
from .stream import LogStream
from .subjects import SessionKey, check_id

if TYPE_CHECKING:
    from .sampling import Sampling
    from .wire import NatsWire

#: After this time without a reply a control request is sent once more.
AGAIN_S: Final = 2.0
#: Chat messages, as `messages.Message` or as dicts in OpenAI's shape.
Messages = Sequence[Message | Mapping[str, Any]]
#: A cache policy, as `messages.CachePolicy` or as a dict of its fields.
Cache = CachePolicy | Mapping[str, Any]


class Session:
    """A session by its name. Several objects may represent the same session.

    A `request_id` that is left out is generated. Repeating a request under its id is safe: the worker answers
    with the recorded result. `timeout_s` is how long a call waits for its result, from when it is awaited,
    across restarts of worker and server; while an answer is streamed, how long for its next chunk. It
    defaults to the client's (10 minutes); `math.inf` is no limit. All methods raise `InvalidMessageError`,
    `RequestFailedError` (the worker refused; `code` says why), `NoWorkerError`, `NotPermittedError` and
    `ResultTimeoutError`.
    """

    def __init__(
        self,
        wire: NatsWire,
        feeds: ResultFeeds,
        key: SessionKey,
        control_timeout_s: float,
        cache: Cache | None = None,
    ) -> None:
        """With `cache` the session is opened under this policy before its first append or generate."""
        self.key = key
        self._cache = None if cache is None else build(Open, cache=_fields(cache)).cache
        self._is_begun = cache is None
        self._beginning = asyncio.Lock()
        self._wire = wire
        self._feeds = feeds
        self._control_timeout_s = control_timeout_s

    @property
    def connected(self) -> bool:
        """Whether the session's client is connected now."""
        return self._wire.connected

    async def open(
        self,
        cache: Cache | None = None,
        *,
        fork_of: ForkPoint | None = None,
        tags: Sequence[str] = (),
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Opened:
        """Start the session explicitly. This must be its first request, or the first one after `close`.

        Without `cache` the session gets this object's policy, or the worker's default. With `fork_of` it
        begins with tokens of another session, under that session's policy: see `fork`. `tags` are names under
        which `turnkeep sessions` finds it.
        """
        asked = self._cache if cache is None and fork_of is None else cache and _fields(cache)
        request = build(Open, request_id, cache=asked, tags=tags, **{"from": fork_of})
        opened = expect(Opened, await self._call(request, timeout_s))
        self._is_begun = True
        return opened

    async def append(
        self,
        *,
        messages: Messages | None = None,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        special_tokens: bool | None = None,
        request_id: str | None = None,
        expect_position: int | None = None,
        deadline_s: float | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Appended:
        """Add exactly one of `messages`, `text`, `tokens` and wait until it is prefilled.

        `tools` and `chat_template_kwargs` become those of the session. `special_tokens` parses special tokens
        that are spelled out in messages: for trusted messages only. After `deadline_s` the worker drops the
        request; `timeout_s` only ends the wait. `headers` are headers of the NATS message; a `traceparent`
        adds the worker's spans to the caller's trace.
        """
        request = build(
            Append,
            request_id,
            messages=messages,
            text=text,
            tokens=tokens,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            special_tokens=special_tokens,
            expect_position=expect_position,
            deadline_s=deadline_s,
            priority=priority,
        )
        return expect(Appended, await self._call(request, timeout_s, self._begin, headers))

    def generate(
        self,
        *,
        messages: Messages | None = None,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        request_id: str | None = None,
        expect_position: int | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Prepare a generate, which first appends at most one of `messages`, `text`, `tokens`.

        Iterate over the result or await it to send the request; in an `async with` block, leaving early
        cancels the answer. `headers` as for `append`. A `response_format` may be a type too: see
        `formats.response_format` and `Generated.parsed`. Raises `InvalidMessageError` at once.
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
        call = self._call(request, timeout_s, self._begin, headers)
        return Generation(call, self._wire, self.cancel)

    def follow(self, request: Generate, seq: int) -> Generation:
        """Return the `Generation` of a generate that is already in the log, at `seq`; publish nothing."""
        call = self._call(request, None)
        call.seq = seq
        return Generation(call, self._wire, self.cancel, is_late=True)

    async def rewind(
        self,
        position: int,
        *,
        request_id: str | None = None,
        expect_position: int | None = None,
        timeout_s: float | None = None,
    ) -> Rewound:
        """Drop all tokens of the session from `position` on; return the session's new state."""
        request = build(Rewind, request_id, position=position, expect_position=expect_position)
        return expect(Rewound, await self._call(request, timeout_s))

    async def fork(
        self,
        name: str,
        position: int | None = None,
        *,
        tags: Sequence[str] = (),
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Session:
        """Open the session `name`, of the same tenant, with the first `position` tokens of this one.

        Without `position` it begins with all tokens that this session has after its last result. The fork
        shares nothing with this session: both may continue, and either may be closed or forgotten.
        """
        session = self._beside(name)
        point = ForkPoint(session=self.key.session, position=position)
        await session.open(fork_of=point, tags=tags, request_id=request_id, timeout_s=timeout_s)
        return session

    async def samples(
        self,
        n: int,
        *,
        messages: Messages | None = None,
        text: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> list[Generated]:
        """Return `n` answers to one prompt; the session, which must be open, does not change.

        Each answer is generated in a fork of the session. The fork is removed afterwards, also if the call
        fails or is cancelled, which takes about a second at most. The prompt is prefilled once. Answer number
        i, from 0, is sampled with the seed `seed + i`.
        """
        check_options(n=n)
        seed, ends = sampling.pop("seed", None), uuid4().hex[:12]

        async def sample(number: int) -> Generated:
            fork = self._beside(f"{self.key.session[:40]}-{ends}-{number}")
            own: Any = {**sampling, "seed": None if seed is None else seed + number}
            try:
                await fork.open(fork_of=ForkPoint(session=self.key.session))
                answer = await fork.generate(messages=messages, text=text, **own)
                await fork.close(forget=True, cancel=True)
            except BaseException:
                with suppress(TurnkeepError):  # also if the fork was not opened
                    await fork.close(forget=True, cancel=True, timeout_s=STOP_S)
                raise
            return answer

        try:
            async with asyncio.TaskGroup() as tasks:
                started = [tasks.create_task(sample(number)) for number in range(n)]
        except BaseExceptionGroup as faults:
            raise faults.exceptions[0] from None
        return [task.result() for task in started]

    async def close(
        self,
        *,
        forget: bool = False,
        cancel: bool = False,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> Closed:
        """End the session; `forget` also removes its content, even of a closed session.

        Only `open` can use its name again.
        With `cancel`, appends and generates without a result are cancelled first, even if no worker runs now.
        """
        request = build(Close, request_id, forget=forget or None, cancel=cancel or None)
        return expect(Closed, await self._call(request, timeout_s))

    async def history(self, *, before: float = inf) -> History:
        """Read the conversation from the log, without failed requests and rewound parts.

        Needs no worker. A fork's history begins with its parent's, as long as the parent is in the log. With
        `before`, a stream sequence, return the conversation as it was before that entry of the log.
        """
        check_options(before=before)
        return await read_history(LogStream(self._wire), self.key, before)

    async def image(self, digest: str) -> bytes:
        """Read an image that the conversation names. Raises `InvalidMessageError` if the log has none."""
        found = await LogStream(self._wire).image(self.key, digest)
        if found is None:
            raise InvalidMessageError(f"the log has no image {digest} of the session {self.key}")
        return found

    async def info(self, *, skip: int = 0, limit: int = 100, snapshot: bool = False) -> SessionInfo:
        """Return the session's state, from the worker that serves the session.

        The state counts all waiting requests, and names at most `limit` of them after the first `skip`.
        With `snapshot` it names the longest stored snapshot of the session's KV. An unknown session raises
        `RequestFailedError`.
        """
        request = InfoRequest(skip=skip, limit=limit, snapshot=snapshot)
        return expect(SessionInfo, await self._control(request))

    async def cancel(self, request_id: str) -> Cancelled:
        """Stop a waiting or running request of the session; return the state that it was in.

        Its result is in the log by then. Raises `RequestFailedError` if no such request waits or runs.
        """
        return expect(Cancelled, await self._control(CancelRequest(id=check_id("request id", request_id))))

    async def count(
        self,
        *,
        messages: Messages | None = None,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        special_tokens: bool | None = None,
        raw: bool = False,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Counted:
        """Count the tokens that a generate with this input would add, without running it.

        Images are stored in the log, as by a generate.
        """
        asked = build(
            Generate,
            messages=messages,
            text=text,
            tokens=tokens,
            special_tokens=special_tokens,
            raw=raw,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        request = CountRequest(**{name: getattr(asked, name) for name in CountRequest.__struct_fields__})
        await self._wire.store_images(self.key, files_of(request), self._feeds.timeout_s)
        return expect(Counted, await self._control(request))

    def _beside(self, name: str) -> Session:
        """Return the session `name` of the same tenant."""
        key = SessionKey(self.key.tenant, check_id("session", name))
        return Session(self._wire, self._feeds, key, self._control_timeout_s)

    def _call(
        self,
        request: Request,
        timeout_s: float | None,
        before: Callable[[], Awaitable[None]] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Call:
        return Call(
            self._wire,
            self._feeds,
            self.key,
            request,
            timeout_s=timeout_s,
            before=before,
            headers=headers,
        )

    async def _begin(self) -> None:
        """Open the session under this object's policy, unless it is already open under that policy."""
        async with self._beginning:
            if self._is_begun:
                return
            asked, found = self._cache or CachePolicy(), await self._policy()
            if found is None:
                try:
                    await self.open(timeout_s=inf)  # the turn's own limit ends it
                except RequestFailedError as refusal:  # another object may have opened the session
                    found = await self._policy() if refusal.code == "invalid_request" else None
                    if found is None:
                        raise
                else:
                    return
            wanted = SessionCache.of(asked) or SessionCache(policy=found.policy, snapshots=asked.snapshots)
            if wanted != found and (asked.policy or wanted.snapshots != found.snapshots):
                raise RequestFailedError(
                    "invalid_request",
                    f"the session is open under {found}, not under {wanted}: close it first, or take"
                    " another name",
                    retryable=False,
                )
            self._is_begun = True

    async def _policy(self) -> SessionCache | None:
        """Return the session's policy; None if the session does not exist yet, or no worker answers."""
        try:
            info = await self.info(limit=0)
        except (RequestFailedError, NoWorkerError):
            return None
        if not info.requests:  # its first request still waits
            return None
        return SessionCache(policy=info.policy) if info.cache is UNSET else info.cache

    async def _control(self, request: ControlRequest) -> ControlReply:
        """Ask the worker; without a reply ask again after 2, 4, 8 ... s, and return the first reply.

        A worker that was killed keeps its connection until its memory is freed, and loses what it gets then.
        """
        subject, patience_s = self._wire.subjects.of(self.key, "ctl"), AGAIN_S
        loop, asked = asyncio.get_running_loop(), list[asyncio.Task[bytes]]()
        try:
            while not (replied := [one for one in asked if one.done()]):
                call = self._wire.ask(subject, encode(request), self._control_timeout_s)
                asked.append(loop.create_task(call))
                await asyncio.wait(asked, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                patience_s *= 2
            return decode_control_reply(replied[0].result())
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)


def _fields(cache: Cache) -> CachePolicy | dict[str, Any]:
    return dict(cache) if isinstance(cache, Mapping) else cache


_Q = TypeVar("_Q", Open, Append, Generate, Rewind, Close)


def build(kind: type[_Q], request_id: str | None = None, **fields: Any) -> _Q:
    """Build a request of the type `kind` from the fields that are not None.

    Raises `InvalidMessageError` if a worker would refuse the request.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if "response_format" in given:
        given["response_format"] = as_format(given["response_format"])
    messages: Any = given.get("messages")
    texts: list[Any] = [given.get("text")]
    if isinstance(messages, Iterable) and not isinstance(messages, str | bytes | Mapping):
        messages = [*messages]
        given["messages"] = [one.sent or one if isinstance(one, Message) else one for one in messages]
        texts += [one.get("content") for one in messages if isinstance(one, Mapping)]
    if any(isinstance(one, bytes) for one in texts):  # which JSON would have in base64
        raise InvalidMessageError("a text must be `str`, not `bytes`: decode it first")
    tag = kind.__struct_config__.tag
    if "id" in given:  # else a repeat would run again under a new id
        raise InvalidMessageError(f"{tag} takes no 'id' here: a request's id is the argument request_id")
    given["id"] = uuid4().hex if request_id is None else request_id
    request = decode_request(encode({"type": tag, **given}))
    if not isinstance(request, kind):  # cannot be: the tag decides
        raise TypeError(request)
    for made, one in zip(getattr(request, "messages", None) or (), messages or (), strict=True):
        if isinstance(one, Message) and one.files:
            force_setattr(made, "files", one.files)
    return request
