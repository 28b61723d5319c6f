"""Describes the gateway's paths: a page for people, an OpenAPI document for programs. Pure; used by `app`."""

from __future__ import annotations

from html import escape
from typing import Any, Final, NamedTuple

import msgspec

from gateway import reranking
from gateway.anthropic import messages
from gateway.ollama import requests as ollama
from gateway.openai import chat, completions, embeddings
from gateway.responses import requests as responses
from gateway.turn import Whole
from turnkeep_client import __version__


class _Served(NamedTuple):
    methods: tuple[str, ...]
    summary: str
    request: type | None = None


_REFERENCE: Final = "#/components/schemas/{name}"
#: What follows the path of one answer, in the APIs with stored answers.
_OF_ANSWERS: Final = {
    "": _Served(("GET", "DELETE"), "An answer that is in the log, whole or as a stream"),
    "/cancel": _Served(("POST",), "End an answer that runs"),
}
#: What the application serves, by path; `request` is the type of the request's body, if it has one.
SERVED: Final = {
    "/v1/chat/completions": _Served(("POST",), "OpenAI's chat completions", chat.DECODER.type),
    "/v1/completions": _Served(("POST",), "OpenAI's completions", completions.DECODER.type),
    "/v1/responses": _Served(("POST",), "OpenAI's Responses API", responses.DECODER.type),
    "/v1/responses/input_tokens": _Served(("POST",), "Count the tokens of an input", responses.DECODER.type),
    "/v1/responses/compact": _Served(("POST",), "Sum up a conversation", responses.DECODER.type),
    "/v1/responses/{id}/stream": _Served(("GET",), "Its events, by the Durable Streams protocol"),
    "/v1/responses/{id}/input_items": _Served(("GET",), "The items of an answer's conversation"),
    "/v1/messages": _Served(("POST",), "Anthropic's Messages API", messages.DECODER.type),
    "/v1/messages/count_tokens": _Served(("POST",), "Count the tokens of messages", messages.DECODER.type),
    "/v1/messages/batches": _Served(("GET", "POST"), "Refused: there are no batches"),
    **{
        f"{path}/{{id}}{more}": one
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
        for more, one in _OF_ANSWERS.items()
    },
    "/api/chat": _Served(("POST",), "Ollama's chat", ollama.Chat),
    "/api/generate": _Served(("POST",), "Ollama's answer to a prompt", ollama.Generate),
    "/api/tags": _Served(("GET",), "The models, as Ollama lists them"),
    "/api/ps": _Served(("GET",), "The models that are loaded, as Ollama lists them"),
    "/api/show": _Served(("POST",), "One model, as Ollama describes it"),
    "/api/embed": _Served(("POST",), "Ollama's embeddings", embeddings.Embed),
    "/api/version": _Served(("GET",), "The version"),
    "/api/{name}": _Served(("POST", "DELETE"), "Refused: models are managed beside the gateway"),
    "/api/v0/models": _Served(("GET",), "The models, as LM Studio lists them"),
    "/v1/embeddings": _Served(("POST",), "OpenAI's embeddings", embeddings.Asked),
    **{
        f"{version}/rerank": _Served(("POST",), "Jina's and Cohere's reranking", reranking.Asked)
        for version in ("", "/v1", "/v2")
    },
    "/v1/models": _Served(("GET",), "The models"),
    "/v1/models/{model}": _Served(("GET",), "One model"),
    "/health": _Served(("GET",), "Whether a worker answers"),
    "/metrics": _Served(("GET",), "Counts for Prometheus, for programs of this machine"),
    "/openapi.json": _Served(("GET",), "This document"),
    "/": _Served(("GET",), "Where to go"),
}


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document. It has schemas of requests, but not of answers."""
    kinds = {one.request for one in SERVED.values() if one.request is not None}
    kinds_in_order = sorted(kinds, key=lambda kind: kind.__module__)
    references, schemas = msgspec.json.schema_components(
        kinds_in_order, schema_hook=_schema, ref_template=_REFERENCE
    )
    bodies = dict(zip(kinds_in_order, references, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Turnkeep's gateway", "version": __version__},
        "paths": {path: _path(path, one, bodies) for path, one in SERVED.items()},
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _schema(kind: type) -> dict[str, Any]:
    if kind is Whole:
        return {"type": "integer"}
    raise NotImplementedError


def _path(path: str, served: _Served, bodies: dict[type, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": served.summary, "responses": {"200": {"description": "OK"}}}
    if served.request is not None:
        body = {"required": True, "content": {"application/json": {"schema": bodies[served.request]}}}
        operation["requestBody"] = body
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return {method.lower(): operation for method in served.methods}


def page(address: str) -> str:
    """Return the page for people who open the gateway's `address` in a browser."""
    at = escape(address.rstrip("/"))
    rows = "".join(
        f"<tr><td><code>{' '.join(one.methods)} {path}</code></td><td>{escape(one.summary)}</td></tr>"
        for path, one in SERVED.items()
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Turnkeep's gateway</title>
<style>body {{ font: 16px/1.5 system-ui; max-width: 46rem; margin: 3rem auto; padding: 0 1rem }}
td {{ padding-right: 1rem; vertical-align: top }}</style>
<h1>Turnkeep's gateway</h1>
<p>This is an API, and has no chat of its own. Programs find it here:</p>
<ul><li>OpenAI's clients: base URL <code>{at}/v1</code></li>
<li>Anthropic's clients: base URL <code>{at}</code></li>
<li>agents: <code>turnkeep launch</code> starts them with this address</li></ul>
<p><a href="/health">Does a worker answer?</a> <a href="/v1/models">Which models are there?</a>
<a href="/openapi.json">OpenAPI</a></p>
<table>{rows}</table>
</html>
"""
