"""How long conversations stay, and whether their KV gets to the disk."""

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gateway import removal
from gateway.index import IndexedSession, SessionIndex
from gateway.removal import remove, sweep
from tests.parts import LocalWorker, until
from turnkeep_client.errors import NoServerError, RequestFailedError
from turnkeep_client.messages import SessionCache


async def indexed(worker: LocalWorker) -> tuple[SessionIndex, IndexedSession]:
    """Return an index with one session, which has one append and was last used long ago."""
    appended = await worker.client.session("s").append(text="hello")
    index, session = SessionIndex(), IndexedSession("s", appended.position, 0.0)
    index.add(session)
    return index, session


async def test_removing_an_idle_session_that_another_gateway_has_used_leaves_the_session_open(
    worker: Any,
) -> None:
    index, session = await indexed(worker)
    await worker.client.session("s").append(text="more")
    await remove(worker.client, index, session)
    await worker.client.session("s").append(text="on")
    assert not index.sessions


async def test_an_idle_session_stays_in_the_gateways_index_until_the_log_has_stored_its_close_request() -> (
    None
):
    submit = AsyncMock(side_effect=[NoServerError("the NATS server is away"), None])
    client: Any = SimpleNamespace(tenant="default", submit=submit)
    index, session = SessionIndex(), IndexedSession("s", 1, 0.0)
    index.add(session)
    await remove(client, index, session)
    assert index.sessions
    await remove(client, index, session)
    assert not index.sessions


async def test_removing_a_session_that_has_refused_all_its_requests_leaves_no_request_in_the_log(
    worker: Any,
) -> None:
    key = worker.client.session("s").key
    with pytest.raises(RequestFailedError):
        await worker.client.session("s").rewind(0)
    index, session = SessionIndex(), IndexedSession("s", 0, 0.0)
    index.add(session)
    await remove(worker.client, index, session, forget=False)
    async with asyncio.timeout(10):
        while [1 async for _, one in worker.client.stored.every(key, "in") if one.seq == 1]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_the_gateway_closes_an_idle_session_only_while_its_model_is_loaded(worker: Any) -> None:
    """The close would load the model, and unload another one that is in use."""
    index, _ = await indexed(worker)
    is_loaded = False

    async def asked() -> bool:
        return is_loaded

    latest: Any = SimpleNamespace(is_loaded=asked)
    sweeping = asyncio.create_task(sweep(worker.client, index, latest, 0.2))
    await asyncio.sleep(0.5)
    assert index.sessions
    await worker.client.session("s").append(text="on")
    index.sessions["s"].position = (await worker.client.session("s").info()).position
    is_loaded = True
    await until(lambda: not index.sessions)
    sweeping.cancel()
    with pytest.raises(RequestFailedError):
        await worker.client.session("s").append(text="on")


async def test_a_session_that_was_running_when_the_gateway_started_is_not_removed_when_its_answer_ends(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "_SWEEP_S", 0.05)
    index, session = await indexed(worker)
    session.position, session.used_s = None, -math.inf
    latest: Any = SimpleNamespace(is_loaded=AsyncMock(return_value=True))
    sweeping = asyncio.create_task(sweep(worker.client, index, latest, 3600.0))
    await until(lambda: session.position is not None)
    await asyncio.sleep(0.5)
    sweeping.cancel()
    assert index.sessions
    await worker.client.session("s").append(text="on")


@pytest.mark.serves("calling_model")
async def test_a_restarted_gateway_whose_clock_is_a_day_ahead_still_has_the_conversation_and_its_answer(
    worker: Any, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long ago a session was used, its server's clock says."""
    monkeypatch.setattr(removal, "_SWEEP_S", 0.05)
    stopped, now = await gateway(), time.time
    said, name, _ = await chat(stopped, [HELLO], {})
    await stopped.stop()
    monkeypatch.setattr(time, "time", lambda: now() + 86400)
    served = await gateway(idle_s=3600.0)
    assert (await chat(served, [HELLO], {}))[1:] == (name, "repeated")
    await asyncio.sleep(0.5)
    more = [HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    assert (await chat(served, more, {}))[1:] == (name, "continued")


UNSAVED = {"x-turnkeep-snapshots": "none"}
SAID = SessionCache(policy="full", snapshots="none")
HELLO = {"role": "user", "content": "Hello, this is long enough for some blocks of the cache. " * 4}


def num_files(worker: Any) -> int:
    return len(list(worker.settings.data_dir.rglob("*.safetensors")))


async def chat(served: Any, messages: list[Any], headers: dict[str, str]) -> tuple[str, str, str]:
    """Send a conversation; return the answer, its session, and how that was found."""
    raw = await served.openai.chat.completions.with_raw_response.create(
        model="m", messages=messages, max_tokens=8, extra_headers=headers
    )
    name, how = raw.headers["x-turnkeep-session"].split()
    return raw.parse().choices[0].message.content or "", name, how


@pytest.mark.serves("calling_model")
async def test_the_header_x_turnkeep_snapshots_none_keeps_a_conversations_kv_off_the_disk(
    worker: Any, served: Any
) -> None:
    """Its sessions are continued only by requests with the header; each key's request has it, too."""
    said, name, how = await chat(served, [HELLO], UNSAVED)
    assert how == "begun"
    assert (await worker.client.session(name).info()).cache == SAID
    more = [HELLO, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    assert (await chat(served, more, UNSAVED))[1:] == (name, "continued")
    _, fork, how = await chat(served, more, UNSAVED | {"Idempotency-Key": "k-1"})
    assert (await worker.client.session(fork).info()).cache == SAID
    _, alone, how = await chat(served, [HELLO], UNSAVED | {"Idempotency-Key": "k-2"})
    assert (await worker.client.session(alone).info()).cache == SAID
    raw = await served.openai.completions.with_raw_response.create(
        model="m", prompt=HELLO["content"], max_tokens=8, extra_headers=UNSAVED
    )
    assert raw.status_code == 200
    await worker.app._store.queue.drained(9.0)
    assert num_files(worker) == 0
    _, other, how = await chat(served, more, {})
    assert (other != name, how) == (True, "begun")
    assert (await worker.client.session(other).info()).cache != SAID


@pytest.mark.serves("calling_model")
async def test_a_value_of_the_header_x_turnkeep_snapshots_other_than_none_is_refused(
    served: Any, http: Any
) -> None:
    body = {"model": "m", "messages": [HELLO], "max_tokens": 2}
    refused = await http.post("/v1/chat/completions", json=body, headers={"x-turnkeep-snapshots": "off"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "x-turnkeep-snapshots can only be none"
