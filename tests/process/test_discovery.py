"""A worker answers the requests PING, INFO and STATS of NATS's service discovery, on a real server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import nats
import nats.errors
import pytest
from nats.aio.client import Client

from tests.parts import LocalWorker
from turnkeep_client.errors import TurnkeepError

pytestmark = pytest.mark.process


@pytest.fixture
async def nc(nats_url: str) -> AsyncIterator[Client]:
    client = await nats.connect(nats_url)
    yield client
    await client.close()


@pytest.fixture
async def worker(local_worker: Callable[..., Awaitable[LocalWorker]]) -> LocalWorker:
    return await local_worker()


async def ask(nc: Client, subject: str, body: bytes = b"") -> dict[str, Any]:
    return dict(json.loads((await nc.request(subject, body, timeout=5)).data))


async def test_a_worker_answers_nats_service_ping_info_and_stats_sent_to_all_services_or_to_its_name_or_id(
    nc: Client, worker: LocalWorker
) -> None:
    """It does not answer what is for other services or ids, and nothing once it has stopped."""
    ping = await ask(nc, "$SRV.PING")
    assert ping["type"] == "io.nats.micro.v1.ping_response"
    assert (ping["name"], ping["version"]) == ("turnkeep", "0.1.0")
    prefix = worker.settings.prefix
    told = dict(ping["metadata"])
    assert {"paged", "forget"} <= set(told.pop("features").split())
    assert told == {"worker": "test", "prefix": prefix, "model": "tiny", "protocol": "1"}
    same = {name: ping[name] for name in ("name", "id", "version", "metadata")}
    own = [f"$SRV.{verb}.turnkeep.{ping['id']}" for verb in ("PING", "INFO", "STATS")]
    for subject in own:
        verb = subject.split(".")[1]
        for to in (subject, f"$SRV.{verb}", f"$SRV.{verb}.turnkeep"):
            found = await ask(nc, to)
            assert found.pop("type") == f"io.nats.micro.v1.{verb.lower()}_response"
            assert {name: found[name] for name in same} == same
    assert (await ask(nc, "$SRV.INFO"))["endpoints"] == [
        {
            "name": "in",
            "subject": f"{prefix}.*.*.in",
            "queue_group": "",
            "metadata": {"stream": f"{prefix}_log"},
        },
        {"name": "ctl", "subject": f"{prefix}.*.*.ctl", "queue_group": "worker", "metadata": {}},
        {"name": "ask", "subject": f"{prefix}.*.*.ask", "queue_group": "worker", "metadata": {}},
    ]
    others = ("PING.other", "PING.turnkeep.other", f"PING.other.{ping['id']}", "PING.turnkeep.x.y", "BOGUS")
    for subject in others:
        with pytest.raises(nats.errors.NoRespondersError):
            await ask(nc, f"$SRV.{subject}")
    await worker.stop()
    for subject in ("$SRV.PING", *own):
        with pytest.raises(nats.errors.NoRespondersError):
            await ask(nc, subject)


async def test_the_nats_service_statistics_of_a_worker_count_requests_errors_and_processing_time(
    nc: Client, worker: LocalWorker
) -> None:
    async def counts() -> dict[str, Any]:
        said = (await ask(nc, "$SRV.STATS"))["endpoints"]
        return {one.pop("name"): one for one in said}

    before = await counts()
    assert {
        (one["num_requests"], one["processing_time"], one["average_processing_time"])
        for one in before.values()
    } == {(0, 0, 0)}
    session = worker.client.session("s")
    await session.append(text="hello")
    with pytest.raises(TurnkeepError):
        await session.append(text="again", expect_position=99)
    await session.info()
    subject = f"{worker.settings.prefix}.default.s"
    assert (await ask(nc, f"{subject}.ctl", b"nonsense"))["code"] == "invalid_request"
    body = json.dumps({"type": "generate", "id": "a", "text": "abc", "max_tokens": 2}).encode()
    assert (await ask(nc, f"{subject}.ask", body))["type"] == "generated"
    found = await counts()
    assert {
        name: (one["num_requests"], one["num_errors"], one["last_error"]) for name, one in found.items()
    } == {
        "in": (3, 1, ""),
        "ctl": (2, 1, "invalid_request"),
        "ask": (1, 0, ""),
    }
    for one in found.values():
        assert one["processing_time"] >= one["average_processing_time"] > 0


def frame(subject: bytes, reply: bytes, body: bytes, head: bytes | None = None) -> bytes:
    to = b" ".join(filter(None, [subject, reply]))
    if head is None:
        return b"PUB %s %d\r\n%s\r\n" % (to, len(body), body)
    return b"HPUB %s %d %d\r\n%s%s\r\n" % (to, len(head), len(head) + len(body), head, body)


MALFORMED = [
    frame(b"$SRV.PING", b"", b""),
    frame(b"$SRV.INFO", b"", b"\xff\x00{[\n"),
    frame(b"$SRV.STATS", b"\xff\xfe", b""),
    frame(b"$SRV.PING", b"not.there", b"PING"),
    frame(b"$SRV.PING", b"gone", b"", b"NATS/1.0"),
    frame(b"$SRV.INFO", b"gone", b"zz", b"NATS/1.0\r\n"),
    frame(b"$SRV.STATS", b"gone", b"", b"NATS/1.0\r\n\xff: \xff\r\n\r\n"),
    frame(b"$SRV.INFO", b"", b"", b"garbage\xff\xff"),
]


async def test_a_worker_still_answers_after_malformed_nats_service_discovery_requests(
    nc: Client, worker: LocalWorker
) -> None:
    """The requests have no reply subject, bytes that are no text, or malformed headers."""
    server = urlsplit(str(worker.settings.nats))
    reader, writer = await asyncio.open_connection(server.hostname, server.port)
    await reader.readline()
    writer.write(b'CONNECT {"headers":true,"verbose":false,"lang":"raw","version":"0"}\r\n')
    for sent in MALFORMED * 10:
        writer.write(sent)
    writer.write(b"PING\r\n")
    async with asyncio.timeout(10):
        while (line := await reader.readline()) != b"PONG\r\n":
            assert not line.startswith(b"-ERR"), line
    ping = await ask(nc, "$SRV.PING", b"\xff" * 1000)
    assert ping["metadata"]["worker"] == "test"
    assert (await worker.client.session("s").append(text="hello")).position == 5
    writer.close()
