"""Servers that do everything wrong: each fault is an outcome with its class, and ends the run with 1."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from bench_runs import PATIENCE_S, turnkeep
from click.testing import CliRunner

from bench.openai import parse
from worker.commands.cli import main

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.spec import Turn

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CUT = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 9999\r\n\r\n")


def event(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    choices = [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}\n\n'
WELL = HEAD + b": keepalive\n\n" + event("Hel") + event("lo", "stop") + USAGE + b"data: [DONE]\n\n"


@asynccontextmanager
async def fake(*replies: bytes) -> AsyncIterator[str]:
    """Serve chat completions with these bytes, the last one from then on, and hang up."""
    left = list(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = [line for line in head.split("\r\n") if line.startswith("content-length")]
        await reader.readexactly(int(length[0].split(":")[1]) if length else 0)
        models = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": [{"id": "m1"}]}'
        writer.write(models if head.startswith("get") else left.pop(0) if len(left) > 1 else left[0])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def ask(url: str) -> Turn:
    async with parse(f"fake={url}") as server:
        assert server.model == "m1"
        return await server.ask([{"role": "user", "content": "Hi"}], max_tokens=4, timeout_s=5)


async def test_an_answer_is_counted_by_the_server_or_by_its_deltas() -> None:
    async with fake(WELL, HEAD + event("a") + event("b", "length") + b"data: [DONE]\n\n") as url:
        counted, own = await ask(url), await ask(url)
    assert (counted.error, counted.prompt_tokens, counted.facts) == (None, 9, {"tokens": 3, "text": "Hello"})
    assert (own.error, own.prompt_tokens, own.facts) == (None, 0, {"tokens": 2, "text": "ab"})


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "no such\n model"}', "http_400", "no such model"),
        (HEAD + event("a"), "broken_off", "ended before the answer"),
        (HEAD + b"data: {oops\n\n", "garbage", "no chat completion chunk: {oops"),
        (HEAD + b"hello\n\n", "broken_off", "ended before the answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>hi", "connection", "text/html"),
        (b"", "connection", "Server disconnected"),
        (HEAD + b'data: {"error": {"message": "out of memory"}}\n\n', "error_event", "out of memory"),
        (CUT + event("a"), "connection", "peer closed"),
    ],
)
async def test_what_a_server_does_wrong_is_an_outcome(reply: bytes, kind: str, says: str) -> None:
    async with fake(reply) as url:
        turn = await ask(url)
    assert (turn.error, turn.position) == (kind, None)
    assert says in turn.message
    assert "\n" not in turn.message


@pytest.mark.parametrize("spec", ["llama", "=http://h", "a=ftp://h", "a=http://", "a=http://h:99999"])
def test_what_is_no_peer_is_one_line(spec: str) -> None:
    done = CliRunner().invoke(main, ["bench", "peers", "--smoke", "--peer", spec])
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert "must be NAME=URL" in done.stderr
    assert parse("a=https://h/x/v1/").url == parse("a=https://h/x").url == "https://h/x/v1"


@pytest.mark.process
async def test_a_run_with_failed_turns_ends_with_1(tmp_path: Path, tiny_model: Path) -> None:
    async with fake(WELL, HEAD + event("a")) as url:
        options = ("--smoke", "--part", "chat", "--peer", f"fake={url}", "--model", tiny_model)
        process = turnkeep("peers", *options, "--out", tmp_path)
        out, err = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    assert process.returncode == 1, err
    assert "2 of 4 turns break it: 2 broken_off" in out
