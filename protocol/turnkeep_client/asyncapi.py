"""Builds the protocol's AsyncAPI 3 document from the message types and the subject grammar.

The document takes the worker's view: the worker receives requests and sends results.
`python -m turnkeep_client.asyncapi` prints the document; `--check FILE` compares a file with it.
"""

from __future__ import annotations

import argparse
import sys
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec
from msgspec import Struct

from .errors import RETRYABLE
from .messages import (
    VERSION,
    Append,
    Asked,
    Chunk,
    Close,
    Closed,
    ControlReply,
    ControlRequest,
    DeadLetter,
    Failed,
    GatewayMetrics,
    Generate,
    Generated,
    KnownResult,
    Metrics,
    Request,
    ServeRequest,
    Serving,
)
from .subjects import ID_RULE, SessionKey, Subjects

if TYPE_CHECKING:
    from collections.abc import Callable

REQUESTS: Final = get_args(Request)
RESULTS: Final = get_args(KnownResult)
CONTROLS: Final = get_args(ControlRequest)
CONTROL_REPLIES: Final = get_args(ControlReply)
SERVES: Final = get_args(ServeRequest)
#: All types of messages with a JSON object.
_KINDS: Final = tuple(
    dict.fromkeys(
        (
            *(*REQUESTS, *RESULTS, Chunk, *CONTROLS, *CONTROL_REPLIES),
            *(*SERVES, Serving, DeadLetter, Metrics, GatewayMetrics),
        )
    )
)

_END: Final = "EndOfTokens"
_IMAGE: Final = "Image"
_KEY: Final = SessionKey("{tenant}", "{session}")
_PARAMETERS: Final = {
    "tenant": {"description": f"The tenant that owns the session: {ID_RULE}.", "default": "default"},
    "session": {"description": f"The session's name: {ID_RULE}."},
    "request": {"description": f"The generate's id: {ID_RULE}."},
    "digest": {"description": "The SHA-256 of an image's file, or of a piece of it, as 64 hex digits."},
    "worker": {"description": f"The worker's name: {ID_RULE}."},
    "gateway": {"description": f"The gateway's name: {ID_RULE}."},
}
_TRACE_HEADERS: Final = {
    "type": "object",
    "description": "Both are optional, and only matter to a worker that sends spans.",
    "properties": {
        "traceparent": {
            "type": "string",
            "description": "The publisher's span, by W3C Trace Context; a malformed one counts as none.",
            "examples": ["00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"],
        },
        "tracestate": {"type": "string", "maxLength": 512},
    },
}
_DESCRIPTION: Final = f"""\
LLM sessions over NATS: turns go in as messages, tokens come out as messages.

Every request on `in` is stored in the log and gets exactly one result on `out`, whose `seq` is the
request's stream sequence. The prefix `turnkeep` is a setting of the worker. Bodies are JSON. Unknown
fields of a request are refused; ignore unknown fields of a result. A failed request with one of the codes
{", ".join(sorted(RETRYABLE))} can succeed later under a new id.
"""


def document() -> dict[str, Any]:
    """Build the AsyncAPI document as dicts and lists."""
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Turnkeep", "version": f"{VERSION}.0.0", "description": _DESCRIPTION},
        "defaultContentType": "application/json",
        "servers": {
            "nats": {"host": "127.0.0.1:4222", "protocol": "nats", "description": "Any NATS server."}
        },
        "channels": _channels(Subjects()),
        "operations": {
            "receiveRequest": _operation("receive", "in", REQUESTS, reply=("out", RESULTS)),
            "sendTokens": _operation("send", "tokens", (Chunk, _END)),
            "receiveImage": _operation("receive", "image", (_IMAGE,)),
            "receiveControl": _operation("receive", "ctl", CONTROLS, reply=("ctlReply", CONTROL_REPLIES)),
            "receiveAsk": _operation(
                "receive", "ask", (Generate, Close), reply=("askReply", (Generated, Closed, Failed))
            ),
            "receiveServe": _operation("receive", "serve", SERVES, reply=("serveReply", (Serving, Failed))),
            "sendDeadLetter": _operation("send", "dead", (DeadLetter,)),
            "sendMetrics": _operation("send", "metrics", (Metrics,)),
            "sendGatewayMetrics": _operation("send", "gateway", (GatewayMetrics,)),
        },
        "components": {"messages": _messages(), "schemas": _schemas()},
    }


