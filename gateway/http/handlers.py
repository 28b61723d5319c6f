"""Serves the routes of all dialects, and defines what a dialect is: a folder whose `routes` has a `Dialect`.

`Handlers` uses dialects only through `Form`, and sessions only through `Conversations`. `app` lists the
dialects; nothing else imports them.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import msgspec
from starlette.exceptions import HTTPException

from gateway import images, logged_answers, models
from gateway.answer_lookup import AnswerLookup, after, own_id
from gateway.form import EVENT_STREAM
from gateway.models import Models
from gateway.turn import SNAPSHOTS, check_results, fault_of, refused, renamed, warning_header
from turnkeep_client.errors import NoWorkerError, TurnkeepError

from . import bodies
from .answer_response import Accounting, AnswerResponse, unless_left
from .bodies import as_json
from .durable import DurableRead

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from gateway.answer_lookup import LocatedAnswer
    from gateway.connections import Connections
    from gateway.event_ids import Cursor
    from gateway.form import Body, Form
    from gateway.image_fetcher import ImageFetcher
    from gateway.keys import ApiKey
    from gateway.logged_answers import LoggedAnswer
    from gateway.metrics import Counters
    from gateway.models import GatewayModel
    from gateway.turn import ClientTurn, Fault
    from turnkeep_client.client import Client

    from .access import Access


class Handlers:
    """The handlers of all dialects' routes. All raise `Fault` and `TurnkeepError`. Event loop only."""

    def __init__(
        self,
        access: Access,
        connections: Connections,
        counters: Counters,
        *,
        explain: bool,
        max_body_bytes: int,
        patience_s: float,
        fetcher: ImageFetcher,
    ) -> None:
        """Requests wait up to `patience_s` for a worker that restarts. `fetcher` gets images by their URLs.

        With `explain`, a header says how much of a conversation was found.
        """
        self._access = access
        self._connections = connections
        self._counters = counters
        self._explain = explain
        self._max_body_bytes = max_body_bytes
        self._patience_s = patience_s
        self._fetcher = fetcher
        self.listing = Models(connections)
        self._lookups = AnswerLookup(connections)

    async def answer(self, form: Form, request: Request) -> Response:
        """Answer a request: by a new answer, or one from the log that it repeats, resumes or names by a key.

        A request without a prompt only loads or unloads a model.
        """
        key = self._access.key(request)
        with contextlib.ExitStack() as running:
            running.enter_context(key.one_request())
            body = await self._body(request)
            model, digest = self.listing.chosen(body), logged_answers.digest(form.name, body)
            if (loading := form.loading(body)) is not None:
                await self._load(key, model, unloads=loading.unloads)
                return as_json(loading.body)
            if cut := await self._lookups.find_resumed(key.tenant, request.headers, digest):
                turn = form.read(body)
                return self._followed(form, *cut, self._accounting(key, running), stream=turn.stream)
            key_id = await self._lookups.key_id(key.tenant, request.headers, model)
            turn = _with_snapshots(await self._turn(key.tenant, form, body), request)
            if key_id and turn.n > 1:
                raise refused("n must be 1 with an Idempotency-Key", "n")
            conversations = await self._connections.of(key.tenant, model)
            worker = await conversations.latest.storing(patience_s=self._patience_s)
            await conversations.latest.loadable()
            turn = msgspec.structs.replace(
                turn,
                model=turn.model or worker.model,
                warnings=images.true_warnings(turn.warnings, sees=worker.vision),
            )
            await conversations.start()
            note = logged_answers.new_note(key_id or uuid4().hex, int(time.time()), turn, form.name, digest)
            accounting = self._accounting(key, running)
            stays = bool(turn.asked.get("background"))
            begin = partial(conversations.answer, turn, accounting.note, note, key_id, stays=stays)
            return AnswerResponse(form, turn, conversations, accounting, begin)

    async def stored(self, form: Form, request: Request) -> Response:
        """Show the answer `{id}` of the log, whole or as a stream; for DELETE, remove its session."""
        key, wanted, found = await self._found(request, form)
        if request.method == "DELETE":
            await found.conversations.forget(found.answer.session)
            kind = form.name if form.object else f"{form.name}.deleted"
            return as_json({"id": wanted, "object": kind, "deleted": True})
        place = after(found.answer, request.headers, request.query_params)
        is_stream = EVENT_STREAM in request.headers.get("accept", "") or place is not None
        is_stream = is_stream or request.query_params.get("stream") == "true"
        if form.object and not is_stream:
            return as_json(_described(form, wanted, found.answer))
        accounting = self._accounting(key, contextlib.ExitStack())
        return self._followed(form, found, place, accounting, stream=is_stream)

    async def cancel(self, form: Form, request: Request) -> Response:
        """Cancel the answer `{id}` and return it; one that has ended is returned as it is."""
        _, wanted, (conversations, answer) = await self._found(request, form)
        answer = await logged_answers.cancel(conversations.client, answer.id) or answer
        return as_json(_described(form, wanted, answer))

    async def durable(self, form: Form, request: Request) -> Response:
        """Return the events of the answer `{id}` by the Durable Streams protocol."""
        _, _, found = await self._found(request, form)
        return DurableRead(form, found, request.query_params)

    async def part(
        self, of: tuple[Form, Callable[[LoggedAnswer, Mapping[str, str]], Body]], request: Request
    ) -> Response:
        """Return what `of`'s function returns for the answer `{id}` and the query, as JSON."""
        form, write = of
        _, _, found = await self._found(request, form)
        return as_json(write(found.answer, request.query_params))

    async def count(self, form: Form, request: Request) -> Response:
        """Return the number of tokens of a request's prompt, which is not run."""
        key = self._access.key(request)
        with key.one_request():
            body = await self._body(request)
            conversations = await self._connections.of(key.tenant, self.listing.chosen(body))
            turn = await self._turn(key.tenant, form, body)
            sees = (await conversations.latest.worker(patience_s=self._patience_s)).vision
            try:
                counted = {**form.counted, "input_tokens": await conversations.count(turn)}
            except TurnkeepError as error:
                raise renamed(fault_of(error), form.names) from None
            return as_json(counted, more=warning_header(images.true_warnings(turn.warnings, sees=sees)))

    async def ask(
        self, ask: Callable[[Client, bytes], Coroutine[Any, Any, tuple[Body, int]]], request: Request
    ) -> Response:
        """Return the JSON that `ask` returns for a request's body; count its tokens for the key's limit."""
        key = self._access.key(request)
        with key.one_request():
            body = await self._body(request)
            conversations = await self._connections.of(key.tenant, self.listing.chosen(body))
            await conversations.latest.worker(patience_s=self._patience_s)
            reply, num_tokens = await unless_left(request, ask(conversations.client, body))
            key.spend(num_tokens)
            return as_json(reply)

    async def models(self, write: Callable[[Sequence[GatewayModel]], Body], request: Request) -> Response:
        """Return what `write` returns for all models, as JSON."""
        return as_json(write(await self.listing.all(self._access.key(request).tenant)))

    async def model(self, write: Callable[[GatewayModel], Body], request: Request) -> Response:
        """Return what `write` returns for the model that the path (`{model}`) or the body names, as JSON."""
        key, named = self._access.key(request), request.path_params.get("model")
        if named is None:
            named = models.wanted(await self._body(request))
        return as_json(write(await self.listing.one(key.tenant, named)))

    async def fixed(self, write: Callable[[Mapping[str, str]], Body], request: Request) -> Response:
        """Return what `write` returns for the parameters of the path, as JSON; `write` can raise `Fault`."""
        self._access.key(request)
        return as_json(write(request.path_params))

    async def absent(self, _of: None, _: Request) -> Response:
        """Raise the error of a path that is not served (404)."""
        raise HTTPException(404)

    async def _body(self, request: Request) -> bytes:
        return await bodies.read(request, self._max_body_bytes)

    async def _turn(self, tenant: str, form: Form, body: bytes) -> ClientTurn:
        """Parse a request, preceded by the conversation that it continues. Raises `Fault`."""
        named = form.object.named(body) if form.object else set()
        answers = await self._lookups.answers(tenant, named) if named else {}
        turn = form.object.read(body, answers) if form.object and answers else form.read(body)
        turn = await self._fetcher.fetched(turn)
        if turn.previous:
            found = await self._lookups.find(tenant, turn.previous)
            turn = logged_answers.continued(turn, found and found.answer)
            if found is not None:
                before = found.conversations.client.session(found.answer.session)
                turn = msgspec.structs.replace(turn, earlier_image=before.image)
        return check_results(turn, form.names)

    async def _load(self, key: ApiKey, model: str, *, unloads: bool) -> None:
        """Load or unload a model; with API keys do neither, as the model is not one tenant's."""
        if self._access.keys.are_needed:
            return
        client = (await self._connections.of(key.tenant, model)).client
        if unloads:
            await client.unload()
        else:
            with contextlib.suppress(NoWorkerError):  # the first request with a prompt says so
                await client.load()

    async def _found(self, request: Request, form: Form) -> tuple[ApiKey, str, LocatedAnswer]:
        """Return a request's key, the id in its path, and the answer of the log that has it."""
        key, wanted = self._access.key(request), request.path_params["id"]
        kept = self._lookups.find_kept(key.tenant, wanted, form.name, conversation=form.object is not None)
        return key, wanted, await kept

    def _accounting(self, key: ApiKey, running: contextlib.ExitStack) -> Accounting:
        return Accounting(key, self._counters, self._explain, running.pop_all())

    def _followed(
        self, form: Form, found: LocatedAnswer, after: Cursor | None, accounting: Accounting, *, stream: bool
    ) -> Response:
        conversations, answer = found
        turn = msgspec.structs.replace(answer.turn, stream=stream)
        follow = partial(conversations.follow, answer)
        return AnswerResponse(form, turn, conversations, accounting, follow, after)


