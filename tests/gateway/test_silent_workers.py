"""Streams of a worker that is silent for long, read by OpenAI's and Anthropic's clients and as raw lines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

pytestmark = pytest.mark.process

NUM_TOKENS = 300
HELLO = [{"role": "user", "content": "Hello."}]
LETTERS = {"logit_bias": {str(token): 100 for token in range(68, 90)}}
CHAT: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": NUM_TOKENS, "stream": True}
COMPLETION = {"model": "m", "prompt": "Hello.", "max_tokens": NUM_TOKENS, "stream": True}
MESSAGE: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": NUM_TOKENS}
RESPONSE: dict[str, Any] = {"model": "m", "input": "Hello.", "max_output_tokens": NUM_TOKENS, "stream": True}
BY_CLIENT = ("chat", "completion", "message", "response")
RAW: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "raw chat": ("/v1/chat/completions", CHAT, {}),
    "two answers": ("/v1/chat/completions", CHAT | {"n": 2}, {}),
    "chat with a key": ("/v1/chat/completions", CHAT, {"idempotency-key": "one"}),
    "raw completion": ("/v1/completions", COMPLETION, {}),
    "raw message": ("/v1/messages", MESSAGE | {"stream": True}, {}),
    "raw response": ("/v1/responses", RESPONSE, {}),
    "durable stream": ("/v1/responses", RESPONSE | {"stream": False, "background": True}, {}),
}


async def texts(openai: AsyncOpenAI, anthropic: AsyncAnthropic, name: str) -> AsyncIterator[str]:
    """Stream an answer from the API of this name with its client, and yield the parts of its text."""
    match name:
        case "chat":
            async for chunk in await openai.chat.completions.create(**CHAT, extra_body=LETTERS):
                yield chunk.choices[0].delta.content or ""
        case "completion":
            async for part in await openai.completions.create(**COMPLETION, extra_body=LETTERS):
                yield part.choices[0].text
        case "response":
            async for event in await openai.responses.create(**RESPONSE, extra_body=LETTERS):
                yield event.delta if event.type == "response.output_text.delta" else ""
        case "message":
            async with anthropic.messages.stream(**MESSAGE, extra_body=LETTERS) as stream:
                async for text in stream.text_stream:
                    yield text


async def blocks(url: str, name: str) -> AsyncIterator[str]:
    """Send a request without a client, and yield what is between two blank lines of its stream."""
    path, body, headers = RAW[name]
    asked = {"method": "POST", "url": path, "json": body | LETTERS, "headers": headers}
    async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
        if name == "durable stream":
            begun = (await http.request(**asked)).json()
            asked = {"method": "GET", "url": f"{path}/{begun['id']}/stream?offset=-1&live=sse"}
        async with http.stream(**asked) as answer:
            written = ""
            async for text in answer.aiter_text():
                *whole, written = (written + text).split("\n\n")
                for block in whole:
                    yield block
            assert not written


@pytest.mark.parametrize("has_begun", [False, True], ids=["before the first chunk", "after it"])
async def test_no_client_takes_a_sign_of_life_for_an_event_or_an_end(
    worker_process: Any, endless_model: Path, door: Any, monkeypatch: pytest.MonkeyPatch, *, has_begun: bool
) -> None:
    """OpenAI's client for Python makes an event of each blank line once an event had an id."""
    for name in ("answer_response._HEARTBEAT_S", "answer_response._PATIENCE_S", "durable._POLL_S"):
        monkeypatch.setattr(f"gateway.http.{name}", 0.05)
    monkeypatch.setattr("gateway.latest_metrics._SEEN_S", 60.0)
    process = worker_process(model=endless_model)
    process.start()
    while '"event": "ready"' not in process.log:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    served = await door(process.url)
    has_text = {name: asyncio.Event() for name in (*BY_CLIENT, *RAW)}

    async def follow(name: str, parts: AsyncIterator[str]) -> list[str]:
        found = []
        try:
            async for part in parts:
                found.append(part)
                if "delta" in part or '"text"' in part or (part and name in BY_CLIENT):
                    has_text[name].set()
        finally:
            has_text[name].set()
        return found

    async with AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as anthropic:
        await served.openai.chat.completions.create(model="m", messages=HELLO, max_tokens=1)
        if not has_begun:
            os.kill(process.worker_pid, signal.SIGSTOP)
        streams = {name: texts(served.openai, anthropic, name) for name in BY_CLIENT}
        streams |= {name: blocks(served.url, name) for name in RAW}
        tasks = {name: asyncio.create_task(follow(name, parts)) for name, parts in streams.items()}
        if has_begun:
            await asyncio.gather(*(one.wait() for one in has_text.values()))
            os.kill(process.worker_pid, signal.SIGSTOP)
        await asyncio.sleep(0.5)
        os.kill(process.worker_pid, signal.SIGCONT)
        await asyncio.wait(tasks.values())
    assert {name: error for name, task in tasks.items() if (error := task.exception())} == {}
    found = {name: task.result() for name, task in tasks.items()}
    assert {name: len("".join(found[name])) for name in BY_CLIENT} == dict.fromkeys(BY_CLIENT, NUM_TOKENS)
    for name in RAW:
        for block in found[name]:
            data = [line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: ")]
            assert len(data) == 1, (name, block)
            assert data == ["[DONE]"] or json.loads(data[0])
