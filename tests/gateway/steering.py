"""A proxy between an agent and the gateway, which forces tool calls: a small model makes none by itself.

The proxy changes the agent's requests, in each API's format, and passes on the answers unchanged.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ops.http_server import listening, url_of

_MOST_TOKENS = 200
#: Agents ask for more of an answer that was cut by its length, so text ends with one of these.
_STOPS = [".", ",", " the ", " and "]
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


class Steering:
    """Makes the model call the tool `tool` with these `arguments` after each message of the user.

    If `calls` is false, the model calls no tool. `answering` is set when an answer's first text has come.
    """

    def __init__(self, url: str, tool: str, arguments: Mapping[str, str]) -> None:
        self.calls = True
        self.answering = asyncio.Event()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.faults: list[str] = []
        self.found: list[str] = []
        self.warnings: list[str] = []
        self._tool = tool
        self._arguments = arguments
        self._http = httpx2.AsyncClient(base_url=url, timeout=600)
        self.app = Starlette(routes=[Route("/{path:path}", self._pass, methods=["GET", "HEAD", "POST"])])

    async def __aenter__(self) -> Self:
        listener = listening("127.0.0.1", 0)
        self.url = url_of(listener)
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_config=None, lifespan="off", ws="none"))
        self._serving = asyncio.create_task(self._server.serve([listener]))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        await self._serving
        await self._http.aclose()

    async def _pass(self, request: Request) -> Response:
        body = await request.body()
        if request.method == "POST":
            body = json.dumps(self._steered(request.url.path, json.loads(body))).encode()
        sent = self._http.build_request(request.method, request.url.path, content=body)
        answer = await self._http.send(sent, stream=True)
        if answer.status_code >= 400:
            await answer.aread()
            self.faults.append(f"{request.url.path}: {answer.status_code} {answer.text}")
        self.found.append(answer.headers.get("x-turnkeep-session", ""))
        self.warnings.append(answer.headers.get("x-turnkeep-warnings", ""))

        async def parts() -> AsyncIterator[bytes]:
            async for part in answer.aiter_raw():
                if b"delta" in part:
                    self.answering.set()
                yield part
            await answer.aclose()

        kind = answer.headers.get("content-type", "application/json")
        return StreamingResponse(parts(), answer.status_code, {"content-type": kind})

    def _steered(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append((path, body))
        body = {**body, "temperature": 0, "repetition_penalty": 1.3}
        for name in _LENGTHS:
            if name in body:
                body[name] = min(body[name], _MOST_TOKENS)
        tools = [self._narrowed(tool) for tool in body.get("tools") or []]
        has_tool = any(_named(tool) == self._tool for tool in tools)
        wants = has_tool and self.calls and _is_users((body.get("messages") or body["input"])[-1])
        choice = _choice(path, self._tool if wants else None) if has_tool else {}
        stops = {} if wants else {_stop(path): _STOPS}
        return {**body, **({"tools": tools} if tools else {}), **choice, **stops}

    def _narrowed(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Return a tool whose schema allows only one value for each argument."""
        if _named(tool) != self._tool:
            return tool
        values = {name: {"type": "string", "enum": [value]} for name, value in self._arguments.items()}
        schema = {"type": "object", "properties": values, "required": [*values]}
        schema["additionalProperties"] = False
        if "input_schema" in tool:
            return {**tool, "input_schema": schema}
        if "function" in tool:
            return {**tool, "function": {**tool["function"], "parameters": schema}}
        return {**tool, "parameters": schema}


def _named(tool: dict[str, Any]) -> str | None:
    name: str | None = tool.get("function", tool).get("name")
    return name


def _is_users(item: dict[str, Any]) -> bool:
    """Whether a conversation's last message or item is from the user, not a tool's result."""
    content = item.get("content")
    kinds = {part.get("type") for part in content} if isinstance(content, list) else set()
    return item.get("role") == "user" and "tool_result" not in kinds


def _stop(path: str) -> str:
    return "stop_sequences" if path.endswith("/messages") else "stop"


def _choice(path: str, tool: str | None) -> dict[str, Any]:
    """Return the request fields that force one call of `tool` or, for None, forbid calls."""
    if path.endswith("/messages"):
        one = {"type": "tool", "name": tool, "disable_parallel_tool_use": True}
        return {"tool_choice": {"type": "none"} if tool is None else one}
    if tool is None:
        return {"tool_choice": "none"}
    named = {"name": tool} if path.endswith("/responses") else {"function": {"name": tool}}
    return {"tool_choice": {"type": "function", **named}, "parallel_tool_calls": False}
