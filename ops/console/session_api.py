"""Serves sessions as JSON: the list, a conversation, its variants, its tree of forks, and files of it."""

from __future__ import annotations

import asyncio
import io
import math
import zipfile
from typing import TYPE_CHECKING, Final

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ops.log import conversation, conversation_files, searching, session_file
from ops.log.costs import SessionCosts
from ops.log.sessions import begun, find_session, list_sessions, order, running, trees
from turnkeep_client.images import images_in, media_type
from turnkeep_client.messages import Opened
from turnkeep_client.session_log import read
from turnkeep_client.subjects import session_key

from .json_http import as_json, read_number
from .question_api import PATIENCE_S
from .streams import pieces
from .turns import inherited, shown
from .variants import VARIANT, joined, may_vary, stem, variants

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.requests import Request

    from ops.log.conversation import LoggedTurn
    from turnkeep_client.client import Client
    from turnkeep_client.history import Turn as Past

#: Sessions on one page of the list, and turns on one page of a conversation.
_SESSIONS: Final = 50
_TURNS: Final = 30
#: Most turns of the parent's conversation that are shown with a fork.
_INHERITED: Final = 30
#: First words and parents are read of at most this many sessions, the most recently active ones.
_READ: Final = 1000


class SessionApi:
    """The part of the API that reads the sessions of one tenant. Event loop only."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._costs = SessionCosts(client)

    def routes(self) -> list[Route]:
        """Return the routes, which all need NATS."""
        one = "/api/sessions/{name}"
        return [
            Route("/api/sessions", self._sessions),
            Route(one, self._session),
            Route(f"{one}/tree", self._tree),
            Route(f"{one}/variants", self._variants),
            Route(f"{one}/export", self._export),
            Route(f"{one}/images/{{digest}}", self._image),
        ]

    async def _sessions(self, request: Request) -> Response:
        """Return a page of the list of sessions; the query's `words` and `state` filter the list.

        `words` must be in a session's name or first words or, with `whole`, in any of its texts. With `brief`
        a conversation's variants are one row, of the most recently active one, and costs are left out.
        """
        asked = request.query_params
        words, state = asked.get("words", "").strip().casefold(), asked.get("state", "")
        listed = await running(self._client, await list_sessions(self._client, self._client.tenant))
        rows = [row for row in listed if (row.state == state if state else row.state != "forgotten")]
        rows = order(rows, "name" if asked.get("sort") == "name" else "last")
        found: dict[str, str] = {}
        is_whole = True
        if words:
            if asked.get("whole"):
                found, is_whole = await searching.said(self._client, words, PATIENCE_S / 4)
            rows = [*await begun(self._client, rows[:_READ]), *rows[_READ:]]
            rows = [
                row
                for row in rows
                if row.session in found or words in f"{row.session} {row.begins or ''}".casefold()
            ]
        if asked.get("brief"):
            stems = {stem(row.session) for row in rows if may_vary(row.session)}
            varied = await begun(self._client, [row for row in listed if stem(row.session) in stems])
            rows = joined(rows, varied)
        skip = read_number(asked.get("skip")) or 0
        page = rows[skip : skip + _SESSIONS]
        new = await begun(self._client, [row for row in page if row.begins is None])
        read = {row.session: row for row in new}
        page = [read.get(row.session, row) for row in page]
        costs = [] if asked.get("brief") else await self._costs.of(page)
        found = {row.session: found[row.session] for row in page if row.session in found}
        part = {"total": len(rows), "rows": page, "costs": costs, "each": _SESSIONS}
        return as_json(part | {"found": found, "is_whole": is_whole})

    async def _session(self, request: Request) -> Response:
        name, asked = request.path_params["name"], request.query_params
        found = await find_session(self._client, session_key(self._client.tenant, name))
        row = (await running(self._client, [found]))[0] if found else None
        before, ends = read_number(asked.get("before")), read_number(asked.get("end"))
        mark = None if before is None or ends is None else conversation.ConversationEnd(before, ends)
        turns, more = await conversation.part(self._client, name, _TURNS, mark)
        cost = (await self._costs.of([row]))[0] if row else None
        past = await self._inherited(name, turns)
        there = await asyncio.to_thread(  # Markdown takes time
            lambda: [*map(inherited, past), *(shown(turn) for turn in turns if not _varies(turn))]
        )
        return as_json({"row": row, "cost": cost, "turns": there, "more": more})

    async def _inherited(self, name: str, turns: Sequence[LoggedTurn]) -> tuple[Past, ...]:
        """Return the last turns that a fork has from its parent, if its `open` is among `turns`."""
        opens = [turn for turn in turns if isinstance(turn.result, Opened) and turn.result.parent]
        if not opens:
            return ()
        then = min((turn.seq for turn in turns if turn.seq > opens[-1].seq), default=math.inf)
        history = await self._client.session(name).history(before=then)
        return history.turns[-_INHERITED:]

    async def _variants(self, request: Request) -> Response:
        """Return the variants of a session's conversation."""
        name = request.path_params["name"]
        rows = await list_sessions(self._client, self._client.tenant, [f"{stem(name)}*"])
        taken = [row.session for row in rows]
        rows = [row for row in rows if row.state != "forgotten"]
        return as_json(variants(name, await begun(self._client, order(rows, "last")[:_READ]), taken))

    async def _tree(self, request: Request) -> Response:
        """Return the tree of forks that a session is in, built from the most recently active sessions.

        Null if the session is not among these.
        """
        name = request.path_params["name"]
        rows = order(await list_sessions(self._client, self._client.tenant), "last")[:_READ]
        found = trees(await begun(self._client, rows))
        return as_json(next((tree for tree in found if any(one.session == name for one in tree)), None))

    async def _image(self, request: Request) -> Response:
        """Return the file of an image that a message of the session names by its digest."""
        name, digest = request.path_params["name"], request.path_params["digest"]
        data = await self._client.session(name).image(digest)
        # Its first bytes have been checked; the door's headers keep the browser from reading it otherwise.
        return Response(data, media_type=media_type(data))

    async def _export(self, request: Request) -> Response:
        name = request.path_params["name"]
        if form := request.query_params.get("form"):
            return await self._written(name, form)
        key = session_key(self._client.tenant, name)
        log = await read(self._client.stored, key)
        file = await asyncio.to_thread(
            session_file.exported, log, await session_file.read_parts(self._client, log)
        )
        attached = {"Content-Disposition": f'attachment; filename="{name}.turnkeep"'}
        return StreamingResponse(pieces(file), 200, attached, "application/octet-stream")

    async def _written(self, name: str, form: str) -> Response:
        history = await self._client.session(name).history()
        if not history.turns:
            raise HTTPException(404, f"the log has no conversation of {name}")
        session, ending = self._client.session(name), form
        named = {digest for one in history.messages for digest in images_in(one.content)}
        images = {digest: await session.image(digest) for digest in named}
        match form:
            case "md":
                files = conversation_files.image_files(f"{name}-images", images)
                body, kind = conversation_files.as_markdown(name, history, files).encode(), "text/markdown"
                if images:
                    ending, kind = "zip", "application/zip"
                    contents = {f"{name}.md": body, **{files[one]: images[one] for one in images}}
                    body = await asyncio.to_thread(_zipped, contents)
            case "json":
                body, kind = conversation_files.as_json(history, images), "application/json"
            case _:
                raise HTTPException(404, f"there is no form {form!r}; there are md and json")
        attached = {"Content-Disposition": f'attachment; filename="{name}.{ending}"'}
        return Response(body, 200, attached, kind)


def _zipped(contents: Mapping[str, bytes]) -> bytes:
    """Return an archive of files by their names."""
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return found.getvalue()


def _varies(turn: LoggedTurn) -> bool:
    """Whether a turn only began a variant of a conversation, which is no event to show."""
    return isinstance(turn.result, Opened) and VARIANT in turn.result.tags
