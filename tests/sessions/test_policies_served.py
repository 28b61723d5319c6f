"""Cache policies as a user meets them: a worker on a real server, the client, restarts and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cache.names.policy import Policy
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import CachePolicy, SessionCache

if TYPE_CHECKING:
    from collections.abc import Callable

CACHE = {"policy": "sink_window", "sink": 2, "window": 32}
SAID = SessionCache(policy="sink_window", sink=2, window=32)


async def test_the_client_opens_a_session_under_its_policy(
    local_worker: Callable,
) -> None:
    """Also for other objects, under another default, and after a restart."""
    worker = await local_worker()
    first = await worker.client.session("s", cache=CACHE).append(tokens=[5] * 40)
    assert (first.cache, first.visible_from) == (SAID, 8)
    second = await worker.client.session("s", cache=CachePolicy(**CACHE)).generate(max_tokens=3)
    assert (second.cache, second.position) == (SAID, 40 + len(second.tokens))
    plain = await worker.client.session("s").append(tokens=[5])
    assert plain.cache == SAID
    await worker.stop()
    worker = await local_worker(cache_policy=Policy(4, 64))
    again = await worker.client.session("s", cache=CACHE).append(tokens=[5])
    assert (again.cache, again.position) == (SAID, plain.position + 1)
    for other, named in (
        ({**CACHE, "window": 64}, "the first 2 tokens and the last 64"),
        ({"policy": "full"}, "full"),
    ):
        with pytest.raises(RequestFailedError) as caught:
            await worker.client.session("s", cache=other).append(tokens=[5])
        assert caught.value.code == "invalid_request"
        assert caught.value.message.startswith(f"the session is open under {SAID}, not under ")
        assert named in caught.value.message
    assert (await worker.client.session("s").info()).position == again.position


async def test_the_default_is_for_sessions_that_choose_none(local_worker: Callable) -> None:
    worker = await local_worker(cache_policy=Policy(2, 32))
    client = worker.client
    assert (await client.session("begun").append(tokens=[5])).cache == SAID
    assert (await client.session("opened").open()).cache == SAID
    assert (await client.session("asked").open({"policy": "full"})).cache is None
    assert (await client.session("precise").open({"kv_bits": None})).cache == SAID
    info = await client.session("begun").info()
    assert (info.policy, info.cache, info.capacity_tokens) == ("sink_window", SAID, 34)
    assert info.worker.sessions_by_policy == {"sink_window": 3, "full": 1}
    assert (await client.session("asked").info()).policy == "full"
    await client.session("begun").close()
    assert (await client.session("asked").info()).worker.sessions_by_policy == {"sink_window": 2, "full": 1}


async def test_a_prompt_and_an_answer_go_beyond_the_context(local_worker: Callable) -> None:
    """The tiny model's context has 2,048 tokens."""
    worker = await local_worker()
    session = worker.client.session("s", cache=CACHE)
    await session.append(tokens=[5] * 2040)
    assert (await session.append(tokens=[7] * 100)).position == 2140
    answer = await session.generate(max_tokens=5)
    assert answer.position == 2140 + len(answer.tokens)
    assert answer.visible_from == answer.position - 32
    with pytest.raises(RequestFailedError, match="context_exceeded"):
        await worker.client.session("full").append(tokens=[5] * 2100)
