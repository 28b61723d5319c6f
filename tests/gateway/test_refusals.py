"""Requests that the gateway refuses, by path: the status, words of the sentence, and the field at fault."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.dialects.anthropic import common as anthropic
from gateway.dialects.anthropic import messages
from gateway.dialects.responses import requests as responses
from gateway.keys import Keys
from gateway.turn import Fault, NotStoredError, fault_of, renamed
from ops.log.sessions import list_sessions
from tests.parts import TINY_CONTEXT
from turnkeep_client.errors import (
    FullServerError,
    InvalidMessageError,
    MessageTooLargeError,
    NoServerError,
    RequestFailedError,
    ResultRemovedError,
    TokenLimit,
    TurnkeepError,
)

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}


@pytest.fixture
async def served(gateway: Any) -> Any:
    return await gateway(max_body_bytes=100_000, patience_s=0.5)


def said(**more: Any) -> dict[str, Any]:
    return {**HELLO, **more}


def content(part: Any) -> dict[str, Any]:
    return said(messages=[{"role": "user", "content": [part]}])


async def test_the_gateway_refuses_bodies_that_are_too_large_or_not_valid_json(
    http: httpx2.AsyncClient,
) -> None:
    for body, status in [
        (b"", 400),
        (b"{", 400),
        (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', 400),
        (b'{"metadata": ' + b"[" * 40_000 + b"]" * 40_000 + b', "messages": []}', 400),
        (b'{"messages": ' + b"[" * 40_000, 400),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', 400),
        (b'{"tools": [{"function": {"name": "a", "parameters": {"a":' + b"[" * 40_000, 400),
        (
            b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '
            + b'{"a":' * 10_000
            + b"}" * 10_000
            + b"}}]}]}",
            400,
        ),
        (json.dumps(content({"type": "text", "text": "x" * 100_000})).encode(), 413),
    ]:
        answer = await http.post(CHAT, content=body)
        assert answer.status_code == status, body[:60]
        assert answer.json()["error"]["type"] == "invalid_request_error"

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 10_000

    with contextlib.suppress(httpx2.NetworkError):
        assert (await http.post(CHAT, content=endless())).status_code == 413
    assert (await http.post(CHAT, json=HELLO)).status_code == 200


async def test_the_gateway_serves_health_and_models_and_refuses_unknown_paths_and_methods(
    http: httpx2.AsyncClient,
) -> None:
    assert (await http.head("/")).status_code == 200
    assert (await http.get("/health")).json()["status"] == "ok"
    models = (await http.get("/v1/models")).json()
    assert [one["id"] for one in models["data"]] == ["tiny"]
    assert (await http.get("/v1/models/tiny")).json() == models["data"][0]
    assert (await http.get("/v1/models/any/name")).json()["id"] == "any/name", "as a request may call it"
    assert models["data"][0]["context_window"] == TINY_CONTEXT
    embedding = await http.post("/v1/embeddings", json={"model": "m", "input": "a"})
    assert (embedding.status_code, "makes no embeddings" in embedding.text) == (400, True)
    for method, path, status, says in [
        ("GET", "/v1/nothing", 404, "GET /v1/nothing is not served"),
        ("GET", CHAT, 405, f"GET {CHAT} is not served, only POST"),
        *(
            (method, f"/v1/{path}", 404, f"{method} /v1/{path} is not served here")
            for path in ("conversations", "conversations/c/items", "messages/batches", "messages/batches/b")
            for method in ("GET", "POST", "DELETE")
            if (method, path) != ("DELETE", "messages/batches")
        ),
        ("POST", "/v1/v1/messages", 404, "without /v1 for Anthropic's"),
        ("POST", "/chat/completions", 404, "ends with /v1 for OpenAI's clients"),
        ("POST", "/v1/chat/completions/../../health", 404, ""),
        ("POST", "/v1/%2e%2e/health", 404, ""),
    ]:
        answer = await http.request(method, path)
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), path


def failed(code: str, *, retryable: bool = False, **more: Any) -> RequestFailedError:
    return RequestFailedError(code, "so many words", retryable=retryable, **more)


LONG = "context_length_exceeded"
#: Errors, with the status, OpenAI's code and Anthropic's type for them.
ERRORS: list[tuple[TurnkeepError | Fault, int, str | None, str]] = [
    (failed("overloaded", retryable=True), 429, "rate_limit_exceeded", "rate_limit_error"),
    (failed("invalid_request"), 400, None, "invalid_request_error"),
    (failed("context_exceeded"), 400, LONG, "invalid_request_error"),
    (failed("context_exceeded", limit=TokenLimit(asked=9, allowed=9)), 400, LONG, "invalid_request_error"),
    (failed("memory_exceeded"), 400, LONG, "invalid_request_error"),
    (failed("internal", retryable=True), 500, None, "api_error"),
    (failed("of_a_later_version", retryable=True), 500, None, "api_error"),
    (NoServerError("nobody"), 503, "no_worker", "overloaded_error"),
    (FullServerError("nobody"), 503, "no_worker", "overloaded_error"),
    (MessageTooLargeError("large"), 413, "request_too_large", "request_too_large"),
    (InvalidMessageError("logprob must be a number"), 500, None, "api_error"),
    (ResultRemovedError("gone"), 500, None, "api_error"),
    (Fault(401, "no"), 401, None, "authentication_error"),
    (Fault(403, "no"), 403, None, "permission_error"),
]


@pytest.mark.parametrize(("error", "status", "code", "kind"), ERRORS, ids=str)
def test_each_error_maps_to_an_http_status_an_openai_code_and_an_anthropic_error_type(
    error: TurnkeepError | Fault, status: int, code: str | None, kind: str
) -> None:
    fault = error if isinstance(error, Fault) else fault_of(error)
    assert (fault.status, fault.code) == (status, code)
    has_limit = isinstance(error, RequestFailedError) and error.limit is not None
    assert has_limit or str(error).partition(": ")[2] in fault.message
    said = anthropic.error(fault)["error"]
    assert said["type"] == kind
    if code != LONG:
        assert said["message"] == fault.sentence
    elif has_limit:
        assert said["message"] == "prompt is too long: 10 tokens > 9 maximum"
    else:
        assert said["message"].startswith("prompt is too long")


def test_the_error_while_nats_stores_nothing_names_a_full_disk_and_a_cluster_without_quorum_as_causes() -> (
    None
):
    said = fault_of(NotStoredError()).message
    assert "is its disk full, or do too few servers" in said
    assert "start more servers of its cluster" in said


def test_an_error_that_a_worker_reports_for_a_message_names_the_clients_message_number_or_no_number() -> None:
    """The worker gets only new messages; of some APIs, one message of the client is several."""
    error = failed("invalid_request", field="messages[0].content[1]").behind(4, "messages")
    for names, param in (
        ({}, "messages[4].content[1]"),
        (responses.NAMES, "input"),
        (messages.NAMES, "messages"),
    ):
        assert renamed(fault_of(error), names).param == param
    assert failed("invalid_request", field="tools[0].function").behind(4, "messages").field == (
        "tools[0].function"
    )


@pytest.mark.process
async def test_the_health_endpoint_reports_within_4_seconds_that_the_worker_or_the_nats_server_is_gone(
    worker_process: Any, door: Any
) -> None:
    process = worker_process()
    process.start()
    client = await process.client()
    await client.close()
    served = await door(process.url)
    for end in (process.kill, process.stop):  # without, and with its NATS server
        async with asyncio.timeout(60):
            while (await served.http.get("/health")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        end()
        await asyncio.sleep(0.2)  # until the server knows that the worker's connection is closed
        async with asyncio.timeout(4):  # a question without an answer takes 5 s
            answer = await served.http.get("/health")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        if end == process.kill:
            process.start()


async def test_the_root_page_shows_the_api_url_and_openapi_json_lists_all_routes(
    served: Any, http: httpx2.AsyncClient
) -> None:
    page = await http.get("/", headers={"accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    assert f"<code>{served.url}/v1</code>" in page.text
    hostile = await http.get("/", headers={"accept": "text/html", "host": "<script>"})
    assert "<script>" not in hostile.text
    assert (await http.get("/")).text == "Ollama is running", "as its clients expect"
    told = (await http.get("/openapi.json")).json()
    paths = {route.path.replace(":path", ""): {*route.methods} for route in served.gateway.routes}
    assert {path: {one.upper() for one in methods} for path, methods in told["paths"].items()} == paths
    body = told["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = told["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert schema["required"] == ["messages"]
    assert {"top_k", "tools", "max_completion_tokens"} <= schema["properties"].keys()
    for one in json.dumps(told).split('"$ref": "')[1:]:
        assert one.partition('"')[0].rpartition("/")[2] in told["components"]["schemas"]


async def test_a_request_without_a_running_worker_gets_503_and_the_command_that_starts_a_worker(
    served: Any, http: httpx2.AsyncClient
) -> None:
    await served.worker.stop()
    await asyncio.sleep(1.1)
    for answer in (
        await http.post(CHAT, json=HELLO),
        await http.get("/v1/models"),
        await http.get("/health"),
    ):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_worker"
        message = answer.json()["error"]["message"]
        assert "`turnkeep serve` starts one" in message
        assert served.worker.settings.prefix not in message, "no subject"
        assert answer.headers["retry-after"] == "5"


async def test_api_keys_of_two_tenants_share_no_sessions_and_a_wrong_key_is_refused(
    worker: Any, gateway: Any, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("# keys\nsecret-1 acme\n\nsecret-2 umbrella\n")
    served = await gateway(keys=Keys.read(file))
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret-1"}):
        answer = await served.http.post(CHAT, json=HELLO, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    bodies = []
    for headers in ({"authorization": "Bearer secret-1"}, {"x-api-key": "secret-2"}):
        answer = await served.http.post(CHAT, json=said(temperature=0), headers=headers)
        assert answer.headers["x-turnkeep-session"].endswith(" begun")
        bodies.append(answer.json())
    assert bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    answer = await served.http.get("/v1/models", headers={"x-api-key": "secret-2"})
    assert answer.status_code == 200
    tenants = {key.tenant for key in await worker.client.stored.subjects()}
    assert tenants == {"acme", "umbrella"}


async def test_a_message_sent_to_a_session_that_was_removed_meanwhile_is_deleted_from_the_log(
    worker: Any, gateway: Any, served: Any
) -> None:
    """Another gateway or an operator has removed the session; the turn is answered in a new one."""
    said = [{"role": "user", "content": "One?"}]
    first = await served.openai.chat.completions.create(model="m", messages=said, max_tokens=4)
    ((row,), secret) = await list_sessions(worker.client, "default"), b"a late secret"
    await worker.client.session(row.session).close(forget=True)
    said += [first.choices[0].message, {"role": "user", "content": secret.decode()}]
    assert (await served.openai.chat.completions.create(model="m", messages=said, max_tokens=4)).choices
    async with asyncio.timeout(20):
        while any(secret in one.body for one in await worker.client.log(row.session)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_at_its_start_a_gateway_deletes_logged_requests_that_were_sent_to_removed_sessions(
    worker: Any, gateway: Any
) -> None:
    session, secret = worker.client.session(f"gw-{'0' * 32}"), b"a late secret"
    await session.append(text="x")
    await session.close(forget=True)
    with pytest.raises(RequestFailedError, match="unknown_session"):
        await session.append(text=secret.decode())
    served = await gateway(idle_s=0.4)
    await served.openai.completions.create(model="m", prompt="x", max_tokens=1)
    async with asyncio.timeout(20):
        while any(secret in one.body for one in await worker.client.log(session.key.session)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
RESPONSES, COMPACT = "/v1/responses", "/v1/responses/compact"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
#: The fields of a request that a row of the table leaves out.
USUAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO["messages"], "max_tokens": 2},
    MESSAGES: {"messages": HELLO["messages"], "max_tokens": 2},
    RESPONSES: {"input": "a"},
    COMPLETIONS: {"prompt": "a"},
    "/api/generate": {"model": "m", "prompt": "Once"},
    RERANK: {"query": "Why?"},
}


def saying(*content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*content]}]}


ORPHAN = "the result of a tool names the call 'b', which no message before it has"


TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
STRANGE = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}}


Row = tuple[str, Any, str, str | None]
#: What the reading of a request refuses, `readings.txt` has; these rows have each API's form, and the rest.
TINY: list[Row] = [
    (CHAT, saying({"type": "text", "text": 7}), "must have a text", "messages[0].content[0]"),
    (CHAT, {"logit_bias": {"99999": 1}}, "99999", "logit_bias"),
    (CHAT, {"messages": None}, "messages", "messages"),
    (CHAT, [], "Expected `object`", None),
    (
        CHAT,
        {
            "messages": [
                *HELLO["messages"],
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
                {"role": "tool", "tool_call_id": "b", "content": "x"},
                {"role": "assistant", "tool_calls": [{"id": "b", "function": {"name": "f"}}]},
                {"role": "tool", "tool_call_id": "b", "content": "x"},
            ]
        },
        ORPHAN,
        "messages",
    ),
    (COMPLETIONS, {"echo": True}, "echo is not supported", "echo"),
    (COMPLETIONS, {"prompt": [99_999]}, "vocabulary", "prompt"),
    (COMPLETIONS, {"prompt": "a b " * 9_000}, "However, your messages resulted in", "prompt"),
    (MESSAGES, saying(7), "messages[0].content[0]: a part of a content must be an object with a type", None),
    (f"{MESSAGES}/count_tokens", saying(7), "an object with a type", None),
    (MESSAGES, {"max_tokens": None}, "max_tokens: Field required", None),
    (MESSAGES, saying({"type": "tool_result", "tool_use_id": "b"}), f"messages: {ORPHAN}", None),
    (f"{MESSAGES}/count_tokens", saying({"type": "tool_result", "tool_use_id": "b"}), ORPHAN, None),
    (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "wat"}}}},
        "output_config.format cannot be followed",
        None,
    ),
    (CHAT, TOOLS | STRANGE, "response_format cannot be followed: Invalid type: wat", "response_format"),
    (
        CHAT,
        TOOLS | {"response_format": {"type": "regex", "regex": "a"}},
        "response_format cannot be followed: beside tools",
        "response_format",
    ),
    (RESPONSES, {"input": None}, "empty", "input"),
    (
        RESPONSES,
        {"input": [{"type": "function_call_output", "call_id": "b", "output": "x"}]},
        ORPHAN,
        "input",
    ),
    (COMPACT, {}, "", "input"),
    (COMPACT, {"input": []}, "", "input"),
    (COMPACT, {"input": 3}, "", "input"),
    (COMPACT, {"input": "a", "prompt": {"id": "b"}}, "", "prompt"),
    ("/api/generate", {"suffix": "end"}, "suffix is not supported", None),
    (
        "/api/chat",
        {"model": "m", "messages": [{"role": "user", "images": ["zz"]}]},
        "messages[0].images[0]: an image's data must be base64",
        None,
    ),
    (EMBEDDINGS, {"input": "a"}, "makes no embeddings", None),
    (RERANK, {"documents": ["a"]}, "Qwen/Qwen3-Reranker-0.6B", None),
]
EMBEDDING: list[Row] = [
    (EMBEDDINGS, {"input": []}, "", "input"),
    (EMBEDDINGS, {"input": ""}, "", "input"),
    (EMBEDDINGS, {"input": {"a": 1}}, "", "input"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "", "input"),
    (EMBEDDINGS, {"input": "a", "encoding_format": "int8"}, "", "encoding_format"),
    (EMBEDDINGS, {"input": "a", "dimensions": 10**6}, "", "dimensions"),
    (CHAT, {}, "makes embeddings of texts", "messages"),
    (MESSAGES, {}, "makes embeddings of texts", None),
    ("/api/chat", {"messages": HELLO["messages"]}, "makes embeddings of texts", None),
]
RANKING: list[Row] = [
    (RERANK, {"documents": []}, "", "documents"),
    (RERANK, {"documents": ["a"] * 1001}, "", "documents"),
    (RERANK, {"documents": ["a", {"title": "b"}]}, "", "documents[1].text"),
    (RERANK, {"documents": "a"}, "", "documents"),
    (RERANK, {"documents": ["a"], "query": None}, "", "query"),
    (RERANK, {"documents": ["a"], "top_n": 0}, "", "top_n"),
    (RERANK, {"documents": ["a"], "max_tokens_per_doc": 0}, "", "max_tokens_per_doc"),
]


def refusal(path: str, told: Any) -> tuple[str, str | None]:
    """Return the sentence and the field of an error; assert that it has the form of the path's API."""
    if path.startswith("/api/"):
        return told["error"], None
    error = told["error"]
    assert error["type"] == "invalid_request_error"
    if path.startswith(MESSAGES):
        assert (told["type"], error.keys()) == ("error", {"type", "message"})
        return error["message"], None
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"], error["param"]


