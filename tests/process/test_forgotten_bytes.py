"""No file of the NATS server has anything of a forgotten session, in whatever form it was stored."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError
from parts import free_port

from worker.process.datadir import DataDir
from worker.process.settings import Settings
from worker.sessions import record
from worker.wire import retention
from worker.wire.broker import EmbeddedServer

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


@pytest.mark.parametrize("whose", ["ours", "foreign", "compressed"])
async def test_no_file_of_the_nats_server_has_anything_of_a_forgotten_session(
    local_worker: Any,
    foreign_server: Any,
    tmp_path: Path,
    endless_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    whose: str,
) -> None:
    """Neither texts nor tokens, before the server's stop and after it; another session keeps all."""
    monkeypatch.setattr(record, "_CHECKPOINT_EVERY", 2)
    monkeypatch.setattr(retention, "_PERIOD_S", 0.2)
    owned = Settings(data_dir=tmp_path / "owner", nats_port=free_port())
    server = EmbeddedServer(DataDir.open(owned.data_dir, "owner"), owned)
    if whose == "ours":
        store = owned.data_dir / "nats"
        await server.start()
        url = server.url.replace("://", f"://{server.token}@")
    else:
        store = tmp_path / "store"
        url = await foreign_server(jetstream={"store_dir": str(store)})
    worker = await local_worker(model=str(endless_model), max_message_bytes=32 * 2**10, nats=url)
    client, prefix = worker.client, worker.settings.prefix
    js = worker.app._nc.jetstream()
    if whose == "compressed":
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
    await server.stop()
    for process in foreign_server.processes:
        process.terminate()
        await asyncio.to_thread(process.wait)
    left = [*itertools.chain(*kept.values())]
    assert (num_found(store, needles), num_found(store, left)) == (0, len(left))