def _with_snapshots(turn: ClientTurn, request: Request) -> ClientTurn:
    """Return a turn without snapshots if a header of its request says `none`. Raises `Fault`."""
    wanted = request.headers.get(SNAPSHOTS)
    if wanted not in (None, "none"):
        raise refused(f"{SNAPSHOTS} can only be none", SNAPSHOTS)
    return turn if wanted is None else msgspec.structs.replace(turn, has_snapshots=False)


def _described(form: Form, wanted: str, answer: LoggedAnswer) -> dict[str, Any]:
    """Describe the answer with the id `wanted`: as the API's object, or whether it runs."""
    if form.object is None:
        return {"id": wanted, "object": form.name, "is_running": answer.result is None}
    return form.object.write(answer.turn, own_id(wanted), answer.note.created, answer.result)


class Route(NamedTuple):
    """One path and the method of `Handlers` that serves it."""

    path: str
    #: The HTTP methods.
    methods: Sequence[str]
    handler: Callable[[Handlers, Any, Request], Coroutine[Any, Any, Response]]
    #: The handler's first argument, such as an API's `Form`.
    of: Any
    #: A line for the guide.
    summary: str
    #: The type of the request's body; None without a body.
    request: type | None = None


class Dialect(NamedTuple):
    """One HTTP API."""

    #: Writes an error as this API's JSON, for requests that have `header` or whose path begins with `prefix`.
    error: Callable[[Fault], Body]
    #: Where paths begin whose errors are this API's, served or not.
    prefix: str
    routes: Sequence[Route]
    #: A request header that only this API's clients send; empty without one.
    header: str = ""
    #: A request header in which clients can send their API key; empty without one.
    key_header: str = ""


def routes_of_answers(path: str, form: Form, summary: str, request: type) -> list[Route]:
    """Return the routes that create an answer, show or delete it later by its id, and cancel it."""
    named = f"{path}/{{id}}"
    shown = "An answer that is in the log, whole or as a stream"
    return [
        Route(path, ["POST"], Handlers.answer, form, summary, request),
        Route(named, ["GET", "DELETE"], Handlers.stored, form, shown),
        Route(f"{named}/cancel", ["POST"], Handlers.cancel, form, "End an answer that runs"),
    ]
