"""A worker is killed with `kill -9`: its answers continue, and no request is answered twice."""

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
from turnkeep_client.messages import Chunk, Generate, Generated, decode_chunk, decode_request, decode_result
from turnkeep_client.subjects import SessionKey, Subjects
from worker.process.constants import CONSTANTS
from worker.sessions.execution import _sampling

pytestmark = pytest.mark.process

OPTIONS: dict[str, Any] = {
    "greedy": {"temperature": 0.0},
    "hot": {"temperature": 0.8},
    "seeded": {"temperature": 0.8, "seed": 5, "presence_penalty": 0.7, "logprobs": True}
    | {"frequency_penalty": 0.4, "repetition_penalty": 1.1, "logit_bias": {70: 2.5}},
}


async def until(condition: Callable[[], Any], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        await asyncio.sleep(0.002)


@dataclass
class Followed:
    """An answer, and the chunks of it that a client has received."""

    generation: Any
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.tokens)

    async def follow(self) -> Generated:
        async for chunk in self.generation:
            self.chunks.append(chunk)
        result: Generated = self.generation.result
        assert self.tokens == result.tokens
        assert "".join(chunk.text for chunk in self.chunks) == result.text
        return result


async def recorded(client: Client, name: str) -> tuple[Generate, Generated]:
    """Read the only request of a session and its only result from the log."""
    asked, told = await client.log(name)
    request, result = decode_request(asked.body), decode_result(told.body)
    assert isinstance(request, Generate)
    assert isinstance(result, Generated)
    assert (asked.kind, told.kind, result.seq) == ("in", "out", asked.seq)
    return request, result


async def assert_stream_is_record(client: Client, name: str, result: Generated) -> None:
    """Assert that the chunks in the token stream are contiguous and join to the recorded result."""
    subjects = Subjects()
    subject = subjects.tokens(SessionKey("default", name), result.id)
    *stored, last = await client._wire.read(subjects.token_stream, subject, 1)
    assert last.body == b""
    chunks = [decode_chunk(one.body) for one in stored]
    assert [chunk.i for chunk in chunks] == [0, *itertools.accumulate(len(c.tokens) for c in chunks[:-1])]
    assert tuple(token for chunk in chunks for token in chunk.tokens) == result.tokens
    assert "".join(chunk.text for chunk in chunks) == result.text


async def test_answers_of_a_worker_that_is_killed_twice_have_the_tokens_of_an_uninterrupted_worker(
    worker_process: Any,
    local_worker: Callable[..., Awaitable[Any]],
    endless_model: Path,
    tmp_path: Path,
) -> None:
    """Clients, the token stream, the log, and an uninterrupted worker have the same tokens."""
    process = worker_process(model=endless_model)
    process.start()
    async with await process.client() as client:
        await until(lambda: '"event": "ready"' in process.log)
        answers = {
            name: Followed(client.session(name).generate(text=f"{name}, begin: ", max_tokens=600, **given))
            for name, given in OPTIONS.items()
        }
        tasks = {name: asyncio.create_task(answer.follow()) for name, answer in answers.items()}
        for life, num_tokens in enumerate((20, 60)):  # the second worker is killed too
            await until(lambda: all(len(answer.tokens) >= num_tokens for answer in answers.values()))  # noqa: B023
            await until(lambda: process.log.count("resuming an interrupted answer") == 3 * life)  # noqa: B023
            assert not any(task.done() for task in tasks.values())
            process.kill()
            process.start()
        results = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        assert process.log.count("resuming an interrupted answer") == 6

        whole = (
            await local_worker(
                model=str(endless_model), data_dir=tmp_path / "alone", block_tokens=CONSTANTS.block_tokens
            )
        ).client
        for name, result in results.items():
            assert len(result.tokens) == 600
            assert [one.id for one in result.logprobs] == (list(result.tokens) if name == "seeded" else [])
            request, found = await recorded(client, name)
            assert found == result
            await assert_stream_is_record(client, name, result)
            # The request's own seed, or the one that a worker derives.
            seed = _sampling(SessionKey("default", name), request, result.seq, {}, None).seed
            given = {**OPTIONS[name], "seed": seed}
            expected = await whole.session(name).generate(text=f"{name}, begin: ", max_tokens=600, **given)
            assert (expected.tokens, expected.text) == (result.tokens, result.text)
