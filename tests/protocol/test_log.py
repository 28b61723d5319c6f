"""Reading the log by the client, and seeds derived from its entries."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from turnkeep_client.client import connect
from turnkeep_client.errors import NoWorkerError
from turnkeep_client.log import derived_seed
from turnkeep_client.subjects import session_key


async def test_a_client_reads_back_the_whole_log_of_its_tenant_and_nobody_elses(local_worker):
    """The log is longer than one batch of a read."""
    worker = await local_worker()
    assert await worker.client.log() == []
    session = worker.client.session("many")
    await asyncio.gather(*(session.append(tokens=[5], request_id=f"r{i}") for i in range(150)))
    await worker.client.session("one").append(tokens=[5])
    async with connect(worker.settings.nats, prefix=worker.settings.prefix, tenant="b") as other:
        await other.session("many").append(tokens=[5])
        assert len(await other.log()) == 2
    found = await worker.client.log()
    assert len(found) == 302
    assert [one.seq for one in found] == sorted(one.seq for one in found)
    assert {one.key.session for one in found} == {"many", "one"}
    assert all((one.model, bool(one.history)) == ("tiny", True) for one in found if one.kind == "out")
    build = found[-1].build
    assert (build["worker"], build["dtype"], build["device"], build["kv"]) == (
        "test",
        "float32",
        "cpu",
        "full",
    )
    assert found[0].build == {}
    assert abs((datetime.now(UTC) - found[-1].stored).total_seconds()) < 60
    assert len(await worker.client.log("one")) == 2


def test_the_seed_derived_for_a_request_is_the_same_in_every_version() -> None:
    """A worker continues answers that an older version began with this seed, and replays logs with it."""
    assert derived_seed(session_key("t1", "s1"), 1) == 10658773766922296
    assert derived_seed(session_key("default", "garden"), 2**40) == 44001429195367002


async def test_reading_the_log_with_a_closed_client_raises_an_error(local_worker):
    worker = await local_worker()
    client = await connect(worker.settings.nats, prefix=worker.settings.prefix)
    await client.close()
    with pytest.raises(NoWorkerError, match="the client is closed"):
        await client.log()
