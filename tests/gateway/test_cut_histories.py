"""Streams that break at random: the client disconnects, or gateways, worker or NATS server are killed.

`TURNKEEP_TEST_EXAMPLES=2500 pytest tests/gateway/test_cut_histories.py -s` runs 200 such histories.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from forked import Forked
from parts import free_port
from test_coming_back import options
from test_interrupted import started as started  # noqa: PLC0414  # a fixture

from turnkeep_client.errors import NoWorkerError
from turnkeep_client.messages import Generated, decode_result

pytestmark = pytest.mark.process

HISTORIES = int(os.environ.get("TURNKEEP_TEST_EXAMPLES", "50")) * 2 // 25
CUTS = (
    "client",
    "gateway",
    "worker",
    "server",
    "gateway and worker",
    "worker and server",
    "client and server",
)
#: After these errors a client tries again: no connection, and 503 of a gateway that has found no worker yet.
BROKEN = (openai.APIConnectionError, openai.InternalServerError, httpx2.HTTPError, NoWorkerError)


class Gateways:
    """Two gateway processes, each of which can be killed and started again at the same address."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder = folder
        self._environment = {**os.environ, "TURNKEEP_NATS": url}
        self.ports = [free_port(), free_port()]
        self._processes: dict[int, Forked] = {}

    def start(self, number: int) -> None:
        command = ["-m", "commands", "gateway", "--listen", str(self.ports[number])]
        log = self._folder / f"gateway-{number}.log"
        self._processes[number] = Forked.logging_to(log, command, self._environment)

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()

    def start_again(self, number: int) -> None:
        """Start a gateway again if it has ended by itself, because there was no NATS server."""
        if self._processes[number].poll() is not None:
            self.start(number)

    def kill_server(self) -> None:
        """Kill the worker's NATS server, which the worker or the next worker process starts again."""
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):  # it is being started
            (ports,) = (self._folder / "data").glob("nats-server_*.ports")
            os.kill(int(ports.stem.partition("_")[2]), signal.SIGKILL)

    def stop(self) -> None:
        for number in self._processes:
            self.kill(number)

    @property
    def log(self) -> str:
        return "".join(one.read_text() for one in self._folder.glob("gateway-*.log"))

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number]}"


async def recorded(client: Any, answer_id: str) -> Generated:
    entries = [one for one in await client.log(f"gw-{answer_id[:32]}") if one.kind == "out"]
    found = [one for one in map(decode_result, (one.body for one in entries)) if isinstance(one, Generated)]
    assert len({one.text for one in found}) == 1, "there is one answer"
    return found[0]


class Reader:
    """A client of one answer, with OpenAI's library: it resumes a broken stream after the last event."""

    def __init__(self, length: int, key: str) -> None:
        self.seen: list[Any] = []
        self.length = length
        self.num_events = length // 4  # characters in an event
        self.key = key

    async def read(self, url: str, until: Callable[[int], bool]) -> bool:
        """Resume the answer at a gateway; return whether it has ended. Raises the client library's errors."""
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            if self.seen:
                answer_id, last = self.seen[0].response.id, self.seen[-1].sequence_number
                stream: Any = await client.responses.retrieve(answer_id, stream=True, starting_after=last)
            else:
                key = {"Idempotency-Key": self.key}
                more = options(self.length, background=True, stream=True, extra_headers=key)
                stream = await client.responses.create(input=f"Begin {self.key}.", **more)
            last = self.seen[-1].sequence_number if self.seen else -1
            async for event in stream:
                if event.sequence_number > last:  # else it is a sign of life
                    self.seen.append(event)
                    last = event.sequence_number
                if until(len(self.seen)):
                    break
            await stream.close()
        return bool(self.seen) and self.seen[-1].type == "response.incomplete"

    async def check(self, client: Any, url: str) -> None:
        """Assert that the events equal the answer in the log, and a new read of the whole stream."""
        assert [one.sequence_number for one in self.seen] == list(range(len(self.seen)))
        text = "".join(one.delta for one in self.seen if one.type == "response.output_text.delta")
        answer_id = self.seen[0].response.id
        result = await recorded(client, answer_id.removeprefix("resp_"))
        assert text == result.text == self.seen[-1].response.output_text
        assert len(result.tokens) == self.length
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as library:
            replay = [one async for one in await library.responses.retrieve(answer_id, stream=True)]
        assert replay == self.seen


@pytest.fixture
async def gateways(started: Any, tmp_path: Path) -> AsyncIterator[Gateways]:
    made = Gateways(tmp_path, started[0].url)
    for number in (0, 1):
        made.start(number)
    yield made
    made.stop()


async def history(
    dice: random.Random, reader: Reader, process: Any, gateways: Gateways, happened: list[str]
) -> None:
    """Read an answer to its end, and break the stream one to three times; add each break to `happened`."""
    num_cuts, is_over = dice.randrange(1, 4), False
    while not is_over:
        most = len(reader.seen) + dice.randrange(reader.num_events // 3) if len(happened) < num_cuts else None
        what, at = dice.choice(CUTS), dice.randrange(2)
        is_cut = False

        def cut(num_seen: int, most: int | None = most, what: str = what, at: int = at) -> bool:
            nonlocal is_cut
            if most is None or num_seen < most or is_cut:
                return is_cut
            is_cut = True
            if "gateway" in what:
                gateways.kill(at)
            if "worker" in what:
                process.kill()
            if "server" in what:
                gateways.kill_server()
            return True

        with contextlib.suppress(*BROKEN):
            is_over = await reader.read(gateways.url(at), cut)
        if is_cut:
            happened.append(f"{what} at {len(reader.seen)}")
            if "gateway" in what:
                gateways.start(at)
        elif not is_over:
            gateways.start_again(at)
            await asyncio.sleep(0.05)


async def supervise(process: Any) -> None:
    """Start the worker again whenever it has ended: it was killed, or found no NATS server at its start."""
    while True:
        if not process.running:
            process.start()
        await asyncio.sleep(0.2)


@pytest.mark.timeout(3600)
async def test_a_client_gets_each_event_once_even_if_gateways_worker_and_nats_are_killed(
    started: Any, gateways: Gateways
) -> None:
    process, client = started
    for seed in range(HISTORIES):
        dice = random.Random(seed)
        reader = Reader(dice.randrange(60, 600), f"history-{seed}")
        happened: list[str] = []
        supervising = asyncio.create_task(supervise(process))
        try:
            async with asyncio.timeout(120):
                await history(dice, reader, process, gateways, happened)
                for number in count():
                    with contextlib.suppress(*BROKEN):
                        await reader.check(client, gateways.url(dice.randrange(2)))
                        break
                    assert number < 200, "no gateway answers"
                    await asyncio.sleep(0.1)
        except BaseException:
            print(f"history {seed}: {happened}, {len(reader.seen)} events")
            print(gateways.log)
            raise
        finally:
            supervising.cancel()
        print(f"history {seed}: {len(reader.seen)} events; {'; '.join(happened)}")
