"""`turnkeep cache remains`: finds what a forget has left, wherever it is, and nothing else."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.commands.command_runs import command, where
from tests.parts import LocalWorker
from worker.wire import retention

Start = Callable[..., Awaitable[LocalWorker]]
TEXT = "Rumpelstilzchen says: “ü”. " * 20
TOKENS = [20 + (7 * number) % 41 for number in range(300)]


async def searched(worker: LocalWorker, *arguments: object) -> tuple[int, str]:
    places = ("--data-dir", worker.settings.data_dir, *where(worker))
    done = await command("cache", "remains", "gone", *arguments, *places)
    return done.returncode, done.stdout


async def test_what_is_left_of_a_forgotten_session_is_found(
    local_worker: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries and chunks of the log, files of KV under any name of a folder, and texts; else 0."""
    monkeypatch.setattr(retention, "_PERIOD_S", 0.2)
    worker = await local_worker(block_tokens=128)
    session, copy = worker.client.session("gone"), tmp_path / "copy"
    await session.append(tokens=TOKENS)
    await session.generate(text=TEXT, max_tokens=4)
    await worker.client.session("kept").append(tokens=TOKENS[::-1])
    await worker.app._store.queue.drained(10)
    shutil.copytree(worker.settings.data_dir / "snapshots", copy)
    refused = await command("cache", "remains", "gone", *where(worker))
    assert "the log does not say that default/gone was forgotten" in refused.stderr
    before = [one async for one in worker.client.stored.remains(session.key)]
    assert {one.headers["Nats-Subject"].split(".")[3] for one in before} >= {"out", "tok"}
    assert (await session.close(forget=True)).settled

    for _ in range(100):
        if (found := await searched(worker))[0] == 0:
            break
    assert found == (0, "0 remains of default/gone\n")
    code, shown = await searched(worker, "--in", copy)
    num_kept = 3  # two blocks and a tail
    assert (code, shown.count("KV: ")) == (1, len([*copy.rglob("*.safetensors")]) - num_kept)
    (tmp_path / "copy" / "notes.txt").write_text("x" * 2**20 + json.dumps(TEXT))
    code, shown = await searched(worker, "--in", copy, "--text", TEXT[:40], "--json")
    texts = [one["where"] for one in json.loads(shown)["remains"] if one["what"] == "text"]
    assert texts == [str(copy / "notes.txt")]
    await session.open()
    await session.append(text="Something else.")
    assert (await searched(worker))[0] == 0, "what came after it is not what was forgotten"


async def test_entries_from_before_the_forget_are_found(
    local_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the worker has not removed them."""
    monkeypatch.setattr(retention.Retention, "run", lambda _: asyncio.sleep(3600))
    worker = await local_worker()
    await worker.client.session("gone").append(text=TEXT)
    await worker.client.session("gone").close(forget=True)
    code, shown = await searched(worker)
    prefix = worker.settings.prefix
    left = [f"log: {prefix}.default.gone.{kind}" for kind in ("in", "out")]
    assert (code, shown.splitlines()) == (1, [*left, "2 remains of default/gone"])
