"""What each API of the gateway must do alike: stream what it answers, and find the conversation again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx2
import pytest
from crafted import LETTERS, user

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NUM = 12


class Api(NamedTuple):
    """One API: the path of its requests, and how they and its answers are written.

    `text` returns the text of an answer, or the part of it that an event of a stream adds; `usage` returns
    the numbers of prompt tokens, of cached ones among them, and of generated ones.
    """

    path: str
    asked: Callable[[list[dict[str, Any]]], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]
    usage: Callable[[dict[str, Any]], tuple[int, int, int]]


def openais(used: dict[str, Any]) -> tuple[int, int, int]:
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return used["prompt_tokens"], cached, used["completion_tokens"]


def anthropics(used: dict[str, Any]) -> tuple[int, int, int]:
    cached = used["cache_read_input_tokens"]
    return used["input_tokens"] + cached, cached, used["output_tokens"]


def choice(answer: dict[str, Any]) -> str:
    found = [one.get("message") or one.get("delta") or {} for one in answer.get("choices") or ()]
    return "".join(one.get("content") or "" for one in found)


def blocks(answer: dict[str, Any]) -> str:
    if "content" in answer:
        return "".join(one["text"] for one in answer["content"])
    return answer.get("delta", {}).get("text", "") if answer["type"] == "content_block_delta" else ""


def items(answer: dict[str, Any]) -> str:
    if "output" in answer:
        return "".join(part["text"] for one in answer["output"] for part in one["content"])
    return answer["delta"] if answer["type"] == "response.output_text.delta" else ""


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        lambda said: {"messages": said, "max_tokens": NUM, "stream_options": {"include_usage": True}},
        choice,
        lambda answer: openais(answer["usage"]),
    ),
    "messages": Api(
        "/v1/messages",
        lambda said: {"messages": said, "max_tokens": NUM},
        blocks,
        lambda answer: anthropics(answer["usage"]),
    ),
    "responses": Api(
        "/v1/responses",
        lambda said: {"input": said, "max_output_tokens": NUM},
        items,
        lambda answer: (
            answer["usage"]["input_tokens"],
            answer["usage"]["input_tokens_details"]["cached_tokens"],
            answer["usage"]["output_tokens"],
        ),
    ),
    "ollama": Api(
        "/api/chat",
        lambda said: {"model": "m", "messages": said, "options": {"num_predict": NUM}},
        lambda answer: str(answer["message"]["content"]),
        lambda answer: (answer["prompt_eval_count"], -1, answer["eval_count"]),
    ),
}


def events(name: str, written: str) -> list[dict[str, Any]]:
    """Parse the lines of Ollama's stream, or the server-sent events of the others."""
    lines = written.splitlines()
    if name != "ollama":
        lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", APIS)
async def test_a_stream_equals_the_whole_answer_and_each_turn_prefills_only_what_is_new(
    name: str, local_worker: Any, door: Any, endless_model: Path
) -> None:
    worker, api = await local_worker(model=str(endless_model)), APIS[name]
    served = await door(worker.settings.nats, worker.settings.prefix)
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:

        async def ask(*said: dict[str, Any], **more: Any) -> tuple[httpx2.Response, str]:
            body = {"logit_bias": LETTERS, "temperature": 0.9, "stream": False, **api.asked([*said]), **more}
            answer = await http.post(api.path, json=body)
            assert answer.status_code == 200, answer.text
            return answer, answer.headers["x-turnkeep-session"].split()[1]

        whole, _ = await ask(user("One?"), seed=5)
        streamed, _ = await ask(user("One?"), seed=5, stream=True)
        text, (num_prompt, _, num_made) = api.text(whole.json()), api.usage(whole.json())
        assert "".join(api.text(one) for one in events(name, streamed.text)) == text != ""
        assert num_made == NUM
        told = [user("One?"), {"role": "assistant", "content": text}]
        for question, expected in (("Two?", "continued"), ("Too?", "forked")):
            more, how = await ask(*told, user(question))
            assert how == expected
            _, num_cached, _ = api.usage(more.json())
            assert name == "ollama" or num_cached >= num_prompt + NUM - 1
        _, how = await ask(user("Else?"), *told[1:], user("Two?"))
        assert how == "begun"


async def test_an_error_has_the_form_of_the_api_that_the_path_or_a_header_belongs_to(
    http: httpx2.AsyncClient,
) -> None:
    anthropic = {"anthropic-version": "2023-06-01"}
    for path, headers, shape in [
        ("/v1/nothing", {}, {"error": dict}),
        ("/nothing", {}, {"error": dict}),
        ("/v2/nothing", {}, {"error": dict}),
        ("/v1/responses/x/y/z", {}, {"error": dict}),
        ("/v1/messages/x/y/z", {}, {"type": str, "error": dict}),
        ("/v1/nothing", anthropic, {"type": str, "error": dict}),
        ("/api/tags/x/y", {}, {"error": str}),
        ("/api/tags/x/y", anthropic, {"type": str, "error": dict}),
    ]:
        answer = await http.get(path, headers=headers)
        assert answer.status_code == 404, path
        assert {name: type(one) for name, one in answer.json().items()} == shape, path
