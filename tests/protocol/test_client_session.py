"""What a session's methods send and return, against a real server and a scripted worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripted_worker import TOKENS, FakeWorker

from protocol.messages import Append, Close, Generate, Open, Rewind

if TYPE_CHECKING:
    from protocol.client import Client


async def test_every_request_of_a_session_gets_its_own_result(client: Client, worker: FakeWorker) -> None:
    session = client.session("s1")
    assert (await session.open()).position == 0
    assert (await session.append(text="a", request_id="a1")).tokens == 3
    assert (await session.generate(max_tokens=6)).tokens == TOKENS
    assert (await session.rewind(2)).position == 2
    assert (await session.close()).position == 9
    kinds = [type(request) for _, request in worker.requests]
    assert kinds == [Open, Append, Generate, Rewind, Close]
    assert len({request.id for _, request in worker.requests}) == 5
