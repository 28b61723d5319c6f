"""Nothing is left of forgotten sessions, though the worker is killed in the middle of turns and forgets."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.names.tokens import as_tokens
from tests.commands.command_runs import command
from tests.parts import WorkerProcess
from turnkeep_client import Client

#: How many sessions are forgotten; `TURNKEEP_TEST_FORGETS=1000` for a campaign, with a kill for each four.
NUM_FORGETS = int(os.environ.get("TURNKEEP_TEST_FORGETS", "8"))
_AT_ONCE = 4
_WINDOW = 16


class Marked:
    """A session with words and tokens that nothing else has."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self.name = f"gone-{number}"
        self.words = f"marker {chance.getrandbits(64):016x}"
        self.tokens = [chance.randrange(40, 200) for _ in range(150)]

    @property
    def needles(self) -> list[str]:
        """Its words, and 16 tokens in a row from each 16th place on, as results and as snapshots have them."""
        found = [self.words]
        for at in range(0, len(self.tokens) - _WINDOW, _WINDOW):
            window = self.tokens[at : at + _WINDOW]
            found += [",".join(map(str, window)), as_tokens(window).packed().hex()]
        return found

    async def live_and_be_forgotten(self, client: Client) -> None:
        session = client.session(self.name)
        await session.append(tokens=self.tokens)
        await session.append(text=f"{self.words} " * 20)
        await session.generate(text=self.words, max_tokens=40)
        await session.close(forget=True)


@pytest.mark.process
async def test_nothing_is_left_of_sessions_that_were_forgotten_under_kills(
    worker_process: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """The store of the NATS server, snapshots, logs of the process: no marker, no 16 tokens in a row."""
    chance = random.Random(os.environ.get("TURNKEEP_TEST_SEED", "7"))
    process = worker_process()
    process.start()
    client = await process.client()
    kept = Marked(-1, chance)
    await client.session("kept").append(tokens=kept.tokens)
    await client.session("kept").append(text=kept.words)
    gone = [Marked(number, chance) for number in range(NUM_FORGETS)]
    for start in range(0, NUM_FORGETS, _AT_ONCE):
        lives = [
            asyncio.create_task(one.live_and_be_forgotten(client)) for one in gone[start : start + _AT_ONCE]
        ]
        await asyncio.sleep(chance.uniform(0.0, 1.5))
        await asyncio.to_thread(process.kill)
        process.start()
        async with asyncio.timeout(120):
            await asyncio.gather(*lives)
    places = ("--data-dir", process.data_dir, "--nats", process.url, "--in", tmp_path)

    async def remains(one: Marked, *, name: str = "") -> tuple[int, str]:
        texts = [part for needle in one.needles for part in ("--text", needle)]
        done = await command("cache", "remains", name or one.name, *texts, *places)
        return done.returncode, done.stdout

    async with asyncio.timeout(60):
        while any([(await remains(one))[0] for one in gone[-_AT_ONCE:]]):
            await asyncio.sleep(1)
    left = {one.name: shown for one in gone if (shown := (await remains(one))[1]) and (await remains(one))[0]}
    assert left == {}
    code, shown = await remains(kept, name=gone[0].name)
    assert (code, "text: " in shown) == (1, True), "what was kept would be found"
    await client.close()
