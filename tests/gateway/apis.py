"""The APIs for conversations, as a client sees them: how a request is written, and an answer read."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx2

Body = dict[str, Any]


class Api(NamedTuple):
    """One API: the path of its requests, and how they and its answers are written.

    `told` is the request's field of messages, and `most` returns its limit of an answer's tokens. `picture`
    is a part of a message: an image whose file is elsewhere. `text` returns the text of an answer, or the
    part of it that an event adds; `said` returns an answer as its client sends it back; `usage` returns the
    numbers of prompt tokens, of cached ones among them, and of generated ones.
    """

    path: str
    told: str
    most: Callable[[int], Body]
    picture: Body
    text: Callable[[Body], str]
    said: Callable[[Body], list[Body]]
    usage: Callable[[Body], tuple[int, int, int]]

    def body(self, told: list[Body], most: int = 4, **more: Any) -> Body:
        """Return the body of a request to answer a conversation; the answer is not a stream."""
        return {"model": "m", self.told: told, "stream": False, **self.most(most), **more}

    def events(self, written: str) -> list[Body]:
        """Parse the lines of Ollama's stream, or the server-sent events of the others."""
        lines = [line.removeprefix("data: ") for line in written.splitlines()]
        return [json.loads(line) for line in lines if line.startswith("{")]


def how(answer: httpx2.Response) -> str:
    """Return how an answer's session was found: `begun`, `continued`, `forked` or `repeated`."""
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-turnkeep-session"].split()[1])


def _chats_usage(answer: Body) -> tuple[int, int, int]:
    used = answer["usage"]
    cached = used["prompt_tokens_details"]["cached_tokens"]
    return used["prompt_tokens"], cached, used["completion_tokens"]


def _messages_usage(answer: Body) -> tuple[int, int, int]:
    used = answer["usage"]
    cached = used["cache_read_input_tokens"]
    return used["input_tokens"] + cached, cached, used["output_tokens"]


def _responses_usage(answer: Body) -> tuple[int, int, int]:
    used = answer["usage"]
    return used["input_tokens"], used["input_tokens_details"]["cached_tokens"], used["output_tokens"]


def _choices(answer: Body) -> str:
    found = [one.get("message") or one.get("delta") or {} for one in answer.get("choices") or ()]
    return "".join(one.get("content") or "" for one in found)


def _blocks(answer: Body) -> str:
    if "content" in answer:
        return "".join(one["text"] for one in answer["content"])
    return answer.get("delta", {}).get("text", "") if answer["type"] == "content_block_delta" else ""


def _items(answer: Body) -> str:
    if "output" in answer:
        return "".join(part["text"] for one in answer["output"] for part in one["content"])
    return answer["delta"] if answer["type"] == "response.output_text.delta" else ""


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        "messages",
        lambda most: {"max_tokens": most},
        {"type": "image_url", "image_url": {"file_id": "a"}},
        _choices,
        lambda answer: [answer["choices"][0]["message"]],
        _chats_usage,
    ),
    "messages": Api(
        "/v1/messages",
        "messages",
        lambda most: {"max_tokens": most},
        {"type": "image", "source": {"type": "file", "file_id": "a"}},
        _blocks,
        lambda answer: [{"role": "assistant", "content": answer["content"] or "."}],
        _messages_usage,
    ),
    "responses": Api(
        "/v1/responses",
        "input",
        lambda most: {"max_output_tokens": most},
        {"type": "input_image", "file_id": "a"},
        _items,
        lambda answer: answer["output"],
        _responses_usage,
    ),
    "ollama": Api(
        "/api/chat",
        "messages",
        lambda most: {"options": {"num_predict": most}},
        {},
        lambda answer: answer["message"]["content"],
        lambda answer: [answer["message"]],
        lambda answer: (answer["prompt_eval_count"], 0, answer["eval_count"]),
    ),
}
