"""A session keeps the cache policy that it began with: through the log, checkpoints and other workers."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_fields
from session_world import World

from cache.names.policy import FULL, Policy
from turnkeep_client.messages import Append, CachePolicy, Close, Failed, Generate, Open, SessionCache
from worker.device.request import TurnRequest
from worker.sessions.history import RefusedError
from worker.sessions.limits import MOST_POLICIES, RequestLimits, misfit

SINK_WINDOW = CachePolicy(policy="sink_window", sink=4, window=40)
SAID = SessionCache(policy="sink_window", sink=4, window=40)


def append(number: int, num_tokens: int = 1) -> Append:
    return Append(id=f"a{number}", tokens=(5,) * num_tokens)


async def test_clients_can_choose_only_a_bounded_number_of_different_cache_policies(world: World) -> None:
    """A worker keeps state for each policy. Policies that were chosen before can still be chosen."""

    async def reopened(number: int, cache: CachePolicy) -> Any:
        if world.session.history.exists and not world.session.history.closed:
            await world.ask(Close(id=f"c{number}"))
        return await world.ask(Open(id=f"o{number}", cache=cache))

    chosen = [replace_fields(SINK_WINDOW, window=40 + i) for i in range(MOST_POLICIES + 1)]
    for number, cache in enumerate([*chosen[:-1], *chosen[:2], CachePolicy(), CachePolicy(policy="full")]):
        assert not isinstance(await reopened(number, cache), Failed)
    refused = await reopened(100, chosen[-1])
    assert (refused.code, "since this worker started" in refused.message) == ("invalid_request", True)
    assert (await reopened(101, chosen[-2])).cache.window == chosen[-2].window
    world.crash()
    await world.ask(Close(id="last"))
    assert (await reopened(102, chosen[-1])).cache.window == chosen[-1].window
    await world.assert_fold_is_life()


def test_many_cache_policies_of_one_tenant_leave_room_for_policies_of_another_tenant() -> None:
    limits = RequestLimits(None, FULL, context_tokens=4096, block_tokens=32, vocab_size=9)  # type: ignore[arg-type]
    for window in range(MOST_POLICIES):
        limits.note(Policy(4, 40 + window), "loud")
    for number in range(MOST_POLICIES // 2):
        limits.note(Policy(5, 40 + number), "quiet")
    for tenant in ("loud", "quiet"):
        with pytest.raises(RefusedError, match="since this worker started"):
            limits.note(Policy(6, 40), tenant)
    limits.note(Policy(5, 40), "loud")


async def test_an_open_request_with_sink_window_but_without_sizes_gets_default_sizes(world: World) -> None:
    result = await world.ask(Open(id="o", cache=CachePolicy(policy="sink_window")))
    assert result.cache == SessionCache(policy="sink_window", sink=4, window=1024)


@pytest.mark.parametrize(
    ("cache", "refusal"),
    [
        (
            {"window": 31},
            "a window of 31 tokens is smaller than this worker's block: it must have 32 or more",
        ),
        (
            {"sink": 5, "window": 9_996},
            "a sink of 5 and a window of 9996 tokens exceed the context: together they may have 10000",
        ),
    ],
)
async def test_an_open_request_with_a_window_below_a_block_or_beyond_the_context_creates_no_session(
    world: World, cache: dict[str, int], refusal: str
) -> None:
    refused = await world.ask(Open(id="o", cache=CachePolicy(policy="sink_window", **cache)))
    assert (refused.code, refused.message) == ("invalid_request", refusal)
    assert not world.session.history.exists
    assert (await world.ask(append(0))).cache is None


def test_a_paged_default_cache_policy_with_snapshots_off_is_refused_with_the_reason() -> None:
    paged = Policy.paged(4096, sink=4)
    limits = {"block_tokens": 32, "context_tokens": 10_000}
    assert misfit(paged, **limits) is None
    assert "needs another cache.policy" in str(misfit(replace(paged, has_snapshots=False), **limits))


@pytest.mark.parametrize(
    "default", [FULL, replace(FULL, has_snapshots=False)], ids=["snapshots by default", "none by default"]
)
@pytest.mark.parametrize("snapshots", ["none", None])
def test_the_snapshots_field_of_an_open_request_overrides_the_workers_default_policy(
    default: Policy, snapshots: Any
) -> None:
    limits = RequestLimits(None, default, context_tokens=9, block_tokens=4, vocab_size=9)  # type: ignore[arg-type]
    assert limits.chosen_policy(CachePolicy(snapshots=snapshots)).has_snapshots is (snapshots is None)


def test_an_open_request_with_the_largest_or_the_smallest_allowed_window_is_accepted() -> None:
    limits = {"block_tokens": 32, "context_tokens": 100}
    assert misfit(Policy(68, 32), **limits) is None
    assert misfit(Policy(4, 96), **limits) is None
    assert misfit(FULL, **limits) is None


async def test_a_worker_whose_model_cannot_serve_a_sessions_cache_policy_refuses_the_sessions_requests(
    world: World,
) -> None:
    await world.ask(Open(id="o", cache=SINK_WINDOW))
    world.engine.refusal = lambda policy: None if policy == FULL else "it has latent attention"
    for request in (append(0), Generate(id="g", tokens=(5,))):
        refused = await world.ask(request)
        assert (refused.code, refused.message) == ("invalid_request", "it has latent attention")
    await world.ask(Close(id="c"))
    refused = await world.ask(Open(id="o2", cache=SINK_WINDOW))
    assert refused.message == "it has latent attention"
    assert (await world.ask(Open(id="o3"))).position == 0


async def test_a_session_under_sink_window_may_become_longer_than_the_models_context(world: World) -> None:
    """The model's context limits neither its prompts nor its answers."""
    refused = await world.ask(append(0, 10_001))
    assert refused.code == "context_exceeded"
    await world.ask(Open(id="o", cache=SINK_WINDOW))
    over = await world.ask(append(1, 10_100))
    assert (over.position, over.visible_from) == (10_100, 10_060)
    asked: list[TurnRequest] = []
    run = world.engine.run

    async def noting(one: TurnRequest, *args: Any, **named: Any) -> Any:
        asked.append(one)
        return await run(one, *args, **named)

    world.engine.run = noting  # type: ignore[method-assign]
    answer = await world.ask(Generate(id="g", max_tokens=20_000))
    assert answer.position > 10_100
    assert (asked[0].answer.max_tokens, asked[0].policy) == (20_000, Policy(4, 40))


async def test_a_session_with_a_logged_cache_policy_of_a_later_version_is_refused_with_the_reason(
    world: World,
) -> None:
    await world.ask(Open(id="o"))
    entries = world.log.entries
    told = entries[1].body.replace(b',"asked"', b',"cache":{"policy":"lru","most":4096},"asked"')
    entries[1] = replace(entries[1], body=told)
    world.crash()
    refused = await world.ask(append(0))
    assert refused.code == "history_diverged"
    assert "the log says a cache policy that this worker does not know: lru; " in refused.message
