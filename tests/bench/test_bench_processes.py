"""Measurements of other programs than the worker: mlx-lm in a process, and HTTP servers with faults."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from bench.faults import BenchError
from bench.local import Program, free_port
from bench.openai import parse
from bench.turns import TimedTurn
from commands.cli import main


@contextlib.contextmanager
def running(model: Path) -> Iterator[Program]:
    program = Program("bench.programs.in_process", model)
    program.start()
    try:
        yield program
    finally:
        program.stop()


@pytest.mark.process
async def test_the_mlx_lm_process_of_a_bench_returns_timings_and_if_killed_is_reported_with_the_exit_code(
    tiny_model,
) -> None:
    async def ask(program: Program, *request: object) -> dict[str, float]:
        return json.loads(await program.exchange(json.dumps(request).encode() + b"\n", 30))

    prompts = [[*range(40, 60)], [*range(50, 90)]]
    with running(tiny_model) as program:
        assert await program.exchange(timeout_s=30) == b"{}\n"
        assert (await ask(program, "prefill", prompts[0]))["prefill"] > 0
        for some in (prompts, prompts[:1], prompts):  # each request begins anew
            assert (await ask(program, "decode", 8, some)).get("decoding", 1) > 0
        os.kill(program.pid, signal.SIGKILL)
        with pytest.raises(BenchError, match=r"^the measuring process ended with exit code -9$"):
            await ask(program, "prefill", prompts[0])


@pytest.mark.process
async def test_a_bench_reports_a_failed_measuring_process_in_one_line_and_kills_a_hanging_measuring_process(
    tiny_model, tmp_path
) -> None:
    fails = pytest.raises(BenchError, match=r"^the measuring process ended with exit code 1: [^\n]+$")
    with running(tmp_path) as program, fails:
        await program.exchange(timeout_s=30)
    with running(tiny_model) as program:
        process = psutil.Process(program.pid)
        with pytest.raises(BenchError, match=r"did not answer within 0\.01 s"):
            await program.exchange(timeout_s=0.01)
    assert not process.is_running()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CUT = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 9999\r\n\r\n")


def event(text: str | None = None, finish: str | None = None) -> bytes:
    choices = [{"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3}}\n\n'
WELL = HEAD + b": keepalive\n\n" + event("Hel") + event("lo", "stop") + USAGE + b"data: [DONE]\n\n"


@contextlib.asynccontextmanager
async def fake(*replies: bytes) -> AsyncIterator[str]:
    """Serve HTTP: answer each POST with the next of `replies`, the last one repeatedly, and hang up."""
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


async def ask(url: str) -> TimedTurn:
    async with parse(f"fake={url}") as server:
        assert server.model == "m1"
        return await server.ask([{"role": "user", "content": "Hi"}], max_tokens=4, timeout_s=5)


async def test_bench_peers_counts_tokens_by_the_servers_reported_usage_or_else_by_streamed_deltas() -> None:
    async with fake(WELL, HEAD + event("a") + event("b", "length") + b"data: [DONE]\n\n") as url:
        counted, own = await ask(url), await ask(url)
    assert (counted.error, counted.prompt_tokens, counted.facts) == (None, 9, {"tokens": 3, "text": "Hello"})
    assert (own.error, own.prompt_tokens, own.facts) == (None, 0, {"tokens": 2, "text": "ab"})


@pytest.mark.parametrize(
    ("reply", "kind", "says"),
    [
        (b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "no such\n model"}', "http_400", "no such model"),
        (HEAD + event("a"), "broken_off", "ended before the answer"),
        (HEAD + b"data: {oops\n\n", "JSONDecodeError", "Expecting property name"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>hi", "broken_off", "ended before the answer"),
        (b"", "APIConnectionError", "Server disconnected"),
        (HEAD + b'data: {"error": {"message": "out of memory"}}\n\n', "APIError", "out of memory"),
        (CUT + event("a"), "APIConnectionError", "peer closed"),
    ],
)
async def test_an_error_or_truncated_reply_of_a_benchmarked_server_is_reported_in_one_line_with_its_kind(
    reply: bytes, kind: str, says: str
) -> None:
    async with fake(reply) as url:
        turn = await ask(url)
    assert (turn.error, turn.position, "\n" in turn.message) == (kind, None, False)
    assert says in turn.message


@pytest.mark.parametrize("spec", ["llama", "=http://h", "a=ftp://h", "a=http://", "a=http://h:99999"])
def test_bench_peers_refuses_a_malformed_peer_option_with_a_one_line_error(spec: str) -> None:
    done = CliRunner().invoke(main, ["bench", "peers", "--smoke", "--peer", spec])
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert "must be NAME=URL" in done.stderr
    assert parse("a=https://h/x/v1/").url == parse("a=https://h/x").url == "https://h/x/v1"


@pytest.mark.process
async def test_a_bench_with_failed_turns_exits_with_code_1(
    tmp_path: Path, tiny_model: Path, turnkeep: Callable[..., Any]
) -> None:
    async with fake(WELL, HEAD + event("a")) as url:
        options = ("--smoke", "--part", "chat", "--peer", f"fake={url}", "--model", tiny_model)
        process = turnkeep("peers", *options, "--out", tmp_path)
        out, err = await asyncio.to_thread(process.communicate, timeout=120)
    assert process.returncode == 1, err
    assert "2 of 4 turns break it: 2 broken_off" in out


def test_the_nats_port_that_a_bench_chooses_for_its_worker_is_below_32768() -> None:
    """One of these could take it before the worker's server listens there."""
    assert all(free_port() < 32_768 for _ in range(20))
