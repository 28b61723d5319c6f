"""Requests that the gateway refuses, by path: the status, words of the sentence, and the field at fault."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx2
import pytest

from ops.log.sessions import list_sessions

Start = Any
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES, COMPACT = "/v1/responses", "/v1/responses/compact"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
HELLO = [{"role": "user", "content": "Hello."}]
#: The fields of a request that a row of the table leaves out.
USUAL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 2},
    MESSAGES: {"messages": HELLO, "max_tokens": 2},
    RESPONSES: {"input": "a"},
    COMPLETIONS: {"prompt": "a"},
    "/api/generate": {"model": "m", "prompt": "Once"},
    RERANK: {"query": "Why?"},
}
CUSTOM_CALL = {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USED = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
#: Its last message is the beginning of the answer.
BEGUN = [*HELLO, {"role": "assistant", "content": "It is in"}]
REQUIRED = {"tools": [FUNCTION], "tool_choice": "required"}
OBJECT = {"type": "json_schema", "schema": {"type": "object"}}


def said(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*content]}]}


def answered(**message: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", **message}]}


def item(**more: Any) -> dict[str, Any]:
    return {"input": [more]}


Row = tuple[str, Any, str, str | None]
TINY: list[Row] = [
    (CHAT, said({"type": "text", "text": 7}), "must have a text", "messages[0].content[0]"),
    (CHAT, said({"type": 7}), "with a type", "messages[0].content[0]"),
    (CHAT, {"modalities": ["text", "audio"]}, "modality", "modalities"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions", "functions"),
    (CHAT, {"web_search_options": {"a": 1}}, "web_search_options", "web_search_options"),
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format", "response_format.type"),
    (CHAT, {"tools": [{"type": "custom"}]}, "custom", "tools[0]"),
    (CHAT, {"tools": [{"name": "f"}]}, "needs the field function", "tools[0]"),
    (CHAT, {"tool_choice": "required"}, "tools", "tool_choice"),
    (CHAT, {"top_logprobs": 2}, "logprobs", "top_logprobs"),
    (CHAT, {"n": 99}, "n must be 1 to 16", "n"),
    (CHAT, {"n": 0}, "n must be 1 to 16", "n"),
    (CHAT, {"logit_bias": {"a": 1}}, "token ids", "logit_bias"),
    (CHAT, {"logit_bias": {"99999": 1}}, "99999", "logit_bias"),
    (CHAT, {"max_tokens": 0}, "max_tokens", "max_tokens"),
    (CHAT, {"max_tokens": "9"}, "Expected `int", "max_tokens"),
    (CHAT, {"temperature": -1}, "temperature", "temperature"),
    (CHAT, {"stop": ["a"] * 17}, "stop", "stop"),
    (CHAT, {"messages": []}, "empty", "messages"),
    (CHAT, said("a", role="critic"), "role", "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "no content", "messages[0].content"),
    (CHAT, {"messages": [CUSTOM_CALL]}, "custom", "messages[0].tool_calls[0]"),
    (CHAT, {"messages": None}, "messages", "messages"),
    (CHAT, [], "Expected `object`", None),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "has messages in", "chat_template_kwargs"),
    (CHAT, {"messages": BEGUN, **REQUIRED}, "must call a tool", "messages"),
    (CHAT, {"messages": BEGUN, "response_format": {"type": "json_object"}}, "format", "messages"),
    (CHAT, answered(tool_calls=[CALL]), "tool calls", "messages"),
    (CHAT, {"messages": BEGUN[1:]}, "before", "messages"),
    (COMPLETIONS, {"echo": True}, "echo is not supported", "echo"),
    (COMPLETIONS, {"prompt": ["a"] * 129}, "128 prompts", "prompt"),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 17}, "n must be", "n"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "a text, or token ids", "prompt"),
    (COMPLETIONS, {"prompt": [1, 2**40]}, "tokens[1]", "prompt[1]"),
    (COMPLETIONS, {"prompt": [99_999]}, "vocabulary", "prompt"),
    (COMPLETIONS, {"prompt": ""}, "a text, or token ids", "prompt"),
    (COMPLETIONS, {"prompt": ["One", ""]}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": [[65], "Two", []]}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": [["a"]]}, "prompt", "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt", "prompt"),
    (COMPLETIONS, {"best_of": 3}, "best_of", "best_of"),
    (COMPLETIONS, {"suffix": "b"}, "suffix", "suffix"),
    (MESSAGES, said(7), "with a type", None),
    (MESSAGES, said({"type": "text"}), "must have a text", None),
    (MESSAGES, said({"type": "tool_result", "content": 7}), "Expected `str | array | null`", None),
    (MESSAGES, said("a", role="tool"), "role", None),
    (MESSAGES, answered(content="b "), "trailing whitespace", None),
    (MESSAGES, {"messages": []}, "empty", None),
    (MESSAGES, {"messages": 1}, "messages", None),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tools", None),
    (MESSAGES, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", None),
    (MESSAGES, {"tools": [FUNCTION]}, "input_schema", None),
    (MESSAGES, {"mcp_servers": [{"url": "x"}]}, "mcp_servers", None),
    (MESSAGES, {"thinking": {"type": "enabled"}}, "budget_tokens", None),
    (MESSAGES, {"max_tokens": -2}, "max_tokens", None),
    (MESSAGES, {"max_tokens": None}, "max_tokens: Field required", None),
    (
        MESSAGES,
        {"messages": BEGUN, "tools": [TOOL], "tool_choice": {"type": "any"}},
        "must call a tool",
        None,
    ),
    (MESSAGES, {"messages": BEGUN, "output_config": {"format": OBJECT}}, "format", None),
    (MESSAGES, answered(content=[USED]), "tool calls", None),
    (RESPONSES, {"input": []}, "empty", "input"),
    (RESPONSES, {"input": None}, "empty", "input"),
    (RESPONSES, {"input": 7}, "Expected", "input"),
    (RESPONSES, {"background": True, "store": False}, "store", "background"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation", "conversation"),
    (RESPONSES, {"prompt": {"id": "a"}}, "prompt", "prompt"),
    (RESPONSES, {"metadata": {"a": "x" * 513}}, "metadata", "metadata"),
    (RESPONSES, {"tool_choice": "required"}, "tools", "tool_choice"),
    (RESPONSES, {"tools": [{"type": "function", "function": {"name": "x"}}]}, "has no name", "tools"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": {"type": "web_search"}}, "web_search", "tool_choice"),
    (RESPONSES, {"tools": [FLAT], "tool_choice": FLAT | {"name": "x"}}, "tool_choice", "tool_choice"),
    (RESPONSES, {"text": {"format": {"type": "yaml"}}}, "response_format", "text.format.type"),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "schema", "text.format.schema"),
    (RESPONSES, {"max_output_tokens": 0}, "1 or more", "max_output_tokens"),
    (RESPONSES, item(role="user", content=[7]), "type", "input[0].content[0]"),
    (RESPONSES, item(role="tool", content="a"), "role", "input[0].role"),
    (RESPONSES, item(type="function_call_output", output=7), "string", "input[0].output"),
    (COMPACT, {}, "", "input"),
    (COMPACT, {"input": []}, "", "input"),
    (COMPACT, {"input": 3}, "", "input"),
    (COMPACT, {"input": "a", "prompt": {"id": "b"}}, "", "prompt"),
    ("/api/generate", {"suffix": "end"}, "suffix is not supported", None),
    ("/api/generate", {"context": [1, 2]}, "context", None),
    ("/api/generate", {"template": "{{ .Prompt }}"}, "template", None),
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
    ("/api/chat", {"messages": HELLO}, "makes embeddings of texts", None),
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
    ("model", "rows"), [("tiny_model", TINY), ("embedding_model", EMBEDDING), ("reranker", RANKING)]
)
async def test_what_cannot_be_served_is_refused_with_a_sentence_and_the_field_at_fault(
    model: str, rows: list[Row], local_worker: Start, door: Start, request: pytest.FixtureRequest
) -> None:
    worker = await local_worker(model=str(request.getfixturevalue(model)))
    served = await door(worker.settings.nats, worker.settings.prefix)
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        for path, fields, says, param in rows:
            body = fields
            if isinstance(fields, dict):
                body = {name: one for name, one in (USUAL.get(path, {}) | fields).items() if one is not None}
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, (path, fields)
            sentence, field = refusal(path, answer.json())
            assert says in sentence, (path, fields, sentence)
            assert field == param, (path, fields)


async def test_token_counts_are_refused_as_the_answer_would_be(http: httpx2.AsyncClient) -> None:
    for path, fields, says, _ in TINY:
        if path == MESSAGES and not {"max_tokens", "output_config", "tool_choice"} & fields.keys():
            answer = await http.post(f"{MESSAGES}/count_tokens", json=USUAL[MESSAGES] | fields)
            assert answer.status_code == 400, fields
            assert says in refusal(MESSAGES, answer.json())[0], fields


TOO_LONG = {
    CHAT: r"maximum context length is 2048 tokens\. However",
    RESPONSES: r"maximum context length is 2048 tokens\. However",
    MESSAGES: r"^prompt is too long: \d+ tokens > 2048 maximum$",
    "/api/chat": "maximum context length",
}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_longer_than_the_context_is_refused_in_each_apis_words_and_leaves_no_session(
    local_worker: Start, door: Start, *, stream: bool
) -> None:
    worker = await local_worker()
    served = await door(worker.settings.nats, worker.settings.prefix)
    long = [{"role": "user", "content": "word " * 500}]
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        for path, says in TOO_LONG.items():
            name = "input" if path == RESPONSES else "messages"
            answer = await http.post(path, json={**USUAL.get(path, {}), name: long, "stream": stream})
            assert answer.status_code == 400, path
            assert re.search(says, refusal(path, answer.json())[0]), answer.text
            assert path != CHAT or answer.json()["error"]["code"] == "context_length_exceeded"
    async with asyncio.timeout(20):
        while {row.state for row in await list_sessions(worker.client, "default")} != {"forgotten"}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not served.index.sessions
