"""Nothing is left of forgotten sessions, in whatever form it was stored, and though workers are killed."""

import asyncio
import contextlib
import itertools
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.json import decode
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError

from cache.admin.remains import search
from cache.names.marks import ErasureNote
from cache.names.tokens import from_compact, unpack
from tests.commands.command_runs import command
from tests.parts import WorkerProcess
from turnkeep_client.client import Client
from worker.sessions import record
from worker.wire import retention

#: How many sessions are forgotten; a campaign has 1,000 (`make campaigns`), with 40 kills.
NUM_FORGETS = int(os.environ.get("TURNKEEP_TEST_FORGETS", "8"))
_AT_ONCE = max(4, NUM_FORGETS // 40)
_WINDOW = 16
_WORDS = re.compile(rb"marker-[0-9a-f]{16}")
#: Ids of tokens in JSON, in headers of snapshots, and in the inputs of results.
_LISTED = re.compile(rb"\d{1,3}(?:,\d{1,3}){15,}")
_PACKED = re.compile(rb"(?:[0-9a-f]{2}000000){16,}")
_COMPACT = re.compile(rb'"input\\*":\\*"([A-Za-z0-9+/=]{20,})')


class Marked:
    """A session with words and tokens that nothing else has."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name = name
        self.words = f"marker-{chance.getrandbits(64):016x}"
        self.tokens = [chance.randrange(40, 200) for _ in range(150)]

    async def live(self, client: Client) -> None:
        session = client.session(self.name)
        await session.append(tokens=self.tokens)
        await session.append(text=f"{self.words} " * 20)
        await session.generate(text=self.words, max_tokens=40)

    async def live_and_be_forgotten(self, client: Client) -> None:
        await self.live(client)
        await client.session(self.name).close(forget=True)


def windows(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[at : at + _WINDOW]) for at in range(len(tokens) - _WINDOW + 1)}


def token_runs(content: bytes) -> Iterator[list[int]]:
    """Yield the runs of tokens in a file, in each form that logs and caches have."""
    for found in _LISTED.findall(content):
        yield [int(one) for one in found.split(b",")]
    for found in _PACKED.findall(content):
        yield [*unpack(bytes.fromhex(found.decode()))]
    for found in _COMPACT.findall(content):
        try:
            yield [*from_compact(found.decode())]
        except ValueError:  # another string
            continue


def num_left(folder: Path, words: set[bytes], tokens: set[tuple[int, ...]]) -> int:
    """Count the markers and the 16 tokens in a row that any file has."""
    left = 0
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            left += len(words & set(_WORDS.findall(content)))
            left += sum(len(tokens & windows(run)) for run in token_runs(content))
    return left


@pytest.mark.process
async def test_sessions_closed_with_forget_while_the_worker_is_killed_leave_nothing_in_files_and_logs(
    worker_process: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """Neither in the store of the NATS server nor in snapshots or logs of processes."""
    chance = random.Random(os.environ.get("TURNKEEP_TEST_SEED", "7"))
    process = worker_process()
    process.start()
    client = await process.client()
    kept = Marked("kept", chance)
    await kept.live(client)
    gone = [Marked(f"gone-{number}", chance) for number in range(NUM_FORGETS)]
    for start in range(0, NUM_FORGETS, _AT_ONCE):
        some = gone[start : start + _AT_ONCE]
        lives = [asyncio.create_task(one.live_and_be_forgotten(client)) for one in some]
        await asyncio.sleep(chance.uniform(0.0, 1.5))
        await asyncio.to_thread(process.kill)
        process.start()
        async with asyncio.timeout(120 + 10 * _AT_ONCE):
            await asyncio.gather(*lives)

    async def remains(name: str, *more: object) -> tuple[int, str]:
        where = ("--data-dir", process.data_dir, "--nats", process.url, "--in", tmp_path)
        done = await command("cache", "remains", name, *more, *where)
        return done.returncode, done.stdout

    async with asyncio.timeout(90 + NUM_FORGETS):
        for one in gone[:: max(1, NUM_FORGETS // 8)]:
            while (await remains(one.name))[0]:  # noqa: ASYNC110  # entries go in the background
                await asyncio.sleep(1)
    notes = [decode(one.body, type=ErasureNote) async for one in client.stored.erasures("default")]
    assert len({one.session for one in notes}) == NUM_FORGETS
    assert [*search(tmp_path, [one.marks for one in notes], [])] == []
    words = {one.words.encode() for one in gone}
    tokens = set[tuple[int, ...]]().union(*(windows(one.tokens) for one in gone))
    assert num_left(tmp_path, words, tokens) == 0
    assert num_left(tmp_path, {kept.words.encode()}, windows(kept.tokens)) > 100, "it would be found"
    assert (await remains(gone[0].name, "--text", kept.words))[0] == 1
    await client.close()


MARKER = "Rumpelstilzchen"
TOKENS = {"kept": [*range(60, 90)], "gone": [*range(90, 60, -1)]}


async def bodies(js: JetStreamContext, prefix: str, session: str) -> dict[str, list[bytes]]:
    """Return, by kind, all that the streams have of a session, except its closes."""
    found: dict[str, list[bytes]] = {}
    for stream in (f"{prefix}_log", f"{prefix}_tok"):
        for seq in range(1, (await js.stream_info(stream)).state.last_seq + 1):
            with contextlib.suppress(NotFoundError):
                message = await js.get_msg(stream, seq)
                names = str(message.subject).split(".")
                if names[2] == session and message.data and b'"type":"close' not in message.data:
                    found.setdefault(names[3], []).append(message.data)
    found.pop("closed", None)
    return found


def num_found(store: Path, needles: list[bytes]) -> int:
    """Count the needles that any file of the store has."""
    files = [one.read_bytes() for one in store.rglob("*") if one.is_file()]
    return sum(any(needle in file for file in files) for needle in needles)


async def test_nothing_of_a_session_closed_with_forget_stays_in_the_files_of_a_compressing_nats_server(
    local_worker: Any,
    foreign_server: Any,
    tmp_path: Path,
    endless_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither texts nor tokens, before the server's stop and after it; another session keeps all."""
    monkeypatch.setattr(record, "_CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(retention, "_PERIOD_S", 0.2)
    store = tmp_path / "store"
    url = await foreign_server(jetstream={"store_dir": str(store)})
    worker = await local_worker(model=str(endless_model), max_message_bytes=32 * 2**10, nats=url)
    client, prefix = worker.client, worker.settings.prefix
    js = worker.app._nc.jetstream()
    for stream in (f"{prefix}_log", f"{prefix}_tok"):
        config = (await js.stream_info(stream)).config
        await js.update_stream(config.evolve(compression="s2"))
    for name in ("kept", "gone"):
        session = client.session(name)
        await session.append(text=f"{MARKER} of {name}: " + name * 600)  # too long for a result
        await session.append(tokens=TOKENS[name])
        for _ in range(3):
            await session.generate(text=f"{MARKER} of {name}", max_tokens=12)
    kept, gone = [await bodies(js, prefix, name) for name in ("kept", "gone")]
    assert gone.keys() == {"in", "out", "checkpoint", "tok"}
    needles = [f"{MARKER} of gone".encode(), b",".join(b"%d" % one for one in TOKENS["gone"])]
    needles += itertools.chain(*gone.values())
    assert num_found(store, needles) == len(needles)
    assert (await client.session("gone").close(forget=True)).settled
    async with asyncio.timeout(60):
        while await bodies(js, prefix, "gone"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert num_found(store, needles) == 0
    await worker.stop()
    for process in foreign_server.processes:
        process.terminate()
        await asyncio.to_thread(process.wait)
    left = [*itertools.chain(*kept.values())]
    assert (num_found(store, needles), num_found(store, left)) == (0, len(left))
