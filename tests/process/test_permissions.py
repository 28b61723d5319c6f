"""The permissions that docs/protocol.md gives a tenant's clients are enough, and not too many."""

from __future__ import annotations

import asyncio
from typing import Any

import nats
import nats.errors
import pytest

from turnkeep_client.client import connect
from turnkeep_client.images import digest_of, image


async def test_the_documented_permissions_let_a_client_use_its_sessions_but_not_forge_messages(
    foreign_server: Any, local_worker: Any, tmp_path: Any
) -> None:
    client = {
        "publish": [
            *(f"turnkeep.acme.*.{kind}" for kind in ("in", "image.*", "ctl", "ask")),
            *(f"$JS.API.DIRECT.GET.turnkeep_{stream}" for stream in ("log", "tok")),
        ],
        "subscribe": ["turnkeep.acme.>", "_INBOX.>"],
    }
    url = await foreign_server(
        jetstream={"store_dir": str(tmp_path / "js"), "max_file_store": 2**60},
        authorization={
            "users": [
                {"user": "worker", "password": "w"},
                {"user": "client", "password": "c", "permissions": client},
            ]
        },
    )
    await local_worker(nats=url.replace("//", "//worker:w@"), prefix="turnkeep")
    mine = url.replace("//", "//client:c@")
    async with connect(mine, tenant="acme") as user:
        answer = user.session("s").generate(text="abc", max_tokens=4)
        chunks = [chunk async for chunk in answer]
        assert [token for chunk in chunks for token in chunk.tokens] == list(answer.result.tokens)
        assert (await user.session("s").info()).position == 7
        part = image(b"\x89PNG")
        await user.session("i").append(messages=[{"role": "user", "content": [part]}])
        assert await user.session("i").image(digest_of(b"\x89PNG")) == b"\x89PNG"
        assert [one.name for one in await user.sessions()] == ["i", "s"]
        assert (await user.session("s").history()).position == 7
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    nc = await nats.connect(mine, error_cb=note)
    kinds = ("commit", "out", "chunk.g", "tok.g")
    subjects = [*(f"turnkeep.acme.s.{kind}" for kind in kinds), "turnkeep.other.s.in"]
    for subject in subjects:
        with pytest.raises((nats.errors.Error, asyncio.TimeoutError)):
            await nc.jetstream().publish(subject, b"{}", timeout=0.3)
    await nc.flush()
    # A weakness that docs/security.md names: replies are published by the worker and the server.
    other = await nats.connect(url.replace("//", "//worker:w@"))
    heard = await other.subscribe("turnkeep.other.s.in")
    await other.flush()
    for kind in ("ctl", "in"):
        await nc.publish(f"turnkeep.acme.s.{kind}", b"{}", reply="turnkeep.other.s.in")
        await heard.next_msg(10)
    await other.close()
    await nc.close()
    assert [subject for subject in subjects if any(f'"{subject}"' in line for line in refused)] == subjects
