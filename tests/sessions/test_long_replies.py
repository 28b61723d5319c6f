"""A reply on `ctl` or `ask` that exceeds the server's message limit is divided, or replaced by a refusal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from raw_wire import Wire, append, generate

from tests.parts import free_port, nats_server_program
from turnkeep_client.messages import Cancelled
from worker.sessions.control import Control

MAX_PAYLOAD = 16 * 1024


@pytest.fixture
def narrow_url(tmp_path: Path) -> Iterator[str]:
    """A NATS server that carries no more than 16 KiB in a message."""
    port = free_port()
    config = {
        "listen": f"127.0.0.1:{port}",
        "max_payload": MAX_PAYLOAD,
        "jetstream": {"store_dir": str(tmp_path / "nats"), "max_file_store": 2**60},
    }
    (tmp_path / "narrow.conf").write_text(json.dumps(config))
    process = subprocess.Popen(
        [nats_server_program(), "-c", str(tmp_path / "narrow.conf")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.02)
    yield f"nats://127.0.0.1:{port}"
    process.terminate()
    process.wait(10)


@pytest.fixture
async def narrow(
    narrow_url: str, local_worker: Callable[..., Awaitable[Any]], endless_model: Path
) -> AsyncIterator[Wire]:
    worker = await local_worker(nats=narrow_url, max_message_bytes=8 * 1024, model=str(endless_model))
    wire = Wire(await nats.connect(narrow_url), worker)
    await wire.listen()
    yield wire
    await wire.nc.close()


async def test_info_lists_waiting_requests_in_pages_if_one_message_cannot_hold_them(
    narrow: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are 300 ids of 64 characters, and a message can hold about 200."""
    ids = [f"{number:064d}" for number in range(300)]
    engine, over = narrow.worker.app._parts.engine, asyncio.Event()
    run = engine.run

    async def held(*arguments: Any, **options: Any) -> Any:
        await over.wait()
        return await run(*arguments, **options)

    monkeypatch.setattr(engine, "run", held)
    await narrow.publish("s", generate("first", text="eee"))
    await narrow.until("s", "waiting")
    for request_id in ids:
        await narrow.publish("s", append(request_id, ""))
    info = await narrow.control("s", {"type": "info"})
    assert (info["type"], info["num_waiting"], info["waiting"]) == ("session", 300, ids[:100])
    told: list[str] = []
    while page := (await narrow.control("s", {"type": "info", "skip": len(told), "limit": 70}))["waiting"]:
        told += page
    assert told == ids
    assert (await narrow.control("s", {"type": "info", "limit": 0}))["waiting"] == []
    refused = await narrow.control("s", {"type": "info", "limit": 300})
    assert (refused["type"], refused["code"]) == ("failed", "invalid_request")
    assert f"the server carries {MAX_PAYLOAD}; ask for less of it" in refused["message"]
    client = await narrow.worker.client.session("s").info(skip=298)
    assert (client.waiting, client.num_waiting) == (tuple(ids[298:]), 300)
    over.set()


async def test_a_reply_larger_than_the_servers_message_limit_becomes_a_refusal(
    narrow: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here another reply takes the place of the one to a count."""

    async def counted(*_: object) -> Cancelled:
        return Cancelled(id="c", was="running" * MAX_PAYLOAD)

    monkeypatch.setattr(Control, "_count", counted)
    await narrow.send("s", append("a"))
    reply = await narrow.control("s", {"type": "count", "text": "a"})
    assert (reply["type"], reply["code"]) == ("failed", "invalid_request")
    assert "the answer takes" in reply["message"]


async def test_a_refused_control_request_or_ask_has_its_valid_id_in_the_reply(narrow: Wire) -> None:
    reply = await narrow.control("s", {"type": "cancel", "id": "mine", "more": 1})
    assert (reply["code"], reply["id"]) == ("invalid_request", "mine")
    asked = await narrow.nc.request(narrow.subject("s", "ask"), b'{"id":"mine","more":1}', timeout=20)
    assert json.loads(asked.data)["id"] == "mine"