def _channels(subjects: Subjects) -> dict[str, Any]:
    """List the channels: each subject or reply inbox, with the messages it carries."""
    return {
        "in": _channel(subjects.of(_KEY, "in"), "Requests of a session; a JetStream log.", REQUESTS),
        "out": _channel(subjects.of(_KEY, "out"), "Results of a session; the same log.", RESULTS),
        "tokens": _channel(
            subjects.tokens(_KEY, "{request}"),
            "Tokens of one generate; a stream kept for minutes.",
            (Chunk, _END),
        ),
        "image": _channel(
            subjects.image(_KEY, "{digest}"),
            "Images of a session, stored before a request; the same log.",
            (_IMAGE,),
        ),
        "ctl": _channel(subjects.of(_KEY, "ctl"), "Control requests about a session.", CONTROLS),
        "ctlReply": _channel(None, "The reply inbox of the control request.", CONTROL_REPLIES),
        "ask": _channel(
            subjects.of(_KEY, "ask"),
            "A generate or a close by request and reply; the `id`, and a generate's `type`, may be left out.",
            (Generate, Close),
        ),
        "askReply": _channel(None, "The reply inbox of the ask.", (Generated, Closed, Failed)),
        "serve": _channel(subjects.serve, "Requests to load or unload the prefix's model.", SERVES),
        "serveReply": _channel(None, "The reply inbox of such a request.", (Serving, Failed)),
        "dead": _channel(
            subjects.of(_KEY, "dead"), "Requests that workers gave up; the same log.", (DeadLetter,)
        ),
        "metrics": _channel(subjects.metrics("{worker}"), "A worker's state.", (Metrics,)),
        "gateway": _channel(subjects.gateway("{gateway}"), "A gateway's counts.", (GatewayMetrics,)),
    }


def render() -> str:
    """Return the document as YAML."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """A YAML dumper that repeats shared values, without anchors, and writes long texts as blocks."""

        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # yaml's signature
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump(document(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def print_or_check(module: str, render: Callable[[], str], arguments: list[str] | None = None) -> int:
    """Print the text that `render` returns and return 0, the exit status.

    With the argument `--check FILE` print no text, but return 1 with a message if FILE has another one.
    `module` is the name by which users run this.
    """
    about = "Print a text that is made from the protocol's message types."
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--check", metavar="FILE", type=Path, help="exit with 1 if FILE is another text")
    checked: Path | None = parser.parse_args(arguments).check
    if checked is None:
        sys.stdout.write(render())
    elif not checked.is_file() or checked.read_text(encoding="utf-8") != render():
        sys.stderr.write(f"{checked} is not current: write it with python -m {module} > {checked}\n")
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Print the document, or check a file: see `print_or_check`."""
    return print_or_check("turnkeep_client.asyncapi", render, arguments)


_Kind = type[Struct] | str


def _channel(address: str | None, description: str, kinds: tuple[_Kind, ...]) -> dict[str, Any]:
    channel: dict[str, Any] = {
        "address": address,
        "description": description,
        "messages": {_name(kind): {"$ref": f"#/components/messages/{_name(kind)}"} for kind in kinds},
    }
    named = {name: text for name, text in _PARAMETERS.items() if address and f"{{{name}}}" in address}
    return channel | ({"parameters": named} if named else {})


def _operation(
    action: str, channel: str, kinds: tuple[_Kind, ...], reply: tuple[str, tuple[_Kind, ...]] | None = None
) -> dict[str, Any]:
    operation = {"action": action, **_selection(channel, kinds)}
    return operation | ({"reply": _selection(*reply)} if reply else {})


def _selection(channel: str, kinds: tuple[_Kind, ...]) -> dict[str, Any]:
    messages = [{"$ref": f"#/channels/{channel}/messages/{_name(kind)}"} for kind in kinds]
    return {"channel": {"$ref": f"#/channels/{channel}"}, "messages": messages}


def _messages() -> dict[str, Any]:
    messages: dict[str, Any] = {}
    for kind in _KINDS:
        messages[kind.__name__] = {
            "title": kind.__name__,
            "summary": cleandoc(kind.__doc__ or "").partition("\n")[0],
            "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
        }
        if kind in REQUESTS + RESULTS:
            messages[kind.__name__]["correlationId"] = {"location": "$message.payload#/id"}
        if kind in {Append, Generate}:
            messages[kind.__name__]["headers"] = _TRACE_HEADERS
    messages[_END] = {
        "title": _END,
        "summary": "An empty body: no more tokens will come.",
        "contentType": "application/octet-stream",
        "payload": {"type": "string", "maxLength": 0},
    }
    messages[_IMAGE] = {
        "title": _IMAGE,
        "summary": "The file of an image, or a piece of it. A long file is stored in pieces, and in its own"
        " message are the SHA-256 digests of the pieces, 32 bytes each.",
        "contentType": "application/octet-stream",
        "payload": {"type": "string", "format": "binary"},
    }
    return messages


def _schemas() -> dict[str, Any]:
    kinds = (*_KINDS, Asked)
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in RESULTS:  # no field of the types, so that a result in memory does not hold its request
        schemas[kind.__name__]["properties"]["asked"] = {"$ref": "#/components/schemas/Asked"}
    for schema in schemas.values():
        if "description" in schema:
            schema["description"] = cleandoc(schema["description"])
    return {name: _without_discriminators(schema) for name, schema in sorted(schemas.items())}


def _without_discriminators(schema: Any) -> Any:
    """Remove `discriminator` from a schema, since AsyncAPI expects schema names in it; keep the tags."""
    if isinstance(schema, list):
        return [_without_discriminators(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _without_discriminators(one) for name, one in schema.items() if name != "discriminator"}


def _name(kind: _Kind) -> str:
    return kind if isinstance(kind, str) else kind.__name__


if __name__ == "__main__":
    sys.exit(main())