@pytest.mark.parametrize(
    ("model", "rows"),
    [("tiny_model", TINY), ("embedding_model", EMBEDDING), ("reranker", RANKING)],
    ids=["tiny", "embedding", "reranker"],
)
async def test_the_gateway_refuses_each_unsupported_request_with_a_sentence_and_the_field_at_fault(
    model: str, rows: list[Row], local_worker: Any, door: Any, request: pytest.FixtureRequest
) -> None:
    worker = await local_worker(model=str(request.getfixturevalue(model)))
    served = await door(worker.settings.nats, worker.settings.prefix)
    for path, fields, says, param in rows:
        body = fields
        if isinstance(fields, dict):
            body = {name: one for name, one in (USUAL.get(path, {}) | fields).items() if one is not None}
        answer = await served.http.post(path, json=body)
        assert answer.status_code == 400, (path, fields)
        sentence, field = refusal(path, answer.json())
        assert says in sentence, (path, fields, sentence)
        assert field == param, (path, fields)


TOO_LONG = {
    CHAT: r"maximum context length is 2048 tokens\. However",
    RESPONSES: r"maximum context length is 2048 tokens\. However",
    MESSAGES: r"^prompt is too long: \d+ tokens > 2048 maximum$",
    "/api/chat": "maximum context length",
}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_longer_than_the_context_gets_the_error_text_of_the_api_and_leaves_no_session(
    worker: Any, served: Any, *, stream: bool
) -> None:
    long = [{"role": "user", "content": "word " * 500}]
    for path, says in TOO_LONG.items():
        name = "input" if path == RESPONSES else "messages"
        answer = await served.http.post(path, json={**USUAL.get(path, {}), name: long, "stream": stream})
        assert answer.status_code == 400, path
        assert re.search(says, refusal(path, answer.json())[0]), answer.text
        assert path != CHAT or answer.json()["error"]["code"] == "context_length_exceeded"
    async with asyncio.timeout(20):
        while {row.state for row in await list_sessions(worker.client, "default")} != {"forgotten"}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not served.index.sessions
