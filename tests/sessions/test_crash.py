"""Workers and NATS servers are killed with `kill -9`: no request is lost, or answered twice."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from turnkeep_client.client import Client
from turnkeep_client.messages import (
    Chunk,
    Generate,
    Generated,
    Request,
    Result,
    decode_chunk,
    decode_request,
    decode_result,
)
from turnkeep_client.subjects import SessionKey, Subjects
from worker.process.constants import CONSTANTS
from worker.sessions.execution import _sampling

pytestmark = pytest.mark.process


BLOCK = CONSTANTS.block_tokens
SUBJECTS = Subjects()


async def until(condition: Callable[[], Any], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        await asyncio.sleep(0.002)


@pytest.fixture
async def started(worker_process: Any, endless_model: Path) -> Any:
    """Start a worker process, and connect to it once it serves."""
    clients = []

    async def start(*options: str) -> tuple[Any, Client]:
        process = worker_process(*options, model=endless_model)
        process.start()
        clients.append(await process.client())
        await until(lambda: '"event": "ready"' in process.log)
        return process, clients[-1]

    yield start
    for client in clients:
        await client.close()


@pytest.fixture
async def alone(local_worker: Callable[..., Awaitable[Any]], endless_model: Path, tmp_path: Path) -> Client:
    """A client of a worker that is never interrupted."""
    worker = await local_worker(model=str(endless_model), data_dir=tmp_path / "alone", block_tokens=BLOCK)
    client: Client = worker.client
    return client


def restart(process: Any) -> None:
    process.kill()
    process.start()


@dataclass
class Followed:
    """An answer, and the chunks of it that a client has received."""

    generation: Any
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.tokens)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    async def follow(self) -> Generated:
        async for chunk in self.generation:
            self.chunks.append(chunk)
        result: Generated = self.generation.result
        assert self.tokens == result.tokens
        assert self.text == result.text
        return result


async def answered(client: Client, name: str) -> list[tuple[Request, Result]]:
    """Read a session's log; return each request with its result, after a check that it has exactly one."""
    entries = await client.log(name)
    requests = {entry.seq: decode_request(entry.body) for entry in entries if entry.kind == "in"}
    results = [decode_result(entry.body) for entry in entries if entry.kind == "out"]
    assert sorted(result.seq for result in results) == sorted(requests), "one result for each request"
    return [(requests[result.seq], result) for result in sorted(results, key=lambda result: result.seq)]


async def assert_stream_is_record(client: Client, name: str, result: Generated) -> None:
    """Assert that the chunks in the token stream are contiguous and join to the recorded result."""
    subject = SUBJECTS.tokens(SessionKey("default", name), result.id)
    *stored, last = await client._wire.read(SUBJECTS.token_stream, subject, 1)
    assert last.body == b""
    chunks = [decode_chunk(one.body) for one in stored]
    assert [chunk.i for chunk in chunks] == [0, *itertools.accumulate(len(c.tokens) for c in chunks[:-1])]
    assert tuple(token for chunk in chunks for token in chunk.tokens) == result.tokens
    assert "".join(chunk.text for chunk in chunks) == result.text


def seed_of(name: str, request: Generate, seq: int) -> int:
    """Return the seed with which a worker samples a request: the request's own, or the derived one."""
    return _sampling(SessionKey("default", name), request, seq, {}, None).seed


async def test_answers_of_a_worker_that_is_killed_twice_have_the_tokens_of_an_uninterrupted_worker(
    started: Any, alone: Client
) -> None:
    """Clients, the token stream, the log, and an uninterrupted worker have the same tokens."""
    process, client = await started()
    options: dict[str, Any] = {
        "greedy": {"temperature": 0.0},
        "hot": {"temperature": 0.8},
        "seeded": {"temperature": 0.8, "seed": 5, "presence_penalty": 0.7, "logprobs": True}
        | {"frequency_penalty": 0.4, "repetition_penalty": 1.1, "logit_bias": {70: 2.5}},
    }
    answers = {
        name: Followed(client.session(name).generate(text=f"{name}, begin: ", max_tokens=600, **given))
        for name, given in options.items()
    }
    tasks = {name: asyncio.create_task(answer.follow()) for name, answer in answers.items()}
    for life, num_tokens in enumerate((20, 60)):  # the second worker is killed too
        await until(lambda: all(len(answer.tokens) >= num_tokens for answer in answers.values()))  # noqa: B023
        await until(lambda: process.log.count("resuming an interrupted answer") == 3 * life)  # noqa: B023
        assert not any(task.done() for task in tasks.values())
        restart(process)
    results = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    assert process.log.count("resuming an interrupted answer") == 6

    for name, result in results.items():
        assert len(result.tokens) == 600
        assert [one.id for one in result.logprobs] == (list(result.tokens) if name == "seeded" else [])
        ((request, recorded),) = await answered(client, name)
        assert recorded == result
        await assert_stream_is_record(client, name, result)
        given = {**options[name], "seed": seed_of(name, request, result.seq)}
        whole = await alone.session(name).generate(text=f"{name}, begin: ", max_tokens=600, **given)
        assert (whole.tokens, whole.text) == (result.tokens, result.text)
