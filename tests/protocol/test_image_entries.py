"""Images in the log: a file is stored once, in entries that prove themselves, and read back."""

import asyncio
import hashlib
import os

import pytest
from scripted_worker import SUBJECTS, FakeWorker

from tests.parts import NatsServer
from turnkeep_client import image
from turnkeep_client.client import Client
from turnkeep_client.errors import NoServerError
from turnkeep_client.images import PIECE_BYTES, assemble, entries
from turnkeep_client.subjects import SessionKey
from turnkeep_client.wire import READ_S

KEY = SessionKey("default", "s")


def picture(num_bytes: int) -> bytes:
    return b"\x89PNG" + os.urandom(num_bytes - 4)


async def test_a_client_stores_an_image_again_if_the_session_was_closed_since_the_image_was_stored(
    client: Client, worker: FakeWorker
) -> None:
    data = picture(99)
    digest = hashlib.sha256(data).hexdigest()
    await client._wire.store_images(KEY, {digest: data})
    await worker.js.publish(SUBJECTS.of(KEY, "closed"), b"")
    for _ in range(2):
        await client._wire.store_images(KEY, {digest: data})
    assert (await client.stored.subjects())[KEY] == {"image": 2, "closed": 1}


async def test_a_request_with_an_image_waits_while_the_nats_server_is_down_and_is_stored_afterwards(
    client: Client, worker: FakeWorker, server: NatsServer
) -> None:
    server.kill()
    message = {"role": "user", "content": [{"type": "text", "text": "which?"}, image(picture(99))]}
    task = asyncio.create_task(client.session("s").generate(messages=[message]).send())
    await asyncio.sleep(READ_S + 1)
    assert not task.done()
    with pytest.raises(NoServerError, match="images were not stored"):
        await client.ask("s", messages=[message], timeout_s=0.3)
    server.start()
    await asyncio.wait_for(task, 20)
    assert (await client.stored.subjects())[KEY] == {"image": 1, "in": 1}


@pytest.mark.parametrize("num_bytes", [1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES])
async def test_an_image_is_read_from_the_log_only_if_its_entries_match_the_digest_in_its_name(
    num_bytes: int,
) -> None:
    data = os.urandom(num_bytes)
    stored = dict(entries(data))
    *_, digest = stored

    async def read(name: str) -> bytes | None:
        return stored.get(name)

    assert max(map(len, stored.values())) <= PIECE_BYTES
    assert await assemble(digest, read) == data
    for name, body in [*stored.items()]:
        stored[name] = body[:-1] + bytes([body[-1] ^ 1])
        assert await assemble(digest, read) is None
        del stored[name]
        assert await assemble(digest, read) is None
        stored[name] = body
