"""Describes the gateway's paths: a page for people, an OpenAPI document for programs. Pure; used by `app`."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.turn import WholeNumber
from turnkeep_client import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .handlers import Route

_REFERENCE: Final = "#/components/schemas/{name}"
#: What Ollama's clients look for at the address.
GREETING: Final = "Ollama is running"


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of these paths. It has schemas of requests, but not of answers."""
    kinds = {one.request for one in routes if one.request is not None}
    kinds_in_order = sorted(kinds, key=lambda kind: kind.__module__)
    references, schemas = msgspec.json.schema_components(
        kinds_in_order, schema_hook=_schema, ref_template=_REFERENCE
    )
    bodies = dict(zip(kinds_in_order, references, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Turnkeep's gateway", "version": __version__},
        "paths": {_shown(one): _path(one, bodies) for one in routes},
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
    if kind is WholeNumber:
        return {"type": "integer"}
    raise NotImplementedError


def _shown(route: Route) -> str:
    return route.path.replace(":path}", "}")


def _path(served: Route, bodies: dict[type, dict[str, Any]]) -> dict[str, Any]:
    path = _shown(served)
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


def page(address: str, routes: Sequence[Route]) -> str:
    """Return the page for people who open the gateway's `address` in a browser."""
    at = escape(address.rstrip("/"))
    rows = "".join(
        f"<tr><td><code>{' '.join(one.methods)} {_shown(one)}</code></td><td>{escape(one.summary)}</td></tr>"
        for one in routes
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
